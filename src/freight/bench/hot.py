"""Benchmark `hot`: rows of which a part also lies in GPU memory, for ids drawn by degree.

The share of ids that rank r of N draws falls with r as in the degrees of a large graph: of the c N highest ranks,
c ** (1 - skew) of all ids. Ranks are spread over the table, so hot rows do not lie together in it.

"misses alone" is the bound: as many uncached ids as miss, drawn evenly from the same table. "no cache" is the same ids
from the same table without hot rows.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import freight
from freight._units import GiB, MiB
from freight.bench import _rows
from freight.bench._registry import benchmark
from freight.bench._run import Run, Skip, Way, Work, at_least

_IDS = 2**19
_ROW_BYTES = 512
_MISSES = "misses alone"
_SPREAD = 0x9E3779B1  # odd: multiplying by it shuffles the numbers below a power of two


@benchmark("hot", title="Hot rows in GPU memory", measures=("freight.rows", "freight.kernels._launch"))
def hot(run: Run) -> None:
    """Declare the cells."""
    for gib in (8, 32):
        for skew in (0.5, 0.75):
            for percent in (1, 5, 20):
                ids = _IDS // (8 if run.quick else 1)
                table = gib * GiB // (1 if run.gpu and not run.quick else 64)
                run.cell(
                    f"{gib}GiB/skew{skew}/{percent}",
                    group="cached",
                    axes={"table_bytes": gib * GiB, "skew": skew, "cached_percent": percent},
                    unit="ms",
                    clock="gpu" if run.gpu else "host",
                    targets=[at_least(0.85, of=_MISSES)] if run.gpu else [],
                    work=partial(_reading, table, skew, percent, ids, on_gpu=run.gpu),
                    seconds=4.0,
                    in_quick=gib == 8 and skew == 0.75,
                    note=f"{ids:,} ids of {_ROW_BYTES}-byte rows, drawn by degree, fresh each round",
                )


@contextlib.contextmanager
def _reading(table_bytes: int, skew: float, percent: int, count: int, *, on_gpu: bool) -> Iterator[Work]:
    if not on_gpu:
        raise Skip("hot rows lie in GPU memory, and there is no GPU")
    held = _rows.memory(table_bytes)
    rows = table_bytes // _ROW_BYTES
    cached = rows * percent // 100
    ranks = torch.arange(rows, device="cuda")
    is_hot = torch.zeros(rows, dtype=torch.bool, device="cuda")
    is_hot[_spread(ranks[:cached], rows)] = True
    degree = torch.empty(rows, device="cuda")
    degree[_spread(ranks, rows)] = (ranks + 1.0) ** -skew
    words = held.words.host().view(rows, _ROW_BYTES // 8)
    with (
        contextlib.closing(freight.unified(words, in_place=True, cache=cached, hot=degree)) as x,
        contextlib.closing(freight.unified(words, in_place=True)) as bare,
    ):

        def prepare() -> tuple[Tensor, Tensor]:
            rank = (rows * torch.rand(count, device="cuda", dtype=torch.float64) ** (1 / (1 - skew))).long()
            ids = _spread(rank.clamp(max=rows - 1), rows)
            misses = count - int(is_hot[ids].sum())
            return ids, torch.randint(rows, (misses,), device="cuda")

        def checked(ids: tuple[Tensor, Tensor], got: Tensor) -> bool:
            asked = ids[0] if len(got) == len(ids[0]) else ids[1]
            return _rows.is_right(asked, got)

        extra = {"hit_share": 1 - prepare()[1].numel() / count, "cached_bytes": x.stats().cached_bytes // MiB * MiB}
        yield Work(
            Way("freight", lambda ids: freight.gather_rows(x, ids[0])),
            check=checked,
            checked="every byte of the rows, computed from the ids",
            rivals=(
                Way(_MISSES, lambda ids: freight.gather_rows(bare, ids[1])),
                Way("no cache", lambda ids: freight.gather_rows(bare, ids[0])),
            ),
            prepare=prepare,
            extra=extra,
        )


def _spread(rank: Tensor, rows: int) -> Tensor:
    """The row that a rank is: every row once, where `rows` is a power of two."""
    return rank * _SPREAD % rows
