"""Write rows of a table in place from the GPU, into host memory and into their hot copies alike.

    table[ids[i], :] = rows[i, :]        and hot[slot(ids[i]), :] = rows[i, :] where that row is hot
    nothing                              where ids[i] lies outside the table, and `fault` gets that id and N

Where an id comes twice, one of its rows is what the table holds afterwards, as with torch's own index assignment; which
one is not said, and the copies may then differ until `refresh()`.
"""
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false
# Triton's annotations are values, and its launches take more than the kernel's parameters.

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from freight.errors import ArgumentError
from freight.kernels._launch import cdiv, launching_on, multiprocessors, next_power_of_two, vector_bytes
from freight.rows._gather import as_bytes
from freight.rows._hot import HotRows, hot_slots

_TILE = 2048  # words
_PROGRAMS = 4  # on each multiprocessor
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# ---- reference: obviously right, and what runs on a CPU ------------------------------------------


def reference(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Write in place; ids are known to lie in the table."""
    at = ids.reshape(-1).to(torch.int64)
    at = torch.where(at < 0, at + len(table), at)
    if table.numel() and at.numel():
        as_bytes(table)[at] = as_bytes(rows.reshape(len(at), *table.shape[1:]).contiguous())


# ---- kernel --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "N", "stride_words", "row_words"])
def _put_kernel(
    table, hot, hot_map, ids, rows, fault,
    n: tl.int64, N: tl.int64, stride_words: tl.int64, row_words: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n = n.to(tl.int64)  # the interpreter knows nothing of annotations
    N = N.to(tl.int64)
    column_blocks = tl.cdiv(row_words.to(tl.int64), COLUMNS)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n, ROWS) * column_blocks, tl.num_programs(0)):
        i = (block // column_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        given = tl.load(ids + i, mask=i < n, other=0).to(tl.int64)
        row = tl.where(given < 0, given + N, given)
        good = (i < n) & (row >= 0) & (row < N)
        if fault is not None:
            outside = (i < n) & (good == 0)
            tl.store(fault + 1 + tl.zeros_like(given), tl.zeros_like(given) + N, mask=outside)
            tl.store(fault + tl.zeros_like(given), given, mask=outside)
        column = (block % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        wanted = good & (column < row_words)
        value = tl.load(rows + (i * row_words + column), mask=wanted)
        tl.store(table + (row * stride_words + column), value, mask=wanted)
        if hot is not None:
            slot = hot_slots(hot_map, row, good)
            tl.store(hot + (slot * row_words + column), value, mask=wanted & (slot >= 0))


# ---- launch --------------------------------------------------------------------------------------


def launch(
    table: Tensor, ids: Tensor, rows: Tensor, *, hot: HotRows | None = None, fault: Tensor | None = None
) -> None:
    """Write contiguous `rows`, of the table's dtype, on a GPU or interpreted; `fault` is two int64 it can write."""
    n, row_bytes = ids.numel(), math.prod(table.shape[1:]) * table.element_size()
    if n == 0 or row_bytes == 0:
        return
    stride_bytes = table.stride(0) * table.element_size()
    lane = min(8, vector_bytes(table.data_ptr(), rows.data_ptr(), stride_bytes, row_bytes))
    words = row_bytes // lane
    columns = min(next_power_of_two(words), _TILE)
    blocks = cdiv(n, _TILE // columns) * cdiv(words, columns)
    word = functools.partial(triton.reinterpret, dtype=_WORDS[lane])
    with launching_on(rows):
        _put_kernel[(min(blocks, _PROGRAMS * multiprocessors(rows.device)),)](
            word(table),
            None if hot is None else word(hot.rows),
            None if hot is None else hot.map,
            ids,
            word(rows),
            fault,
            n,
            len(table),
            stride_bytes // lane,
            words,
            ROWS=_TILE // columns,
            COLUMNS=columns,
            num_warps=8,
        )


def put(table: Tensor, ids: Tensor, rows: Any, *, source: Tensor, hot: HotRows | None, fault: Tensor) -> None:
    """`table[ids] = rows` by the GPU; `source` is the table as the GPU sees it, `rows` whatever can be broadcast."""
    shape = (*ids.shape, *table.shape[1:])
    values = torch.as_tensor(rows).to(device=source.device, dtype=table.dtype)
    try:
        values = values.expand(shape).contiguous()
    except RuntimeError:
        raise ArgumentError(
            f"rows of shape {tuple(values.shape)} do not fit into {tuple(shape)}, the shape of x[ids]."
        ) from None
    launch(source, ids.contiguous(), values, hot=hot, fault=fault)


COMPILE = {
    "_put_kernel": [
        {
            "args": {
                "table": f"*{word}",
                "hot": f"*{word}",
                "hot_map": "*i32",
                "ids": "*i64",
                "rows": f"*{word}",
                "fault": "*i64",
                "n": "i64",
                "N": "i64",
                "stride_words": "i64",
                "row_words": "i64",
            },
            "constants": {"ROWS": 32, "COLUMNS": 64},
            "options": {"num_warps": 8},
        }
        for word in ("i64", "i32", "i16", "u8")
    ]
}
