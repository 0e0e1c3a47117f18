"""What the tests of rows share: dtypes, rows of random bytes, tables that compute on the CPU."""

import functools
import math

import torch
from torch import Tensor

import freight

unified = functools.partial(freight.unified, device="cpu")  # also where there is a GPU: the other lane has that

# Those that torch can do everything with; those that it cannot compare or multiply; those that it can only store.
WHOLE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
POOR = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
BARE = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and "torch.q" not in str(value)}
    - {*WHOLE, *POOR},
    key=str,
)


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of random bytes, every kind of NaN among them."""
    data = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype)


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """What torch gathers; as bytes, for it cannot index every dtype."""
    shape, width = (*ids.shape, *table.shape[1:]), math.prod(table.shape[1:])
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=table.dtype)
    flat = table.contiguous().view(len(table), width).view(torch.uint8)
    return flat.index_select(0, ids.long().reshape(-1) % len(table)).view(table.dtype).view(shape)
