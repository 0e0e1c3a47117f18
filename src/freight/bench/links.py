"""Benchmark `links`: the host arena against torch's pinned memory, and the GPU's reads of host memory in place.

    copy    the arena to the GPU, back, and both at once; against torch copies from and to a `pin_memory` tensor
    pin     making memory ready for the GPU: mapping, faulting in, page-locking; against `torch.empty(pin_memory=True)`
    read    the GPU's own reads of the arena in place; against the copy engine, and against gathering on the CPU

Without a GPU there remain: copies inside host memory, and making memory ready by faulting it in.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import psutil
import torch
from torch import Tensor

from freight._units import GiB, MiB, show_bytes
from freight.bench._registry import benchmark
from freight.bench._run import Run, Skip, Way, Work, at_least
from freight.memory import CopyStreams, HostBlock, allocate

_OF_MEMORY = ("_host", "_registry", "_budget", "_streams", "_devices", "_token", "_views")  # all but pools and disk
_MEASURES = (*(f"freight.memory.{name}" for name in _OF_MEMORY), "freight._cuda", "freight._pages")
_TORCH = "torch pin_memory"
_PAGE = 4096
_PURPOSE = "the links benchmark"


@benchmark(
    "links",
    title="Host memory and the link to the GPU",
    measures=_MEASURES,
)
def links(run: Run) -> None:
    """Declare the cells."""
    if run.gpu:
        _declare_copies(run)
        _declare_reads(run)
    else:
        for nbytes in (64 * MiB, 256 * MiB):
            _declare_host_copy(run, nbytes)
    _declare_pinning(run)


# ---- copy: between the arena and the GPU -----------------------------------------------------------


def _declare_copies(run: Run) -> None:
    for nbytes in (64 * MiB, 256 * MiB, GiB):
        for direction in ("h2d", "d2h", "both"):
            targets = [at_least(0.98, of=_TORCH)] if direction != "both" and nbytes >= 256 * MiB else []
            if direction == "both" and nbytes == GiB:
                targets.append(at_least(95.0))
            run.cell(
                f"copy/{direction}/{_short(nbytes)}",
                group="copy",
                axes={"direction": direction, "bytes": nbytes},
                unit="GB/s",
                amount=2 * nbytes if direction == "both" else nbytes,
                clock="gpu",
                targets=targets,
                work=partial(_copying, direction, nbytes),
                in_quick=nbytes < GiB,
                note="bytes of both directions together" if direction == "both" else "",
            )


@contextlib.contextmanager
def _copying(direction: str, nbytes: int) -> Iterator[Work]:
    blocks = 2 if direction == "both" else 1
    pattern = _random_bytes(nbytes)  # what is sent, either way; inverted every round, so what is stale is wrong
    landing = torch.empty_like(pattern)
    streams = CopyStreams()
    side = [torch.cuda.Stream(), torch.cuda.Stream()]
    with contextlib.ExitStack() as stack:
        arena = [stack.enter_context(allocate(nbytes, purpose=_PURPOSE)).tensor() for _ in range(blocks)]
        pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(blocks)]
        sources = [arena[0], pinned[0]] if direction != "d2h" else []
        for step in (_empty_pinned_cache, pinned.clear, sources.clear):  # at the end, the last first
            stack.callback(step)

        def prepare() -> None:
            pattern.bitwise_not_()
            sources.reverse()  # the one filled last may still be in the processor's cache: each in its turn
            for source in sources:
                source.copy_(pattern)

        def pairs(host: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
            to_gpu, to_host = (landing, host[0]), (host[-1], pattern)
            return {"h2d": [to_gpu], "d2h": [to_host], "both": [to_gpu, to_host]}[direction]

        def by_freight(_: None) -> list[Tensor]:
            for token in [streams.copy(dst, src) for dst, src in pairs(arena)]:
                token.wait_on()
            return [dst for dst, _ in pairs(arena)]

        def by_torch(_: None) -> list[Tensor]:
            copies = pairs(pinned)
            if len(copies) == 1:
                copies[0][0].copy_(copies[0][1], non_blocking=True)
            else:
                _at_once(copies, side)
            return [dst for dst, _ in copies]

        yield Work(
            Way("freight", by_freight),
            check=lambda _, ends: all(torch.equal(end.cuda(), pattern) for end in ends),
            checked="every byte of the destination, random content inverted each round",
            rivals=(Way(_TORCH, by_torch),),
            prepare=prepare,
        )


def _at_once(copies: list[tuple[Tensor, Tensor]], streams: list[torch.cuda.Stream]) -> None:
    current = torch.cuda.current_stream()
    for (dst, src), stream in zip(copies, streams, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
    for stream in streams:
        current.wait_stream(stream)


# ---- copy, without a GPU: inside host memory -------------------------------------------------------


def _declare_host_copy(run: Run, nbytes: int) -> None:
    run.cell(
        f"copy/host/{_short(nbytes)}",
        group="copy",
        axes={"direction": "host", "bytes": nbytes},
        unit="GB/s",
        amount=nbytes,
        clock="host",
        work=partial(_copying_on_host, nbytes),
        seconds=10.0,
        in_quick=nbytes <= 64 * MiB,
        note="no GPU: from one block of host memory to another",
    )


@contextlib.contextmanager
def _copying_on_host(nbytes: int) -> Iterator[Work]:
    with allocate(nbytes, purpose=_PURPOSE) as source, allocate(nbytes, purpose=_PURPOSE) as target:
        pattern = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        arena = target.tensor(), source.tensor()
        plain = torch.empty_like(pattern), pattern.clone()
        arena[1].copy_(pattern)

        def prepare() -> None:
            for inverted in (pattern, arena[1], plain[1]):
                inverted.bitwise_not_()

        yield Work(
            Way("freight", lambda _: arena[0].copy_(arena[1])),
            check=lambda _, copied: torch.equal(copied, pattern),
            checked="every byte of the destination, random content inverted each round",
            rivals=(Way("torch", lambda _: plain[0].copy_(plain[1])),),
            prepare=prepare,
        )


# ---- pin: memory made ready ------------------------------------------------------------------------


def _declare_pinning(run: Run) -> None:
    sizes = (256 * MiB, 4 * GiB, 32 * GiB) if run.gpu else (256 * MiB, GiB)
    for nbytes in sizes:
        large = nbytes == 32 * GiB
        run.cell(
            f"pin/{_short(nbytes)}",
            group="pin",
            axes={"bytes": nbytes},
            unit="GB/s",
            amount=nbytes,
            clock="host",
            targets=[at_least(4.0)] if large else [],
            work=partial(_pinning, nbytes, on_gpu=run.gpu),
            pairs=3 if large else 10,
            seconds=60.0 if large else 12.0,
            in_quick=nbytes == 256 * MiB,
            note="" if run.gpu else "no GPU: mapped and faulted in, not page-locked",
        )


@contextlib.contextmanager
def _pinning(nbytes: int, *, on_gpu: bool) -> Iterator[Work]:
    _require_room(nbytes)

    def by_torch(_: None) -> list[Tensor]:
        if on_gpu:
            return [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)]
        return [torch.empty(nbytes, dtype=torch.uint8).zero_()]

    def free(held: list[Tensor]) -> None:
        held.clear()
        if on_gpu:
            _empty_pinned_cache()

    if on_gpu:
        _empty_pinned_cache()
    mark = (torch.arange(nbytes // _PAGE) % 251).to(torch.uint8)
    yield Work(
        Way("freight", lambda _: allocate(nbytes, purpose=_PURPOSE), after=HostBlock.close),
        check=lambda _, memory: _usable(memory.tensor() if isinstance(memory, HostBlock) else memory[0], mark, on_gpu),
        checked="a byte of every page, written by the host and read by the GPU"
        if on_gpu
        else "a byte of every page, written and read back",
        rivals=(Way(_TORCH if on_gpu else "torch.empty, zero_", by_torch, after=free),),
    )


def _usable(memory: Tensor, mark: Tensor, on_gpu: bool) -> bool:
    pages = memory.view(-1, _PAGE)
    pages[:, 0] = mark
    if not on_gpu:
        return torch.equal(pages[:, 0], mark)
    parts = zip(pages.split(GiB // _PAGE), mark.split(GiB // _PAGE), strict=True)
    return memory.is_pinned() and all(torch.equal(part.cuda()[:, 0].cpu(), expected) for part, expected in parts)


def _require_room(nbytes: int) -> None:
    available = psutil.virtual_memory().available
    if available < 1.25 * nbytes:
        raise Skip(f"it takes {show_bytes(nbytes)} of host memory and {show_bytes(available)} are available")


# ---- read: the GPU's own reads of host memory in place ---------------------------------------------


def _declare_reads(run: Run) -> None:
    nbytes = 64 * MiB if run.quick else GiB
    run.cell(
        "read/sequential",
        group="read",
        axes={"order": "sequential", "row_bytes": None, "table_bytes": nbytes},
        unit="GB/s",
        amount=nbytes,
        clock="gpu",
        work=partial(_reading_in_order, nbytes),
    )
    count = 2**16 if run.quick else 2**19
    for row_bytes in (256, 512, 1024):
        run.cell(
            f"read/rows/{row_bytes}",
            group="read",
            axes={"order": "random rows", "row_bytes": row_bytes, "table_bytes": nbytes},
            unit="GB/s",
            amount=count * row_bytes,
            clock="host",
            work=partial(_reading_rows, nbytes, row_bytes, count),
            note=f"{count:,} random rows, bytes of rows only",
        )


@contextlib.contextmanager
def _reading_in_order(nbytes: int) -> Iterator[Work]:
    pattern = _random_bytes(nbytes).view(torch.int32)
    landing = torch.empty_like(pattern)
    with allocate(nbytes, purpose=_PURPOSE) as block:
        host, alias = block.tensor(torch.int32), block.alias(torch.int32)

        def prepare() -> None:
            host.copy_(pattern.bitwise_not_())

        yield Work(
            Way("GPU reads in place", lambda _: torch.add(alias, 0, out=landing)),
            check=lambda _, landed: torch.equal(landed, pattern),
            checked="every byte read, random content inverted each round",
            rivals=(Way("copy engine", lambda _: landing.copy_(host, non_blocking=True)),),
            prepare=prepare,
        )


@contextlib.contextmanager
def _reading_rows(nbytes: int, row_bytes: int, count: int) -> Iterator[Work]:
    table = _random_bytes(nbytes).view(torch.int32).view(-1, row_bytes // 4)
    landing = torch.empty(count, row_bytes // 4, dtype=torch.int32, device="cuda")
    staging = torch.empty(count, row_bytes // 4, dtype=torch.int32, pin_memory=True)
    with allocate(nbytes, purpose=_PURPOSE) as block:
        host, alias = block.tensor(torch.int32, table.shape), block.alias(torch.int32, table.shape)
        host.copy_(table)

        def prepare() -> tuple[Tensor, Tensor]:
            ids = torch.randint(table.shape[0], (count,), device="cuda")
            return ids, ids.cpu()

        def on_cpu(ids: tuple[Tensor, Tensor]) -> Tensor:
            torch.index_select(host, 0, ids[1], out=staging)
            return landing.copy_(staging, non_blocking=True)

        yield Work(
            Way("GPU reads in place", lambda ids: torch.index_select(alias, 0, ids[0], out=landing)),
            check=lambda ids, rows: torch.equal(rows, table.index_select(0, ids[0])),
            checked="every byte of the rows, fresh ids each round",
            rivals=(Way("CPU index_select, copy", on_cpu),),
            prepare=prepare,
            extra={"cpu_threads": torch.get_num_threads()},
        )


# ---- shared ----------------------------------------------------------------------------------------


def _random_bytes(nbytes: int) -> Tensor:
    """Random bytes on the GPU."""
    words = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), dtype=torch.int64, device="cuda")
    return words.view(torch.uint8)


def _empty_pinned_cache() -> None:
    """Have torch give back pinned memory that it keeps for the next who asks."""
    torch.cuda.synchronize()
    torch._C._host_emptyCache()


def _short(nbytes: int) -> str:
    return show_bytes(nbytes).replace(" ", "")
