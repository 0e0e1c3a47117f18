"""The kernel that writes rows, interpreted without a GPU, against torch's own index assignment."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows_on_cpu import POOR, WHOLE, random_rows
from torch import Tensor

from freight.errors import ArgumentError
from freight.kernels._tolerance import assert_same_bits
from freight.rows import _put
from freight.rows._hot import HotRows, build_map

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE = -(2**63)


def some_hot(table: Tensor, share: float) -> HotRows | None:
    ids = torch.randperm(len(table), device=DEVICE)[: round(share * len(table))].sort().values
    if not len(ids):
        return None
    return HotRows(
        table[ids].clone(), build_map(ids, len(table)), ids, torch.zeros(1, dtype=torch.int64, device=DEVICE)
    )


@given(
    N=st.sampled_from([1, 2, 33, 130]),
    row=st.sampled_from([1, 2, 3, 7, 12, 16, 100, 400, 2408]),
    gap=st.sampled_from([0, 1, 8, 24]),
    skew=st.sampled_from([0, 1, 4, 8]),
    rows_skew=st.sampled_from([0, 1, 4]),
    outside=st.integers(0, 2),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    ids_dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_kernel_against_torch(
    N: int, row: int, gap: int, skew: int, rows_skew: int, outside: int, share: float, ids_dtype: torch.dtype
) -> None:
    whole = torch.randint(256, (skew + N * (row + gap) + 64,), dtype=torch.uint8, device=DEVICE)
    table = whole[skew:].as_strided((N, row), (row + gap, 1))
    hot = some_hot(table, share)
    ids = torch.randperm(N)[: max(1, N * 2 // 3)]
    ids[::2] -= N  # from the end
    bad = torch.tensor([N, -N - 1])[:outside]
    ids = torch.cat([bad, ids]).to(DEVICE, ids_dtype)
    rows = torch.randint(256, (rows_skew + len(ids) * row,), dtype=torch.uint8, device=DEVICE)[rows_skew:].view(-1, row)
    fault = torch.full((2,), NONE, device=DEVICE)

    want = whole.clone()
    want[skew:].as_strided(table.shape, table.stride())[ids[outside:].long()] = rows[outside:]
    _put.launch(table, ids, rows, hot=hot, fault=fault)
    assert_same_bits(whole, want)  # nothing beside the rows either
    if hot is not None:
        assert_same_bits(hot.rows, table[hot.ids])
    if outside:
        assert fault[0] in bad.to(DEVICE)
        assert fault[1] == N
    else:
        assert fault.tolist() == [NONE, NONE]


def test_rows_wider_than_a_tile() -> None:
    for row in (2048 * 8 + 8, 5001):
        table = torch.zeros(4, row, dtype=torch.uint8, device=DEVICE)
        rows = torch.randint(256, (2, row), dtype=torch.uint8, device=DEVICE)
        hot = some_hot(table, 1.0)
        _put.launch(table, torch.tensor([3, -4], device=DEVICE), rows, hot=hot)
        assert hot is not None
        for got in (table, hot.rows):
            assert_same_bits(got[[3, 0]], rows)
            assert not got[1:3].any()


def test_of_one_row_written_twice_one_is_kept() -> None:
    table = torch.zeros(3, 5, device=DEVICE)
    rows = torch.arange(20.0, device=DEVICE).view(4, 5)
    _put.launch(table, torch.tensor([1, -2, 1, 0], device=DEVICE), rows)
    assert any(torch.equal(table[1], rows[at]) for at in range(3))
    assert torch.equal(table[0], rows[3])


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 3), (1, 5)], ids=str)
@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def rows(n: int) -> Tensor:
        return random_rows(n * shape[1:].numel(), dtype=dtype).view(n, *shape[1:]).to(DEVICE)

    shape = torch.Size(shape)
    table, ids = rows(shape[0]), torch.tensor([shape[0] - 1, -shape[0]][: shape[0]], device=DEVICE)
    values, want = rows(len(ids)), table.clone()
    _put.reference(want, ids, values)
    _put.launch(table, ids, values)
    assert_same_bits(table, want)
    assert_same_bits(table[ids] if dtype in WHOLE else _put.as_bytes(table)[ids].view(dtype).view(values.shape), values)


@pytest.mark.parametrize(("n", "N", "row"), [(0, 3, 2), (2, 3, 0), (0, 0, 2)])
def test_nothing_to_write(n: int, N: int, row: int) -> None:
    table = torch.ones(N, row, device=DEVICE)
    ids, rows = torch.zeros(n, dtype=torch.int64, device=DEVICE), torch.zeros(n, row, device=DEVICE)
    _put.launch(table, ids, rows)
    _put.reference(table, ids, rows)
    assert (table == 1).all()


def put(table: Tensor, ids: Tensor, rows: Any) -> Tensor:
    """By way of the public function's own door: values of any kind, spread over the rows."""
    fault = torch.full((2,), NONE, device=DEVICE)
    _put.put(table, ids.to(DEVICE), rows, source=table, hot=None, fault=fault)
    return table


@pytest.mark.parametrize(
    "value", [7, 2.5, True, torch.tensor(3), torch.arange(3.0), torch.arange(3), [1, 2, 3]], ids=str
)
def test_values_are_spread_and_cast(value: Any) -> None:
    want = torch.zeros(5, 3, device=DEVICE)
    want[[4, 0]] = torch.as_tensor(value, device=DEVICE).float()
    assert torch.equal(put(torch.zeros(5, 3, device=DEVICE), torch.tensor([4, 0]), value), want)


def test_ids_of_any_shape() -> None:
    ids = torch.tensor([[0, 1], [2, 3]]).t()  # not contiguous
    values = torch.randn(2, 2, 3, device=DEVICE)
    want = torch.zeros(5, 3, device=DEVICE)
    want[ids.to(DEVICE)] = values
    assert torch.equal(put(torch.zeros(5, 3, device=DEVICE), ids, values), want)


def test_values_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"rows of shape \(4,\) do not fit into \(2, 3\), the shape of x\[ids\]"):
        put(torch.zeros(5, 3, device=DEVICE), torch.tensor([0, 1]), torch.ones(4))
