"""Direct writes and reads of one directory's disk, by threads and block size; bounded in bytes and in seconds."""

import contextlib
import ctypes
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from freight import _direct, _pages
from freight._units import MiB, show_bytes
from freight.errors import DirectIOError, DiskError, HostMemoryError
from freight.machine import _cufile
from freight.machine._budget import Budget
from freight.machine._facts import Disk, DiskRate, short

Move = Callable[[int, int, int, int], None]


def measure(directory: Path, budget: Budget, *, gpu: bool) -> Disk:
    """The disk under `directory`; what is wrong with it is told in the facts and not raised."""
    place = Disk(quick=budget.quick, directory=str(directory), cufile_absent="direct I/O does not work here")
    try:
        found, free = _direct.file_system(directory), shutil.disk_usage(directory).free
        place = Disk(**{**vars(place), "kind": found.kind, "name": found.name, "free_bytes": free})
        rates = _rates(directory, _size(free, budget), budget)
    except DirectIOError as error:
        return Disk(**{**vars(place), "direct": False, "absent": _reason(error)})
    except (OSError, HostMemoryError) as error:
        return Disk(**{**vars(place), "absent": _reason(error)})
    works, why_not = _cufile.check(directory, gpu=gpu) if budget.cufile else (None, "a quick probe does not try it")
    return Disk(**{**vars(place), "direct": True, "rates": rates, "cufile": works, "cufile_absent": why_not})


def free_bytes(directory: str | None) -> int | None:
    """What is free there now; None where nothing can be said."""
    try:
        return None if directory is None else shutil.disk_usage(directory).free
    except OSError:
        return None


def _size(free: int, budget: Budget) -> int:
    size = min(budget.disk_bytes, free // 2) // MiB * MiB
    if size < 2 * min(budget.disk_blocks):
        raise DiskError(None, f"only {show_bytes(free)} are free; free some, or choose another with FREIGHT_DISK_DIR")
    return size


def _rates(directory: Path, size: int, budget: Budget) -> tuple[DiskRate, ...]:
    most_threads, block = max(budget.disk_threads), max(budget.disk_blocks)
    with _buffers(most_threads * block) as address, _file(directory, size) as fd:

        def moved(move: Move, size: int, threads: int, block: int, seconds: float) -> tuple[int, float]:
            return _moved(move, fd, address, size, threads, block, seconds)

        # Written once beforehand: a read of blocks that were only reserved never reaches the disk. A slow disk gets
        # through a part of the file; the figures are then taken on that part.
        first = block if size >= 2 * block else min(budget.disk_blocks)
        written, _ = moved(_direct.write_from, size, min(4, most_threads), first, 3 * budget.disk_seconds)
        rates = []
        for threads, block in itertools.product(budget.disk_threads, budget.disk_blocks):
            if 2 * threads * block > written and rates:
                continue  # the last blocks under way would outweigh the rest
            ways = [
                moved(move, written, threads, block, budget.disk_seconds)
                for move in (_direct.write_from, _direct.read_into)
            ]
            rates.append(DiskRate(threads, block, *(short(done / seconds / 1e9) for done, seconds in ways)))
    return tuple(rates)


def _moved(move: Move, fd: int, address: int, size: int, threads: int, block: int, seconds: float) -> tuple[int, float]:
    """Bytes moved, from the file's beginning on and at most once, and the seconds it took; stops when time is up."""
    offsets = itertools.count(0, block)
    begin: SimpleQueue[bool] = SimpleQueue()
    stopped = False

    def work(buffer: int) -> int:
        done, go = 0, begin.get()
        while go and not stopped and (offset := next(offsets)) + block <= size:
            if offset and time.perf_counter() > start + seconds:
                break
            move(fd, buffer, block, offset)
            done += block
        return done

    workers = ThreadPoolExecutor(threads, thread_name_prefix="freight-probe")
    try:
        running = [workers.submit(work, address + index * block) for index in range(threads)]
        start = time.perf_counter()
        for _ in running:
            begin.put(True)
        done = sum(worker.result() for worker in running)
        return done, time.perf_counter() - start
    finally:  # on Ctrl-C too: no thread may touch the buffers once they are unmapped. A thread that Ctrl-C met in the
        # making is none that the pool waits for, which is why none begins before all are made.
        stopped = True
        for _ in range(threads):
            begin.put(False)
        workers.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _buffers(nbytes: int) -> Iterator[int]:
    """Memory full of noise, which no disk can compress."""
    address = _pages.map_segments(nbytes)
    try:
        noise = os.urandom(MiB)
        for start in range(0, nbytes, MiB):
            ctypes.memmove(address + start, noise, min(MiB, nbytes - start))
        yield address
    finally:
        _pages.unmap(address, nbytes)


@contextlib.contextmanager
def _file(directory: Path, size: int) -> Iterator[int]:
    fd = _direct.open_nameless(directory, size)
    try:
        yield fd
    finally:
        os.close(fd)


def _reason(error: OSError | HostMemoryError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
