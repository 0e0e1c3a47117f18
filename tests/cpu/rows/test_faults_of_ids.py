"""Ids outside the table: whoever asks for them is told the id and the size, and nothing is read or written there."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows_on_cpu import unified
from torch import Tensor
from torch.nn.functional import embedding

import freight
from freight.errors import FreightError, OutOfRangeError
from freight.rows import _table
from freight.rows._table import Fault, out_of_range

ROWS = 7
ENDS = [ROWS, -ROWS - 1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63)]

WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "x[ids]": lambda x, ids: x[ids],
    "x[ids, 1]": lambda x, ids: x[ids, 1],
    "x[ids] of a view": lambda x, ids: x[:][ids],
    "x[list]": lambda x, ids: x[ids.tolist()],
    "x[array]": lambda x, ids: x[ids.numpy()],
    "gather_rows": lambda x, ids: freight.gather_rows(x, ids),
    "several batches": lambda x, ids: freight.gather_rows(x, [torch.tensor([0]), ids]),
    "with out": lambda x, ids: freight.gather_rows(x, ids, torch.zeros(*ids.shape, 3)),
    "with a cast": lambda x, ids: freight.gather_rows(x, ids, dtype=torch.float64),
    "a plain table": lambda x, ids: freight.gather_rows(x.host(), ids),
    "rows in pieces": lambda x, ids: freight.gather_rows(x.host().t().contiguous().t(), ids),
    "x.index_select": lambda x, ids: x.index_select(0, ids),
    "torch.index_select": lambda x, ids: torch.index_select(x, dim=0, index=ids),
    "embedding": lambda x, ids: embedding(ids, x),
    "compiled": lambda x, ids: torch.compile(lambda i: x[i] * 1, backend="eager", dynamic=True)(ids),
    "x[ids] = 0": lambda x, ids: x.__setitem__(ids, 0),
    "x[ids, 1] = 0": lambda x, ids: x.__setitem__((ids, 1), 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_cpu_ids_raise_at_once(way: str) -> None:
    x = unified(torch.arange(ROWS * 3.0).view(ROWS, 3))
    before = x.host().clone()
    for bad in ENDS:
        with pytest.raises(IndexError, match=str(bad)) as caught:
            WAYS[way](x, torch.tensor([0, bad, ROWS - 1]))
        assert f"{ROWS}" in str(caught.value)
        if "= 0" not in way:
            assert isinstance(caught.value, FreightError)
            assert torch.equal(x.host(), before)
    WAYS[way](x, torch.tensor([0, ROWS - 1]))


@pytest.mark.parametrize("way", ["x.index_select", "torch.index_select", "embedding"])
def test_negative_ids_where_torch_has_none(way: str) -> None:
    x = unified(torch.ones(ROWS, 3))
    with pytest.raises(
        OutOfRangeError, match=r"id -1 lies outside the table of 7 rows; ids go from 0 to 6, and negative"
    ):
        WAYS[way](x, torch.tensor([-1]))


def test_take_counts_elements() -> None:
    x = unified(torch.arange(6.0).view(3, 2))
    assert x.take(torch.tensor([[5, -6]])).tolist() == [[5, 0]]
    for bad in (6, -7):
        with pytest.raises(OutOfRangeError, match=f"id {bad} lies outside the table of 6 rows"):
            x.take(torch.tensor([0, bad]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_of_many_ids_one_that_is_none_is_named(dtype: torch.dtype) -> None:
    x, ids = unified(torch.ones(ROWS, 3)), torch.arange(300_000, dtype=dtype) % ROWS
    assert x[ids].shape == (300_000, 3)
    ids[299_999] = -8
    with pytest.raises(OutOfRangeError, match="id -8"):
        x[ids]
    ids[3] = 1234
    with pytest.raises(OutOfRangeError, match=r"id (-8|1234)"):
        x[ids]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_ids_are_never_outside(shape: tuple[int, ...]) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    for rows in (0, 5):
        assert unified(torch.ones(rows, 3))[ids].shape == (*shape, 3)


@pytest.mark.parametrize("columns", [0, 3])
def test_a_table_of_no_rows_says_so(columns: int) -> None:
    with pytest.raises(OutOfRangeError, match="id 0 lies outside the table, which has 0 rows and so no ids"):
        unified(torch.ones(0, columns))[torch.tensor([0])]


def test_rows_of_no_columns_have_ids_too() -> None:
    x = unified(torch.ones(4, 0))
    assert x[torch.tensor([3, -4])].shape == (2, 0)
    with pytest.raises(OutOfRangeError, match="id 4"):
        x[torch.tensor([4])]


def test_check_ids_changes_nothing_on_the_cpu() -> None:
    x = unified(torch.ones(ROWS, 3))
    with freight.config(check_ids=True):
        assert x[torch.tensor([1])].sum() == 3
        with pytest.raises(OutOfRangeError):
            x[torch.tensor([ROWS])]
    x.check()
    x.close()


def test_messages() -> None:
    assert out_of_range(9, 5) == "id 9 lies outside the table of 5 rows; ids go from 0 to 4, or from -5 to -1."
    assert "ids go from 0 to 1,999, or from -2,000 to -1" in out_of_range(2000, 2000)
    assert "negative ones are none here" in out_of_range(-1, 5, wrap=False)


# ---- the words that a GPU writes ---------------------------------------------------------------------


def words() -> tuple[Fault, Any]:
    """A fault over words of this process; only their view from a GPU is left out."""
    fault = Fault.__new__(Fault)
    fault._words = (ctypes.c_int64 * 2)(-(2**63), -(2**63))
    return fault, fault._words


@pytest.mark.parametrize(("bad", "rows"), [(9, 5), (-6, 5), (0, 0), (2**63 - 1, 5), (-(2**63), 5)])
def test_a_fault_is_told_once(bad: int, rows: int) -> None:
    """The least int64 too: it is what a NaN becomes that is cast to an id."""
    fault, written = words()
    fault.check()
    written[:] = (bad, rows)
    with pytest.raises(OutOfRangeError, match=f"id {bad} lies outside the table"):
        fault.check()
    fault.check()


def test_a_table_tells_the_fault_that_it_met() -> None:
    x = unified(torch.ones(5, 2))
    fault, written = words()
    x._table._faults.append(fault)
    for call in (x.check, x.stats, lambda: x[torch.tensor([0])], lambda: freight.gather_rows(x, torch.tensor([0]))):
        written[:] = (77, 5)
        with pytest.raises(OutOfRangeError, match="id 77 lies outside the table of 5 rows"):
            call()
        call()
    written[:] = (78, 5)
    with pytest.raises(OutOfRangeError, match="id 78"):
        x.close()
    x.close()
    assert repr(x).startswith("UnifiedTensor(closed")


def test_at_exit_nothing_is_left_unsaid(caplog: pytest.LogCaptureFixture) -> None:
    """One is raised, and the others are logged; a table that met none says nothing."""
    tables = [unified(torch.ones(5, 2)) for _ in range(4)]
    for bad, x in zip((71, 72, 73), tables, strict=False):
        fault, written = words()
        x._table._faults.append(fault)
        written[:] = (bad, 5)
    with caplog.at_level("ERROR", "freight"), pytest.raises(OutOfRangeError) as raised:
        _table._last_look()
    said = [str(raised.value), *caplog.messages]
    assert sorted(text.split(" lies")[0] for text in said) == ["id 71", "id 72", "id 73"]
    _table._last_look()
