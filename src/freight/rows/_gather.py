"""Gather rows of a table that the GPU reads in place, each to its own place in the output.

    out[i, :] = table[ids[i], :]              hot rows come from their copy in GPU memory; `dtype` casts on the way
    out[i, :] = NaN, or the least integer     where ids[i] lies outside the table, and `fault` gets that id and N

Shapes: N rows of `row` bytes, n ids. Bytes are moved as words of up to 8 bytes, two of them a load where everything is
a multiple of 16 bytes.

Ordered by address, for tables past the reach of the GPU's address translation. There a look-up of a page is the limit,
not the link, so all rows of one page are read at one time. No sort is needed for that, only grouping: three passes over
the ids come before the copy, all four in one launch with the whole grid meeting between them.

    count    k[i] = how many ids before i (in any order) lie in the window of i; windows are pages of 64 KiB
    offset   o[w] = where window w begins: a running sum of the counts
    place    order[o[window of i] + k[i]] = i
    copy     row ids[order[s]] to out[order[s]], for s = 0, 1, ... side by side over the grid

Ids of hot rows and ids outside the table are counted into windows in turn, so they come evenly spread between reads of
host memory and are hidden behind them. Rows that are no multiple of 128 bytes are read from the line of 128 bytes in
which they begin, so that each line crosses the link once.
"""
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false
# Triton's annotations are values, and its launches take more than the kernel's parameters.

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels._launch import (
    Prepared,
    cdiv,
    interpreted,
    launching_on,
    multiprocessors,
    next_power_of_two,
    vector_bytes,
    why_not,
)
from freight.kernels._table import Config, Tunable, register
from freight.rows._hot import HotRows, hot_slots

LINE = 128  # bytes that cross the link together
WINDOW = 64 * 1024  # bytes; host pages behave so under a GPU's address translation
_MOST_WINDOWS = 2**20
_BARRIERS = 4  # words of the workspace before the windows' counts: three meeting points and the running sum

# ---- reference: obviously right, and what runs on a CPU ------------------------------------------


def reference(table: Tensor, ids: Tensor, dtype: torch.dtype, *, wrap: bool) -> tuple[Tensor, Tensor]:
    """The rows, and which ids lie outside the table; on any device that both are on."""
    ids = ids.to(torch.int64)
    rows = torch.where(ids < 0, ids + len(table), ids) if wrap else ids
    good = (rows >= 0) & (rows < len(table))
    out = torch.empty((*ids.shape, *table.shape[1:]), dtype=table.dtype, device=table.device)
    as_bytes(out)[good] = as_bytes(table)[rows[good]]  # as bytes: not every dtype can be indexed on every device
    out = out.to(dtype)
    as_bytes(out)[~good] = fill_bytes(dtype).to(out.device).repeat(out[0].numel() if len(out) else 0)
    return out, ~good


def as_bytes(rows: Tensor) -> Tensor:
    """Rows as a two-dimensional view of their bytes."""
    return rows.reshape(len(rows), -1).view(torch.uint8)


def fill_bytes(dtype: torch.dtype) -> Tensor:
    """What a row outside the table is made of: NaN, or the least integer."""
    if dtype.is_complex:
        one = torch.tensor([complex("nan+nanj")], dtype=dtype)
    elif dtype.is_floating_point:
        one = torch.tensor([float("nan")]).to(dtype)
    else:
        one = torch.tensor([0 if dtype is torch.bool else torch.iinfo(dtype).min], dtype=dtype)
    return one.view(torch.uint8)


# ---- kernel --------------------------------------------------------------------------------------


@triton.jit
def _meet(counter):
    """Wait until every program of the grid is here; what each wrote before is seen by all behind."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel")
    while tl.atomic_add(counter, 0, sem="acq_rel") < tl.num_programs(0):
        pass
    tl.debug_barrier()


@triton.jit
def _resolve(ids, hot_map, i, inside, N, WRAP: tl.constexpr, HOT: tl.constexpr):
    """Of the ids `i`: the row, whether it lies in the table, its place among the hot rows (-1: none), the id itself."""
    given = tl.load(ids + i, mask=inside, other=0).to(tl.int64)
    row = given
    if WRAP:
        row = tl.where(row < 0, row + N, row)
    good = inside & (row >= 0) & (row < N)
    row = tl.where(good, row, 0)
    slot = tl.full(row.shape, -1, tl.int64)
    if HOT:
        slot = hot_slots(hot_map, row, good)
    return row, good, slot, given


@triton.jit
def _window(row, good, slot, i, window_shift, W):
    """The window that an id is counted into."""
    return tl.where(good & (slot < 0), row >> window_shift, i % W)


@triton.jit
def _copy(
    table, hot, ids, hot_map, order, out, fault, block, n, N, column_blocks, skew_pairs, stride_pairs, row_words, fill,
    WRAP: tl.constexpr, CAST: tl.constexpr, PAIR: tl.constexpr, LINE_PAIRS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy tile `block`; how many of its rows were hot.

    Offsets are written as multiples of PAIR: that tells the compiler that it may load and store pairs. Rows have a
    second dimension from the beginning, and with it the layout of the tile: the compiler trips over vectors that
    change their layout.
    """
    s = (block // column_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = s < n
    i = s
    if order is not None:
        i = tl.load(order + s, mask=inside, other=0, cache_modifier=".cg").to(tl.int64)
    row, good, slot, given = _resolve(ids, hot_map, i, inside, N, WRAP, hot is not None)
    if fault is not None:
        outside = inside & (good == 0)
        tl.store(fault + 1 + tl.zeros_like(given), tl.zeros_like(given) + N, mask=outside)
        tl.store(fault + tl.zeros_like(given), given, mask=outside)
    shift = tl.zeros_like(row)  # by how many words the row begins behind its line
    if LINE_PAIRS > 1:
        shift = (skew_pairs + row * stride_pairs) % LINE_PAIRS * PAIR
    column = (block % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    word = column - shift
    wanted = inside & (word >= 0) & (word < row_words)
    source = table + (row * stride_pairs * PAIR + word)
    hits = 0
    if hot is not None:
        source = tl.where(slot >= 0, hot + (slot * row_words + word), source)
        hits = tl.sum(tl.where(slot >= 0, 1, 0))
    value = tl.load(source, mask=wanted & good)
    if CAST:
        value = tl.where(good, value.to(out.dtype.element_ty), float("nan"))
    else:
        value = tl.where(good, value, fill.to(value.dtype))
    tl.store(out + (i * row_words + word), value, mask=wanted)
    return hits


_SIZES = ("n", "N", "W", "window_shift", "copiers", "skew_pairs", "stride_pairs", "row_words", "lines_words", "fill")


@triton.jit(do_not_specialize=_SIZES)
def _gather_kernel(
    table, hot, hot_map, ids, out, fault, served, work,
    n: tl.int64, N: tl.int64, W: tl.int64, window_shift: tl.int64, copiers: tl.int64,
    skew_pairs: tl.int64, stride_pairs: tl.int64, row_words: tl.int64, lines_words: tl.int64, fill: tl.int64,
    FROM: tl.constexpr, UPTO: tl.constexpr, WRAP: tl.constexpr, CAST: tl.constexpr,
    PAIR: tl.constexpr, LINE_PAIRS: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Passes FROM to UPTO: 0 count, 1 offset, 2 place, 3 copy; 3 alone without `work` takes the ids as they come."""
    n = n.to(tl.int64)  # the interpreter knows nothing of annotations
    N = N.to(tl.int64)
    HOT: tl.constexpr = hot is not None
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    if work is not None:
        W = W.to(tl.int64)
        window_shift = window_shift.to(tl.int64)
        begin = work + 4
        rank = begin + W
        order = rank + n
    else:
        order: tl.constexpr = None

    if FROM <= 0 and UPTO >= 0:
        for block in range(program, tl.cdiv(n, IDS), programs):
            i = block * IDS + tl.arange(0, IDS)
            inside = i < n
            row, good, slot, _ = _resolve(ids, hot_map, i, inside, N, WRAP, HOT)
            window = _window(row, good, slot, i, window_shift, W)
            tl.store(rank + i, tl.atomic_add(begin + window, 1, mask=inside, sem="relaxed"), mask=inside)
    if FROM < 1 and UPTO >= 1:
        _meet(work)

    if FROM <= 1 and UPTO >= 1:
        for block in range(program, tl.cdiv(W, 2048), programs):  # groups of windows in any order, each in its own
            w = block * 2048 + tl.arange(0, 2048)
            count = tl.load(begin + w, mask=w < W, other=0, cache_modifier=".cg")
            start = tl.atomic_add(work + 3, tl.sum(count, axis=0), sem="relaxed")
            tl.store(begin + w, start + tl.cumsum(count, axis=0) - count, mask=w < W)
    if FROM < 2 and UPTO >= 2:
        _meet(work + 1)

    if FROM <= 2 and UPTO >= 2:
        for block in range(program, tl.cdiv(n, IDS), programs):
            i = block * IDS + tl.arange(0, IDS)
            inside = i < n
            row, good, slot, _ = _resolve(ids, hot_map, i, inside, N, WRAP, HOT)
            window = _window(row, good, slot, i, window_shift, W)
            place = tl.load(begin + window, mask=inside, other=0, cache_modifier=".cg")
            place += tl.load(rank + i, mask=inside, other=0)
            tl.store(order + place, i.to(tl.int32), mask=inside)
    if FROM < 3 and UPTO >= 3:
        _meet(work + 2)

    if FROM <= 3 and UPTO >= 3:
        fill = fill.to(tl.int64)
        skew_pairs = skew_pairs.to(tl.int64)
        stride_pairs = stride_pairs.to(tl.int64)
        row_words = row_words.to(tl.int64)
        lines_words = lines_words.to(tl.int64)
        row_words = row_words // PAIR * PAIR
        column_blocks = tl.cdiv(lines_words, COLUMNS)
        copiers = copiers.to(tl.int64)
        blocks = tl.where(program < copiers, tl.cdiv(n, ROWS) * column_blocks, 0)
        served_hot = tl.zeros((), tl.int64)
        for block in range(program, blocks, copiers):
            hits = _copy(
                table, hot, ids, hot_map, order, out, fault, block, n, N, column_blocks, skew_pairs, stride_pairs,
                row_words, fill, WRAP, CAST, PAIR, LINE_PAIRS, ROWS, COLUMNS,
            )  # fmt: skip
            if HOT:
                served_hot += tl.where(block % column_blocks == 0, hits, 0)
        if HOT:
            tl.atomic_add(served, served_hot, sem="relaxed")


# ---- launch --------------------------------------------------------------------------------------


_WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDENED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_IDS = 1024
_WARP = 32
_SM_REGISTERS = 65536
_launch = Prepared(_gather_kernel)


def casts(source: torch.dtype, to: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel casts so by itself; what it does not cast is cast afterwards."""
    if to is not torch.float32 or source not in _WIDENED:
        return False
    return source.itemsize > 1 or device.type != "cuda" or why_not(device, least=89) is None


@dataclass(frozen=True, eq=False)
class _Plan:
    """What a launch takes beside its tensors and their lengths."""

    word: torch.dtype
    sizes: tuple[int, ...]  # skew_pairs, stride_pairs, row_words, lines_words, fill
    constants: dict[str, int]  # the kernel's, from WRAP on
    options: dict[str, int]
    rows: int  # of a tile
    column_blocks: int
    programs: int  # that can all be resident
    copiers: int

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What is compiled for it."""
        return (self.word, *self.constants.values(), *self.options.values())


@functools.lru_cache(maxsize=1024)
def _plan(
    row_bytes: int,
    stride_bytes: int,
    skew_bytes: int,
    grain: int,
    source: torch.dtype,
    to: torch.dtype,
    wrap: bool,
    device: torch.device,
    settings: tuple[tuple[str, int], ...] | None,
) -> _Plan:
    """`skew_bytes` is by how much the table begins behind a line, `grain` what divides every address of the output."""
    cast = source is not to
    lane = vector_bytes(skew_bytes, stride_bytes, row_bytes, *(() if cast else (grain,)))
    word = source if cast else _WORDS[lane]
    pair = lane // word.itemsize
    # A row that one instruction of a warp reads whole asks for each of its lines once, wherever it begins.
    begins = _grain(skew_bytes, stride_bytes)
    lined = row_bytes > _WARP * lane and (begins < LINE or row_bytes % LINE > 0)
    lines_bytes = cdiv(row_bytes + LINE - begins, LINE) * LINE if lined else row_bytes
    config = dict(settings) if settings else tunable.config((row_bytes,), "uint8", device)
    columns = min(next_power_of_two(lines_bytes // word.itemsize), config["TILE"])
    rows = config["TILE"] // columns
    sizes = (skew_bytes // lane, stride_bytes // lane, row_bytes // word.itemsize, lines_bytes // word.itemsize)
    constants = {"WRAP": wrap, "CAST": cast, "PAIR": pair, "LINE_PAIRS": LINE // lane if lined else 1}
    return _Plan(
        word=word,
        sizes=(*sizes, 0 if cast else _fill_word(to)),
        constants=constants | {"IDS": _IDS, "ROWS": rows, "COLUMNS": columns},
        options={"num_warps": config["num_warps"], "maxnreg": _registers(config)},
        rows=rows,
        column_blocks=cdiv(lines_bytes // word.itemsize, columns),
        programs=config["programs_per_sm"] * multiprocessors(device),
        copiers=config["copiers"],
    )


def launch(
    table: Tensor,
    ids: Tensor,
    out: Tensor,
    *,
    hot: HotRows | None = None,
    fault: Tensor | None = None,
    ordered: bool = False,
    wrap: bool = True,
    sms: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Gather rows into contiguous `out`, on a GPU or interpreted; rows of `table` are contiguous, `ids` too.

    `fault` is two int64 that the GPU can write. `sms` bounds the multiprocessors that copy rows.
    """
    n, N, row = ids.numel(), len(table), math.prod(table.shape[1:])
    if n == 0 or row == 0:
        return out
    address, width = table.data_ptr(), table.element_size()
    plan = _plan(
        row * width,
        table.stride(0) * width,
        address % LINE,
        _grain(out.data_ptr()),
        table.dtype,
        out.dtype,
        wrap,
        out.device,
        None if config is None else tuple(config.items()),
    )
    most = plan.programs if sms is None else min(plan.programs, sms * plan.programs // multiprocessors(out.device))
    copiers = max(1, min(cdiv(n, plan.rows) * plan.column_blocks, most, plan.copiers if ordered else most))
    work, windows, shift = _workspace(n, N, table.stride(0) * width, out.device) if ordered else (None, 0, 0)
    steps = (3, 3) if not ordered else (0, 3)
    pointers = (table, hot and hot.rows, hot and hot.map, ids, out, fault, hot and hot.served, work)
    numbers = (n, N, windows, shift, copiers, *plan.sizes)

    def typed() -> tuple[Any, ...]:
        rows = None if hot is None else triton.reinterpret(hot.rows, plan.word)
        to = out if plan.constants["CAST"] else triton.reinterpret(out, plan.word)
        return (triton.reinterpret(table, plan.word), rows, hot and hot.map, ids, to, *pointers[5:], *numbers)

    with launching_on(out):
        if ordered and interpreted():  # programs run one after the other and cannot meet
            for step in range(4):
                _gather_kernel[(plan.programs,)](*typed(), FROM=step, UPTO=step, **plan.constants, **plan.options)
            return out
        constants = {"FROM": steps[0], "UPTO": steps[1], **plan.constants}
        options = plan.options | ({"launch_cooperative_grid": True} if ordered else {})
        grid = plan.programs if ordered else copiers
        key = (plan.key, out.dtype, ordered, ids.dtype, _alignments(pointers))
        _launch(key, grid, pointers, numbers, typed, constants, options)
    return out


def _alignments(pointers: Sequence[Tensor | None]) -> tuple[bool | None, ...]:
    """What Triton compiles anew for: which pointers there are, and which of them are multiples of 16."""
    return tuple(None if pointer is None else pointer.data_ptr() % 16 == 0 for pointer in pointers)


def _fill_word(dtype: torch.dtype) -> int:
    """What rows outside the table are filled with, as a signed 64-bit number."""
    pattern = fill_bytes(dtype)
    return int(pattern.repeat(8 // min(8, pattern.numel()))[:8].view(torch.int64))


def _registers(config: Config) -> int:
    """How many registers a thread may have for all programs to be resident, which those that meet must be."""
    return min(255, _SM_REGISTERS // (_WARP * config["num_warps"] * config["programs_per_sm"]))


def _grain(*addresses_and_strides: int) -> int:
    """The largest power of two, up to a line, that divides all of them."""
    bits = LINE
    for value in addresses_and_strides:
        bits |= value
    return bits & -bits


def _workspace(n: int, N: int, stride_bytes: int, device: torch.device) -> tuple[Tensor, int, int]:
    """What ordering writes to, how many windows there are, and by how many bits a row's number makes its window's."""
    shift = max(0, (WINDOW // max(1, stride_bytes)).bit_length() - 1)
    while N >> shift > _MOST_WINDOWS:
        shift += 1
    windows = (N >> shift) + 1
    return torch.zeros(_BARRIERS + windows + 2 * n, dtype=torch.int32, device=device), windows, shift


# ---- tuning --------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    from freight.memory import allocate

    (row_bytes,) = shape
    nbytes, n = 256 * 2**20, 2**18
    block = allocate(nbytes, purpose="tuning the gather")
    table = block.alias(torch.uint8, (nbytes // row_bytes, row_bytes), device=device)
    table.random_()
    ids = torch.randint(len(table), (n,), device=device)
    return table, ids, torch.empty(n, row_bytes, dtype=torch.uint8, device=device)


def _check(inputs: tuple[Tensor, Tensor, Tensor], got: Tensor) -> None:
    table, ids, _ = inputs
    assert torch.equal(got, table[ids]), "rows are not those that the ids name"


tunable = register(
    Tunable(
        op="gather_rows",
        dims=("row_bytes",),
        default={"TILE": 4096, "num_warps": 8, "programs_per_sm": 2, "copiers": 32},
        space={
            "TILE": (2048, 4096),
            "num_warps": (4, 8),
            "programs_per_sm": (2,),
            "copiers": (16, 24, 32, 64, 128, 256),
        },
        cells=tuple(((row_bytes,), "uint8") for row_bytes in (64, 256, 1024, 4096)),
        inputs=_inputs,
        launch=launch,
        check=_check,
    )
)


# ---- the compile lane ----------------------------------------------------------------------------


def _variant(word: str, out: str, pair: int, line_pairs: int, columns: int, *, hot: bool, ordered: bool) -> dict:
    sizes = dict.fromkeys(_SIZES, "i64")
    pointers = {"table": f"*{word}", "ids": "*i64", "out": f"*{out}", "fault": "*i64"}
    pointers |= {"hot": f"*{word}", "hot_map": "*i32", "served": "*i64"} if hot else {}
    pointers |= {"work": "*i32"} if ordered else {}
    absent = {name: None for name in ("hot", "hot_map", "served", "work") if name not in pointers}
    return {
        "args": {**pointers, **sizes},
        "constants": {
            **absent,
            "FROM": 0 if ordered else 3,
            "UPTO": 3,
            "WRAP": True,
            "CAST": word != out,
            "PAIR": pair,
            "LINE_PAIRS": line_pairs,
            "IDS": _IDS,
            "ROWS": 4096 // columns,
            "COLUMNS": columns,
        },
        "aligned": [name for name in pointers if pair > 1 or name not in ("table", "out")],
        "options": {"num_warps": 8, "maxnreg": 128, **({"launch_cooperative_grid": True} if ordered else {})},
    }


COMPILE = {
    "_meet": "inlined",
    "_resolve": "inlined",
    "_window": "inlined",
    "_copy": "inlined",
    "_gather_kernel": [
        _variant("i64", "i64", 2, 1, 64, hot=False, ordered=False),
        _variant("i64", "i64", 2, 8, 64, hot=True, ordered=True),
        _variant("i32", "i32", 1, 32, 1024, hot=False, ordered=True),
        _variant("u8", "u8", 1, 128, 128, hot=True, ordered=False),
        _variant("bf16", "fp32", 8, 1, 128, hot=True, ordered=True),
        {**_variant("fp8e4nv", "fp32", 16, 1, 128, hot=False, ordered=False), "targets": [90, 100]},
    ],
}
