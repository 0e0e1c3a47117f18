"""One table in several processes: one copy of the memory, seen and written by all, and outliving any of them."""

import gc
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from rows_on_cpu import POOR, WHOLE, random_rows, unified
from sharing import Rows, Views, answer
from torch import Tensor
from torch.utils.data import DataLoader

import freight
from freight import memory
from freight.errors import ClosedError, UnsupportedError
from freight.kernels._tolerance import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def table(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def sent(x: Any) -> Any:
    """`x` as another process gets it; this one stands in for it."""
    return pickle.loads(ForkingPickler.dumps(x))


# ---- workers of a DataLoader ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_the_memory(method: str) -> None:
    x = unified(table(12, 5))
    x.host()[3] = 70
    before = x.host().clone()
    loader = DataLoader(Rows(x), batch_size=4, num_workers=1, multiprocessing_context=method)
    rows, gathered, held = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(rows, before)
    assert torch.equal(gathered[:, 0, 1:], before[:, 1:])
    assert not held.any()  # nothing of its own
    assert (x.host()[:, 0] == -1).all()
    assert torch.equal(x.host()[:, 1:], before[:, 1:])
    assert x.data_ptr() == x._table.block.address


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_over_the_table_itself(workers: int) -> None:
    x = unified(table(10, 3))
    dataset: Any = Views(x) if workers else x
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None)
    batches = list(loader)
    assert [type(batch) for batch in batches] == [Tensor] * 3
    assert torch.equal(torch.cat(batches), x.host())


def test_a_forked_process_sees_what_is_written_later() -> None:
    x = unified(table(6, 4))
    go, to_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.read(go, 1)
            right = x[torch.tensor([2])].tolist() == [[42] * 4] and x[3].tolist() == [43] * 4
            x[torch.tensor([0])] = 9
            x.host()[1] = 8
            x.close()
            status = 0 if right and x.compute_device.type == "cpu" else 2
        finally:
            os._exit(status)
    x.host()[2] = 42
    x[torch.tensor([3])] = 43
    os.write(to_child, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert x[[0, 1, 2]].tolist() == [[9] * 4, [8] * 4, [42] * 4]
    for end in (go, to_child):
        os.close(end)


# ---- processes of their own ----------------------------------------------------------------------------


def test_of_two_processes_one_is_killed(held_before: int) -> None:
    """Each has the one memory and nothing more; the other one, and this one, go on."""
    x = unified(table(8, 4))
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(2)]
    children = [spawn.Process(target=answer, args=(x, x[2:4].t(), pair[1]), daemon=True) for pair in pairs]
    for child in children:
        child.start()
    first, second = (pair[0] for pair in pairs)
    for end in (first, second):
        assert end.poll(120)
        assert end.recv() == (True, True, "cpu", 0)

    x.host()[2] = 50
    first.send((2, None))
    assert first.recv() == ([[50] * 4], x[2:4].t().tolist())
    first.send((3, 60.0))
    assert first.recv() == ([[60] * 4], [[50, 60]] * 4)
    second.send((3, None))
    assert second.recv() == ([[60] * 4], [[50, 60]] * 4)
    assert x[3].tolist() == [60] * 4

    os.kill(children[0].pid or 0, signal.SIGKILL)
    children[0].join(60)
    assert children[0].exitcode == -signal.SIGKILL
    x.host()[2] = 51
    second.send((2, None))
    assert second.recv()[0] == [[51] * 4]
    second.send(None)
    assert second.recv() == "closed"
    children[1].join(60)
    assert children[1].exitcode == 0
    assert x[torch.tensor([2, 3])].tolist() == [[51] * 4, [60] * 4]
    assert x.data_ptr() == x._table.block.address
    del x
    gc.collect()
    assert memory.stats().held == held_before


# ---- what is sent --------------------------------------------------------------------------------------

SEEN: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[2:5],
    "columns": lambda x: x[:, 1:3],
    "transposed": lambda x: x.t(),
    "a row": lambda x: x[4],
    "an element": lambda x: x[4, 2],
    "steps": lambda x: x[1::2, ::3],
    "spread": lambda x: x[:1].expand(3, 6),
    "another shape": lambda x: x.view(3, 2, 6),
    "no rows": lambda x: x[2:2],
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex128, torch.float8_e5m2], ids=str)
def test_what_is_sent_is_the_same_memory(name: str, dtype: torch.dtype, held_before: int) -> None:
    x = unified(random_rows(6, 6, dtype=dtype))
    held = memory.stats().held
    here = SEEN[name](x)
    there = sent(here)
    assert memory.stats().held == held > held_before
    assert there.is_unified
    assert (there.shape, there.stride(), there.dtype) == (here.shape, here.stride(), dtype)
    assert there.data_ptr() != here.data_ptr() or here.numel() == 0
    assert_same_bits(there.host(), here.host())
    x.host().view(torch.uint8).fill_(7)
    assert_same_bits(there.host(), here.host())
    last = here.host()
    x.close()
    again = sent(there)
    there.close()
    assert_same_bits(again.host(), last)


@pytest.mark.parametrize("dtype", WHOLE + POOR, ids=str)
def test_every_dtype_is_sent(dtype: torch.dtype) -> None:
    x = unified(random_rows(3, 2, dtype=dtype))
    assert_same_bits(sent(x).host(), x.host())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_nothing_is_sent_too(shape: tuple[int, ...]) -> None:
    there = sent(unified(torch.ones(shape)))
    assert there.is_unified
    assert there.shape == shape


def test_one_attached_closed_leaves_the_others() -> None:
    x = unified(table(3, 2))
    one, other = sent(x), sent(x)
    one[0] = 5
    one.close()
    assert other[0].tolist() == x[0].tolist() == [5, 5]
    x.close()
    other[1] = 6
    assert other.tolist() == [[5, 5], [6, 6], [5, 6]]


def test_what_is_not_sent() -> None:
    with pytest.raises(UnsupportedError, match=r"in_place=True\) cannot go to other processes; leave in_place out"):
        sent(unified(table(3, 2), in_place=True))
    with pytest.raises(UnsupportedError, match="lazily conjugated view cannot go to other processes; send the table"):
        sent(unified(torch.ones(3, 2, dtype=torch.complex64)).conj())
    x = unified(table(3, 2))
    x.close()
    with pytest.raises(ClosedError, match="was closed"):
        sent(x)


def test_what_is_lent_goes_as_torch_sends_it() -> None:
    """By a copy in shared memory, which leaves the table where it is."""
    x = unified(table(3, 2))
    lent = x.host()
    there = sent(lent)
    assert type(there) is Tensor
    assert torch.equal(there, table(3, 2))
    assert x.data_ptr() == x._table.block.address
    x[0] = 9
    assert x.host()[0].tolist() == [9, 9]


def test_many_are_sent_without_a_descriptor_left() -> None:
    x = unified(table(3, 2))
    sent(x)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        sent(x)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # the server of descriptors has its own
    assert freight.memory.stats().held
