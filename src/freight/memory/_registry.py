"""What is page-locked in this process: ranges of addresses, none overlapping, each shared by all who asked for it.

The CUDA runtime refuses a range that overlaps a registered one and cannot say whose it is. This registry can: a range
inside a registered one uses that registration, the same range twice is one registration, and a partial overlap is an
error that names both.
"""

import bisect
import os
import threading
from dataclasses import dataclass, field

import torch

from freight import _cuda
from freight._units import show_bytes
from freight.errors import OverlapError


@dataclass(eq=False)
class _Range:
    start: int
    end: int
    keep: object  # whoever owns the memory; it must not be freed while it is registered
    locked: bool  # False where there is no GPU, or where somebody else pinned it
    users: int = 1
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"{self.start:#x} to {self.end:#x} ({show_bytes(self.end - self.start)})"


class Registry:
    """The registered ranges of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may run in the thread that holds it
        self._starts: list[int] = []
        self._ranges: list[_Range] = []
        self._deferred: list[_Range] = []

    def acquire(self, address: int, nbytes: int, keep: object, *, pinned_by_others: bool = False) -> "_Range":
        """Have the range page-locked, by a new registration or inside an existing one."""
        end = address + nbytes
        with self._lock:
            self.release_deferred()
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
            new = _Range(address, end, keep, lock)
            at = bisect.bisect(self._starts, address)
            self._starts.insert(at, address)
            self._ranges.insert(at, new)
            return new

    def release(self, used: "_Range") -> None:
        """End one use of a range; the last one unlocks it. Never raises."""
        with self._lock:
            if used.process != os.getpid():
                return
            used.users -= 1
            if used.users:
                return
            at = bisect.bisect_left(self._starts, used.start)
            del self._starts[at], self._ranges[at]
            if used.locked:
                self._unlock(used)
            else:
                used.keep = None

    def release_deferred(self) -> None:
        """Unlock what could not be unlocked while a CUDA graph was being captured."""
        with self._lock:
            waiting, self._deferred = self._deferred, []
            for used in waiting:
                self._unlock(used)

    def _unlock(self, used: "_Range") -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._deferred.append(used)  # any such call now would spoil the capture; the memory stays until later
            return
        _cuda.unregister(used.start)
        used.keep = None

    def release_all(self) -> None:
        """Unlock everything, at exit and while the context still stands."""
        with self._lock:
            for used in (*self._ranges, *self._deferred):
                if used.locked and used.process == os.getpid():
                    _cuda.unregister(used.start)
                    used.locked = False
            self._deferred.clear()

    def forget(self) -> None:
        """Start anew in a forked child, which has no part in its parent's registrations."""
        self.__init__()

    def held_bytes(self) -> int:
        """Bytes registered now."""
        with self._lock:
            return sum(used.end - used.start for used in self._ranges)

    def _touching(self, start: int, end: int) -> list[_Range]:
        at = bisect.bisect(self._starts, start)
        first = at - 1 if at and self._ranges[at - 1].end > start else at
        last = bisect.bisect_left(self._starts, end)
        return self._ranges[first:last]


registry = Registry()
os.register_at_fork(after_in_child=registry.forget)
