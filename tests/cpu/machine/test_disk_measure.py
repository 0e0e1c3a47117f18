"""One directory's disk: what is measured, within which bounds, and what is told of places where nothing can be."""

import ctypes
import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest

from freight import _direct, _pages
from freight._units import KiB, MiB
from freight.errors import DiskError, HostMemoryError
from freight.machine import Disk, _disk
from freight.machine._budget import FULL, Budget

SMALL = dataclasses.replace(
    FULL, disk_bytes=8 * MiB, disk_threads=(1, 4), disk_blocks=(256 * KiB, MiB), disk_seconds=30.0, cufile=False
)


def measure(directory: Path, budget: Budget = SMALL) -> Disk:
    return _disk.measure(directory, budget, gpu=False)


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """A directory with direct I/O, or a reason to skip."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as error:
        pytest.skip(f"needs a disk with O_DIRECT for temporary files: {tmp_path} says {error.strerror}")
    if _direct.file_system(tmp_path).kind == "memory":
        pytest.skip(f"needs a disk for temporary files: {tmp_path} is memory")
    return tmp_path


def state() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


# ---- a disk that works -------------------------------------------------------------------------------


def test_every_point_is_measured(disk_dir: Path) -> None:
    before = state()
    found = measure(disk_dir)
    assert (found.absent, found.direct, found.directory) == (None, True, str(disk_dir))
    assert (found.kind, found.quick) == ("disk", False)
    assert [(rate.threads, rate.block_bytes) for rate in found.rates] == [
        (1, 256 * KiB),
        (1, MiB),
        (4, 256 * KiB),
        (4, MiB),
    ]
    assert all(rate.write_gbs > 0 and rate.read_gbs > 0 for rate in found.rates)
    assert abs((found.free_bytes or 0) - shutil.disk_usage(disk_dir).free) < 2**30
    assert (found.cufile, found.cufile_absent) == (None, "a quick probe does not try it")
    assert state() == before
    assert list(disk_dir.iterdir()) == []


def test_rates_are_bytes_by_seconds(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gains a second whenever it is looked at: the rate is that of the bytes that really moved."""
    moved: list[tuple[str, int, int]] = []
    for name in ("write_from", "read_into"):
        monkeypatch.setattr(_direct, name, lambda fd, address, size, at, name=name: moved.append((name, size, at)))
    ticks = iter(range(10**6))
    monkeypatch.setattr(_disk.time, "perf_counter", lambda: float(next(ticks)))
    found = measure(disk_dir, dataclasses.replace(SMALL, disk_threads=(1,), disk_blocks=(MiB,), disk_seconds=4.5))
    first, writes, reads = moved[:8], moved[8:13], moved[13:]
    assert first == [("write_from", MiB, at * MiB) for at in range(8)]  # the whole file, in three times the seconds
    assert writes == [("write_from", MiB, at * MiB) for at in range(5)]  # from the beginning, until 4.5 s are over
    assert reads == [("read_into", MiB, at * MiB) for at in range(5)]
    [rate] = found.rates
    assert rate.write_gbs == rate.read_gbs == pytest.approx(5 * MiB / 6 / 1e9, rel=1e-3)


def test_blocks_are_moved_once_by_threads_with_memory_of_their_own(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, offsets, busy, shared = _direct.write_from, [], set(), []

    def write(fd: int, address: int, nbytes: int, offset: int) -> None:
        shared.extend(other for other in busy.copy() if abs(other - address) < nbytes)
        busy.add(address)
        offsets.append(offset)
        real(fd, address, nbytes, offset)
        busy.remove(address)

    monkeypatch.setattr(_direct, "write_from", write)
    measure(disk_dir, dataclasses.replace(SMALL, disk_threads=(4,), disk_blocks=(MiB,)))
    assert Counter(offsets) == {at * MiB: 2 for at in range(8)}  # beforehand, and measured
    assert shared == []


def test_what_is_written_is_noise(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros would measure how fast a disk compresses."""
    seen: set[bytes] = set()

    def write(fd: int, address: int, nbytes: int, offset: int) -> None:
        seen.add(ctypes.string_at(address, nbytes))

    monkeypatch.setattr(_direct, "write_from", write)
    measure(disk_dir, dataclasses.replace(SMALL, disk_threads=(1,), disk_blocks=(2 * MiB,)))
    [block] = seen
    counts = Counter(block)
    assert len(counts) == 256
    assert max(counts.values()) < 2 * len(block) / 256


def test_a_slow_disk_is_measured_on_a_part_of_the_file(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time allows no more than one block, that block is what the figures are from; larger points are left out."""
    offsets: set[int] = set()

    def move(fd: int, address: int, nbytes: int, offset: int) -> None:
        offsets.add(offset)

    for name in ("write_from", "read_into"):
        monkeypatch.setattr(_direct, name, move)
    found = measure(disk_dir, dataclasses.replace(SMALL, disk_seconds=0.0))
    assert [(rate.threads, rate.block_bytes) for rate in found.rates] == [(1, 256 * KiB)]
    assert offsets == {0}


# ---- places where nothing can be ----------------------------------------------------------------------


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    found = measure(tmp_path / "none")
    assert (found.absent, found.direct, found.rates) == ("No such file or directory", None, ())
    assert found.directory == str(tmp_path / "none")


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    found = measure(tmp_path / "file")
    assert found.direct is None
    assert "there is no such directory" in (found.absent or "")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_cannot_be_written(unwritable: Path) -> None:
    before = state()
    found = measure(unwritable)
    assert found.direct is None
    assert (found.absent or "").startswith("freight's disk file cannot be made (")
    assert "FREIGHT_DISK_DIR" in (found.absent or "")
    assert state() == before


def test_memory_is_no_disk(mount) -> None:
    place = mount("tmpfs", "size=64m")
    found = measure(place)
    assert (found.kind, found.name, found.direct) == ("memory", "tmpfs", False)
    assert "it is tmpfs, which is memory and no disk" in (found.absent or "")
    assert found.free_bytes == 64 * MiB
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("size", ["256k", "full"])
def test_a_full_disk(mount, size: str) -> None:
    place = mount("tmpfs", f"size={'1m' if size == 'full' else size}")
    if size == "full":
        (place / "ballast").write_bytes(bytes(MiB))
    found = measure(place)
    assert found.direct is None
    assert (found.absent or "").startswith(f"only {'0 B' if size == 'full' else '256 KiB'} are free; free some, or ")
    assert found.free_bytes == (0 if size == "full" else 256 * KiB)


def test_a_small_disk_that_fills_up(mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real ext4 of 4 MiB that says it has more, as under a quota: the file is refused before a byte is written."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(4 * MiB)
    tool = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if tool is None:
        pytest.skip("needs mkfs.ext4 to make a small disk")
    subprocess.run([tool, "-q", "-F", str(image)], timeout=60, check=True)
    place = mount("ext4", "loop", str(image))
    before, real = state(), shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=100 * MiB))
    found = measure(place)
    assert found.direct is None
    assert (found.absent or "").startswith("freight's disk file needs 8 MiB and ")
    assert state() == before
    assert [path.name for path in place.iterdir()] == ["lost+found"]


def test_too_little_memory_for_buffers(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> int:
        raise HostMemoryError("the system refused to map 4 MiB of host memory")

    monkeypatch.setattr(_pages, "map_segments", refuse)
    found = measure(disk_dir)
    assert (found.direct, found.absent) == (None, "the system refused to map 4 MiB of host memory")
    assert found.free_bytes


# ---- faults in the middle ------------------------------------------------------------------------------


@pytest.mark.parametrize("move", ["write_from", "read_into"])
def test_a_disk_that_breaks(disk_dir: Path, move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = state(), getattr(_direct, move)

    def broken(fd: int, address: int, nbytes: int, offset: int) -> None:
        if offset == 3 * MiB:
            raise DiskError(errno.EIO, "the disk broke", "file")
        real(fd, address, nbytes, offset)

    monkeypatch.setattr(_direct, move, broken)
    found = measure(disk_dir, dataclasses.replace(SMALL, disk_blocks=(MiB,)))
    assert (found.absent, found.direct, found.rates) == ("the disk broke", None, ())
    assert state() == before


def test_ctrl_c_in_the_middle_leaves_nothing(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, mapped = state(), _direct.read_into, []
    real_unmap = _pages.unmap

    def interrupted(fd: int, address: int, nbytes: int, offset: int) -> None:
        if offset == 0:
            os.kill(os.getpid(), signal.SIGINT)
        real(fd, address, nbytes, offset)

    def unmap(address: int, nbytes: int) -> None:
        mapped.append(threading.active_count())
        real_unmap(address, nbytes)

    monkeypatch.setattr(_direct, "read_into", interrupted)
    monkeypatch.setattr(_pages, "unmap", unmap)
    with pytest.raises(KeyboardInterrupt):
        measure(disk_dir)
    assert mapped == [before[1]]  # no thread was left to write into memory that is gone
    assert state() == before
    assert list(disk_dir.iterdir()) == []


def test_ctrl_c_while_threads_are_made(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was being made is one that the pool does not wait for, so it must not have begun."""
    before, moved = state(), []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_direct, "write_from", lambda *args: moved.append(args))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            measure(disk_dir)
    for thread in threading.enumerate():
        if thread.name.startswith("freight-probe"):
            thread.join()
    assert moved == []
    assert state() == before


def test_free_bytes() -> None:
    assert _disk.free_bytes("/") == pytest.approx(shutil.disk_usage("/").free, abs=2**30)
    assert _disk.free_bytes(None) is None
    assert _disk.free_bytes("/no/such/place") is None
