"""`freight demo`: the main jobs on what is at hand, each verified and shown with its rate.

A part is a function that does one job and yields what it found, line by line. Parts run one after the other, and what
one of them cannot do here is said and does not end the others.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

import freight
from freight import _cuda
from freight._units import GiB, MiB, show_bytes
from freight.errors import FreightError
from freight.machine import Machine, probe
from freight.memory import DiskFile, stats

_ROW_BYTES = 512
_ROUNDS = 3  # the first one warms up
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """One thing that was shown; `right` is None where there was nothing to verify."""

    what: str
    value: str
    right: bool | None = None


Part = Callable[[], Iterator[Line]]


def main() -> int:
    """Run every part; 1 where a result was wrong."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    status = 0
    for title, part in PARTS:
        console.print(Text(title, "bold"))
        try:
            for line in part():
                mark = {True: ("verified", "green"), False: ("WRONG", "bold red"), None: ("", "")}[line.right]
                console.print(Text.assemble(f"  {line.what:<38} {line.value:>12}  ", mark), soft_wrap=True)
                status |= line.right is False
        except FreightError as error:
            console.print(Text(f"  not shown here: {error}", "yellow"), soft_wrap=True)
    return int(status)


def machine() -> Iterator[Line]:
    """What this computer is, from the cache where it was measured before."""
    found = probe(quick=True)
    yield Line(found.gpu.name or "no GPU: all of this runs on the CPU", "")
    for what, gbs in _rates(found):
        yield Line(what, "–" if gbs is None else f"{gbs:.4g} GB/s")


def _rates(found: Machine) -> list[tuple[str, float | None]]:
    on_gpu = [("copies to the GPU", found.link.h2d_gbs), ("the GPU's own reads", found.reads.sequential_gbs)]
    on_disk = [("disk, write", found.disk.write_gbs), ("disk, read", found.disk.read_gbs)]
    return [*(on_gpu if found.gpu.absent is None else []), ("memory copy", found.host.memcpy_gbs), *on_disk]


def rows() -> Iterator[Line]:
    """A table of rows in host memory, and random rows of it: read where they lie, and by way of the CPU."""
    nbytes = _affordable(GiB)
    table = torch.randint(-(2**63), 2**63 - 1, (nbytes // _ROW_BYTES, _ROW_BYTES // 8))
    with contextlib.closing(freight.unified(table)) as x:
        device = x.compute_device
        ids = torch.randint(len(x), (len(x) // 4,), device=device)
        yield Line(f"a table of {len(x):,} rows in host memory", show_bytes(nbytes))
        yield Line(f"{len(ids):,} random rows of it, as", show_bytes(len(ids) * _ROW_BYTES))
        want = table[ids.cpu()]
        for how, read in (
            ("x[ids], where freight reads in place", lambda: x[ids]),
            ('table[ids].to("cuda"), by the CPU' if device.type == "cuda" else "table[ids]", _naive(table, ids)),
        ):
            seconds, got = _timed(read)
            yield Line(how, _rate(got.nbytes, seconds), torch.equal(got.cpu(), want))


def _naive(table: torch.Tensor, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: table[ids.cpu()].to(ids.device)


def disk() -> Iterator[Line]:
    """A tensor to the disk, past the page cache, and back."""
    nbytes = _affordable(256 * MiB)
    device = "cuda" if _cuda.available() else "cpu"
    tensor = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), device=device)
    back = torch.zeros_like(tensor)
    with DiskFile(nbytes, checksum=True) as file:
        pieces = list(zip(tensor.chunk(8), back.chunk(8), strict=True))
        extents = [file.allocate(source.nbytes) for source, _ in pieces]

        def write() -> None:
            tokens = [file.write(extent, source) for extent, (source, _) in zip(extents, pieces, strict=True)]
            for token in tokens:
                token.wait()

        def read() -> None:
            tokens = [file.read(extent, to) for extent, (_, to) in zip(extents, pieces, strict=True)]
            for token in tokens:
                token.wait()

        yield Line(f"a nameless file in {file.directory}", show_bytes(nbytes))
        seconds, _ = _timed(write)
        yield Line("written", _rate(nbytes, seconds))
        seconds, _ = _timed(read)
        yield Line("read back", _rate(nbytes, seconds), torch.equal(back, tensor))


PARTS: tuple[tuple[str, Part], ...] = (
    ("This computer", machine),
    ("Rows of host memory", rows),
    ("Bytes on the disk", disk),
)


def _affordable(wanted: int) -> int:
    """As much of `wanted` as leaves most of the memory alone."""
    return min(wanted, max(MiB, stats().left // 16 // MiB * MiB), GiB)


def _timed(work: Callable[[], T], rounds: int = _ROUNDS) -> tuple[float, T]:
    """The best time of a few calls, to their end on the GPU, and the last result."""
    finish = torch.cuda.synchronize if _cuda.available() else contextlib.nullcontext
    best = float("inf")
    while True:
        start = time.perf_counter()
        result = work()
        finish()
        best = min(best, time.perf_counter() - start)
        rounds -= 1
        if not rounds:
            return best, result


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.4g} GB/s"
