"""Tensors over memory that freight holds: checked to fit, and keeping that memory alive."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from freight.errors import ArgumentError

Shape = Sequence[int] | int | None


def fit(what: str, room: int, dtype: torch.dtype, shape: Shape, offset: int) -> tuple[int, tuple[int, ...]]:
    """Bytes and sizes of a tensor at byte `offset` of `room` bytes; without `shape`, one-dimensional to the end.

    >>> fit("a block", 64, torch.float32, None, 16)
    (48, (12,))
    """
    if not 0 <= offset <= room or offset % dtype.itemsize:
        raise ArgumentError(
            f"{what}: the offset of a {dtype} tensor must be a multiple of {dtype.itemsize} within its {room} bytes; "
            f"got {offset}."
        )
    if shape is None:
        shape = (room - offset) // dtype.itemsize
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"{what}: sizes must not be negative; got {sizes}.")
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    if offset + nbytes > room:
        raise ArgumentError(
            f"{what} holds {room} bytes; {sizes} of {dtype} at offset {offset} ends at {offset + nbytes}."
        )
    return nbytes, sizes


def over(address: int, nbytes: int, keep: object, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """A CPU tensor over `nbytes` at `address`; `keep` lives as long as any view of it."""
    if nbytes == 0:
        return torch.empty(sizes, dtype=dtype)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]  # the tensor holds the array, the array holds the memory
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(sizes)
