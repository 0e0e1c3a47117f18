"""Which rows also lie in GPU memory, and where: one bit a row, and how many bits are set before each word of them.

    slot(row) = rank[row // 32] + ones(bits[row // 32] below bit row % 32)      where row's bit is set, else -1

So a table of 64 million rows needs 16 MiB to say which of them are hot, and a kernel needs one load of 8 bytes a row.
Hot rows lie in the order of their numbers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BITS = 32

# ---- reference: obviously right ------------------------------------------------------------------


def reference_slots(hot_ids: Tensor, rows: Tensor) -> Tensor:
    """Where each of `rows` lies among the sorted `hot_ids`, -1 where it is not one of them."""
    at = torch.searchsorted(hot_ids, rows).clamp(max=max(0, hot_ids.numel() - 1))
    found = hot_ids[at] == rows if hot_ids.numel() else torch.zeros_like(rows, dtype=torch.bool)
    return torch.where(found, at, -1)


@dataclass(frozen=True)
class HotRows:
    """The rows of a table that also lie in GPU memory."""

    rows: Tensor  # their copy
    map: Tensor  # which rows of the table they are
    ids: Tensor  # the same as sorted numbers
    served: Tensor  # how many reads they served so far
    share: float = 0.5  # of all reads that they are expected to serve

    @property
    def nbytes(self) -> int:
        """GPU memory taken."""
        return self.rows.nbytes + self.map.nbytes + self.ids.nbytes


# ---- the map -------------------------------------------------------------------------------------


def build_map(hot_ids: Tensor, n_rows: int) -> Tensor:
    """The map for sorted, distinct `hot_ids` of a table of `n_rows`: int32 pairs of bits and rank, on their device."""
    words = -(-max(n_rows, 1) // _BITS)
    bits = torch.zeros(words, dtype=torch.int64, device=hot_ids.device)
    bits.index_add_(0, hot_ids // _BITS, 1 << hot_ids % _BITS)  # ids are distinct: adding sets bits
    ones = torch.zeros(words, dtype=torch.int64, device=hot_ids.device)
    ones.index_add_(0, hot_ids // _BITS, torch.ones_like(hot_ids))
    rank = ones.cumsum(0) - ones
    signed = torch.where(bits >= 2**31, bits - 2**32, bits)
    return torch.stack([signed, rank], dim=1).to(torch.int32)


# ---- for kernels ---------------------------------------------------------------------------------


@triton.jit
def hot_slots(hot_map, row, inside):
    """Where each row lies among the hot ones, -1 where it is not hot or not `inside`."""
    word = tl.where(inside, row, 0) >> 5
    bits = tl.load(hot_map + 2 * word, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    rank = tl.load(hot_map + 2 * word + 1, mask=inside, other=0).to(tl.int64)
    bit = row & 31
    below = bits & ((1 << bit) - 1)
    below = below - ((below >> 1) & 0x55555555)  # ones by pairs, nibbles and bytes, and the bytes' sum at the top
    below = (below & 0x33333333) + ((below >> 2) & 0x33333333)
    below = (below + (below >> 4)) & 0x0F0F0F0F
    ones = ((below * 0x01010101) >> 24) & 0xFF
    return tl.where(inside & (((bits >> bit) & 1) == 1), rank + ones, -1)


COMPILE = {"hot_slots": "inlined"}
