"""Reads of host memory by the GPU's own cores, in order and by random rows: what the link gives to a kernel.

    partial[p] = sum over the words w of program p's share of table[w]          (in order; sums wrap at 64 bits)
    rows[n, :] = table[ids[n], :]                                               (random rows)

Both read lanes of 16 bytes, two int64 words: the widest load there is, and one code for rows of any length. Shapes: a
table of W words, or of N rows of L lanes.
"""

# pyright: reportArgumentType=false
# A launch takes a plain number for a parameter that Triton annotates as a constexpr.

import torch
import triton
import triton.language as tl
from torch import Tensor

LANE = 16  # bytes

# ---- reference: obviously right ------------------------------------------------------------------


def reference_total(words: Tensor) -> Tensor:
    """The sum of all words."""
    return words.sum()


def reference_rows(table: Tensor, ids: Tensor) -> Tensor:
    """The rows of `table` that `ids` name."""
    return table.index_select(0, ids)


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["steps"])
def _total_kernel(words, partial, W, steps, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.int64)
    for step in range(steps):  # programs lie side by side in every step, so that all of them read one region
        start = (step * programs + program).to(tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        total += tl.load(words + at, mask=at < W, other=0)
    tl.store(partial + program, tl.sum(total))


@triton.jit(do_not_specialize=["L"])  # one compilation for rows of any length
def _rows_kernel(table, ids, rows, N, L, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = lane // L
    inside = n < N
    row = tl.load(ids + n, mask=inside, other=0)
    word = tl.arange(0, 2)[None, :]
    source = (row * L + lane % L)[:, None] * 2 + word
    value = tl.load(table + source, mask=inside[:, None])
    tl.store(rows + lane[:, None] * 2 + word, value, mask=inside[:, None])


# ---- launches, on a GPU or interpreted -----------------------------------------------------------


def launch_total(words: Tensor, *, programs: int = 1024, block: int = 1024) -> Tensor:
    """Read int64 `words` from first to last and give their sum."""
    W = words.numel()
    partial = torch.zeros(programs, dtype=torch.int64, device=words.device)
    steps = triton.cdiv(W, programs * block)
    _total_kernel[(programs,)](words, partial, W, steps, block)
    return partial.sum()


def launch_rows(table: Tensor, ids: Tensor, rows: Tensor, *, block: int = 512) -> Tensor:
    """Gather rows of an int64 `table`, an even number of words wide, into `rows`."""
    N, L = ids.numel(), table.shape[1] * table.element_size() // LANE
    if N and L:  # Triton refuses an empty grid
        _rows_kernel[(triton.cdiv(N * L, block),)](table, ids, rows, N, L, block)
    return rows


# Plain data for `python -m freight.kernels._compile`; page-locked tables begin at a multiple of 16 bytes.
COMPILE = {
    "_total_kernel": [
        {
            "args": {"words": "*i64", "partial": "*i64", "W": "i32", "steps": "i32"},
            "constants": {"BLOCK": 1024},
            "aligned": ["words", "partial", "W"],
        }
    ],
    "_rows_kernel": [
        {
            "args": {"table": "*i64", "ids": "*i64", "rows": "*i64", "N": "i32", "L": "i32"},
            "constants": {"BLOCK": 512},
            "aligned": ["table", "ids", "rows", "N"],
        }
    ],
}
