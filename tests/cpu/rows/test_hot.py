"""Which rows also lie in GPU memory: the map that says where, how many there is room for, and which they are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from rows_on_cpu import unified
from torch import Tensor
from torch.utils.data import DataLoader

from freight import memory
from freight._units import KiB, MiB
from freight.errors import ArgumentError, ArgumentTypeError, FreightError, OutOfRangeError
from freight.rows import _cache
from freight.rows._hot import HotRows, build_map, hot_slots, reference_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UGLY = st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 1000, 1025])


# ---- the map -----------------------------------------------------------------------------------------


@triton.jit
def _slots_kernel(hot_map, rows, good, slots, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0)
    wanted = inside & (tl.load(good + i, mask=inside, other=0) != 0)
    tl.store(slots + i, hot_slots(hot_map, row, wanted), mask=inside)


def slots(hot_ids: Tensor, n_rows: int, rows: Tensor, good: Tensor) -> Tensor:
    found = torch.full_like(rows, -7)
    _slots_kernel[(triton.cdiv(len(rows), 256),)](
        build_map(hot_ids, n_rows), rows, good.to(torch.int8), found, len(rows), BLOCK=256
    )
    return found


@given(n_rows=UGLY, share=st.sampled_from([0.0, 0.03, 0.5, 0.97, 1.0]), seed=st.integers(0, 99))
def test_slots_against_reference(n_rows: int, share: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    hot_ids = torch.randperm(n_rows, generator=random)[: round(share * n_rows)].sort().values.to(DEVICE)
    rows = torch.arange(n_rows, device=DEVICE)
    good = (torch.rand(n_rows, generator=random) < 0.9).to(DEVICE)
    want = torch.where(good, reference_slots(hot_ids, rows), -1)
    assert torch.equal(slots(hot_ids, n_rows, rows, good), want)
    assert torch.equal(want[hot_ids][good[hot_ids]], torch.arange(len(hot_ids), device=DEVICE)[good[hot_ids]])


def test_slots_at_every_bit() -> None:
    """The bit that is the sign of its word too."""
    for bit in range(33):
        rows = torch.arange(66, device=DEVICE)
        for hot_ids in (torch.tensor([bit]), torch.tensor([bit, 65])):
            hot_ids = hot_ids.to(DEVICE)
            got = slots(hot_ids, 66, rows, torch.ones(66, dtype=torch.bool, device=DEVICE))
            assert torch.equal(got, reference_slots(hot_ids, rows))


def test_reference_slots() -> None:
    assert reference_slots(torch.tensor([2, 5, 9]), torch.tensor([5, 4, 2, 9, 10, 0])).tolist() == [1, -1, 0, 2, -1, -1]
    assert reference_slots(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 3])).tolist() == [-1, -1]


def test_the_map_takes_a_quarter_of_a_byte_a_row() -> None:
    assert build_map(torch.tensor([0]), 32 * 1000).nbytes == 8000
    assert build_map(torch.tensor([0]), 1).nbytes == build_map(torch.tensor([0]), 32).nbytes == 8


def test_bytes_taken() -> None:
    ids = torch.tensor([1, 2])
    hot = HotRows(torch.ones(2, 3), build_map(ids, 33), ids, torch.zeros(1, dtype=torch.int64))
    assert hot.nbytes == 24 + 16 + 16


# ---- how many ----------------------------------------------------------------------------------------


@given(
    n_rows=st.sampled_from([1, 31, 32, 33, 1000, 99_999]),
    row_bytes=st.sampled_from([1, 7, 400, 4096]),
    room=st.integers(0, 2 * MiB),
)
def test_bytes_are_never_more_than_allowed(n_rows: int, row_bytes: int, room: int) -> None:
    map_bytes = build_map(torch.zeros(0, dtype=torch.int64), n_rows).nbytes
    if room < map_bytes:
        with pytest.raises(ArgumentError, match=f"cache='{room}' has no room for the map.*make it larger"):
            _cache._most_rows(str(room), n_rows, row_bytes)
        return
    rows = _cache._most_rows(str(room), n_rows, row_bytes)
    assert map_bytes + rows * (row_bytes + 8) <= room
    assert rows == n_rows or map_bytes + (rows + 1) * (row_bytes + 8) > room


def test_numbers_are_rows() -> None:
    assert _cache._most_rows(5, 100, 4) == 5
    assert _cache._most_rows(500, 100, 4) == 100
    assert _cache._most_rows(np.int64(7), 100, 4) == 7
    assert _cache._most_rows(0, 100, 4) == 0
    assert _cache._most_rows("1 KiB", 100, 0) == 100


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (-1, ArgumentError, "at least 0; got -1"),
        (True, ArgumentError, "got True"),
        (1.5, ArgumentTypeError, "a number of rows, or bytes such as '2GiB'; got 1.5"),
        ("many", ArgumentError, "cache must look like '2GiB'"),
        ("7", ArgumentError, "no room for the map of which of 10 rows are hot, 8 B; make it larger"),
    ],
)
def test_sizes_that_are_none(cache: Any, error: type[FreightError], message: str) -> None:
    with pytest.raises(error, match=message):
        unified(torch.ones(10, 2), cache=cache, hot=torch.ones(10))


# ---- which -------------------------------------------------------------------------------------------


def test_the_highest_scores() -> None:
    scores = torch.tensor([3.0, 0.0, 9.0, -1.0, float("nan"), 5.0])
    assert _cache._hottest(scores, 2).tolist() == [2, 5]
    assert _cache._hottest(scores, 6).tolist() == [0, 2, 5]  # nothing that nobody asks for


@pytest.mark.parametrize(
    "scores",
    [
        torch.tensor([3, 0, 9, 4]),
        torch.tensor([3, 0, 9, 4], dtype=torch.uint8),
        torch.tensor([3.0, 0, 9, 4], dtype=torch.bfloat16),
        np.array([3, 0, 9, 4]),
        torch.tensor([True, False, True, True]),
    ],
    ids=lambda scores: str(scores.dtype),
)
def test_scores_of_any_dtype(scores: Any) -> None:
    assert set(_cache._hottest(_cache._scores(scores, 4), 3).tolist()) == {0, 2, 3}


def test_a_loader_is_seen_once() -> None:
    seen = [torch.tensor([[1, 1], [3, 3]]), SimpleNamespace(n_id=torch.tensor([3, 0], dtype=torch.int32))]
    assert _cache._scores(iter(seen), 5).tolist() == [1, 2, 0, 3, 0]
    loader = DataLoader(torch.tensor([2, 2, 4]), batch_size=2)  # type: ignore[arg-type]
    assert _cache._scores(loader, 5).tolist() == [0, 0, 2, 0, 1]


@given(ids=st.lists(st.integers(0, 9), max_size=20), most=st.integers(0, 12))
def test_hot_ids_are_taken_from_the_front(ids: list[int], most: int) -> None:
    assert _cache._first(torch.tensor(ids, dtype=torch.int64), most).tolist() == sorted(list(dict.fromkeys(ids))[:most])


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"hot_ids": [0, 4]}, OutOfRangeError, "hot_ids must lie between 0 and 3; got 0 to 4"),
        ({"hot_ids": [-1]}, OutOfRangeError, "got -1 to -1"),
        ({"hot_ids": [0.5]}, ArgumentTypeError, "hot_ids must be row numbers; got torch.float32"),
        ({"hot_ids": [True] * 4}, ArgumentTypeError, "must be row numbers; got torch.bool"),
        ({"hot": torch.ones(3)}, ArgumentError, r"one score for each of the 4 rows; got \(3,\)"),
        ({"hot": torch.ones(4, 1)}, ArgumentError, r"got \(4, 1\)"),
        ({"hot": 7}, ArgumentTypeError, r"scores of shape \(4,\) or a loader; got 7"),
        ({"hot": [[1, 2]]}, ArgumentTypeError, "must give row numbers, or batches with `n_id`; got <class 'list'>"),
        (
            {"hot": [torch.tensor([1, 4])]},
            OutOfRangeError,
            "what the loader for hot= asks for must lie between 0 and 3",
        ),
        ({"hot": [torch.tensor([1.5])]}, ArgumentTypeError, "asks for must be row numbers; got torch.float32"),
        ({}, ArgumentError, r"pass hot= \(scores or a loader\) or hot_ids="),
    ],
)
def test_what_is_refused(how: dict[str, Any], error: type[FreightError], message: str) -> None:
    with pytest.raises(error, match=message):
        unified(torch.ones(4, 2), cache=2, **how)


@pytest.mark.parametrize("how", [{"hot": torch.ones(4)}, {"hot_ids": [0]}])
def test_hot_without_cache(how: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="say how many with cache="):
        unified(torch.ones(4, 2), **how)


def test_where_the_cpu_computes_nothing_is_cached() -> None:
    x = unified(torch.arange(8.0).view(4, 2), cache=2, hot=torch.tensor([1, 5, 0, 9]))
    assert x.stats().cached_rows == x.stats().cached_bytes == 0
    x.host()[3] = -1
    x.refresh()
    assert x[torch.tensor([3])].tolist() == [[-1, -1]]
    assert "GPU memory" not in repr(x)
    assert unified(x, cache=1, hot_ids=[0]) is x


def test_a_wrong_cache_leaves_no_table_behind(held_before: int) -> None:
    """Also while the error is still looked at, as a notebook does."""
    with pytest.raises(ArgumentError) as caught:
        unified(torch.ones(1000, 100), cache="1B", hot=torch.ones(1000))
    assert caught.value.__traceback__ is not None
    assert memory.stats().held == held_before
    x = unified(torch.ones(1000, 100))
    with pytest.raises(ArgumentError):
        unified(x, cache="1B", hot=torch.ones(1000))
    assert memory.stats().held - held_before >= 400 * 1000
    assert x[torch.tensor([7])].sum() == 100
    assert KiB < x.stats().table_bytes
