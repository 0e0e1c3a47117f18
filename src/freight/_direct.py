"""Files whose bytes go to the disk and not to the page cache: nameless, reserved in full, checked to be direct.

A nameless file has no entry in any directory, so the system frees it when the process ends, however it ends. Direct
I/O is asked for by a flag that some file systems accept and then ignore; here a block is written and the page cache
is looked at, so what is promised is in force.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from freight._config import current
from freight._units import round_up, show_bytes
from freight.errors import DirectIOError, DiskError, DiskFullError

ALIGN = 4096  # addresses, offsets and lengths of direct I/O are multiples of this

_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_OVERLAY = {"overlay", "overlayfs", "aufs", "fuse.fuse-overlayfs"}
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "virtiofs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "afs",
    "fuse",
}
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)  # how kernels and file systems decline O_TMPFILE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


@dataclass(frozen=True)
class FileSystem:
    """What a directory stands on: `kind` is "disk", "memory", "overlay" or "network"; `name` is the system's own."""

    kind: str
    name: str


def file_system(directory: str | os.PathLike[str]) -> FileSystem:
    """The file system of an existing directory.

    >>> file_system("/dev/shm").kind
    'memory'
    """
    path = Path(directory).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    if not mounts:
        return FileSystem("disk", "unknown")
    name = max(enumerate(mounts), key=lambda item: (len(item[1].mountpoint), item[0]))[1].fstype
    for kind, names in (("memory", _MEMORY), ("overlay", _OVERLAY), ("network", _NETWORK)):
        if name in names or (kind == "network" and name.startswith("fuse.") and name not in _OVERLAY):
            return FileSystem(kind, name)
    return FileSystem("disk", name)


def default_directory() -> Path:
    """The directory for freight's disk files: `disk_dir`, or the first of the usual ones that is a real disk."""
    chosen = current().disk_dir
    if chosen is not None:
        return chosen
    usual = [Path(name) for name in (os.environ.get("TMPDIR"), "/var/tmp", "/tmp") if name]
    there = [path for path in usual if path.is_dir() and os.access(path, os.W_OK)]
    if not there:
        return Path(tempfile.gettempdir())
    return next((path for path in there if file_system(path).kind == "disk"), there[0])


def open_nameless(directory: str | os.PathLike[str], nbytes: int, *, direct: bool = True) -> int:
    """The descriptor of a new nameless file in `directory` with `nbytes` reserved, open for direct I/O.

    Everything that can go wrong with the place goes wrong here: a missing, read-only or full directory, and a file
    system on which direct I/O is not in force.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        fd = _open(str(directory), flags)
    except OSError as error:
        raise _cannot_open(error, directory, direct) from None
    try:
        _reserve(fd, round_up(nbytes, ALIGN), directory)
        if direct:
            _check_direct(fd, directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_into(fd: int, address: int, nbytes: int, offset: int) -> None:
    """Read `nbytes` at `offset` to memory at `address`, all of them; other threads run meanwhile."""
    _whole(os.preadv, "read", fd, address, nbytes, offset)


def write_from(fd: int, address: int, nbytes: int, offset: int) -> None:
    """Write `nbytes` from memory at `address` to `offset`, all of them; other threads run meanwhile."""
    _whole(os.pwritev, "write", fd, address, nbytes, offset)


def _whole(call, what: str, fd: int, address: int, nbytes: int, offset: int) -> None:
    done, stalled = 0, False
    while done < nbytes:
        rest = (ctypes.c_char * (nbytes - done)).from_address(address + done)
        try:
            count = call(fd, [rest], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            reason = f"{what} of {show_bytes(nbytes)} at offset {offset} failed ({os.strerror(error.errno or 0)})"
            kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskError
            raise kind(error.errno, reason, _name(fd)) from None
        if done + count < nbytes:  # cut short inside a block: that block is moved again, whole
            count -= (done + count) % ALIGN
        if count <= 0 and stalled:
            reason = f"{what} of {show_bytes(nbytes)} at offset {offset} ended after {done} bytes"
            raise DiskError(errno.EIO, reason, _name(fd))
        done, stalled = done + count, count <= 0


def _open(directory: str, flags: int) -> int:
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS or not os.path.isdir(directory):
            raise
    fd, name = tempfile.mkstemp(prefix=".freight-", dir=directory)
    try:
        with contextlib.closing(os.fdopen(fd, "r+b")):
            return os.open(name, flags)
    finally:
        os.unlink(name)


def _cannot_open(error: OSError, directory: str | os.PathLike[str], direct: bool) -> DiskError:
    place = "Choose another directory with FREIGHT_DISK_DIR or freight.config(disk_dir=...)"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DiskError(error.errno, f"there is no such directory for freight's disk file. {place}", str(directory))
    if error.errno == errno.EINVAL and direct:
        return DirectIOError(error.errno, _not_direct(directory), str(directory))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(error.errno, f"no room for freight's disk file. {place}", str(directory))
    reason = os.strerror(error.errno or 0)
    return DiskError(error.errno, f"freight's disk file cannot be made ({reason}). {place}", str(directory))


def _reserve(fd: int, nbytes: int, directory: str | os.PathLike[str]) -> None:
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            os.ftruncate(fd, 0)  # or the part that was reserved until then counts as used
            free = os.fstatvfs(fd)
            left = show_bytes(free.f_bavail * free.f_frsize)
            reason = (
                f"freight's disk file needs {show_bytes(nbytes)} and {left} are free ({os.strerror(error.errno)}). "
                "Free some, ask for less, or choose another directory with FREIGHT_DISK_DIR"
            )
            raise DiskFullError(error.errno, reason, str(directory)) from None
        reason = (
            f"space cannot be reserved on this file system ({file_system(directory).name}: "
            f"{os.strerror(error.errno or 0)}). Choose another directory with FREIGHT_DISK_DIR"
        )
        raise DiskError(error.errno, reason, str(directory)) from None


def _check_direct(fd: int, directory: str | os.PathLike[str]) -> None:
    """Write one block and see that no page of it is in the page cache."""
    if os.fstat(fd).st_size < ALIGN:
        return
    in_force = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    with contextlib.closing(mmap.mmap(-1, ALIGN)) as block:
        try:
            written = os.pwritev(fd, [block], 0) if in_force else 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                reason = f"the first block of freight's disk file cannot be written ({os.strerror(error.errno or 0)})"
                raise DiskError(error.errno, reason, str(directory)) from None
            written = 0
    if written != ALIGN or _cached(fd):
        raise DirectIOError(errno.EINVAL, _not_direct(directory), str(directory))


def _cached(fd: int) -> bool:
    """Whether the first page of the file is in the page cache."""
    with contextlib.closing(mmap.mmap(fd, mmap.PAGESIZE)) as view:
        start = ctypes.c_char.from_buffer(view)
        resident = ctypes.c_ubyte()
        failed = _libc.mincore(ctypes.addressof(start), mmap.PAGESIZE, ctypes.byref(resident))
        del start  # a mapping with a live view cannot be closed
    return not failed and bool(resident.value & 1)


def _not_direct(directory: str | os.PathLike[str]) -> str:
    found = file_system(directory)
    where = {
        "memory": f"it is {found.name}, which is memory and no disk",
        "overlay": f"it is a container's overlay ({found.name}); mount a volume of the host there",
        "network": f"it is a network or shared file system ({found.name})",
        "disk": f"{found.name} does not offer it, or is set up so that it is ignored",
    }[found.kind]
    return (
        f"direct I/O is not in force: {where}. Choose a directory on a local disk with FREIGHT_DISK_DIR, or go "
        "through the page cache with freight.config(direct_io=False)"
    )


def _name(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"
