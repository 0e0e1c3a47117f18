"""One page-locked block for the time of a measurement."""

import contextlib
import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from freight import _cuda, _pages
from freight._config import current
from freight._units import MiB, show_bytes
from freight.errors import HostMemoryError

_SMALLEST = 64 * MiB


def affordable(wanted: tuple[int, ...], available: int) -> tuple[int, ...]:
    """Those of the sizes `wanted` that fit into a quarter of the `available` memory and into freight's own limit."""
    most = available // 4
    limit = current().host_bytes
    most = most if limit is None else min(most, limit)
    sizes = tuple(size for size in wanted if size <= most)
    if sizes or most < _SMALLEST:
        return sizes
    return (most // MiB * MiB,)


@contextlib.contextmanager
def page_locked(nbytes: int) -> Iterator[int]:
    """The address of a page-locked block of `nbytes`, which is gone when the block ends, however it ends."""
    if nbytes == 0:
        raise HostMemoryError(
            f"a measurement needs {show_bytes(_SMALLEST)} of page-locked memory, four times that available, and "
            "FREIGHT_HOST_BYTES may not be less. Free some memory, or raise the limit."
        )
    address = _pages.map_segments(nbytes)
    try:
        _pages.fault_in(address, nbytes)
        _cuda.register(address, nbytes)
        yield address
    finally:
        with contextlib.suppress(RuntimeError):  # an error of the measurement itself is on its way already
            torch.cuda.synchronize()
        _cuda.unregister(address)
        _pages.unmap(address, nbytes)


def host_tensor(address: int, nbytes: int) -> Tensor:
    """The bytes at `address` as a CPU tensor, which must not outlive them."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
