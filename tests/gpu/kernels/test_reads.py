"""The kernels that read host memory, on a GPU: from GPU memory and from page-locked host memory, against the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freight import _cuda
from freight._units import show_bytes
from freight.machine._reads import _rows_kernel, launch_rows, launch_total, reference_rows, reference_total

LARGEST = torch.iinfo(torch.int64).max


def draw(memory: str, *shape: int) -> tuple[Tensor, Tensor]:
    """The same table twice: on the CPU, and where the kernel is to read it."""
    host = torch.randint(-LARGEST, LARGEST, shape)
    if memory == "gpu" or host.numel() == 0:
        return host, host.cuda()
    pinned = host.pin_memory()
    return host, _cuda.alias(pinned.data_ptr(), pinned.nbytes, pinned).view(torch.int64).view(shape)


def gathered(table: Tensor, ids: Tensor) -> Tensor:
    return launch_rows(table, ids, torch.empty(len(ids), table.shape[1], dtype=torch.int64, device="cuda"))


@pytest.mark.parametrize("memory", ["gpu", "host"])
def test_total_of_every_length(memory: str) -> None:
    for words in (0, 1, 2, 1023, 1024, 1025, 1_000_003, 2**21):
        host, table = draw(memory, words)
        assert launch_total(table).item() == reference_total(host).item(), words


@pytest.mark.parametrize("memory", ["gpu", "host"])
@pytest.mark.parametrize("row_bytes", [16, 48, 64, 112, 400, 1024, 2416, 4096])
def test_rows_of_every_width(memory: str, row_bytes: int) -> None:
    host, table = draw(memory, 1009, row_bytes // 8)
    for count in (0, 1, 31, 10_007):
        ids = torch.randint(1009, (count,))
        assert torch.equal(gathered(table, ids.cuda()).cpu(), reference_rows(host, ids)), count


def test_more_than_31_bits() -> None:
    """Rows and words past 2**31 of a table that is zero up to there."""
    torch.cuda.empty_cache()
    needed, (free, _) = 18 * 2**30, torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {show_bytes(needed)} of free GPU memory; there are {show_bytes(free)}")
    table = torch.zeros(2**25 + 77, 64, dtype=torch.int64, device="cuda")
    last, on_gpu = draw("gpu", 77, 64)
    table[2**25 :] = on_gpu
    ids = torch.arange(2**25 - 3, 2**25 + 77)
    want = torch.cat([torch.zeros(3, 64, dtype=torch.int64), last])
    assert torch.equal(gathered(table, ids.cuda()).cpu(), want)
    assert launch_total(table.view(-1)).item() == last.sum().item()
    del table
    torch.cuda.empty_cache()  # for the tests that follow


def test_one_compilation_for_rows_of_any_length(compilations: Callable[[Any], int]) -> None:
    """As many ids as a measurement takes; the probe would otherwise compile for each width."""
    ids = torch.randint(33, (4096,))
    gathered(draw("gpu", 33, 64)[1], ids.cuda())
    before = compilations(_rows_kernel)
    for lanes in (1, 2, 3, 7, 16, 255, 256):
        host, table = draw("gpu", 33, 2 * lanes)
        assert torch.equal(gathered(table, ids.cuda()).cpu(), reference_rows(host, ids))
    assert compilations(_rows_kernel) == before
