"""Blocks of host memory: exact, aligned, zeroed, shared with whoever may see them, and gone with the last who does."""

import gc
import multiprocessing
import os
import pickle
import resource
import threading

import numpy as np
import psutil
import pytest
import torch
from fake_runtime import FakeRuntime

import freight
from freight import _cuda, _pages, memory
from freight._pages import PAGE
from freight._units import MiB
from freight.errors import ArgumentError, ArgumentTypeError, ClosedError, HostMemoryError, PinError

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * MiB + 5])
@pytest.mark.parametrize("shareable", [False, True])
def test_exact_aligned_and_zeroed(nbytes: int, shareable: bool, held_before: int) -> None:
    with memory.allocate(nbytes, shareable=shareable) as block:
        bytes_ = block.tensor()
        assert bytes_.shape == (nbytes,)
        assert not bytes_.any()
        assert block.address % PAGE == 0
        assert memory.stats().held - held_before == -(-nbytes // PAGE) * PAGE  # never the next power of two
        bytes_.fill_(7)
        assert (block.tensor() == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    with memory.allocate(PAGE) as block:
        block.tensor().random_(generator=torch.Generator().manual_seed(0))
        seen = block.tensor(dtype, (2, 3), offset=dtype.itemsize)
        assert (seen.dtype, seen.shape) == (dtype, (2, 3))
        assert seen.data_ptr() == block.address + dtype.itemsize
        start = dtype.itemsize
        same = block.tensor()[start : start + 6 * dtype.itemsize].clone().view(dtype).view(2, 3)
        assert torch.equal(seen.view(torch.uint8), same.view(torch.uint8))


def test_views_keep_the_memory_and_nothing_else_does(held_before: int) -> None:
    block = memory.allocate(5 * MiB)
    view = block.tensor(torch.int32)[10:20].view(2, 5)
    array = block.tensor().numpy()[100:200]
    block.close()
    block.close()
    view.fill_(3)
    array[:] = 5
    assert memory.stats().held - held_before == 5 * MiB
    del view
    gc.collect()
    assert memory.stats().held - held_before == 5 * MiB
    del array
    gc.collect()
    assert memory.stats().held == held_before


def test_freed_memory_goes_back_to_the_system() -> None:
    process = psutil.Process()
    block = memory.allocate(256 * MiB)
    with_block = process.memory_info().shared
    del block
    gc.collect()
    assert with_block - process.memory_info().shared >= 250 * MiB


def test_closed_block_says_so() -> None:
    block = memory.allocate(10, purpose="the table")
    block.close()
    for use in (block.tensor, block.alias, block.pin, block.fileno):
        with pytest.raises(ClosedError, match="the table was closed"):
            use()
    assert block.closed
    assert not block.pinned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.float32, None, 2), "multiple of 4"),
        ((torch.uint8, None, 101), "within its 100 bytes; got 101"),
        ((torch.uint8, None, -1), "got -1"),
        ((torch.float32, (5, 6)), "holds 100 bytes.* ends at 120"),
        ((torch.uint8, (-1, 3)), "must not be negative"),
    ],
)
def test_tensors_that_do_not_fit(arguments: tuple, message: str) -> None:
    with memory.allocate(100) as block, pytest.raises(ArgumentError, match=message):
        block.tensor(*arguments)


def test_sizes_as_people_write_them() -> None:
    for size, nbytes in (("8KiB", 8192), (np.int32(5), 5), (0, 0)):
        with memory.allocate(size) as block:
            assert block.nbytes == nbytes


@pytest.mark.parametrize("nbytes", [-1, 1.5, "many", None, True])
def test_sizes_that_are_none(nbytes: object) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="rows: the size must"):
        memory.allocate(nbytes, purpose="rows")  # type: ignore[arg-type]


def test_a_refused_mapping_leaves_nothing(monkeypatch: pytest.MonkeyPatch, held_before: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    def refuse(*_: object) -> int:
        raise HostMemoryError("no")

    monkeypatch.setattr("freight._pages.map_segments", refuse)
    monkeypatch.setattr("freight._pages.map_file", refuse)
    for shareable in (False, True):
        with pytest.raises(HostMemoryError):
            memory.allocate(MiB, shareable=shareable)
    assert memory.stats().held == held_before
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("shareable", [False, True])
def test_a_failed_block_is_gone_while_its_error_is_still_looked_at(
    monkeypatch: pytest.MonkeyPatch, shareable: bool, held_before: int
) -> None:
    """A notebook keeps the last traceback, and the traceback keeps whatever the frames hold."""
    descriptors = len(os.listdir("/proc/self/fd"))

    def refuse(address: int, nbytes: int) -> None:
        raise HostMemoryError("the system gave no pages")

    monkeypatch.setattr("freight._pages.fault_in", refuse)
    with pytest.raises(HostMemoryError, match="no pages") as caught:
        memory.allocate(MiB, shareable=shareable)
    assert caught.value.__traceback__ is not None
    assert memory.stats().held == held_before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_refused_page_lock_names_the_limit_and_leaves_nothing(runtime: FakeRuntime, held_before: int) -> None:
    runtime.refuse = True
    with pytest.raises(PinError, match=r"the table: no\. Lockable memory is") as caught:
        memory.allocate(MiB, purpose="the table")
    assert isinstance(caught.value, RuntimeError)
    assert memory.stats().held == held_before
    assert not runtime.locked


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (65536, r"Lockable memory is 64 KiB \(`ulimit -l`\), and freight has 4 KiB locked: raise it with `ulimit -l"),
        (resource.RLIM_INFINITY, "Lockable memory is not limited; freight has 4 KiB locked"),
    ],
)
def test_the_lockable_limit_is_told(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, limit: int, says: str
) -> None:
    block = memory.allocate(PAGE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    runtime.refuse = True
    with pytest.raises(PinError, match=says):
        memory.allocate(PAGE)
    block.close()


def test_the_lock_goes_before_the_memory(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both when nobody is left who can reach them."""
    events: list[str] = []
    unlock, unmap = runtime.unregister, _pages.unmap
    monkeypatch.setattr(_cuda, "unregister", lambda address: (events.append("unlock"), unlock(address))[1])
    monkeypatch.setattr(_pages, "unmap", lambda address, size: (events.append("unmap"), unmap(address, size))[1])
    with memory.allocate(PAGE) as block:
        assert block.pinned
        view = block.tensor()
    assert events == ["unlock"]
    del view
    assert events == ["unlock", "unmap"]


def test_a_block_is_locked_once(runtime: FakeRuntime) -> None:
    with memory.allocate(3 * PAGE) as block:
        block.pin()
        assert runtime.locked == {block.address: 3 * PAGE}
        assert memory.stats().locked >= 3 * PAGE
    assert not runtime.locked


def test_memory_closed_during_a_capture_is_there_again_after_it(runtime: FakeRuntime, held_before: int) -> None:
    with freight.config(host_bytes=held_before + 4 * PAGE):
        block = memory.allocate(3 * PAGE)
        runtime.capturing = True
        block.close()
        assert memory.stats().held == held_before + 3 * PAGE
        runtime.capturing = False
        memory.allocate(3 * PAGE).close()
    assert not runtime.locked


def test_memory_closed_during_a_capture_can_be_registered_after_it(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver still had locked then is not somebody else's."""
    locked = lambda tensor: any(at <= tensor.data_ptr() < at + size for at, size in runtime.locked.items())  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "is_pinned", locked)
    block = memory.allocate(PAGE)
    tensor = block.tensor()
    runtime.capturing = True
    block.close()
    assert tensor.is_pinned()
    runtime.capturing = False
    with memory.register(tensor):
        assert runtime.locked == {tensor.data_ptr(): PAGE}
    assert not runtime.locked


def test_memory_that_others_pinned_is_neither_locked_nor_unlocked(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    with memory.register(torch.zeros(5)) as block:
        assert block.pinned
        assert not runtime.locked


# ---- the caller's own memory ---------------------------------------------------------------------------


def test_registering_views_shares_the_storage() -> None:
    table = torch.arange(60.0).view(6, 10)
    column = memory.register(table[:, 3:5])
    whole = memory.register(table)
    assert (column.address, column.nbytes) == (whole.address, whole.nbytes) == (table.data_ptr(), 240)
    assert torch.equal(whole.tensor(torch.float32, (6, 10)), table)
    whole.tensor(torch.float32)[0] = 42
    assert table[0, 0] == 42


def test_registered_memory_outlives_its_tensor() -> None:
    array = np.arange(10, dtype=np.int64)
    block = memory.register(torch.from_numpy(array))
    del array
    gc.collect()
    assert block.tensor(torch.int64).tolist() == list(range(10))


@pytest.mark.parametrize("value", [[1, 2], torch.ones(2, device="meta"), torch.eye(3).to_sparse()], ids=str)
def test_registering_what_is_no_cpu_tensor(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a dense CPU tensor; got"):
        memory.register(value)  # type: ignore[arg-type]


# ---- other processes -----------------------------------------------------------------------------------


def test_a_shareable_block_is_the_same_memory_in_a_spawned_process() -> None:
    block = memory.allocate(64, shareable=True, purpose="shared rows")
    block.tensor(torch.int64)[0] = 5
    code = "import torch; block.tensor(torch.int64)[1] = 77"
    child = multiprocessing.get_context("spawn").Process(target=exec, args=(code, {"block": block}))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert block.tensor(torch.int64)[:2].tolist() == [5, 77]


def test_an_empty_block_goes_to_other_processes_too() -> None:
    block = pickle.loads(pickle.dumps(memory.allocate(0, shareable=True, purpose="no rows")))
    assert (block.nbytes, block.purpose) == (0, "no rows")
    block.close()
    with pytest.raises(ClosedError):
        pickle.dumps(block)


def test_an_attached_block_is_not_on_the_account(held_before: int) -> None:
    with memory.allocate(64, shareable=True) as block:
        other = memory.attach(os.dup(block.fileno()), 64)
        assert memory.stats().held == held_before + PAGE
        other.tensor()[3] = 9
        assert block.tensor()[3] == 9
        fd = other.fileno()
        other.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_block_that_is_not_shareable_says_how_to_make_one() -> None:
    block = memory.allocate(64, purpose="private rows")
    with pytest.raises(ArgumentError, match="private rows is not shareable: allocate it with shareable=True"):
        pickle.dumps(block)


def test_attaching_more_than_there_is() -> None:
    block = memory.allocate(64, shareable=True)
    with pytest.raises(ArgumentError, match="cannot be mapped"):
        memory.attach(block.fileno(), 2**30)


def test_a_forked_child_shares_the_bytes_and_not_the_account() -> None:
    block = memory.allocate(MiB)
    pool = memory.HostPool()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            block.tensor()[0] = 9
            fresh = memory.stats().held == 0
            try:
                pool.take(10)
            except freight.errors.ForkedError:
                del block
                gc.collect()
                status = 0 if fresh and memory.stats().held == 0 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert block.tensor()[0] == 9
    assert memory.stats().held >= MiB


def test_blocks_from_many_threads(held_before: int) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(20):
                with memory.allocate(PAGE * (1 + (seed + turn) % 5)) as block:
                    block.tensor().fill_(seed)
                    assert (block.tensor() == seed).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not errors
    assert memory.stats().held == held_before
