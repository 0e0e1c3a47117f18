"""Tensors over memory: what fits, and what keeps the memory alive."""

import ctypes
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.errors import ArgumentError
from freight.memory._views import fit, over

DTYPES = st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128])


class Owner:
    """Something that can be seen to go."""


@given(
    room=st.integers(0, 200),
    dtype=DTYPES,
    shape=st.one_of(st.none(), st.integers(-1, 20), st.lists(st.integers(-1, 6), max_size=3)),
    offset=st.integers(-8, 210),
)
def test_what_fits_is_given_and_nothing_else(
    room: int, dtype: torch.dtype, shape: int | list[int] | None, offset: int
) -> None:
    item = dtype.itemsize
    aligned = 0 <= offset <= room and offset % item == 0
    sizes = (shape,) if isinstance(shape, int) else tuple(shape or ()) if shape is not None else None
    if sizes is None and aligned:
        sizes = ((room - offset) // item,)
    possible = aligned and sizes is not None and min(sizes, default=0) >= 0
    if possible and offset + math.prod(sizes) * item <= room:
        assert fit("a block", room, dtype, shape, offset) == (math.prod(sizes) * item, sizes)
    else:
        with pytest.raises(ArgumentError, match="a block"):
            fit("a block", room, dtype, shape, offset)


def test_it_says_what_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"^rows: the offset of a torch.float32 tensor must be a multiple of 4 "):
        fit("rows", 100, torch.float32, None, 2)
    with pytest.raises(
        ArgumentError, match=r"^rows holds 100 bytes; \(5, 4\) of torch.float32 at offset 24 ends at 104"
    ):
        fit("rows", 100, torch.float32, (5, 4), 24)
    with pytest.raises(ArgumentError, match=r"^rows: sizes must not be negative; got \(-1, 3\)"):
        fit("rows", 100, torch.float32, (-1, 3), 0)


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3), (2, 0, 3)], ids=str)
def test_the_memory_lives_as_long_as_any_view(sizes: tuple[int, ...]) -> None:
    memory = (ctypes.c_ubyte * 64)()
    owner = Owner()
    gone = weakref.ref(owner)
    nbytes = 4 * math.prod(sizes)
    tensor = over(ctypes.addressof(memory), nbytes, owner, torch.float32, sizes)
    del owner
    assert tensor.shape == sizes
    if nbytes:
        tensor.fill_(1)
        assert bytes(memory)[:4] == b"\x00\x00\x80\x3f"
        view = tensor.flatten()[-1:].numpy()
        del tensor
        assert gone() is not None
        assert view[0] == 1
        del view
    gc.collect()
    assert gone() is None
