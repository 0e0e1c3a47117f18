"""Rates at which the GPU's cores read page-locked tables in place: from first to last, and by random rows."""

import torch
from torch import Tensor

from freight import _cuda
from freight.machine._budget import Budget
from freight.machine._facts import RandomRead, Reads, short
from freight.machine._timing import best_seconds_on_gpu

_SEED = 20261118


def measure(address: int, tables: tuple[int, ...], free_bytes: int, budget: Budget) -> Reads:
    """The rates for tables of the sizes `tables`, each the beginning of the page-locked block at `address`."""
    from freight.machine import _reads  # Triton is imported by those who launch kernels

    words = _cuda.alias(address, max(tables), None).view(torch.int64)
    some = words[: min(tables) // 8]
    sequential = best_seconds_on_gpu(lambda: _reads.launch_total(some), budget.seconds)

    generator = torch.Generator("cuda").manual_seed(_SEED)
    rows = torch.empty(min(budget.gather_bytes, free_bytes // 8) // 8, dtype=torch.int64, device="cuda")
    random = []
    for table_bytes in sorted(tables):
        for row_bytes in budget.row_bytes:
            table = words[: table_bytes // 8].view(-1, row_bytes // 8)
            count = min(budget.ids, rows.nbytes // row_bytes, len(table) // 2)
            seconds = _best_gather(table, rows[: count * row_bytes // 8], count, generator)
            random.append(RandomRead(table_bytes, row_bytes, short(count * row_bytes / seconds / 1e9)))
    return Reads(sequential_gbs=short(some.nbytes / sequential / 1e9), random=tuple(random))


def _best_gather(table: Tensor, rows: Tensor, count: int, generator: torch.Generator) -> float:
    """The best of a few gathers, each with rows drawn anew: rows seen before could come from a cache."""
    from freight.machine import _reads

    draws = iter([torch.randint(len(table), (count,), device="cuda", generator=generator) for _ in range(4)])
    return best_seconds_on_gpu(lambda: _reads.launch_rows(table, next(draws), rows), 0.0)
