"""Pages of host memory: mapped shared, faulted in by threads, given back.

All of freight's host memory is mapped shared, never private. A private page that the GPU knows by its physical address
is replaced under it when a fork makes it copy-on-write; a shared page stays where it is, and a forked child reads the
same bytes. A shared mapping is faulted in under a lock of its own, so a large block is made of many small mappings
side by side, which threads fill at once. Only a block that other processes may open is one mapping of one file.
"""

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from freight._config import current
from freight._units import MiB, show_bytes
from freight.errors import HostMemoryError

PAGE = mmap.PAGESIZE
_SEGMENT = 64 * MiB
_MOST_SEGMENTS = 4096  # a process may hold 65,530 mappings
_FAULT_AT_ONCE = 16 * MiB

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_segments(nbytes: int) -> int:
    """Reserve `nbytes` of address space and back it by anonymous shared segments; its address."""
    segment = max(_SEGMENT, -(-nbytes // _MOST_SEGMENTS // PAGE) * PAGE)
    address = _mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    try:
        for start in range(0, nbytes, segment):
            flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _mmap(address + start, min(segment, nbytes - start), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
    except BaseException:
        unmap(address, nbytes)
        raise
    _libc.madvise(address, nbytes, _MADV_HUGEPAGE)  # a hint; most systems ignore it for shared memory
    return address


def create_file(nbytes: int) -> int:
    """A nameless file in memory that other processes can map; its descriptor."""
    fd = os.memfd_create("freight", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_file(fd: int, nbytes: int) -> int:
    """Map a file made by `create_file`; its address here."""
    return _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)


def unmap(address: int, nbytes: int) -> None:
    """Give the pages back to the system."""
    _libc.munmap(address, nbytes)


def fault_in(address: int, nbytes: int) -> None:
    """Have the kernel provide every page now, by threads, so that nothing is left to fail or to stall later."""
    pieces = [(address + start, min(_FAULT_AT_ONCE, nbytes - start)) for start in range(0, nbytes, _FAULT_AT_ONCE)]
    if len(pieces) < 2:
        for piece in pieces:
            _fault(*piece)
        return
    workers = ThreadPoolExecutor(min(_threads(), len(pieces)), thread_name_prefix="freight-fault")
    try:
        for done in [workers.submit(_fault, *piece) for piece in pieces]:
            done.result()
    finally:  # on Ctrl-C too: no thread may touch the pages once the caller has unmapped them
        workers.shutdown(wait=True, cancel_futures=True)


def _fault(address: int, nbytes: int) -> None:
    while _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):
            continue
        if code == errno.EINVAL:  # a kernel before 5.14: the pages are new and zero, so writing zeros faults them in
            ctypes.memset(address, 0, nbytes)
            return
        raise HostMemoryError(f"the system gave no pages for {show_bytes(nbytes)} of host memory: {os.strerror(code)}.")


def _threads() -> int:
    return current().host_threads or min(16, len(os.sched_getaffinity(0)))


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if got is None or got == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise HostMemoryError(
            f"the system refused to map {show_bytes(nbytes)} of host memory: {reason}. "
            "Check `ulimit -v` and the number of mappings (`sysctl vm.max_map_count`)."
        )
    return got
