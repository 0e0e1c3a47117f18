"""Arrays in files, read straight into memory that is there already: `.npy` and `.safetensors`.

.npy           its header by numpy; its bytes by several threads, each reading pieces into their places
.safetensors   by its own library, a slice at a time
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freight._config import current
from freight._units import GiB, MiB, show_bytes
from freight.errors import ArgumentError, DiskError, MissingError

_PIECE = 64 * MiB
_WORTH_SHOWING = GiB  # below, a progress bar would only flicker

Told = Callable[[int], object]


@dataclass(frozen=True)
class Array:
    """An array in an open file; `read_into` fills a contiguous CPU tensor of its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    read: Callable[[Tensor, Told], None]

    def read_into(self, to: Tensor) -> None:
        """Read all of it, with a progress bar on a terminal."""
        with _progress(self.name, to.numel() * to.element_size()) as told:
            self.read(to, told)


@contextlib.contextmanager
def open_array(path: Path, name: str | None = None) -> Iterator[Array]:
    """The array in a `.npy` file, or tensor `name` of a `.safetensors` file, where it has more than one."""
    kinds = {".npy": _npy, ".safetensors": _safetensors}
    if path.suffix not in kinds:
        raise ArgumentError(f"{path} is neither .npy nor .safetensors; load it and pass it to freight.unified.")
    try:
        with kinds[path.suffix](path, name) as array:
            yield array
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise DiskError(error.errno, f"the array cannot be read ({reason})", str(path)) from None


@contextlib.contextmanager
def _npy(path: Path, name: str | None) -> Iterator[Array]:
    if name is not None:
        raise ArgumentError(f"a .npy file holds one array without a name; got name={name!r}.")
    with path.open("rb") as file:
        shape, dtype = _npy_header(file, path)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
        if size < start + nbytes:
            raise ArgumentError(
                f"{path} is cut short: its header promises {show_bytes(nbytes)} of {dtype} of shape {shape}, and "
                f"{show_bytes(max(0, size - start))} are there. Write it again."
            )
        yield Array(shape, dtype, path.name, lambda to, told: _read_pieces(file.fileno(), start, to, told, path))


def _npy_header(file: Any, path: Path) -> tuple[tuple[int, ...], torch.dtype]:
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, column_major, dtype = read[version](file)
    except KeyError as error:
        raise ArgumentError(f"{path} is a .npy file of version {error}; freight reads 1.0 and 2.0.") from None
    except OSError:
        raise
    except Exception as error:  # the header is Python's own text, and what its parser says of nonsense is of any kind
        raise ArgumentError(f"{path} is no .npy file: {error}.") from None
    if not shape or (column_major and len(shape) > 1):
        what = "column-major" if shape else "a single number"
        raise ArgumentError(f"{path} is {what}; freight reads rows: save it with numpy.ascontiguousarray(array).")
    try:
        return shape, torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        raise ArgumentError(f"{path} holds {dtype}, for which torch has no dtype; convert the array first.") from None


def _read_pieces(fd: int, start: int, to: Tensor, told: Told, path: Path) -> None:
    memory = to.view(-1).view(torch.uint8).numpy().data if to.numel() else memoryview(b"")
    workers = ThreadPoolExecutor(current().disk_threads, thread_name_prefix="freight-read")
    try:
        pieces = [workers.submit(_read_piece, fd, start, memory, at, path) for at in range(0, len(memory), _PIECE)]
        for piece in pieces:
            told(piece.result())
    finally:  # on Ctrl-C too: no thread may write to memory that its owner gives up
        workers.shutdown(wait=True, cancel_futures=True)


def _read_piece(fd: int, start: int, memory: memoryview, at: int, path: Path) -> int:
    done, end = at, min(at + _PIECE, len(memory))
    while done < end:
        count = os.preadv(fd, [memory[done:end]], start + done)
        if count == 0:
            raise DiskError(None, f"the file ended {show_bytes(end - done)} early", str(path))
        done += count
    return end - at


@contextlib.contextmanager
def _safetensors(path: Path, name: str | None) -> Iterator[Array]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingError(f"reading {path.name} needs safetensors ({error}): pip install safetensors.") from None
    if not path.is_file():
        raise FileNotFoundError(2, os.strerror(2))
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            chosen = names[0] if name is None and len(names) == 1 else name
            if chosen not in names:
                raise ArgumentError(f"{path} has the tensors {', '.join(names)}; got name={name!r}.")
            piece = file.get_slice(chosen)
            shape = tuple(piece.get_shape())
            if not shape:
                raise ArgumentError(f"{chosen} in {path} is a single number; freight reads rows.")
            dtype = piece[0:0].dtype
            yield Array(shape, dtype, f"{path.name}: {chosen}", lambda to, told: _read_slices(piece, to, told))
    except SafetensorError as error:
        raise ArgumentError(f"{path} is no safetensors file: {error}.") from None


def _read_slices(piece: Any, to: Tensor, told: Told) -> None:
    at_once = max(1, _PIECE // max(1, to[0:1].numel() * to.element_size()))
    for start in range(0, len(to), at_once):
        rows = piece[start : min(start + at_once, len(to))]
        to[start : start + len(rows)] = rows
        told(rows.numel() * rows.element_size())


@contextlib.contextmanager
def _progress(name: str, nbytes: int) -> Iterator[Told]:
    if nbytes < _WORTH_SHOWING or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"reading {name}", total=nbytes)
        yield lambda done: bar.update(task, advance=done)
