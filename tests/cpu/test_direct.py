"""Files past the page cache, as far as no disk is needed: places, refusals, and transfers that are cut short."""

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import freight
from freight import _direct
from freight._direct import ALIGN, default_directory, file_system, open_nameless, read_into, write_from
from freight.errors import DirectIOError, DiskError, DiskFullError

# ---- what a directory stands on ----------------------------------------------------------------------


def mounted(monkeypatch: pytest.MonkeyPatch, *mounts: tuple[str | Path, str]) -> None:
    """Have the system report these mounts, in the order in which they were made."""
    table = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: table if all else [])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ext4", "disk"),
        ("xfs", "disk"),
        ("btrfs", "disk"),
        ("fuseblk", "disk"),
        ("tmpfs", "memory"),
        ("ramfs", "memory"),
        ("overlay", "overlay"),
        ("fuse.fuse-overlayfs", "overlay"),
        ("nfs4", "network"),
        ("9p", "network"),
        ("lustre", "network"),
        ("fuse", "network"),
        ("fuse.sshfs", "network"),
    ],
)
def test_kinds(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, ("/", "ext3"), (tmp_path, name))
    assert file_system(tmp_path) == _direct.FileSystem(kind, name)
    assert file_system(tmp_path / "below" / "it").name == name
    assert file_system(tmp_path.parent).name == "ext3"


def test_the_nearest_mount_counts_and_of_two_the_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    mounted(monkeypatch, (inner, "xfs"), ("/", "overlay"), (tmp_path, "ext4"), (tmp_path, "tmpfs"))
    assert file_system(inner).name == "xfs"
    assert file_system(tmp_path).name == "tmpfs"
    assert file_system(f"{inner}side").name == "tmpfs"  # begins with the same letters and lies elsewhere


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    mounted(monkeypatch, (tmp_path, "tmpfs"), (tmp_path / "disk", "ext4"))
    assert file_system(tmp_path / "link").name == "ext4"


def test_no_mount_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch)
    assert file_system(tmp_path) == _direct.FileSystem("disk", "unknown")


def test_the_default_is_the_first_real_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mounted(monkeypatch, ("/", "overlay"), (tmp_path, "tmpfs"), ("/var/tmp", "ext4"))
    assert default_directory() == Path("/var/tmp")
    mounted(monkeypatch, ("/", "overlay"), (tmp_path, "ext4"), ("/var/tmp", "ext4"))
    assert default_directory() == tmp_path
    mounted(monkeypatch, ("/", "overlay"))
    assert default_directory() == tmp_path  # none is: the first, whose refusal then says so
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert default_directory() == Path("/var/tmp")
    with freight.config(disk_dir=tmp_path / "chosen"):
        assert default_directory() == tmp_path / "chosen"  # as it was chosen, there or not


# ---- places where no file can be ---------------------------------------------------------------------

REMEDY = "Choose another directory with FREIGHT_DISK_DIR or freight.config(disk_dir=...)"


def refused(directory: Path, *, direct: bool = False, nbytes: int = ALIGN) -> DiskError:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskError) as caught:
        open_nameless(directory, nbytes, direct=direct)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert caught.value.filename == str(directory)
    if directory.is_dir():
        assert list(directory.iterdir()) == []
    return caught.value


@pytest.mark.parametrize("direct", [False, True])
def test_a_directory_that_is_not_there(direct: bool, tmp_path: Path) -> None:
    error = refused(tmp_path / "none", direct=direct)
    assert error.errno == errno.ENOENT
    assert f"there is no such directory for freight's disk file. {REMEDY}" in str(error)


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refused(tmp_path / "file")
    assert error.errno == errno.ENOTDIR
    assert "there is no such directory" in str(error)


def without_rights(directory: Path) -> DiskError:
    """The refusal that a user without rights gets; told by a child, since rights cannot be dropped and taken again."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setuid(65534)
            try:
                open_nameless(directory, ALIGN, direct=False)
            except DiskError as error:
                os.write(writer, f"{error.errno} {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as told:
        code, _, text = told.read().partition(" ")
    return DiskError(int(code), text)


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A directory that every user may look into; the tests' own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_directory_without_the_right_to_write(everybodys: Path) -> None:
    everybodys.chmod(0o555)
    error = without_rights(everybodys)
    assert error.errno == errno.EACCES
    assert f"cannot be made (Permission denied). {REMEDY}" in str(error)


def test_a_directory_behind_a_closed_one_is_not_said_to_be_missing(everybodys: Path) -> None:
    (everybodys / "closed" / "inner").mkdir(parents=True)
    (everybodys / "closed").chmod(0o600)
    error = without_rights(everybodys / "closed" / "inner")
    (everybodys / "closed").chmod(0o700)
    assert error.errno == errno.EACCES
    assert "Permission denied" in str(error)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, *codes: int) -> None:
    """Have the first calls of a function of `os` fail with these errors, one after the other, and the rest work."""
    real, left = getattr(os, name), list(codes)

    def call(*arguments: Any, **named: Any) -> Any:
        if left:
            code = left.pop(0)
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.EROFS, DiskError, "cannot be made (Read-only file system). Choose another directory"),
        (errno.ENOSPC, DiskFullError, "no room for freight's disk file. Choose another directory"),
        (errno.EDQUOT, DiskFullError, "no room for freight's disk file"),
        (errno.EMFILE, DiskError, "cannot be made (Too many open files)"),
    ],
)
def test_a_file_that_cannot_be_made(
    code: int, kind: type[DiskError], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "open", code)
    error = refused(tmp_path)
    assert (type(error), error.errno) == (kind, code)
    assert says in str(error)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
def test_where_nameless_files_are_not_known_a_named_one_is_unlinked(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "open", code)
    fd = open_nameless(tmp_path, 3 * ALIGN - 5, direct=False)
    try:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(fd).st_size == 3 * ALIGN
        assert os.fstat(fd).st_nlink == 0
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tmpfs", "it is tmpfs, which is memory and no disk"),
        ("overlay", r"it is a container's overlay (overlay); mount a volume of the host there"),
        ("nfs4", "it is a network or shared file system (nfs4)"),
        ("ext4", "ext4 does not offer it, or is set up so that it is ignored"),
    ],
)
def test_direct_io_that_is_not_offered(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tmpfs did until Linux 6.6: it does not know the flag."""
    mounted(monkeypatch, (tmp_path, name))
    failing(monkeypatch, "open", errno.EINVAL)
    error = refused(tmp_path, direct=True)
    assert isinstance(error, DirectIOError)
    assert f"direct I/O is not in force: {says}. Choose a directory on a local disk" in str(error)
    assert "freight.config(direct_io=False)" in str(error)


def test_direct_io_that_is_accepted_and_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tmpfs does since Linux 6.6, and some file systems with compression: the page cache has what was written."""
    monkeypatch.setattr(os, "O_DIRECT", 0)
    assert isinstance(refused(tmp_path, direct=True), DirectIOError)


def test_a_first_block_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_direct.fcntl, "fcntl", lambda *_: os.O_DIRECT)
    failing(monkeypatch, "pwritev", errno.EIO)
    error = refused(tmp_path, direct=True) if direct_works(tmp_path) else pytest.skip("needs a disk with O_DIRECT")
    assert error.errno == errno.EIO
    assert "the first block of freight's disk file cannot be written (Input/output error)" in str(error)


def direct_works(directory: Path) -> bool:
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "posix_fallocate", code)
    error = refused(tmp_path, nbytes=5000)
    assert (type(error), error.errno) == (DiskFullError, code)
    assert "needs 8 KiB and " in str(error)
    assert f" are free ({os.strerror(code)}). Free some, ask for less, or choose another directory" in str(error)


def test_space_that_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, (tmp_path, "odd"))
    failing(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP)
    error = refused(tmp_path)
    assert f"space cannot be reserved on this file system (odd: {os.strerror(errno.EOPNOTSUPP)})" in str(error)


def test_nothing_is_reserved_for_nothing(tmp_path: Path) -> None:
    os.close(open_nameless(tmp_path, 0, direct=False))


# ---- transfers ---------------------------------------------------------------------------------------


class Disk:
    """A disk of 16 blocks behind `os.preadv` and `os.pwritev`, which moves as much of each call as `counts` say.

    A count that is an error is raised instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts: Sequence[int | OSError]) -> None:
        self.bytes = bytearray(os.urandom(16 * ALIGN))
        self.counts = list(counts)
        monkeypatch.setattr(os, "preadv", self.call(lambda memory, disk: memory.__setitem__(slice(None), disk)))
        monkeypatch.setattr(os, "pwritev", self.call(lambda memory, disk: disk.__setitem__(slice(None), memory)))

    def call(self, move: Callable[[memoryview, memoryview], None]) -> Callable[[int, list[Any], int], int]:
        def transfer(fd: int, buffers: list[Any], offset: int) -> int:
            memory = memoryview(buffers[0]).cast("B")
            count = self.counts.pop(0) if self.counts else len(memory)
            if isinstance(count, OSError):
                raise count
            count = min(count, len(memory))
            move(memory[:count], memoryview(self.bytes)[offset : offset + count])
            return count

        return transfer


EINTR, EIO = InterruptedError(errno.EINTR, "interrupted"), OSError(errno.EIO, "broken")


@given(
    counts=st.lists(st.one_of(st.just(EINTR), st.integers(ALIGN, 6 * ALIGN)), max_size=8),
    blocks=st.integers(0, 8),
    rest=st.sampled_from([0, 0, 1, ALIGN - 1]),
    first=st.integers(0, 6),
    write=st.booleans(),
)
def test_what_is_cut_short_goes_on_where_it_stopped(
    counts: list[int | OSError], blocks: int, rest: int, first: int, write: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk, offset, nbytes = Disk(patch, counts), first * ALIGN, blocks * ALIGN + rest
        before = bytes(disk.bytes)
        content = os.urandom(nbytes)
        memory = (ctypes.c_ubyte * max(nbytes, 1)).from_buffer(bytearray(content or b"\0"))
        (write_from if write else read_into)(0, ctypes.addressof(memory), nbytes, offset)
        want = content if write else before[offset : offset + nbytes]
        assert bytes(memory)[:nbytes] == want
        assert disk.bytes[offset : offset + nbytes] == want
        assert disk.bytes[:offset] + disk.bytes[offset + nbytes :] == before[:offset] + before[offset + nbytes :]


@pytest.mark.parametrize("short", [1, 512, ALIGN - 1, 2 * ALIGN + 7])
def test_a_block_that_was_moved_in_part_is_moved_again(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with sectors of 512 bytes may stop inside one of our blocks, and direct I/O cannot go on from there."""
    disk = Disk(monkeypatch, [short, EINTR, ALIGN])
    memory = (ctypes.c_ubyte * (4 * ALIGN))()
    read_into(0, ctypes.addressof(memory), 4 * ALIGN, ALIGN)
    assert bytes(memory) == disk.bytes[ALIGN : 5 * ALIGN]


@pytest.mark.parametrize("counts", [[0, 0], [512, 512], [ALIGN, 3, 0]], ids=str)
def test_a_transfer_that_does_not_get_on_ends(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the end of a file a read gives nothing, again and again."""
    Disk(monkeypatch, counts)
    memory = (ctypes.c_ubyte * (4 * ALIGN))()
    done = counts[0] // ALIGN * ALIGN
    with pytest.raises(DiskError, match=rf"read of 16 KiB at offset 4096 ended after {done} bytes") as caught:
        read_into(0, ctypes.addressof(memory), 4 * ALIGN, ALIGN)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("call", [read_into, write_from])
def test_an_error_in_the_middle(call: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, [2 * ALIGN, EIO])
    memory = (ctypes.c_ubyte * (4 * ALIGN))()
    what = "read" if call is read_into else "write"
    fd = os.memfd_create("the-file")
    try:
        with pytest.raises(
            DiskError, match=rf"{what} of 16 KiB at offset 4096 failed \(Input/output error\)"
        ) as caught:
            call(fd, ctypes.addressof(memory), 4 * ALIGN, ALIGN)
    finally:
        os.close(fd)
    assert (type(caught.value), caught.value.errno) == (DiskError, errno.EIO)
    assert "the-file" in caught.value.filename


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, [OSError(code, "full")])
    memory = (ctypes.c_ubyte * ALIGN)()
    with pytest.raises(DiskFullError, match="write of 4 KiB at offset 0 failed") as caught:
        write_from(-1, ctypes.addressof(memory), ALIGN, 0)
    assert (caught.value.errno, caught.value.filename) == (code, "file descriptor -1")
