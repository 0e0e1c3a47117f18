"""What is page-locked in this process: ranges of addresses, none overlapping, each shared by all who asked for it.

The CUDA runtime refuses a range that overlaps a registered one and cannot say whose it is. This registry can: a range
inside a registered one uses that registration, the same range twice is one registration, and a partial overlap is an
error that names both.
"""

import atexit
import bisect
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from freight import _cuda
from freight._units import show_bytes
from freight.errors import OverlapError


@dataclass(eq=False)
class Range:
    """Registered memory; it ends with its last user."""

    start: int
    end: int
    keep: object  # whoever owns the memory; it must not be freed while it is registered
    locked: bool  # False where there is no GPU, or where somebody else pinned it
    users: int = 1
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"{self.start:#x} to {self.end:#x} ({show_bytes(self.end - self.start)})"


class Registry:
    """The registered ranges of this process.

    `release` is called by finalizers, which run in any thread at any moment, also inside these methods. It therefore
    only queues what ended; whoever holds the lock, or gets it, does the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ranges: list[Range] = []
        self._ended: deque[Range] = deque()
        self._deferred: list[Range] = []  # cannot be unlocked while a CUDA graph is being captured

    def acquire(self, address: int, nbytes: int, keep: object, *, pinned_by_others: bool = False) -> Range:
        """Have the range page-locked, by a new registration or inside an existing one."""
        end = address + nbytes
        with self._exclusive():
            self._unlock_deferred()
            touching = self._touching(address, end)
            if len(touching) == 1 and touching[0].start <= address and end <= touching[0].end:
                touching[0].users += 1
                return touching[0]
            if touching:
                raise OverlapError(
                    f"{address:#x} to {end:#x} ({show_bytes(nbytes)}) overlaps memory that freight has registered, "
                    f"only in part: {', '.join(map(str, touching))}. Register the larger range first (a part of it "
                    "then shares its registration), or close the other registration."
                )
            lock = _cuda.available() and not pinned_by_others
            if lock:
                _cuda.register(address, nbytes)
            new = Range(address, end, keep, lock)
            at = bisect.bisect(self._starts, address)
            self._starts.insert(at, address)
            self._ranges.insert(at, new)
            return new

    def release(self, used: Range) -> None:
        """End one use of a range; the last one unlocks it. Never raises, never waits for another thread."""
        self._ended.append(used)
        self._settle()

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether the whole range lies in one that is registered."""
        with self._exclusive():
            touching = self._touching(address, address + max(nbytes, 1))
            return any(found.start <= address and address + nbytes <= found.end for found in touching)

    def held_bytes(self) -> int:
        """Bytes registered now."""
        with self._exclusive():
            return sum(used.end - used.start for used in self._ranges)

    def release_all(self) -> None:
        """Unlock everything, at exit and while the context still stands."""
        with self._exclusive():
            for used in (*self._ranges, *self._deferred):
                if used.locked and used.process == os.getpid():
                    _cuda.unregister(used.start)
                    used.locked = False
            self._deferred.clear()

    def forget(self) -> None:
        """Start anew in a forked child, which has no part in its parent's registrations."""
        self.__init__()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._settle()

    def _settle(self) -> None:
        """End what was queued, unless somebody holds the lock: then they do it when they leave."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._end_use(self._ended.popleft())
            finally:
                self._lock.release()

    def _end_use(self, used: Range) -> None:
        if used.process != os.getpid():
            return
        used.users -= 1
        if used.users:
            return
        at = bisect.bisect_left(self._starts, used.start)
        del self._starts[at], self._ranges[at]
        self._unlock(used)

    def _unlock_deferred(self) -> None:
        waiting, self._deferred = self._deferred, []
        for used in waiting:
            self._unlock(used)

    def _unlock(self, used: Range) -> None:
        if used.locked and torch.cuda.is_current_stream_capturing():
            self._deferred.append(used)  # any such call now would spoil the capture; the memory stays until later
            return
        if used.locked:
            _cuda.unregister(used.start)
            used.locked = False
        used.keep = None

    def _touching(self, start: int, end: int) -> list[Range]:
        at = bisect.bisect(self._starts, start)
        first = at - 1 if at and self._ranges[at - 1].end > start else at
        last = bisect.bisect_left(self._starts, end)
        return self._ranges[first:last]


registry = Registry()
os.register_at_fork(after_in_child=registry.forget)
atexit.register(registry.release_all)
