"""What the tests of rows on a GPU share. A module of its own, so that spawned workers can import it too."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import freight
from freight.kernels._tolerance import assert_same_bits
from freight.rows._order import Ordering

LONG = 1_000_000_000  # GPU cycles, about half a second

# those whose elements torch can compare on a GPU, which opcheck's test of the schema needs
COMPARABLE = [
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
OTHERS = [
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

# ---- tables, ids, and the rows that torch has for them on the CPU --------------------------------------


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of random bytes, every kind of NaN among them."""
    data = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype)


def random_ids(rows: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Ids from both ends, a quarter of them twice; the first and the last row, said both ways, come first."""
    ids = torch.randint(-rows, rows, (count,))
    ends = torch.tensor([0, rows - 1, -1, -rows])[:count]
    ids[: len(ends)] = ends
    ids[count - count // 4 :] = ids[: count // 4]
    return ids.to(dtype)


def rows_of(host: Tensor, ids: Tensor) -> Tensor:
    """What torch gathers on the CPU; as bytes, for it cannot index every dtype."""
    shape, width = (*ids.shape, *host.shape[1:]), math.prod(host.shape[1:])
    if math.prod(shape) == 0:
        return host.new_empty(shape)
    flat = host.reshape(len(host), width).contiguous().view(torch.uint8)
    return flat.index_select(0, ids.cpu().long().reshape(-1) % len(host)).view(host.dtype).view(shape)


def assert_rows(got: Tensor, host: Tensor, ids: Tensor) -> None:
    """`got` is a plain tensor on the GPU, and bit for bit what torch gathers on the CPU."""
    assert type(got) is Tensor
    assert got.is_cuda
    assert_same_bits(got, rows_of(host, ids))


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """GPU memory in which everything that is never written is seen: no row of the tests is made of these bytes."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xA5, dtype=torch.uint8, device="cuda").view(dtype)


# ---- the two ways of the kernel ------------------------------------------------------------------------

BOTH_WAYS = pytest.mark.parametrize("ordered", [False, True], ids=["as they come", "ordered"])


def order(x: freight.UnifiedTensor, ordered: bool) -> None:
    """Have ids of this table ordered by address always, or never: what pays is the machine's to say, and not tested."""
    row_bytes = x.stride(0) * x.element_size()
    x._table._orderings[row_bytes] = Ordering(pays=0 if ordered else 2**31, steps=((0, 16),))
    assert (x._table.copiers(row_bytes, 1) is not None) == ordered


def table(rows: int, *row: int, ordered: bool, dtype: torch.dtype = torch.float32) -> freight.UnifiedTensor:
    """A small table; its ids are ordered, or not, whatever would pay."""
    x = freight.unified(random_rows(rows, *row, dtype=dtype))
    order(x, ordered)
    return x


# ---- waiting -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """The GPU has half a second of work when the block begins, and has not done it when the block ends."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(LONG)
        yield
        behind = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert behind, "the host has waited for the GPU"


# ---- in workers ----------------------------------------------------------------------------------------


class Rows(Dataset):
    """Rows by number, with the process's own opinion of where they are computed."""

    def __init__(self, x: freight.UnifiedTensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, str, str]:
        rows = self.x[torch.tensor([at, -1])]
        return rows, str(rows.device), str(self.x.compute_device)


class Marked(Dataset):
    """Marks, in the table's own memory, the rows that were asked for."""

    def __init__(self, x: freight.UnifiedTensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> Tensor:
        row = self.x.host()[at]
        row += 1000
        return row.clone()


def read_until_killed(x: freight.UnifiedTensor, ids: Tensor, to_parent: Connection) -> None:
    """A process of its own with the same table: say what its GPU reads, write a row by it, and go on reading."""
    rows = x[ids.to(x.compute_device)]
    x[torch.tensor([1])] = torch.full((1, x.shape[1]), 7.0, device=x.compute_device)
    x.check()
    to_parent.send((str(rows.device), rows.cpu().numpy()))
    while True:
        x[ids]
        x.check()
