"""Benchmark `gather`: rows of host memory onto the GPU, against every way that a user has today.

    rows    one call of 2**19 random ids, by row width and table size; and four batches of that size in one call
    cpu     the same against the ways that go through the CPU; for some with CPU seconds and GPU energy of a gigabyte
    host    calls a second of few rows: as the host submits them, and until the GPU is done with them

Rivals: `torch.index_select` on the table seen as a CUDA tensor; `index_select` by CPU threads into pinned buffers,
each copied while the next is filled; the naive `x[ids].to("cuda")`; and all rows in GPU memory, which is the bound.
Ways that need ids on the CPU get them there, at no cost.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import freight
from freight._units import GiB, MiB, show_bytes
from freight.bench import _rows
from freight.bench._record import Scalar
from freight.bench._registry import benchmark
from freight.bench._run import Run, Way, Work, at_least

_IDS = 2**19
_WIDTHS = (64, 128, 256, 400, 512, 1024, 2408, 4096)
_GBS = {  # of useful rows, that a call is to reach
    (8, 1): (10, 20, 40, 43, 47, 49, 48, 50),
    (32, 1): (4.2, 8.4, 16, 26, 33, 47, 48, 50),
    (32, 4): (11, 22, 44, 46, 50, 50, 49, 50),
}
_OVER_STAGING = {256: 2.0, 400: 2.0, 512: 2.2, 1024: 2.2, 2408: 2.2, 4096: 2.2}  # at 8 GiB
_PRICED = (256, 512, 1024)  # the widths at which CPU seconds and energy are measured too
_ALIAS = "torch on the alias"
_CALLS = 200
_MEASURES = ("freight.rows", "freight.kernels._launch")


@benchmark("gather", title="Rows of host memory onto the GPU", measures=_MEASURES)
def gather(run: Run) -> None:
    """Declare the cells."""
    if not run.gpu:
        _declare_on_cpu(run)
        return
    for row_bytes in _WIDTHS:
        _declare_rows(run, 1, 1, row_bytes, None)
    for (gib, batches), speeds in _GBS.items():
        for row_bytes, gbs in zip(_WIDTHS, speeds, strict=True):
            _declare_rows(run, gib, batches, row_bytes, gbs)
        if gib == 8:  # while the table of that size is there
            for row_bytes in _WIDTHS:
                _declare_cpu(run, row_bytes)
    for clock, until in (("submit", "until the last of them returns"), ("host", "until the GPU is done with them")):
        for name, least in (("gather_rows", 1e6 / 30), ("x[ids]", 1e6 / 60)):
            run.cell(
                f"host/{clock}/{name}",
                group="host",
                axes={"call": name, "clock": clock},
                unit="1/s",
                amount=_CALLS,
                clock=clock,
                targets=[at_least(least)],
                work=partial(_calling, name),
                note=f"{_CALLS} calls of 64 rows of 256 bytes, {until}",
            )


# ---- rows: the GPU's own ways ------------------------------------------------------------------------


def _declare_rows(run: Run, gib: int, batches: int, row_bytes: int, gbs: float | None) -> None:
    ids = _IDS * batches // (8 if run.quick else 1)
    table = gib * GiB // (16 if run.quick else 1)
    run.cell(
        f"rows/{gib}GiB/{batches}/{row_bytes}",
        group="rows",
        axes={"table_bytes": gib * GiB, "batches": batches, "row_bytes": row_bytes},
        unit="GB/s",
        amount=ids * row_bytes,
        clock="gpu",
        targets=[*([] if gbs is None else [at_least(gbs)]), at_least(0.98, of=_ALIAS)],
        work=partial(_reading, table, row_bytes, ids),
        seconds=5.0,
        in_quick=row_bytes in (64, 512, 4096),
        note=f"{ids:,} uniform random ids, fresh each round; bytes of rows only",
    )


@contextlib.contextmanager
def _reading(table_bytes: int, row_bytes: int, count: int) -> Iterator[Work]:
    held = _rows.memory(table_bytes)
    with contextlib.closing(held.table(row_bytes)) as x:
        alias = x._table.on_gpu(x.host())
        in_hbm = held.on_gpu(row_bytes)
        out = torch.empty(count, row_bytes // 8, dtype=torch.int64, device="cuda")

        def checked(ids: Tensor, rows: Tensor) -> bool:
            right = _rows.is_right(ids, rows)
            rows.fill_(-1)  # so that nobody inherits what another way wrote
            return right

        yield Work(
            Way("freight", lambda ids: freight.gather_rows(x, ids, out)),
            check=checked,
            checked="every byte of the rows, computed from the ids",
            rivals=(
                Way(_ALIAS, lambda ids: torch.index_select(alias, 0, ids, out=out)),
                Way("all in GPU memory", lambda ids: torch.index_select(in_hbm, 0, ids, out=out)),
            ),
            prepare=lambda: torch.randint(len(x), (count,), device="cuda"),
            extra={"programs_that_copy": x._table.copiers(row_bytes, count)},
        )


# ---- cpu: the ways through the CPU -------------------------------------------------------------------


def _declare_cpu(run: Run, row_bytes: int) -> None:
    ids = _IDS // (8 if run.quick else 1)
    table = 8 * GiB // (16 if run.quick else 1)
    everyone = _staging_name(_rows.all_threads())
    over = _OVER_STAGING.get(row_bytes)
    run.cell(
        f"cpu/8GiB/{row_bytes}",
        group="cpu",
        axes={"table_bytes": 8 * GiB, "row_bytes": row_bytes},
        unit="GB/s",
        amount=ids * row_bytes,
        clock="host",
        targets=[] if over is None else [at_least(over, of=everyone)],
        work=partial(_through_cpu, table, row_bytes, ids),
        seconds=4.0,
        in_quick=row_bytes == 512,
        note="ids on the CPU for those that need them there; bytes of rows only",
    )


def _staging_name(threads: int) -> str:
    return f"CPU staging, {threads} thread{'s' * (threads > 1)}"


@contextlib.contextmanager
def _through_cpu(table_bytes: int, row_bytes: int, count: int) -> Iterator[Work]:
    held = _rows.memory(table_bytes)
    with contextlib.closing(held.table(row_bytes)) as x:
        plain = x.host()
        out = torch.empty(count, row_bytes // 8, dtype=torch.int64, device="cuda")
        threads = list(dict.fromkeys((1, 4, _rows.all_threads())))
        staging = {number: _rows.Staging(plain, number) for number in threads}

        def prepare() -> tuple[Tensor, Tensor]:
            ids = torch.randint(len(x), (count,), device="cuda")
            return ids, ids.cpu()

        def by_staging(number: int) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
            return lambda ids: staging[number](ids[1], out)

        ways = {
            "freight": lambda ids: freight.gather_rows(x, ids[0], out),
            **{_staging_name(number): by_staging(number) for number in threads},
            'x[ids].to("cuda")': lambda ids: plain[ids[1]].to("cuda"),
        }
        ids, priced = prepare(), ways if row_bytes in _PRICED else {}
        costs = {name: _rows.cost(partial(way, ids), count * row_bytes) for name, way in priced.items()}
        extra: dict[str, Scalar] = {f"{name}, CPU seconds a GB": spent.cpu_seconds for name, spent in costs.items()}
        extra |= {f"{name}, joules a GB": spent.joules for name, spent in costs.items()}
        subject, *rivals = [Way(name, way) for name, way in ways.items()]

        yield Work(
            subject,
            check=lambda ids, rows: _rows.is_right(ids[0], rows),
            checked="every byte of the rows, computed from the ids",
            rivals=tuple(rivals),
            prepare=prepare,
            extra=extra,
        )


# ---- host: what a call costs the host ----------------------------------------------------------------


@contextlib.contextmanager
def _calling(name: str) -> Iterator[Work]:
    nbytes, row_bytes = 64 * MiB, 256
    held = _rows.memory(nbytes)
    with contextlib.closing(held.table(row_bytes)) as x:
        call = {"gather_rows": partial(freight.gather_rows, x), "x[ids]": lambda ids: x[ids]}[name]
        alias = x._table.on_gpu(x.host())

        def many(way: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
            for _ in range(_CALLS - 1):
                way(ids)
            return way(ids)

        yield Work(
            Way("freight", partial(many, call)),
            check=lambda ids, rows: _rows.is_right(ids, rows),
            checked="every byte of the last call's rows, computed from the ids",
            rivals=(Way(_ALIAS, partial(many, partial(torch.index_select, alias, 0))),),
            prepare=lambda: torch.randint(len(x), (64,), device="cuda"),
        )


# ---- without a GPU -----------------------------------------------------------------------------------


def _declare_on_cpu(run: Run) -> None:
    for row_bytes in (64, 512, 4096):
        run.cell(
            f"rows/cpu/{row_bytes}",
            group="rows",
            axes={"table_bytes": 256 * MiB, "row_bytes": row_bytes},
            unit="GB/s",
            amount=2**15 * row_bytes,
            clock="host",
            work=partial(_on_cpu, 256 * MiB, row_bytes, 2**15),
            seconds=4.0,
            in_quick=row_bytes == 512,
            note=f"no GPU: rows of a table of {show_bytes(256 * MiB)} by the CPU",
        )


@contextlib.contextmanager
def _on_cpu(table_bytes: int, row_bytes: int, count: int) -> Iterator[Work]:
    plain = torch.randint(-(2**63), 2**63 - 1, (table_bytes // row_bytes, row_bytes // 8))
    with contextlib.closing(freight.unified(plain, in_place=True)) as x:
        yield Work(
            Way("freight", lambda ids: freight.gather_rows(x, ids)),
            check=lambda ids, rows: torch.equal(rows, plain[ids]),
            checked="every byte of the rows",
            rivals=(Way("torch.index_select", lambda ids: torch.index_select(plain, 0, ids)),),
            prepare=lambda: torch.randint(len(plain), (count,)),
        )
