"""Benchmark `disk`: freight's disk extents against raw direct I/O, and against `torch.save` and `torch.load`.

    write   a tensor to the disk, in pieces that are all in flight; on a computer with a GPU it comes from there
    read    the same tensor back to where it was

"raw O_DIRECT" is a loop of `pwritev` or `preadv` in threads, from and to page-aligned host memory: it has no GPU to
copy from or to, and in each cell its best number of threads and block size are looked for first. "torch.save, fsync"
ends when the disk has the bytes; before each "torch.load" the page cache is told to forget the file, or it would be
read from memory. Every file is nameless, so nothing is left behind however the process ends.
"""

import contextlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from freight import _direct
from freight._config import config
from freight._units import GiB, MiB, show_bytes
from freight.bench._registry import benchmark
from freight.bench._run import Run, Skip, Way, Work, at_least
from freight.errors import DirectIOError, DiskFullError
from freight.memory import DiskFile

_RAW, _TORCH = "raw O_DIRECT", "torch"
_STEP = -0x61C8864680B583EB  # odd and large: words that it is added to come round after 2**64 times
_TUNING_PASSES = 2  # the disk's speed drifts, so each setting is tried again after all others


class _Setting(NamedTuple):
    threads: int
    block: int


_SETTINGS = [_Setting(2, 8 * MiB), _Setting(4, 4 * MiB), _Setting(4, 8 * MiB), _Setting(8, MiB), _Setting(8, 4 * MiB)]
_SETTINGS += [_Setting(8, 8 * MiB), _Setting(16, MiB), _Setting(16, 4 * MiB), _Setting(16, 8 * MiB)]


@benchmark(
    "disk",
    title="A tensor to the disk and back",
    measures=("freight.memory", "freight._direct", "freight._cuda", "freight._pages"),
)
def disk(run: Run) -> None:
    """Declare the cells."""
    nbytes = 128 * MiB if run.quick else GiB
    piece = nbytes // 16 if run.gpu and not run.quick else nbytes // 8
    device = "cuda" if run.gpu else "cpu"
    works = {"write": _writing, "read": _reading}
    notes = {
        ("write", _RAW): "raw O_DIRECT moves host memory only",
        ("read", _RAW): "raw O_DIRECT moves host memory only",
        ("write", _TORCH): "torch.save ends with fsync",
        ("read", _TORCH): "the page cache forgets the file before each torch.load",
    }
    for (operation, against), note in notes.items():
        raw = against == _RAW
        run.cell(
            operation if raw else f"{operation}/torch",
            group="tensor" if raw else "torch",
            axes={"operation": operation, "bytes": nbytes, "piece_bytes": piece, "tensor_on": device},
            unit="GB/s",
            amount=nbytes,
            clock="host",
            targets=[at_least(0.90, of=_RAW)] if run.gpu and raw else [],
            work=partial(works[operation], against, nbytes, piece, device),
            pairs=30 if raw else 5,
            seconds=16.0,
            note=f"pieces all in flight; {note}",
        )


class _Place:
    """The three files that are compared, in one directory, and the tensor that they hold."""

    def __init__(self, nbytes: int, piece: int, device: str, stack: contextlib.ExitStack) -> None:
        directory = _direct.default_directory()
        free = shutil.disk_usage(directory).free
        if free < 3.5 * nbytes:
            raise Skip(f"it takes {show_bytes(3.5 * nbytes)} of disk and {directory} has {show_bytes(free)} free")
        stack.enter_context(config(direct_io=True))
        try:
            self.file = stack.enter_context(DiskFile(nbytes, directory=directory))
        except (DirectIOError, DiskFullError) as error:
            raise Skip(str(error)) from None
        self.tensor = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), dtype=torch.int64, device=device)
        self.extents = [self.file.allocate(part.nbytes) for part in self.split(self.tensor, piece)]
        self.piece = piece
        raw = _direct.open_nameless(directory, nbytes)
        stack.callback(os.close, raw)
        pool = stack.enter_context(ThreadPoolExecutor(max(setting.threads for setting in _SETTINGS)))
        self.raw = _RawFile(raw, nbytes, pool)
        saved = _direct.open_nameless(directory, 0, direct=False)
        stack.callback(os.close, saved)
        self.saved = _SavedFile(saved)
        self.kind = _direct.file_system(directory).name

    def split(self, tensor: Tensor, piece: int) -> tuple[Tensor, ...]:
        """The parts of `tensor` that are moved each by itself."""
        return tensor.split(piece // tensor.itemsize)

    def write(self) -> None:
        """The tensor to freight's extents."""
        parts = self.split(self.tensor, self.piece)
        for token in [self.file.write(extent, part) for extent, part in zip(self.extents, parts, strict=True)]:
            token.wait()

    def read(self, into: Tensor) -> Tensor:
        """Freight's extents to `into`."""
        parts = self.split(into, self.piece)
        for token in [self.file.read(extent, part) for extent, part in zip(self.extents, parts, strict=True)]:
            token.wait()
        return into

    def extra(self, best: _Setting | None) -> dict[str, str | int | float | bool | None]:
        """What the record says beside the figures."""
        found = {} if best is None else {"raw_threads": best.threads, "raw_block_bytes": best.block}
        return {"file_system": self.kind, **found}


@contextlib.contextmanager
def _writing(against: str, nbytes: int, piece: int, device: str) -> Iterator[Work]:
    with contextlib.ExitStack() as stack:
        place = _Place(nbytes, piece, device, stack)
        tensor, raw, saved = place.tensor, place.raw, place.saved
        raw.memory.copy_(tensor)
        best = raw.tune(os.pwritev) if against == _RAW else None

        def prepare() -> None:
            tensor.add_(_STEP)  # every word is new each time, so what was written before is wrong whenever it was
            raw.memory.copy_(tensor)

        def by_freight(_: None) -> Callable[[], Tensor]:
            place.write()
            return lambda: place.read(torch.zeros_like(tensor))

        def by_raw(_: None) -> Callable[[], Tensor]:
            raw.move(os.pwritev, best or _SETTINGS[0])
            return raw.read_back

        def by_torch(_: None) -> Callable[[], Tensor]:
            saved.save(tensor)
            return saved.load

        yield Work(
            Way("freight", by_freight),
            check=lambda _, read_back: torch.equal(read_back().to(device), tensor),
            checked="every byte, read back; random content, new each round",
            rivals=(Way(_RAW, by_raw) if best else Way(f"{_TORCH}.save, fsync", by_torch),),
            prepare=prepare,
            extra=place.extra(best),
        )


@contextlib.contextmanager
def _reading(against: str, nbytes: int, piece: int, device: str) -> Iterator[Work]:
    with contextlib.ExitStack() as stack:
        place = _Place(nbytes, piece, device, stack)
        tensor, raw, saved = place.tensor, place.raw, place.saved
        place.write()
        raw.memory.copy_(tensor)
        raw.move(os.pwritev, _SETTINGS[-1])
        saved.save(tensor)
        best = raw.tune(os.preadv) if against == _RAW else None
        raw.memory.zero_()
        landing = torch.empty_like(tensor)

        def by_raw(_: None) -> Tensor:
            raw.move(os.preadv, best or _SETTINGS[0])
            return raw.memory

        by_torch = Way(f"{_TORCH}.load", lambda _: saved.load(device), before=saved.evict)
        yield Work(
            Way("freight", lambda _: place.read(landing), before=landing.zero_),
            check=lambda _, got: torch.equal(got.to(device), tensor),
            checked="every byte against the random bytes that were written",
            rivals=(Way(_RAW, by_raw) if best else by_torch,),
            extra=place.extra(best),
        )


# ---- rivals ----------------------------------------------------------------------------------------


class _RawFile:
    """A nameless file, reserved in full, and host memory of its size: direct I/O with nothing around it."""

    def __init__(self, fd: int, nbytes: int, pool: ThreadPoolExecutor) -> None:
        self._fd, self._nbytes, self._pool = fd, nbytes, pool
        self._pages = memoryview(mmap.mmap(-1, nbytes))
        self.memory = torch.frombuffer(self._pages, dtype=torch.int64)

    def tune(self, call: Callable[..., int]) -> _Setting:
        """The setting that moves the first GiB fastest, the whole having been written once."""
        self.move(os.pwritev, _SETTINGS[-1])
        taken = dict.fromkeys(_SETTINGS, 0.0)
        for _ in range(_TUNING_PASSES):
            for setting in _SETTINGS:
                start = time.perf_counter()
                self.move(call, setting, min(self._nbytes, GiB))
                taken[setting] += time.perf_counter() - start
        return min(taken, key=lambda setting: taken[setting])

    def move(self, call: Callable[..., int], setting: _Setting, nbytes: int | None = None) -> None:
        """All of the file, or its first `nbytes`, by `os.pwritev` or `os.preadv`."""
        end = self._nbytes if nbytes is None else nbytes

        def lane(first: int) -> None:
            for start in range(first * setting.block, end, setting.threads * setting.block):
                self._whole(call, start, min(start + setting.block, end))

        for done in [self._pool.submit(lane, first) for first in range(setting.threads)]:
            done.result()

    def read_back(self) -> Tensor:
        """What the file holds, in memory that held zeros before."""
        self.memory.zero_()
        self.move(os.preadv, _SETTINGS[-1])
        return self.memory

    def _whole(self, call: Callable[..., int], start: int, end: int) -> None:
        while start < end:
            moved = call(self._fd, [self._pages[start:end]], start)
            if moved == 0:
                raise EOFError(f"the file ends at {start}")
            start += moved


class _SavedFile:
    """A nameless file for `torch.save` and `torch.load`, which open it by the path of its descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._path = f"/proc/self/fd/{fd}"

    def save(self, tensor: Tensor) -> None:
        """Write `tensor`, until the disk has it."""
        torch.save(tensor, self._path)
        os.fsync(self._fd)

    def load(self, device: str = "cpu") -> Tensor:
        """The tensor saved last."""
        return torch.load(self._path, map_location=device, weights_only=True)

    def evict(self) -> None:
        """Have the page cache forget the file; its pages are on the disk since `save`."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
