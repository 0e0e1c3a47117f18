"""What launches share: sizes of a grid, the device to launch on, how wide memory may be read, what a GPU can do.

Nothing here imports triton before a kernel does.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_WIDEST = 16  # bytes that one thread reads in one instruction


def cdiv(value: int, by: int) -> int:
    """`value / by`, rounded up.

    >>> cdiv(0, 4), cdiv(8, 4), cdiv(9, 4)
    (0, 2, 3)
    """
    return -(-value // by)


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`; 1 for 0.

    >>> next_power_of_two(0), next_power_of_two(3), next_power_of_two(64)
    (1, 4, 64)
    """
    return 1 << max(0, value - 1).bit_length()


def vector_bytes(*addresses_and_strides: int) -> int:
    """The widest load, 1 to 16 bytes, that is aligned at all of these byte addresses, row widths and strides.

    >>> vector_bytes(4096, 512), vector_bytes(4096, 602 * 4), vector_bytes(4098, 6)
    (16, 8, 2)
    """
    bits = _WIDEST
    for value in addresses_and_strides:
        bits |= value
    return bits & -bits


def fits_int32(*tensors: Tensor) -> bool:
    """Whether every element of `tensors` lies less than 2**31 elements behind its first: int32 offsets reach it.

    >>> fits_int32(torch.empty(2**31, device="meta")), fits_int32(torch.empty(2**31 + 1, device="meta"))
    (True, False)
    """
    return all(
        sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) < 2**31
        for t in tensors
        if t.numel()
    )


def launching_on(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's GPU the current one: Triton launches there, on its current stream. Nothing for a CPU tensor."""
    return torch.cuda.device_of(tensor)


class Launch:
    """One way to launch a Triton kernel from a hot path: what no call changes is worked out at the first one.

    Triton looks at every argument of every launch, a microsecond or two each. Only the first launch goes that way; from
    then on addresses go as numbers, so what varies must keep its type and whether it is a multiple of 16. The kernel's
    parameters are the varying pointers, the varying numbers, what is fixed, and the constants, in this order.
    """

    def __init__(
        self,
        kernel: Any,
        fixed: Sequence[Any],
        constants: Mapping[str, int],
        options: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self._kernel, self._fixed, self._constants, self._options = kernel, fixed, constants, options
        self._device = device
        self._compiled: Any = None
        self._tail: tuple[Any, ...] = ()

    def __call__(
        self, grid: int, addresses: Sequence[int | None], numbers: Sequence[int], typed: Callable[[], Sequence[Any]]
    ) -> None:
        """Launch on the current stream, or interpreted; `typed` gives the varying pointers as Triton takes them."""
        if self._compiled is None:
            self._first(grid, numbers, typed())
            return
        index = self._device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(grid, addresses, numbers, typed)
            return
        compiled, stream = self._compiled, torch._C._cuda_getCurrentRawStream(index)
        arguments = (*addresses, *numbers, *self._tail)
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )  # fmt: skip

    def _first(self, grid: int, numbers: Sequence[int], pointers: Sequence[Any]) -> None:
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            compiled = self._kernel[(grid,)](*pointers, *numbers, *self._fixed, **self._constants, **self._options)
        if compiled is None:  # the interpreter compiles nothing
            return
        fixed = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in self._fixed]
        self._tail = (*fixed, *self._constants.values())
        self._compiled = compiled


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; few where the interpreter stands in for one."""
    return _properties(device).multi_processor_count if device.type == "cuda" else 2


def why_not(device: torch.device, *, least: int = 80, most: int | None = None) -> str | None:
    """Why a kernel made for sm_`least` (to sm_`most`) cannot run on `device`; None where it can.

    >>> why_not(torch.device("cpu"), least=90)
    'needs a GPU; the data is on cpu'
    """
    if device.type != "cuda":
        return f"needs a GPU; the data is on {device}"
    gpu = _properties(device)
    sm = 10 * gpu.major + gpu.minor
    if sm < least:
        return f"needs sm_{least} or later; {gpu.name} is sm_{sm}"
    if most is not None and sm > most:
        return f"is made for sm_{least} to sm_{most}; {gpu.name} is sm_{sm}"
    return None


def _properties(device: torch.device):
    return _properties_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _properties_of(index: int):
    return torch.cuda.get_device_properties(index)
