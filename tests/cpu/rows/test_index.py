"""What an index asks for: on every index, the very rows that torch itself takes, or an error."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_on_cpu import unified
from torch import Tensor

from freight.errors import ArgumentError, OutOfRangeError
from freight.rows import _index

TABLE = torch.arange(5 * 4 * 3).view(5, 4, 3)
CPU = torch.device("cpu")


def tensor(*values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype)


ROWS = {
    "int": 3,
    "negative": -5,
    "numpy int": np.int64(3),
    "scalar tensor": torch.tensor(2),
    "slice": slice(1, 4),
    "steps": slice(None, None, 2),
    "empty slice": slice(3, 1),
    "Ellipsis": ...,
    "None": None,
    "nothing": (),
    "True": True,
    "False": False,
    "scalar mask": torch.tensor(True),
    "ids": tensor(0, 4, 4, -5),
    "int32 ids": tensor(0, -1, dtype=torch.int32),
    "ids of two dimensions": tensor([0, 1], [2, -3]),
    "one id": tensor(2),
    "no ids": torch.zeros(0, dtype=torch.int64),
    "no ids of two dimensions": torch.zeros(2, 0, dtype=torch.int64),
    "strided ids": torch.arange(5)[::2],
    "mask": tensor(True, False, False, True, True),
    "mask of nothing": tensor(*[False] * 5),
    "mask of elements": TABLE > 20,
    "mask of rows and columns": TABLE[:, :, 0] % 2 == 0,
    "list": [4, 0, -1],
    "empty list": [],
    "list of bools": [True, False, False, True, True],
    "list of numpy ints": [np.int64(1), np.int64(2)],
    "range": range(1, 4),
    "array": np.array([4, -5]),
    "array of two dimensions": np.array([[4], [-5]]),
    "empty array": np.array([]),
    "int32 array": np.array([1, 2], dtype=np.int32),
    "uint16 array": np.array([1, 2], dtype=np.uint16),
    "uint64 array": np.array([1, 2], dtype=np.uint64),
    "mask array": np.array([True, False, False, True, True]),
}
RESTS = {
    "": (),
    "an int": (2,),
    "a slice": (slice(1, 3),),
    "all but the last": (..., 1),
    "a new dimension": (None,),
    "ids too": (tensor(1, 0),),
    "ids further on": (slice(None), tensor(1, 0)),
    "a list": ([1, 0],),
    "an empty list": ([],),
    "an array": (np.array([1, 0]),),
    "a mask": (tensor(True, False, True, False),),
    "True": (True,),
}


def outcome(what: Any) -> Any:
    try:
        return what()
    except Exception as error:
        return error


def assert_alike(ours: Any, theirs: Any) -> None:
    """The same rows, or an error of the same kind; an error, too, where torch would first warn."""
    if isinstance(theirs, Exception):
        assert isinstance(ours, Exception)
        assert isinstance(ours, type(theirs)) or isinstance(theirs, Warning)
        return
    if isinstance(ours, Exception):
        raise ours
    ours = ours.host() if hasattr(ours, "host") else ours
    assert ours.dtype is theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs)


def index_of(rows: str, rest: str) -> Any:
    first, more = ROWS[rows], RESTS[rest]
    if not more:
        return first
    return (*first, *more) if isinstance(first, tuple) else (first, *more)


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_rows_that_torch_takes(rows: str, rest: str) -> None:
    x, index = unified(TABLE), index_of(rows, rest)
    assert_alike(outcome(lambda: x[index]), outcome(lambda: TABLE[index]))


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_rows_that_torch_writes(rows: str, rest: str) -> None:
    x, plain, index = unified(TABLE), TABLE.clone(), index_of(rows, rest)
    ours, theirs = outcome(lambda: x.__setitem__(index, -1)), outcome(lambda: plain.__setitem__(index, -1))
    assert isinstance(ours, Exception) == isinstance(theirs, Exception)
    assert torch.equal(x.host(), plain)


INDEX = st.one_of(
    st.integers(-6, 6),
    st.slices(6).filter(lambda part: part.step is None or part.step > 0),
    st.just(None),
    st.just(...),
    st.booleans(),
    st.lists(st.integers(-6, 6), max_size=4),
    st.lists(st.integers(-6, 6), max_size=4).map(lambda ids: torch.tensor(ids, dtype=torch.int64)),
    st.lists(st.integers(-4, 3), min_size=2, max_size=2).map(lambda ids: torch.tensor([ids, ids], dtype=torch.int32)),
    st.lists(st.integers(-4, 3), max_size=4).map(lambda ids: np.array(ids, dtype=np.int64)),
    st.lists(st.booleans(), min_size=3, max_size=5).map(torch.tensor),
)


@settings(max_examples=300)
@given(parts=st.lists(INDEX, max_size=4))
def test_any_index(parts: list[Any]) -> None:
    """Drawn without regard for what fits: masks of the wrong length, too many dimensions, ids that are none."""
    index = parts[0] if len(parts) == 1 else tuple(parts)
    ours, theirs = outcome(lambda: unified(TABLE)[index]), outcome(lambda: TABLE[index])
    if isinstance(ours, OutOfRangeError) and isinstance(theirs, Tensor) and theirs.numel() == 0:
        return  # torch does not look at ids that meet an empty index
    assert_alike(ours, theirs)


@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_masks_of_another_length(length: int) -> None:
    x = unified(TABLE)
    for mask in (torch.zeros(length, dtype=torch.bool), [False] * length or np.zeros(0, bool)):
        for index in (mask, (mask, 1)):
            with pytest.raises(IndexError, match=r"shape of the mask \[\d\]"):
                x[index]
            with pytest.raises(IndexError, match=r"shape of the mask \[\d\]"):
                x[index] = 0
    assert torch.equal(x.host(), TABLE)


@pytest.mark.parametrize(
    "index", [[[0, 1], [2, 3]], [tensor(0, 1)], [slice(0, 2)], [None], [...], [(0, 1)], [np.array([1])]], ids=str
)
def test_lists_that_mean_two_things(index: Any) -> None:
    x = unified(TABLE)
    with pytest.raises(ArgumentError, match=r"write x\[tuple\(index\)\] or x\[torch\.tensor\(index\)\]; got \["):
        x[index]
    with pytest.raises(ArgumentError, match="one tensor"):
        x[index] = 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_ids_that_torch_refuses_and_that_mean_one_thing(dtype: torch.dtype) -> None:
    assert torch.equal(unified(TABLE)[torch.tensor([1, 4]).to(dtype)], TABLE[[1, 4]])


def test_uint64_ids_do_not_become_negative() -> None:
    for index in (np.array([2**64 - 1], dtype=np.uint64), (slice(None), np.array([2**63], dtype=np.uint64))):
        with pytest.raises(OutOfRangeError, match="beyond 2"):
            unified(TABLE)[index]


def test_a_unified_tensor_as_index() -> None:
    x, ids = unified(TABLE), unified(torch.tensor([4, 0]))
    assert torch.equal(x[ids], TABLE[[4, 0]])
    assert torch.equal(TABLE[ids], TABLE[[4, 0]])
    assert torch.equal(x[ids, 1], TABLE[[4, 0], 1])
    assert torch.equal(x.index_select(0, ids), TABLE[[4, 0]])


# ---- the parts ---------------------------------------------------------------------------------------


def test_rows_and_what_follows() -> None:
    ids = tensor(1, 2)
    for index, rest in ((ids, ()), ((ids,), ()), ((ids, 3), (3,)), ((ids, ..., None), (..., None))):
        found = _index.rows_and_rest(index, 5)
        assert found is not None
        assert found[0] is ids
        assert found[1] == rest
    for index in ((3, ids), (ids, ids), (ids, [1]), (ids, ..., ...), (..., ids), "rows", 1.5, TABLE > 0):
        assert _index.rows_and_rest(index, 5) is None


def test_basic_is_what_gives_a_view() -> None:
    basic = (2, -1, np.int32(1), torch.tensor(1), slice(None), None, ..., (), (1, ..., None))
    other = (True, torch.tensor(True), tensor(1), [1], np.array([1]), 1.5, (1, [0]), torch.tensor(1.5))
    assert [index for index in basic if not _index.is_basic(index)] == []
    assert [index for index in other if _index.is_basic(index)] == []


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (tensor(0, 5), "index 5 is out of bounds for dimension 0 with size 5"),
        (tensor(-6), "index -6 is out of bounds for dimension 0 with size 5"),
        ((slice(None), tensor(4)), "index 4 is out of bounds for dimension 1 with size 4"),
        ((..., tensor(3)), "index 3 is out of bounds for dimension 2 with size 3"),
        ((None, 0, tensor(-5)), "index -5 is out of bounds for dimension 1 with size 4"),
        ((True, tensor(5)), "index 5 is out of bounds for dimension 0 with size 5"),
        ((TABLE[:, :, 0] > 3, tensor(3)), "index 3 is out of bounds for dimension 2 with size 3"),
    ],
    ids=str,
)
def test_what_a_gpu_could_not_say(index: Any, message: str) -> None:
    """There torch would end the context instead."""
    with pytest.raises(OutOfRangeError, match=message):
        _index.check_range(_index.on_device(index, CPU), TABLE.shape)


@pytest.mark.parametrize(
    ("index", "dimension", "message"),
    [
        (tensor([0, 4], [3, 1]), 1, "index 4 is out of bounds for dimension 1 with size 4"),
        (tensor(0, -1), 0, "index -1 is out of bounds for dimension 0 with size 4"),
        (tensor(4), None, "index 4 is out of bounds for the flattened tensor with size 4"),
    ],
)
def test_numbers_that_a_gpu_could_not_say(index: Tensor, dimension: int | None, message: str) -> None:
    with pytest.raises(OutOfRangeError, match=message):
        _index.check_numbers(index, 4, dimension)
    _index.check_numbers(index.clamp(0, 3), 4, dimension)
    _index.check_numbers(index[:0], 0, dimension)


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("rows", ROWS)
def test_nothing_is_refused_that_fits(rows: str, rest: str) -> None:
    index = index_of(rows, rest)
    if not isinstance(outcome(lambda: TABLE[index]), Exception):
        _index.check_range(_index.on_device(index, CPU), TABLE.shape)


def test_indices_are_moved_whole() -> None:
    index = (tensor(1), [0, 1], np.array([2]), slice(1), None, ..., 3)
    moved = _index.on_device(index, torch.device("meta"))
    assert [part.device.type for part in itertools.takewhile(lambda part: isinstance(part, Tensor), moved)] == [
        "meta"
    ] * 3
    assert moved[3:] == index[3:]
