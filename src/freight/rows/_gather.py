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

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.kernels._launch import (
    Launch,
    cdiv,
    interpreted,
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
_WORDS_BEFORE = 5  # the windows' counts: three meeting points, the running sum, the next tile to copy

# ---- reference: obviously right, and what runs on a CPU ------------------------------------------


def reference(table: Tensor, ids: Tensor, dtype: torch.dtype, *, wrap: bool) -> tuple[Tensor, Tensor]:
    """The rows, and which ids lie outside the table; on any device that both are on."""
    given = ids.reshape(-1).to(torch.int64)
    rows = torch.where(given < 0, given + len(table), given) if wrap else given
    good = (rows >= 0) & (rows < len(table))
    out = torch.empty((len(rows), *table.shape[1:]), dtype=table.dtype, device=table.device)
    as_bytes(out)[good] = as_bytes(table)[rows[good]]  # as bytes: not every dtype can be indexed on every device
    out = out.to(dtype)
    as_bytes(out)[~good] = fill_bytes(dtype).to(out.device).repeat(math.prod(table.shape[1:]))
    return out.view(*ids.shape, *table.shape[1:]), ~good.view(ids.shape)


def as_bytes(rows: Tensor) -> Tensor:
    """Rows as a two-dimensional view of their bytes."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def fill_bytes(dtype: torch.dtype) -> Tensor:
    """What a row outside the table is made of: NaN, or the least integer; zeros where torch knows no such value."""
    if dtype.is_complex:
        return fill_bytes(dtype.to_real()).repeat(2)
    try:
        if dtype.is_floating_point:
            return torch.tensor([float("nan")]).to(dtype).view(torch.uint8)
        return torch.tensor([torch.iinfo(dtype).min], dtype=dtype).view(torch.uint8)
    except (TypeError, NotImplementedError):  # bool, and dtypes that torch can only store
        return torch.zeros(dtype.itemsize, dtype=torch.uint8)


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


_SIZES = ("n", "copiers", "N", "W", "window_shift", "skew_pairs", "stride_pairs", "row_words", "lines_words", "fill")


@triton.jit(do_not_specialize=_SIZES)
def _gather_kernel(
    ids, out, work, n: tl.int64, copiers: tl.int64,
    table, hot, hot_map, served, fault, N: tl.int64, W: tl.int64, window_shift: tl.int64,
    skew_pairs: tl.int64, stride_pairs: tl.int64, row_words: tl.int64, lines_words: tl.int64, fill: tl.int64,
    WRAP: tl.constexpr, CAST: tl.constexpr, PAIR: tl.constexpr, LINE_PAIRS: tl.constexpr,
    IDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FROM: tl.constexpr, UPTO: tl.constexpr,
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
        begin = work + 5
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
        blocks = tl.cdiv(n, ROWS) * column_blocks
        served_hot = tl.zeros((), tl.int64)
        if work is None:
            for block in range(program, blocks, copiers):
                hits = _copy(
                    table, hot, ids, hot_map, order, out, fault, block, n, N, column_blocks, skew_pairs, stride_pairs,
                    row_words, fill, WRAP, CAST, PAIR, LINE_PAIRS, ROWS, COLUMNS,
                )  # fmt: skip
                if HOT:
                    served_hot += tl.where(block % column_blocks == 0, hits, 0)
        else:  # the last few programs copy, each the next tile that nobody has taken
            block = blocks
            if program >= programs - copiers:  # a tile that another program took would be copied by nobody
                block = tl.atomic_add(work + 4, 1, sem="relaxed").to(tl.int64)
            while block < blocks:
                hits = _copy(
                    table, hot, ids, hot_map, order, out, fault, block, n, N, column_blocks, skew_pairs, stride_pairs,
                    row_words, fill, WRAP, CAST, PAIR, LINE_PAIRS, ROWS, COLUMNS,
                )  # fmt: skip
                if HOT:
                    served_hot += tl.where(block % column_blocks == 0, hits, 0)
                block = tl.atomic_add(work + 4, 1, sem="relaxed").to(tl.int64)
        if HOT:
            tl.atomic_add(served, served_hot, sem="relaxed")


# ---- launch --------------------------------------------------------------------------------------


_WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDENED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_IDS = 1024
_WARP = 32
_SM_REGISTERS = 65536


def casts(source: torch.dtype, to: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel casts so by itself; what it does not cast is cast afterwards."""
    if to is not torch.float32 or source not in _WIDENED:
        return False
    return source.itemsize > 1 or device.type != "cuda" or why_not(device, least=89) is None


class Reader:
    """Gathers from one table into rows of one dtype: everything about it that no call changes is worked out here.

    `table` is what the GPU sees, each of its rows in one piece. Rows land at addresses that `grain` divides. `fault` is
    two int64 that the GPU can write. `sms` bounds the multiprocessors that copy rows.
    """

    def __init__(
        self,
        table: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        *,
        grain: int = 16,
        hot: HotRows | None = None,
        fault: Tensor | None = None,
        wrap: bool = True,
        sms: int | None = None,
        config: Config | None = None,
    ) -> None:
        width, skew_bytes = table.element_size(), table.data_ptr() % LINE
        row_bytes, stride_bytes = math.prod(table.shape[1:]) * width, table.stride(0) * width
        cast = table.dtype is not dtype
        lane = vector_bytes(skew_bytes, stride_bytes, row_bytes, *(() if cast else (grain,)))
        word = table.dtype if cast else _WORDS[lane]
        # A row that one instruction of a warp reads whole asks for each of its lines once, wherever it begins.
        begins = grain_of(skew_bytes, stride_bytes)
        lined = row_bytes > _WARP * lane and (begins < LINE or row_bytes % LINE > 0)
        lines_bytes = cdiv(row_bytes + LINE - begins, LINE) * LINE if lined else row_bytes
        config = config or tunable.config((row_bytes,), "uint8", device)
        tile = config["TILE"] // (1 if lane == 16 else 2)  # narrower loads take more registers for as many words
        columns = min(next_power_of_two(lines_bytes // word.itemsize), tile)

        self._device = device
        self._keep = (table, hot, fault)
        self._empty = row_bytes == 0
        self._cast = cast
        self._word = word
        self._rows = tile // columns  # of a tile
        self._column_blocks = cdiv(lines_bytes // word.itemsize, columns)
        self._programs = config["programs_per_sm"] * multiprocessors(device)  # that can all be resident
        self._most = self._programs if sms is None else min(self._programs, sms * config["programs_per_sm"])
        self._windows, shift = _windows(len(table), stride_bytes)
        sizes = (skew_bytes // lane, stride_bytes // lane, row_bytes // word.itemsize, lines_bytes // word.itemsize)
        self._numbers = (len(table), self._windows, shift, *sizes, 0 if cast else _fill_word(dtype))
        self._constants = {"WRAP": wrap, "CAST": cast, "PAIR": lane // word.itemsize}
        self._constants |= {"LINE_PAIRS": LINE // lane if lined else 1}
        self._constants |= {"IDS": _IDS, "ROWS": self._rows, "COLUMNS": columns}
        self._options = {"num_warps": config["num_warps"], "maxnreg": _registers(config)}
        self._launches: dict[tuple[torch.dtype, bool, bool], list[Launch]] = {}

    def __call__(self, ids: Tensor, out: Tensor, copiers: int | None = None) -> Tensor:
        """Gather into contiguous `out`. With `copiers`, ids are ordered first, and that many programs copy rows."""
        n = ids.numel()
        if n == 0 or self._empty:
            return out
        if copiers is None:
            work, at_work = None, None
            grid = copiers = min(cdiv(n, self._rows) * self._column_blocks, self._most)
        else:
            work = torch.zeros(_WORDS_BEFORE + self._windows + 2 * n, dtype=torch.int32, device=self._device)
            at_work, grid, copiers = work.data_ptr(), self._programs, min(copiers, self._most)
        at_ids = ids.data_ptr()
        key = (ids.dtype, at_ids % 16 == 0, work is None)
        launches = self._launches.get(key)
        if launches is None:
            launches = self._launches[key] = self._prepare(work is not None)
        for launch in launches:
            launch(grid, (at_ids, out.data_ptr(), at_work), (n, copiers), lambda: (ids, self._words(out), work))
        return out

    def _prepare(self, ordered: bool) -> list[Launch]:
        table, hot, fault = self._keep
        hot_parts = (
            (None, None, None) if hot is None else (triton.reinterpret(hot.rows, self._word), hot.map, hot.served)
        )
        fixed = (triton.reinterpret(table, self._word), *hot_parts, fault, *self._numbers)
        passes, options = [(3, 3)], self._options
        if ordered and interpreted():  # programs run one after the other and cannot meet
            passes = [(one, one) for one in range(4)]
        elif ordered:
            passes, options = [(0, 3)], {**options, "launch_cooperative_grid": True}
        constants = [{**self._constants, "FROM": first, "UPTO": last} for first, last in passes]
        return [Launch(_gather_kernel, fixed, some, options, self._device) for some in constants]

    def _words(self, out: Tensor) -> Any:
        return out if self._cast else triton.reinterpret(out, self._word)


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
    copiers: int = 16,
    config: Config | None = None,
) -> Tensor:
    """One gather, on a GPU or interpreted; see `Reader`."""
    grain = grain_of(out.data_ptr())
    reader = Reader(table, out.dtype, out.device, grain=grain, hot=hot, fault=fault, wrap=wrap, sms=sms, config=config)
    return reader(ids, out, copiers if ordered else None)


def _fill_word(dtype: torch.dtype) -> int:
    """What rows outside the table are filled with, as a signed 64-bit number."""
    pattern = fill_bytes(dtype)
    return int(pattern.repeat(8 // min(8, pattern.numel()))[:8].view(torch.int64))


def _registers(config: Config) -> int:
    """How many registers a thread may have for all programs to be resident, which those that meet must be."""
    return min(255, _SM_REGISTERS // (_WARP * config["num_warps"] * config["programs_per_sm"]))


def grain_of(*addresses_and_strides: int) -> int:
    """The largest power of two, up to a line, that divides all of them."""
    bits = LINE
    for value in addresses_and_strides:
        bits |= value
    return bits & -bits


def _windows(N: int, stride_bytes: int) -> tuple[int, int]:
    """How many windows a table has, and by how many bits a row's number makes its window's."""
    shift = max(0, (WINDOW // max(1, stride_bytes)).bit_length() - 1)
    while N >> shift > _MOST_WINDOWS:
        shift += 1
    return (N >> shift) + 1, shift


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
        default={"TILE": 8192, "num_warps": 8, "programs_per_sm": 2},
        space={"TILE": (2048, 4096, 8192), "num_warps": (4, 8), "programs_per_sm": (1, 2)},
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
            "ROWS": (8192 if pair > 1 else 4096) // columns,
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
