"""The kernels that read host memory (interpreted without a GPU) against plain PyTorch; all of it is whole numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.machine._reads import launch_rows, launch_total, reference_rows, reference_total

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 64  # lanes or words that a program reads at once, so that small tables have many blocks and a ragged end
LARGEST = torch.iinfo(torch.int64).max


@pytest.fixture(autouse=True)
def _poison(poisoned_memory: None) -> None:
    """What a kernel leaves unwritten is the largest integer, never a lucky zero."""


def draw(*shape: int) -> torch.Tensor:
    return torch.randint(-LARGEST, LARGEST, shape, device=DEVICE)


def gathered(table: torch.Tensor, ids: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    rows = torch.empty(len(ids), table.shape[1], dtype=torch.int64, device=DEVICE)
    assert launch_rows(table, ids, rows, block=block) is rows
    return rows


@given(
    words=st.sampled_from([0, 1, 2, 7, 63, 64, 65, 191, 192, 193, 1000, 1021]),
    programs=st.sampled_from([1, 2, 3, 5]),
)
def test_total_of_every_length(words: int, programs: int) -> None:
    table = draw(words)
    assert torch.equal(launch_total(table, programs=programs, block=BLOCK), reference_total(table))


def test_total_wraps_as_torch_does() -> None:
    table = torch.full((257,), LARGEST, device=DEVICE)
    assert torch.equal(launch_total(table, programs=2, block=BLOCK), reference_total(table))


def test_every_word_is_read_once() -> None:
    """Each word is a power of two of its own, within a window that all positions take their turn in."""
    for start in range(0, 300, 60):
        table = torch.zeros(300, dtype=torch.int64, device=DEVICE)
        table[start : start + 60] = 1 << torch.arange(60, device=DEVICE)
        assert launch_total(table, programs=2, block=BLOCK).item() == 2**60 - 1


@given(
    row_bytes=st.sampled_from([16, 32, 48, 112, 128, 400, 1008, 1024, 2416, 4096]),
    table_rows=st.sampled_from([1, 2, 7, 31]),
    count=st.sampled_from([0, 1, 2, 3, 17]),
)
def test_rows_of_every_width(row_bytes: int, table_rows: int, count: int) -> None:
    table = draw(table_rows, row_bytes // 8)
    ids = torch.randint(table_rows, (count,), device=DEVICE)
    assert torch.equal(gathered(table, ids), reference_rows(table, ids))


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 3])
@pytest.mark.parametrize("lanes", [1, 3])
def test_nothing_is_written_behind_the_last_row(count: int, lanes: int) -> None:
    table = draw(11, 2 * lanes)
    ids = torch.randint(11, (count,), device=DEVICE)
    room = torch.full((count * 2 * lanes + 2 * BLOCK,), 7, device=DEVICE)
    rows = room[: count * 2 * lanes].view(count, -1)
    launch_rows(table, ids, rows, block=BLOCK)
    assert torch.equal(rows, reference_rows(table, ids))
    assert room[rows.numel() :].unique().tolist() == [7]


def test_repeated_first_and_last_rows() -> None:
    table = draw(5, 6)
    ids = torch.tensor([4, 0, 4, 4, 0, 3, 0], device=DEVICE)
    assert torch.equal(gathered(table, ids), reference_rows(table, ids))


def test_tables_without_rows_to_give() -> None:
    assert gathered(draw(3, 0), torch.tensor([0, 2], device=DEVICE)).shape == (2, 0)
    assert gathered(draw(0, 4), torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0, 4)
