"""Pages of host memory: mapped in segments, all there, and given back."""

import ctypes
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import freight
from freight import _pages
from freight._pages import PAGE
from freight.errors import HostMemoryError

SEGMENT = 16 * PAGE


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "_SEGMENT", SEGMENT)
    monkeypatch.setattr(_pages, "_FAULT_AT_ONCE", 3 * PAGE)


def mappings(address: int, nbytes: int) -> list[tuple[int, int, str]]:
    """What lies in the range, as (start, end, rights), from the system's own list."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights = line.split()[:2]
        start, end = (int(part, 16) for part in where.split("-"))
        if start < address + nbytes and address < end:
            found.append((max(start, address), min(end, address + nbytes), rights))
    return found


def resident(address: int, nbytes: int) -> int:
    """How many pages of the range the system has provided to this process."""
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(address // PAGE * 8)
        entries = table.read(-(-nbytes // PAGE) * 8)
    return sum(entry >> 63 for entry in memoryview(entries).cast("Q"))


@pytest.mark.parametrize(
    "nbytes", [1, PAGE, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT - PAGE, 3 * SEGMENT + 5 * PAGE + 7]
)
def test_every_size_around_a_segment(nbytes: int, small_segments: None) -> None:
    address = _pages.map_segments(nbytes)
    try:
        whole = -(-nbytes // PAGE) * PAGE
        assert address % PAGE == 0
        parts = mappings(address, whole)
        assert [rights for *_, rights in parts] == ["rw-s"] * len(parts)  # shared: a fork copies nothing
        assert len(parts) == -(-nbytes // SEGMENT)
        assert sum(end - start for start, end, _ in parts) == whole
        assert resident(address, whole) == 0
        _pages.fault_in(address, nbytes)
        assert resident(address, whole) == whole // PAGE
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        assert not any(memory)
        memory[nbytes - 1] = 1
    finally:
        _pages.unmap(address, nbytes)
    assert mappings(address, whole) == []


def test_large_blocks_have_larger_segments_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "_SEGMENT", PAGE)
    monkeypatch.setattr(_pages, "_MOST_SEGMENTS", 7)
    for pages in (7, 8, 100):
        address = _pages.map_segments(pages * PAGE)
        parts = mappings(address, pages * PAGE)
        assert len(parts) <= 7
        assert sum(end - start for start, end, _ in parts) == pages * PAGE
        _pages.unmap(address, pages * PAGE)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(threads: int, small_segments: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int, **named: str) -> None:
            asked.append(workers)
            super().__init__(workers, **named)

    monkeypatch.setattr(_pages, "ThreadPoolExecutor", Pool)
    before, nbytes = threading.active_count(), 10 * PAGE
    address = _pages.map_segments(nbytes)
    with freight.config(host_threads=threads):
        _pages.fault_in(address, nbytes)
    assert resident(address, nbytes) == 10
    assert asked == [min(threads, 4)]  # four pieces of three pages
    assert threading.active_count() == before
    _pages.unmap(address, nbytes)


def test_nothing_takes_no_thread_and_no_page() -> None:
    _pages.fault_in(0, 0)


def test_pages_survive_a_fork_where_they_are() -> None:
    """A private page would be copied at the next write, and the GPU would go on reading the old one."""
    address = _pages.map_segments(PAGE)
    memory = (ctypes.c_ubyte * PAGE).from_address(address)
    pid = os.fork()
    if pid == 0:
        memory[5] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert memory[5] == 7
    _pages.unmap(address, PAGE)


def test_a_file_is_one_memory_for_all_who_map_it() -> None:
    fd = _pages.create_file(2 * PAGE)
    assert os.fstat(fd).st_size == 2 * PAGE
    assert not os.get_inheritable(fd)
    first, second = _pages.map_file(fd, 2 * PAGE), _pages.map_file(fd, 2 * PAGE)
    os.close(fd)  # the mappings keep it
    _pages.fault_in(first, 2 * PAGE)
    ctypes.memset(first + PAGE, 3, 1)
    assert (ctypes.c_ubyte * 1).from_address(second + PAGE)[0] == 3
    for address in (first, second):
        _pages.unmap(address, 2 * PAGE)


def test_a_file_that_cannot_be_made_that_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, "too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="too large"):
        _pages.create_file(PAGE)
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ---- refusals ----------------------------------------------------------------------------------------


class Kernel:
    """The C library, but for the answers that a test gives to `madvise` and `mmap`: an error number, or None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real = _pages._libc
        self.madvise_answers: list[int | None] = []
        self.mmap_answers: list[int | None] = []
        self.advised = 0
        monkeypatch.setattr(_pages, "_libc", self)

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        self.advised += 1
        code = self.madvise_answers.pop(0) if self.madvise_answers else None
        if code is None:
            return self.real.madvise(address, nbytes, advice)
        ctypes.set_errno(code)
        return -1

    def mmap(self, *arguments: int | None) -> int | None:
        code = self.mmap_answers.pop(0) if self.mmap_answers else None
        if code is None:
            return self.real.mmap(*arguments)
        ctypes.set_errno(code)
        return ctypes.c_void_p(-1).value

    def munmap(self, address: int, nbytes: int) -> int:
        return self.real.munmap(address, nbytes)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def test_more_than_the_address_space() -> None:
    with pytest.raises(
        HostMemoryError, match=r"the system refused to map .* TiB of host memory: Cannot allocate.*ulimit -v"
    ):
        _pages.map_segments(2**58)


def test_a_segment_that_is_refused_gives_the_others_back(kernel: Kernel, small_segments: None) -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    kernel.mmap_answers = [None, None, None, errno.ENOMEM]
    with pytest.raises(HostMemoryError, match=r"refused to map 64 KiB .*vm.max_map_count"):
        _pages.map_segments(5 * SEGMENT)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_what_was_interrupted_is_tried_again(code: int, kernel: Kernel) -> None:
    address = _pages.map_segments(PAGE)
    kernel.madvise_answers = [code, code]
    kernel.advised = 0
    _pages.fault_in(address, PAGE)
    assert kernel.advised == 3
    assert resident(address, PAGE) == 1
    _pages.unmap(address, PAGE)


def test_a_kernel_that_does_not_know_how_to_populate(kernel: Kernel) -> None:
    """Before Linux 5.14."""
    address = _pages.map_segments(2 * PAGE)
    kernel.madvise_answers = [errno.EINVAL]
    _pages.fault_in(address, 2 * PAGE)
    assert resident(address, 2 * PAGE) == 2
    _pages.unmap(address, 2 * PAGE)


@pytest.mark.parametrize("pages", [2, 10])
def test_pages_that_are_not_given(pages: int, kernel: Kernel, small_segments: None) -> None:
    before, address = threading.active_count(), _pages.map_segments(pages * PAGE)
    kernel.madvise_answers = [errno.ENOMEM]
    with pytest.raises(
        HostMemoryError, match=r"the system gave no pages for (8|12) KiB of host memory: Cannot allocate memory\."
    ):
        _pages.fault_in(address, pages * PAGE)
    assert threading.active_count() == before  # no thread may touch what the caller now unmaps
    _pages.unmap(address, pages * PAGE)


def test_what_is_not_mapped_is_not_populated() -> None:
    address = _pages.map_segments(4 * PAGE)
    _pages.unmap(address + 2 * PAGE, 2 * PAGE)
    with pytest.raises(HostMemoryError, match="gave no pages"):
        _pages.fault_in(address, 4 * PAGE)
    _pages.unmap(address, 2 * PAGE)
