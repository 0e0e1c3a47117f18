"""The disk file when things go wrong: a killed or interrupted process, a full disk, an error in the middle, a fork."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import freight
from freight import memory
from freight._direct import ALIGN
from freight._units import KiB, MiB
from freight.errors import ClosedError, DirectIOError, DiskError, DiskFullError, ForkedError, HostMemoryError
from freight.memory import Content, DiskFile, State, Token

BLOCK = 64 * KiB
SMALL = {"threads": 3, "block_bytes": BLOCK}

Mount = Callable[..., Path]


def descriptors_threads_held() -> tuple[int, int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), memory.stats().held


# ---- killed and interrupted --------------------------------------------------------------------------

WRITER = """
import sys, torch
import freight
from freight.memory import DiskFile

with freight.config(disk_dir=sys.argv[1]), DiskFile("16MiB", threads=3, block_bytes="64KiB") as disk:
    tensor = torch.arange(300_000)
    print("made", flush=True)
    while True:
        extents = [disk.allocate(tensor.nbytes) for _ in range(5)]
        for extent in extents:
            disk.write(extent, tensor)
            print("begun", flush=True)
        for extent in extents:
            disk.read(extent, torch.empty_like(tensor)).wait()
            disk.free(extent)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_process_that_ends_during_its_writes_leaves_nothing(
    number: signal.Signals, place: Path, mount: Mount
) -> None:
    """A process of its own, to its very end: with the interpreter's exit, or without."""
    disk = mount("ext4")
    free = os.statvfs(disk).f_bfree
    with DiskFile(MiB, directory=disk, **SMALL) as ours:
        tensor = torch.arange(50_000)
        extent, back = ours.allocate(tensor.nbytes), torch.empty_like(tensor)
        ours.write(extent, tensor).wait()
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(disk)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(8)]
        assert lines == ["made\n", *["begun\n"] * 7]
        assert os.statvfs(disk).f_bfree < free - 16 * MiB // os.statvfs(disk).f_frsize
        child.send_signal(number)
        _, said = child.communicate(timeout=60)
        assert child.returncode == -number
        assert said == "" if number is signal.SIGKILL else said.rstrip().endswith("KeyboardInterrupt")
        ours.read(extent, back).wait()
        assert torch.equal(back, tensor)
    os.sync()
    assert list(disk.iterdir()) == []
    assert os.statvfs(disk).f_bfree == free


LEAVER = """
import sys, torch
import freight
from freight.memory import DiskFile

disk = DiskFile("16MiB", directory=sys.argv[1], threads=3, block_bytes="64KiB")
tensors = [torch.arange(150_000) for _ in range(10)]
tokens = [disk.write(disk.allocate(tensor.nbytes), tensor) for tensor in tensors]
"""


def test_a_process_that_leaves_during_its_writes_ends_well(place: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVER, str(place)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(place.iterdir()) == []


def write_until_stopped(directory: Path, told: int) -> None:
    """In a forked child: begin transfers and say so, until the end comes from outside.

    The tensor is small, because torch's own threads do not survive a fork; it is three blocks all the same.
    """
    tensor = torch.arange(20_000)
    with DiskFile(4 * MiB, directory=directory, **SMALL) as disk:
        back = torch.empty_like(tensor)
        while True:
            extent = disk.allocate(tensor.nbytes)
            disk.write(extent, tensor)
            os.write(told, b".")
            disk.read(extent, back)
            os.write(told, b".")
            disk.free(extent)
            disk.allocate(ALIGN)
            disk.join()
            assert torch.equal(back, tensor)
            assert disk.stats().free == 4 * MiB


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_at_whatever_moment_it_comes(number: signal.Signals, place: Path) -> None:
    for steps in range(1, 41):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                write_until_stopped(place, writer)
            except KeyboardInterrupt:
                status = 7 if threading.active_count() == 1 else 8
            finally:
                os._exit(status)
        os.close(writer)
        for _ in range(steps):
            assert os.read(reader, 1) == b"."
        os.kill(pid, number)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(reader)
        assert ended == (-number if number is signal.SIGKILL else 7)
        assert list(place.iterdir()) == []


# ---- no room -----------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_met_at_once_and_costs_nothing(mount: Mount) -> None:
    disk = mount("ext4")
    free, before = os.statvfs(disk).f_bfree, descriptors_threads_held()
    with pytest.raises(DiskFullError, match=r"needs 100 MiB and .* are free") as caught:
        DiskFile("100MiB", directory=disk, **SMALL)
    assert caught.value.errno == errno.ENOSPC
    assert descriptors_threads_held() == before
    assert list(disk.iterdir()) == []
    assert os.statvfs(disk).f_bfree == free


def test_a_disk_that_others_fill_later_is_never_met(mount: Mount) -> None:
    disk = mount("ext4")
    with DiskFile("16MiB", directory=disk, checksum=True, **SMALL) as file:
        with (disk / "filler").open("wb") as filler, pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(filler.fileno(), 0, 64 * MiB)
        tensors = [torch.full((4 * MiB,), n, dtype=torch.uint8) for n in range(4)]
        extents = [file.allocate(tensor.nbytes) for tensor in tensors]
        for extent, tensor in zip(extents, tensors, strict=True):
            file.write(extent, tensor)
        for extent, tensor in zip(extents, tensors, strict=True):
            back = torch.empty_like(tensor)
            file.read(extent, back).wait()
            assert torch.equal(back, tensor)


def test_no_memory_for_staging_leaves_no_file(place: Path) -> None:
    before = descriptors_threads_held()
    with (
        freight.config(host_bytes=memory.stats().held + BLOCK),
        pytest.raises(HostMemoryError, match="staging for the disk asked for 1 MiB"),
    ):
        DiskFile(MiB, **SMALL)
    assert descriptors_threads_held() == before


def test_where_direct_io_is_not_in_force_nothing_is_made(mount: Mount) -> None:
    directory, before = mount("tmpfs", "size=4m"), descriptors_threads_held()
    with pytest.raises(DirectIOError, match="memory and no disk"):
        DiskFile(MiB, directory=directory, **SMALL)
    assert descriptors_threads_held() == before
    with freight.config(direct_io=False), DiskFile(MiB, directory=directory, **SMALL) as disk:
        assert disk.stats().file_system == "tmpfs"


# ---- errors in the middle ----------------------------------------------------------------------------


class Faults:
    """`os.preadv` and `os.pwritev` as they are, but for the calls (counted from 1) that fail or are cut short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail: dict[int, OSError] = {}
        self.cut: dict[int, int] = {}
        self.calls = 0
        self.lock = threading.Lock()
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self.around(getattr(os, name)))

    def around(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, buffers: list, offset: int) -> int:
            with self.lock:
                self.calls += 1
                number = self.calls
            if number in self.fail:
                raise self.fail[number]
            if number in self.cut:
                buffers = [memoryview(buffers[0])[: self.cut[number]]]
            return real(fd, buffers, offset)

        return call

    def next(self, number: int) -> int:
        """The number of the `number`-th call from now on."""
        return self.calls + number


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def test_an_error_in_the_middle_of_a_read_is_raised_to_its_waiter(place: Path, faults: Faults) -> None:
    with DiskFile(4 * MiB, **SMALL) as disk:
        tensors = [torch.randint(0, 256, (10 * BLOCK,), dtype=torch.uint8) for _ in range(3)]
        extents = [disk.allocate(tensor.nbytes) for tensor in tensors]
        for extent, tensor in zip(extents, tensors, strict=True):
            disk.write(extent, tensor)
        disk.join()
        faults.fail[faults.next(15)] = OSError(errno.EIO, "Input/output error")
        backs = [torch.zeros_like(tensor) for tensor in tensors]
        tokens = [disk.read(extent, back) for extent, back in zip(extents, backs, strict=True)]
        failed = [token for token in tokens if error_of(token) is not None]
        assert len(failed) == 1
        error = error_of(failed[0])
        assert isinstance(error, DiskError)
        assert error.errno == errno.EIO
        assert "read of 64 KiB at offset" in str(error)
        assert failed[0].state is State.FAILED
        for token, tensor, back in zip(tokens, tensors, backs, strict=True):
            assert token is failed[0] or torch.equal(back, tensor)
        assert all(extent.content is Content.WRITTEN for extent in extents)
        again = tokens.index(failed[0])
        disk.read(extents[again], backs[again]).wait()
        assert torch.equal(backs[again], tensors[again])


def error_of(token: Token) -> BaseException | None:
    try:
        token.wait()
    except DiskError as error:
        return error
    return None


def test_a_write_that_fails_is_never_read_and_its_place_is_still_good(place: Path, faults: Faults) -> None:
    with DiskFile(4 * MiB, **SMALL) as disk:
        tensor = torch.randint(0, 256, (10 * BLOCK,), dtype=torch.uint8)
        extent, back = disk.allocate(tensor.nbytes), torch.zeros_like(tensor)
        faults.fail[faults.next(7)] = OSError(errno.EIO, "Input/output error")
        with pytest.raises(DiskError, match=r"write of 64 KiB at offset \d+ failed \(Input/output error\)"):
            disk.write(extent, tensor).wait()
        assert extent.content is Content.FAILED
        assert not back.any()
        disk.write(extent, tensor)
        disk.read(extent, back).wait()
        assert torch.equal(back, tensor)


def test_calls_that_are_cut_short_and_interrupted_change_nothing(place: Path, faults: Faults) -> None:
    with DiskFile(4 * MiB, **SMALL) as disk:
        tensor = torch.randint(0, 256, (6 * BLOCK + 17,), dtype=torch.uint8)
        extent, back = disk.allocate(tensor.nbytes), torch.zeros_like(tensor)
        for number in range(1, 40, 2):
            faults.cut[faults.next(number)] = ALIGN * (1 + number % 5)
            faults.fail[faults.next(number + 41)] = InterruptedError(errno.EINTR, "Interrupted system call")
        for _ in range(4):
            disk.write(extent, tensor)
            disk.read(extent, back).wait()
            assert torch.equal(back, tensor)


def test_a_file_that_lost_its_end_says_so(place: Path) -> None:
    with DiskFile(MiB, **SMALL) as disk:
        tensor = torch.ones(4 * BLOCK, dtype=torch.uint8)
        extent = disk.allocate(tensor.nbytes)
        disk.write(extent, tensor).wait()
        os.ftruncate(disk._fd, 3 * BLOCK + ALIGN)
        with pytest.raises(DiskError, match=r"read of 64 KiB at offset 196608 ended after 4096 bytes"):
            disk.read(extent, torch.empty_like(tensor)).wait()


# ---- the end while transfers are under way -----------------------------------------------------------


class Stop(Exception):  # noqa: N818
    """What a training step raises."""


def test_an_exception_while_transfers_are_under_way_ends_them_first(place: Path) -> None:
    before, tokens = descriptors_threads_held(), []

    def step() -> None:
        with DiskFile(8 * MiB, **SMALL) as disk:
            for n in range(20):
                tensor = torch.full((5 * BLOCK,), n, dtype=torch.uint8)
                extent = disk.allocate(tensor.nbytes)
                tokens.append(disk.write(extent, tensor))
                tokens.append(disk.read(extent, torch.empty_like(tensor)))
            raise Stop

    with pytest.raises(Stop):
        step()
    assert {token.state for token in tokens} == {State.DONE}
    tokens.clear()
    assert descriptors_threads_held() == before


def test_closing_from_another_thread_while_transfers_are_under_way(place: Path) -> None:
    before = descriptors_threads_held()
    disk = DiskFile(8 * MiB, **SMALL)
    tensor, tokens, refused = torch.ones(3 * BLOCK, dtype=torch.uint8), [], threading.Event()

    def write_until_closed() -> None:
        while True:
            try:
                extent = disk.allocate(tensor.nbytes)
                tokens.append(disk.write(extent, tensor))
                disk.free(extent)
                disk.join()
            except ClosedError:
                refused.set()
                return

    writing = threading.Thread(target=write_until_closed)
    writing.start()
    while len(tokens) < 20:
        disk.join()
    disk.close()
    writing.join(60)
    assert refused.is_set()
    assert {token.state for token in tokens} == {State.DONE}
    tokens.clear()
    assert descriptors_threads_held() == before


# ---- forks -------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_harms_nobody(place: Path) -> None:
    with DiskFile(4 * MiB, **SMALL) as disk:
        tensor = torch.arange(20_003)
        extent, back = disk.allocate(tensor.nbytes), torch.zeros_like(tensor)
        disk.write(extent, tensor)  # still under way at the fork, perhaps
        pid = os.fork()
        if pid == 0:
            status = 0
            try:
                for use in (lambda: disk.write(extent, tensor), lambda: disk.read(extent, back), disk.join):
                    try:
                        use()
                    except ForkedError:
                        status += 1
                disk.close()
                with DiskFile(MiB, **SMALL) as own:
                    mine = own.allocate(tensor.nbytes)
                    own.write(mine, tensor)
                    own.read(mine, back).wait()
                    status += 10 * torch.equal(back, tensor)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 13
        disk.read(extent, back).wait()
        assert torch.equal(back, tensor)


def test_the_space_is_free_when_the_last_who_has_the_file_lets_go(mount: Mount) -> None:
    """A forked child has the descriptor, until it closes the file or ends."""
    directory = mount("ext4")
    free = os.statvfs(directory).f_bfree
    disk = DiskFile("16MiB", directory=directory, **SMALL)
    (to_child, go), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(to_child, 1)
        disk.close()
        os.write(tell, b".")
        os.read(to_child, 1)
        os._exit(0)
    disk.close()
    assert os.statvfs(directory).f_bfree < free
    os.write(go, b".")
    assert os.read(told, 1) == b"."
    os.sync()
    assert os.statvfs(directory).f_bfree == free
    os.close(go)
    os.waitpid(pid, 0)
    for fd in (to_child, told, tell):
        os.close(fd)
