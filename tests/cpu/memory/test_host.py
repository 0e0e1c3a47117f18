"""Blocks of host memory: exact, aligned, zeroed, shared with whoever may see them, and gone with the last who does."""

import gc
import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import freight
from freight import memory
from freight._pages import PAGE
from freight._units import MiB
from freight.errors import ArgumentError, ArgumentTypeError, ClosedError, HostMemoryError
from freight.memory import _budget

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * MiB + 5])
@pytest.mark.parametrize("shareable", [False, True])
def test_exact_aligned_and_zeroed(nbytes: int, shareable: bool) -> None:
    before = memory.stats().held
    with memory.allocate(nbytes, shareable=shareable) as block:
        bytes_ = block.tensor()
        assert bytes_.shape == (nbytes,)
        assert not bytes_.any()
        assert block.address % PAGE == 0
        assert memory.stats().held - before == -(-nbytes // PAGE) * PAGE  # never the next power of two
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


def test_views_keep_the_memory_and_nothing_else_does() -> None:
    before = memory.stats().held
    block = memory.allocate(5 * MiB)
    view = block.tensor(torch.int32)[10:20].view(2, 5)
    array = block.tensor().numpy()[100:200]
    block.close()
    block.close()
    view.fill_(3)
    array[:] = 5
    assert memory.stats().held - before == 5 * MiB
    del view
    gc.collect()
    assert memory.stats().held - before == 5 * MiB
    del array
    gc.collect()
    assert memory.stats().held == before


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


@pytest.mark.parametrize("nbytes", [-1, 1.5, "many", None, True])
def test_sizes_that_are_none(nbytes: object) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="size must"):
        memory.allocate(nbytes)  # type: ignore[arg-type]


def test_the_budget_says_what_is_left_and_is_given_back() -> None:
    with freight.config(host_bytes=10 * MiB + memory.stats().held):
        block = memory.allocate(6 * MiB, purpose="features")
        with pytest.raises(HostMemoryError, match=r"labels asked for 5 MiB .* 4 MiB are left.*FREIGHT_HOST_BYTES"):
            memory.allocate(5 * MiB, purpose="labels")
        with pytest.raises(MemoryError):
            memory.allocate(5 * MiB, shareable=True)
        assert memory.stats().left == 4 * MiB
        del block
        gc.collect()
        memory.allocate(10 * MiB).close()


def test_the_machine_says_what_it_has() -> None:
    with (
        freight.config(host_bytes="1000TiB"),
        pytest.raises(HostMemoryError, match=r"the machine has .* available"),
    ):
        memory.allocate(2**49)


def test_a_share_of_ram_is_the_limit_unless_told() -> None:
    with freight.config(host_share=0.25):
        stats = memory.stats()
        assert stats.limit <= 0.25 * psutil.virtual_memory().total
        assert "host_share=0.25" in stats.limited_by


def test_a_container_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\nactive_file 50000\n")
    monkeypatch.setattr(_budget, "_CGROUP", tmp_path)
    room = _budget.Budget().room()
    assert (room.limit, room.available) == (800000, 450000)
    (tmp_path / "memory.max").write_text("max\n")
    assert _budget.Budget().room().limit > 10**9


def test_a_refused_mapping_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory.stats().held
    descriptors = len(os.listdir("/proc/self/fd"))

    def refuse(*_: object) -> int:
        raise HostMemoryError("no")

    monkeypatch.setattr("freight._pages.map_segments", refuse)
    monkeypatch.setattr("freight._pages.map_file", refuse)
    for shareable in (False, True):
        with pytest.raises(HostMemoryError):
            memory.allocate(MiB, shareable=shareable)
    assert memory.stats().held == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_pages_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory.stats().held

    def refuse(address: int, nbytes: int) -> None:
        raise HostMemoryError("the system gave no pages")

    monkeypatch.setattr("freight._pages.fault_in", refuse)
    with pytest.raises(HostMemoryError, match="no pages"):
        memory.allocate(MiB)
    gc.collect()
    assert memory.stats().held == before


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


def _write_elsewhere(block: memory.HostBlock) -> None:
    block.tensor(torch.int64)[1] = 77


def test_a_shareable_block_is_the_same_memory_in_a_spawned_process() -> None:
    block = memory.allocate(64, shareable=True, purpose="shared rows")
    block.tensor(torch.int64)[0] = 5
    child = multiprocessing.get_context("spawn").Process(target=_write_elsewhere, args=(block,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert block.tensor(torch.int64)[:2].tolist() == [5, 77]


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


def test_blocks_from_many_threads() -> None:
    before = memory.stats().held
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
    assert memory.stats().held == before
