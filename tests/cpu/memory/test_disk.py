"""The disk file through the page cache, so that it runs anywhere; `tests/storage` does the same with direct I/O."""

import errno
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import freight
from freight import _direct, memory
from freight._direct import ALIGN
from freight._units import MiB
from freight.errors import (
    ArgumentError,
    ArgumentTypeError,
    ChecksumError,
    ClosedError,
    DiskError,
    DiskFullError,
    ForkedError,
    FreightError,
    HostMemoryError,
)
from freight.memory import Content, CopyStreams, DiskFile, Extent, ModelDevice, State


@pytest.fixture(autouse=True)
def _through_the_page_cache(tmp_path: Path) -> Iterator[None]:
    with freight.config(direct_io=False, disk_dir=tmp_path, checksum=True, disk_threads=3, disk_block_bytes=2 * ALIGN):
        yield


def there_and_back(disk: DiskFile, tensor: torch.Tensor) -> torch.Tensor:
    extent, back = disk.allocate(tensor.nbytes), torch.empty_like(tensor)
    disk.write(extent, tensor)
    disk.read(extent, back).wait()  # behind the write, without waiting for it here
    disk.free(extent)
    return back


@pytest.mark.parametrize("nbytes", [0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 2 * ALIGN, 5 * ALIGN + 17])
def test_every_byte_comes_back(nbytes: int) -> None:
    with DiskFile(MiB) as disk:
        tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        assert torch.equal(there_and_back(disk, tensor), tensor)
        assert disk.stats().bytes_written == disk.stats().bytes_read == nbytes
        assert disk.stats().free == MiB


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex128], ids=str)
def test_dtypes_and_views(dtype: torch.dtype) -> None:
    with DiskFile(MiB) as disk:
        tensor = torch.randint(0, 2, (50, 33)).to(dtype)[7:31]
        back = there_and_back(disk, tensor)
        assert torch.equal(back.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("start", [0, 1, 64])
def test_memory_at_any_address(start: int) -> None:
    with DiskFile(MiB) as disk, memory.allocate(MiB) as block:
        tensor = block.tensor()[start : start + 5 * ALIGN]
        tensor.random_(0, 256)
        assert torch.equal(there_and_back(disk, tensor), tensor)


def test_device_memory_goes_through_the_streams() -> None:
    device = ModelDevice(eager=False)
    with DiskFile(MiB, streams=CopyStreams(device)) as disk:
        source = device.own(torch.zeros(5000))
        back = device.own(torch.full((5000,), -1.0))
        device.launch(lambda: source.copy_(torch.arange(5000.0)))
        extent = disk.allocate(source.nbytes)
        written = disk.write(extent, source)
        last_use = device.launch(lambda: back.fill_(-2))
        disk.read(extent, back).wait()
        assert last_use.passed
        assert written.state is State.DONE
        assert torch.equal(back, torch.arange(5000.0))


@pytest.mark.parametrize("aligned", [False, True])
def test_reading_into_what_autograd_saved_is_seen(aligned: bool) -> None:
    with DiskFile(MiB) as disk, memory.allocate(MiB) as block:
        saved = block.tensor(torch.float32, ALIGN) if aligned else torch.ones(5)
        extent = disk.allocate(saved.nbytes)
        disk.write(extent, saved).wait()
        weight = torch.ones_like(saved, requires_grad=True)
        loss = (weight * saved).sum()
        disk.read(extent, saved).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_full_file_says_what_is_free() -> None:
    with DiskFile(4 * ALIGN) as disk:
        extents = [disk.allocate(ALIGN) for _ in range(4)]
        disk.free(extents[0])
        disk.free(extents[2])
        with pytest.raises(DiskFullError, match=r"no place for 8 KiB: of 16 KiB, 8 KiB are free in 2 pieces") as caught:
            disk.allocate(2 * ALIGN)
        assert caught.value.errno == errno.ENOSPC
        assert disk.allocate(ALIGN).offset in (extents[0].offset, extents[2].offset)


def test_what_cannot_be_transferred(tmp_path: Path) -> None:
    with DiskFile(MiB) as disk, DiskFile(MiB) as other:
        extent = disk.allocate(100)
        with pytest.raises(FreightError, match="write it first"):
            disk.read(extent, torch.empty(100, dtype=torch.uint8))
        with pytest.raises(ArgumentError, match="is for 100 bytes; the tensor has 99"):
            disk.write(extent, torch.empty(99, dtype=torch.uint8))
        with pytest.raises(ArgumentError, match="belongs to another file"):
            other.write(extent, torch.empty(100, dtype=torch.uint8))
        with pytest.raises(ArgumentError, match="contiguous"):
            disk.write(extent, torch.empty(10, 20, dtype=torch.uint8)[:, ::2])
        with pytest.raises(ArgumentError, match="is on meta"):
            disk.write(extent, torch.empty(100, dtype=torch.uint8, device="meta"))
        disk.free(extent)
        with pytest.raises(FreightError, match="was freed"):
            disk.write(extent, torch.empty(100, dtype=torch.uint8))
        with pytest.raises(FreightError, match="was freed"):
            disk.free(extent)
    with pytest.raises(ClosedError, match="was closed"):
        disk.allocate(1)
    disk.close()
    with pytest.raises(ArgumentError, match="threads must be at least 1"):
        DiskFile(MiB, threads=0)


# ---- faults ------------------------------------------------------------------------------------------


class Gate:
    """Holds calls of a function of `_direct` until it is opened, and can make one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.open = threading.Event()
        self.inside = threading.Semaphore(0)
        self.fail_at: int | None = None
        self.calls = 0
        real = getattr(_direct, name)

        def call(fd: int, address: int, nbytes: int, offset: int) -> None:
            self.calls += 1
            number = self.calls
            self.inside.release()
            assert self.open.wait(60)
            if number == self.fail_at:
                raise DiskError(errno.EIO, "the disk broke", "file")
            real(fd, address, nbytes, offset)

        monkeypatch.setattr(_direct, name, call)


def test_a_failing_read_reaches_the_waiter_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskFile(MiB) as disk:
        tensor = torch.randn(10000)
        extent, back = disk.allocate(tensor.nbytes), torch.empty_like(tensor)
        disk.write(extent, tensor).wait()
        gate = Gate(monkeypatch, "read_into")
        gate.open.set()
        gate.fail_at = 2
        token = disk.read(extent, back)
        with pytest.raises(OSError, match="the disk broke"):
            token.wait()
        with pytest.raises(DiskError):
            token.wait_on()
        assert token.state is State.FAILED
        assert extent.content is Content.WRITTEN
        disk.read(extent, back).wait()
        assert torch.equal(back, tensor)


def test_a_failed_write_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "write_from")
    gate.fail_at = 3
    with DiskFile(MiB) as disk:
        tensor = torch.randn(20000)
        extent, back = disk.allocate(tensor.nbytes), torch.zeros_like(tensor)
        written, read = disk.write(extent, tensor), disk.read(extent, back)
        gate.open.set()
        for token in (written, read):
            with pytest.raises(DiskError, match="the disk broke"):
                token.wait()
        assert extent.content is Content.FAILED
        assert not back.any()
        with pytest.raises(FreightError, match="write it first"):
            disk.read(extent, back)
        assert disk.stats().bytes_written == 0
        disk.write(extent, tensor).wait()  # the place itself is still good
        assert torch.equal(there_and_back(disk, tensor), tensor)


def test_bytes_that_changed_on_disk_are_found() -> None:
    with DiskFile(MiB, checksum=True) as disk:
        tensor = torch.randn(10000)
        extent = disk.allocate(tensor.nbytes)
        disk.write(extent, tensor).wait()
        os.pwrite(disk._fd, b"!", extent.offset + 20001)
        with pytest.raises(ChecksumError, match="are not what was written"):
            disk.read(extent, torch.empty_like(tensor)).wait()


def test_a_busy_extent_is_not_overwritten_and_a_freed_one_is_kept_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch, "write_from")
    with DiskFile(2 * ALIGN) as disk:
        tensor = torch.ones(ALIGN, dtype=torch.uint8)
        extent = disk.allocate(ALIGN)
        token = disk.write(extent, tensor)
        assert gate.inside.acquire(timeout=60)
        with pytest.raises(FreightError, match="in use by another transfer"):
            disk.write(extent, tensor)
        disk.free(extent)
        assert disk.stats().free == ALIGN
        gate.open.set()
        token.wait()
        disk.join()
        assert disk.stats().free == 2 * ALIGN


def test_tensors_live_until_their_transfer_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "write_from")
    gc.collect()
    with DiskFile(MiB) as disk:
        extent = disk.allocate(8 * ALIGN)
        before = memory.stats().held
        block = memory.allocate(8 * ALIGN)
        block.tensor().fill_(3)
        token = disk.write(extent, block.tensor())
        del block
        gc.collect()
        assert memory.stats().held - before == 8 * ALIGN
        gate.open.set()
        token.wait()
        assert memory.stats().held == before  # at once, and not when the threads get to it
        back = torch.empty(8 * ALIGN, dtype=torch.uint8)
        disk.read(extent, back).wait()
        assert (back == 3).all()


def test_an_interrupt_while_waiting_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "write_from")
    with DiskFile(MiB) as disk:
        tensor = torch.randn(10000)
        extent, back = disk.allocate(tensor.nbytes), torch.empty_like(tensor)
        token = disk.write(extent, tensor)

        def wait_for_ctrl_c() -> None:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            token.wait()

        with pytest.raises(KeyboardInterrupt):
            wait_for_ctrl_c()
        gate.open.set()
        disk.read(extent, back).wait()
        assert torch.equal(back, tensor)


def test_a_failed_write_lets_its_tensor_go(monkeypatch: pytest.MonkeyPatch, held_before: int) -> None:
    """The token keeps the error, the error its traceback, and that must not keep the tensor."""
    gate = Gate(monkeypatch, "write_from")
    gate.fail_at = 2
    gate.open.set()
    with DiskFile(MiB) as disk, memory.allocate(8 * ALIGN + 5) as block:
        held = memory.stats().held
        token = disk.write(disk.allocate(block.nbytes), block.tensor())
        with pytest.raises(DiskError) as caught:
            token.wait()
        del block._keep
        block.close()
        assert memory.stats().held == held - 9 * ALIGN
        assert caught.value.__traceback__ is not None


def test_an_error_on_the_way_from_the_gpu_reaches_the_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ModelDevice()
    with DiskFile(MiB, streams=CopyStreams(device)) as disk:
        source = device.own(torch.ones(5000))
        extent = disk.allocate(source.nbytes)

        def fail(*_: object) -> object:
            raise RuntimeError("the link broke")

        back = device.own(torch.zeros(5000))
        for _ in range(5):  # more often than there are staging slots, of which none may get lost
            with monkeypatch.context() as patch:
                patch.setattr(device, "copy", fail)
                with pytest.raises(RuntimeError, match="the link broke"):
                    disk.write(extent, source).wait()
                assert extent.content is Content.FAILED
            disk.write(extent, source).wait()
            with monkeypatch.context() as patch:
                patch.setattr(device, "copy", fail)
                with pytest.raises(RuntimeError, match="the link broke"):
                    disk.read(extent, back).wait()
        disk.read(extent, back).wait()
        assert torch.equal(back, source)


def test_an_error_in_the_block_closes_the_file(held_before: int) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()

    def step() -> None:
        with DiskFile(MiB) as disk:
            disk.write(disk.allocate(100), torch.zeros(100, dtype=torch.uint8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert memory.stats().held == held_before


def test_a_closed_file_holds_nothing_even_while_somebody_holds_it(held_before: int) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    disk = DiskFile(MiB)
    token = disk.write(disk.allocate(100), torch.zeros(100, dtype=torch.uint8))
    disk.close()
    assert token.state is State.DONE
    assert memory.stats().held == held_before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert repr(disk).endswith(", closed)")


@pytest.mark.parametrize("fails", ["open_nameless", "allocate", "threads"])
def test_a_file_that_cannot_be_made_holds_nothing_even_while_its_error_is_looked_at(
    fails: str, monkeypatch: pytest.MonkeyPatch, held_before: int
) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    if fails == "open_nameless":
        monkeypatch.setattr(_direct, fails, raising(DiskFullError(errno.ENOSPC, "no room", "here")))
    elif fails == "allocate":
        monkeypatch.setattr("freight.memory._disk.allocate", raising(HostMemoryError("no room")))
    else:
        spare = iter([True, True])
        start = threading.Thread.start

        def start_where_there_is_one(thread: threading.Thread) -> None:
            if not next(spare, False):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_where_there_is_one)
    with pytest.raises(FreightError, match=r"no room|gave 2 of the 3 threads asked for \(can't start") as caught:
        DiskFile(MiB)
    assert caught.value.__traceback__ is not None
    assert memory.stats().held == held_before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def test_a_forgotten_file_is_closed(held_before: int) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    disk = DiskFile(MiB)
    disk.write(disk.allocate(100), torch.zeros(100, dtype=torch.uint8))
    disk.join()
    del disk
    wait_until(lambda: threading.active_count() == threads)  # the last to hold it may be one of its own threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert memory.stats().held == held_before


def wait_until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        gc.collect()


def test_a_forgotten_extent_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "write_from")
    with DiskFile(2 * ALIGN) as disk:
        extent = disk.allocate(ALIGN)
        token = disk.write(extent, torch.ones(ALIGN, dtype=torch.uint8))
        del extent
        gc.collect()
        assert disk.stats().free == ALIGN  # the write still needs it
        gate.open.set()
        token.wait()
        assert disk.stats().free == 2 * ALIGN


def test_closing_waits_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "write_from")
    disk = DiskFile(MiB)
    tokens = [disk.write(disk.allocate(5000), torch.ones(5000, dtype=torch.uint8)) for _ in range(9)]
    closing = threading.Thread(target=disk.close)
    closing.start()
    wait_until(lambda: refuses(disk))  # nothing new is begun, for nobody would end it
    assert not any(token.done() for token in tokens)
    gate.open.set()
    closing.join(60)
    assert all(token.state is State.DONE for token in tokens)


def refuses(disk: DiskFile) -> bool:
    try:
        disk.free(disk.allocate(1))
    except ClosedError:
        return True
    return False


def test_an_interrupt_anywhere_loses_no_byte_and_hangs_nobody(interrupted_everywhere: Callable[..., None]) -> None:
    with DiskFile(16 * ALIGN) as disk:
        kept = disk.allocate(3 * ALIGN)
        tensor = torch.arange(3 * ALIGN, dtype=torch.int32).to(torch.uint8)
        disk.write(kept, tensor).wait()
        extents: list[Extent] = []
        back = torch.empty_like(tensor)

        def use() -> None:
            extents.append(disk.allocate(3 * ALIGN))
            disk.write(extents[0], tensor)
            disk.read(extents[0], back).wait()
            disk.read(kept, back)
            disk.free(extents.pop())
            disk.allocate(ALIGN)

        def check() -> None:
            disk.join()
            while extents:
                assert extents[-1].content in (Content.EMPTY, Content.WRITTEN, Content.FAILED, Content.FREED)
                if extents[-1].content is Content.WRITTEN:
                    disk.read(extents[-1], back).wait()
                    assert torch.equal(back, tensor)
                extents.pop()
            disk.allocate(13 * ALIGN)  # all of the rest, in one piece
            disk.read(kept, back).wait()
            assert torch.equal(back, tensor)

        interrupted_everywhere(use, check)


@pytest.mark.parametrize("nbytes", [-1, 2.5, "many", None])
def test_sizes_that_are_none(nbytes: object) -> None:
    with DiskFile(MiB) as disk, pytest.raises((ArgumentError, ArgumentTypeError), match="the size of an extent must"):
        disk.allocate(nbytes)  # type: ignore[arg-type]


def test_a_forked_child_is_refused() -> None:
    with DiskFile(MiB) as disk:
        extent = disk.allocate(10)
        pid = os.fork()
        if pid == 0:
            refused = 0
            try:
                for use in (
                    disk.stats,
                    disk.join,
                    lambda: disk.allocate(1),
                    lambda: disk.write(extent, torch.zeros(10, dtype=torch.uint8)),
                    lambda: disk.free(extent),
                ):
                    try:
                        use()
                    except ForkedError:
                        refused += 1
                disk.close()
            finally:
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        tensor = torch.randn(100)
        assert torch.equal(there_and_back(disk, tensor), tensor)


# ---- places where no file can be ------------------------------------------------------------------------


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    held = memory.stats().held
    with pytest.raises(OSError, match=r"there is no such directory.*FREIGHT_DISK_DIR") as caught:
        DiskFile(MiB, directory=tmp_path / "none")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "none"))
    del caught
    gc.collect()
    assert memory.stats().held == held


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskFullError, match=r"needs 1024 TiB and .* are free"):
        DiskFile("1024TiB")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not list(tmp_path.iterdir())


def test_memory_file_systems_are_told_apart() -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs /dev/shm, a file system in memory")
    with freight.config(direct_io=True), pytest.raises(DiskError, match="which is memory and no disk"):
        DiskFile(MiB, directory="/dev/shm")


# ---- against a model ------------------------------------------------------------------------------------


class Disk(RuleBasedStateMachine):
    """Extents hold what was last written to them, whatever else is written, read and freed at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = DiskFile(40 * ALIGN)
        self.holds: dict[Extent, torch.Tensor] = {}
        self.reads: list = []
        self.writing: dict[Extent, memory.Token] = {}
        self.failed: set[Extent] = set()  # a traceback may keep them after they are forgotten
        self.failing = False
        self.patch = pytest.MonkeyPatch()
        really_write = _direct.write_from

        def write_from(fd: int, address: int, nbytes: int, offset: int) -> None:
            if self.failing:
                raise DiskError(errno.EIO, "the disk broke", "file")
            really_write(fd, address, nbytes, offset)

        self.patch.setattr(_direct, "write_from", write_from)

    @rule(nbytes=st.integers(0, 12 * ALIGN), seed=st.integers(0, 255))
    def write_new(self, nbytes: int, seed: int) -> None:
        used = sum(max(ALIGN, -(-e.nbytes // ALIGN) * ALIGN) for e in self.holds)
        try:
            extent = self.disk.allocate(nbytes)
        except DiskFullError:
            assert used + nbytes > 12 * ALIGN
            return
        self.write(extent, seed)

    @rule(data=st.data(), seed=st.integers(0, 255))
    def write_again(self, data: st.DataObject, seed: int) -> None:
        if self.holds:
            extent = self.pick(data)
            self.settle()
            self.write(extent, seed)

    def write(self, extent: Extent, seed: int) -> None:
        tensor = torch.arange(seed, seed + extent.nbytes).to(torch.uint8)
        self.writing[extent] = self.disk.write(extent, tensor)
        self.holds[extent] = tensor

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if self.holds:
            extent = self.pick(data)
            to = torch.empty(extent.nbytes, dtype=torch.uint8)
            self.reads.append((self.disk.read(extent, to), to, self.holds[extent]))

    @rule(data=st.data(), seed=st.integers(0, 255))
    def fail_to_write(self, data: st.DataObject, seed: int) -> None:
        """What it held is lost and never read; its place stays taken."""
        if self.holds:
            extent = self.pick(data)
            self.settle()
            self.failing = bool(extent.nbytes)
            self.write(extent, seed)
            if self.failing:
                self.failed.add(extent)
                with pytest.raises(DiskError, match="the disk broke"):
                    self.writing.pop(extent).wait()
                self.failing = False
                with pytest.raises(FreightError, match="write it first"):
                    self.disk.read(extent, torch.empty(extent.nbytes, dtype=torch.uint8))
                self.write(extent, seed)

    @rule(data=st.data(), how=st.sampled_from(["free", "forget"]))
    def free(self, data: st.DataObject, how: str) -> None:
        if self.holds:
            extent = self.pick(data)
            if how == "free" or extent in self.failed:
                self.disk.free(extent)
            self.failed.discard(extent)
            self.holds.pop(extent)

    @rule()
    def settle(self) -> None:
        for token, to, want in self.reads:
            token.wait()
            assert torch.equal(to, want)
        for token in self.writing.values():
            token.wait()
        self.reads.clear()
        self.writing.clear()
        self.disk.join()

    @rule()
    def count(self) -> None:
        self.settle()
        stats = self.disk.stats()
        spans = sorted((e.offset, e.offset + max(ALIGN, -(-e.nbytes // ALIGN) * ALIGN)) for e in self.holds)
        gaps = [start - end for (_, end), (start, _) in itertools.pairwise([(0, 0), *spans, (stats.nbytes, 0)])]
        assert (stats.extents, stats.under_way) == (len(spans), 0)
        assert (stats.free, stats.largest) == (sum(gaps), max(gaps))

    @invariant()
    def no_two_extents_overlap(self) -> None:
        spans = sorted((e.offset, e.offset + e.nbytes) for e in self.holds)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def pick(self, data: st.DataObject) -> Extent:
        """By its offset: what is drawn is kept, and an extent that is kept is not free."""
        offset = data.draw(st.sampled_from(sorted(extent.offset for extent in self.holds)))
        return next(extent for extent in self.holds if extent.offset == offset)

    def teardown(self) -> None:
        self.settle()
        for extent in self.holds:
            self.disk.free(extent)
        assert self.disk.stats().free == self.disk.nbytes
        self.disk.close()
        self.patch.undo()


Disk.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDisk = Disk.TestCase
