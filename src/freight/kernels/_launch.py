"""What launches share: sizes of a grid, the device to launch on, how wide memory may be read, what a GPU can do.

Nothing here imports triton before a kernel does.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
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


class Prepared:
    """A Triton kernel for hot paths: launched again and again with little work on the host.

    Triton looks at every argument of every launch, a microsecond or two each. Here the caller says by `key` what a
    launch is compiled for (types, alignments, constants), and from its second launch on, addresses go as numbers.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[int, Hashable], Any] = {}

    def __call__(
        self,
        key: Hashable,
        grid: int,
        pointers: Sequence[Tensor | None],
        numbers: Sequence[int],
        typed: Callable[[], tuple[Any, ...]],
        constants: Mapping[str, int],
        options: Mapping[str, int],
    ) -> None:
        """Launch on the current GPU and stream, or interpreted.

        The kernel's parameters are the `pointers`, the `numbers` and the `constants`, in this order; `typed` gives the
        first two as Triton itself takes them.
        """
        where = (torch.cuda.current_device() if torch.cuda.is_available() else -1, key)
        compiled = self._compiled.get(where)
        if compiled is None:
            compiled = self._kernel[(grid,)](*typed(), **constants, **options)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled[where] = compiled
            return
        addresses = [None if pointer is None else pointer.data_ptr() for pointer in pointers]
        compiled[(grid, 1, 1)](*addresses, *numbers, *constants.values())


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
