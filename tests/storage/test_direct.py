"""Direct I/O on real file systems: in force or refused, and every refusal with its reason."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from freight._direct import ALIGN, default_directory, file_system, open_nameless, read_into, write_from
from freight._units import MiB
from freight.errors import DirectIOError, DiskError, DiskFullError

Mount = Callable[..., Path]


class Memory:
    """Page-aligned memory, by its address."""

    def __init__(self, nbytes: int, content: bytes | None = None) -> None:
        self.map = mmap.mmap(-1, nbytes)
        if content is not None:
            self.map[:] = content
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.map))

    def __bytes__(self) -> bytes:
        return self.map[:]


def refused(directory: Path, nbytes: int = MiB, *, direct: bool = True) -> DiskError:
    descriptors, free = len(os.listdir("/proc/self/fd")), os.statvfs(directory).f_bavail
    with pytest.raises(DiskError) as caught:
        open_nameless(directory, nbytes, direct=direct)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.statvfs(directory).f_bavail == free
    assert list(directory.iterdir()) == []
    assert caught.value.filename == str(directory)
    return caught.value


def there_and_back(directory: Path, *, direct: bool, blocks: int = 40) -> int:
    """Write to a new file and read it back; its descriptor."""
    content = os.urandom(blocks * ALIGN)
    fd = open_nameless(directory, len(content), direct=direct)
    assert list(directory.iterdir()) == []
    source, to = Memory(len(content), content), Memory(len(content))
    write_from(fd, source.address, len(content), 0)
    read_into(fd, to.address, len(content), 0)
    assert bytes(to) == content
    return fd


def test_direct_io_is_in_force(place: Path, cached_pages: Callable[[int], int]) -> None:
    fd = there_and_back(place, direct=True)
    assert cached_pages(fd) == 0
    os.close(fd)


def test_the_page_cache_is_used_when_it_is_asked_for(place: Path, cached_pages: Callable[[int], int]) -> None:
    fd = there_and_back(place, direct=False)
    assert cached_pages(fd) == 40  # so the count above counts
    os.close(fd)


def test_all_of_it_is_reserved_at_once(place: Path) -> None:
    fd = open_nameless(place, 8 * MiB + 1)
    assert os.fstat(fd).st_size == 8 * MiB + ALIGN
    assert os.fstat(fd).st_blocks * 512 >= 8 * MiB + ALIGN
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_a_read_past_the_end(place: Path) -> None:
    fd, memory = open_nameless(place, 2 * ALIGN), Memory(4 * ALIGN)
    with pytest.raises(DiskError, match="read of 16 KiB at offset 0 ended after 8192 bytes"):
        read_into(fd, memory.address, 4 * ALIGN, 0)
    os.close(fd)


def test_memory_that_direct_io_cannot_use_is_an_error_and_not_a_detour(place: Path) -> None:
    fd, memory = open_nameless(place, 2 * ALIGN), Memory(2 * ALIGN)
    with pytest.raises(DiskError, match=r"write of 4 KiB at offset 0 failed \(Invalid argument\)"):
        write_from(fd, memory.address + 1, ALIGN, 0)
    os.close(fd)


def test_a_full_disk_is_met_when_the_space_is_reserved(mount: Mount) -> None:
    disk = mount("ext4")
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    error = refused(disk, 64 * MiB)
    assert (type(error), error.errno) == (DiskFullError, errno.ENOSPC)
    assert f"freight's disk file needs 64 MiB and {free / MiB:.4g} MiB are free (No space left" in str(error)
    os.close(there_and_back(disk, direct=True))


def test_what_is_reserved_can_be_written_on_a_disk_that_is_full_by_then(mount: Mount) -> None:
    disk = mount("ext4")
    fd = open_nameless(disk, 16 * MiB)
    with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(filler.fileno(), 0, 64 * MiB)
    assert os.statvfs(disk).f_bavail == 0
    memory = Memory(MiB, os.urandom(MiB))
    for start in range(0, 16 * MiB, MiB):
        write_from(fd, memory.address, MiB, start)
    os.fsync(fd)
    os.close(fd)


def test_a_disk_that_may_only_be_read(mount: Mount) -> None:
    disk = mount("ext4", "ro")
    error = refused(disk)
    assert error.errno == errno.EROFS
    assert "freight's disk file cannot be made (Read-only file system). Choose another directory" in str(error)


def test_a_file_system_that_accepts_direct_io_and_ignores_it(mount: Mount) -> None:
    """ext4 that journals data goes through the page cache whatever it is told."""
    disk = mount("ext4", "data=journal")
    error = refused(disk)
    assert (type(error), error.errno) == (DirectIOError, errno.EINVAL)
    assert "direct I/O is not in force: ext4 does not offer it, or is set up so that it is ignored" in str(error)
    os.close(there_and_back(disk, direct=False))


def test_tmpfs_is_memory_and_no_disk(mount: Mount) -> None:
    """Before Linux 6.6 it refuses direct I/O, since then it accepts and ignores it: the same error either way."""
    memory = mount("tmpfs", "size=1m")
    assert file_system(memory).kind == "memory"
    error = refused(memory, 65536)
    assert (type(error), error.errno) == (DirectIOError, errno.EINVAL)
    assert "direct I/O is not in force: it is tmpfs, which is memory and no disk" in str(error)
    os.close(there_and_back(memory, direct=False))


def test_a_full_tmpfs(mount: Mount) -> None:
    error = refused(mount("tmpfs", "size=1m"), 2 * MiB, direct=False)
    assert (type(error), error.errno) == (DiskFullError, errno.ENOSPC)
    assert "freight's disk file needs 2 MiB and 1 MiB are free (No space left on device)" in str(error)


def test_an_overlay_is_told_apart_and_as_direct_as_what_it_lies_on(
    mount: Mount, cached_pages: Callable[[int], int]
) -> None:
    on_disk, on_memory = mount("overlay", upper=mount("ext4")), mount("overlay", upper=mount("tmpfs"))
    assert file_system(on_disk).kind == file_system(on_memory).kind == "overlay"
    error = refused(on_memory)
    assert isinstance(error, DirectIOError)
    assert "it is a container's overlay (overlay); mount a volume of the host there" in str(error)
    try:
        fd = there_and_back(on_disk, direct=True)
    except DirectIOError:  # it depends on the kernel; what may not be is a file that only seems direct
        return
    assert cached_pages(fd) == 0
    os.close(fd)


def test_the_default_directory_is_a_disk_where_there_is_one() -> None:
    directory = default_directory()
    assert directory.is_dir()
    if not os.environ.get("FREIGHT_DISK_DIR"):
        kinds = {file_system(usual).kind for usual in ("/var/tmp", "/tmp")}
        assert file_system(directory).kind == "disk" or "disk" not in kinds
