"""What is page-locked in this process: ranges of addresses, none overlapping, each shared by all who asked for it.

The CUDA runtime refuses a range that overlaps a registered one and cannot say whose it is. This registry can: a range
inside a registered one uses that registration, the same range twice is one registration, and a partial overlap is an
error that names both.
"""

import bisect
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch

from freight import _cuda
from freight._units import show_bytes
from freight.errors import OverlapError

_T = TypeVar("_T")
_by_start = attrgetter("start")


@dataclass(eq=False)
class Range:
    """Registered memory; it ends with its last use."""

    start: int
    end: int
    keep: object  # whoever owns the memory; it must not be freed while it is registered
    locked: bool = False  # stays so where there is no GPU, or where somebody else pinned it
    uses: "set[_Ref]" = field(default_factory=set)
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"{self.start:#x} to {self.end:#x} ({show_bytes(self.end - self.start)})"


class Use:
    """One use of a registered range. It ends by `end`, or when nobody holds it any more."""

    def __init__(self, registry: "Registry") -> None:
        self._registry = registry
        settle = weakref.finalize(self, registry.settle)
        settle.atexit = False  # the registry unlocks everything at exit, in one place
        self._ref = _Ref(self, registry.ended.append)  # made later than the other, so it is called before it

    @property
    def range(self) -> Range:
        """What is used."""
        assert self._ref.range is not None
        return self._ref.range

    def begin(self, used: Range) -> None:
        """Become a use of `used`."""
        self._ref.range = used
        used.uses.add(self._ref)

    def end(self) -> None:
        """Do without it from now on; again does nothing."""
        self._registry.ended.append(self._ref)
        self._registry.settle()


class _Ref(weakref.ref[Use]):
    """What is left of a use when it goes; no Python runs then that an interrupt could stop."""

    range: Range | None = None


class Registry:
    """The registered ranges of this process.

    Uses end in any thread at any moment, also inside these methods. They are therefore only queued; whoever is at work
    here, or finds nobody at work, does the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._at_work = False  # somebody is; it may be this very thread, in whose middle a finalizer runs
        self._ranges: list[Range] = []  # by address
        self.ended: deque[_Ref] = deque()
        self._deferred: list[Range] = []  # cannot be unlocked while a CUDA graph is being captured

    def acquire(self, address: int, nbytes: int, keep: object, *, pinned_by_others: bool = False) -> Use:
        """Have the range page-locked, by a new registration or inside an existing one."""
        use = Use(self)
        try:
            self._alone(self._acquire, use, Range(address, address + nbytes, keep), pinned_by_others)
            return use
        except BaseException:  # Ctrl-C too: the traceback would keep the use for as long as somebody looks at it
            use.end()
            raise

    def use(self, address: int, nbytes: int) -> Use | None:
        """A use of the registered range that the bytes at `address` lie in; None where they lie in none."""
        use = Use(self)
        return use if self._alone(self._use, use, address, address + nbytes) else None

    def held_bytes(self) -> int:
        """Bytes registered now."""
        return self._alone(lambda: sum(used.end - used.start for used in self._ranges))

    def settle(self) -> None:
        """End what was queued or deferred, unless somebody is at work here: then they do it when they are done."""
        while self._may_settle() and not self._at_work:
            with self._lock:
                try:
                    self._at_work = True
                    while self.ended:
                        self._end_use(self.ended[0])
                        self.ended.popleft()
                    while self._deferred and not torch.cuda.is_current_stream_capturing():
                        self._unlock(self._deferred.pop())
                finally:
                    self._at_work = False

    def release_all(self) -> None:
        """Unlock everything, at exit and while the context still stands."""
        self._alone(self._release_all)

    def forget(self) -> None:
        """Start anew in a forked child, which has no part in its parent's registrations."""
        self.__init__()

    def _alone(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Call with nobody else at work here, and then see to what ended meanwhile."""
        self.settle()
        try:
            with self._lock:  # and nothing cleverer: Ctrl-C cannot come between taking it and the block that returns it
                try:
                    self._at_work = True
                    return call(*arguments)
                finally:
                    self._at_work = False
        finally:
            self.settle()

    def _acquire(self, use: Use, new: Range, pinned_by_others: bool) -> None:
        touching = self._touching(new.start, new.end)
        if len(touching) == 1 and _within(new.start, new.end, touching[0]):
            use.begin(touching[0])
            return
        if touching:
            raise OverlapError(
                f"{new} overlaps memory that freight has registered, only in part: {', '.join(map(str, touching))}. "
                "Register the larger range first (a part of it then shares its registration), or close the other "
                "registration."
            )
        use.begin(new)
        if _cuda.available() and not pinned_by_others:
            _cuda.register(new.start, new.end - new.start)
            new.locked = True
        bisect.insort(self._ranges, new, key=_by_start)

    def _use(self, use: Use, start: int, end: int) -> bool:
        touching = self._touching(start, max(end, start + 1))
        if len(touching) != 1 or not _within(start, end, touching[0]):
            return False
        use.begin(touching[0])
        return True

    def _release_all(self) -> None:
        for used in (*self._ranges, *self._deferred):
            if used.locked and used.process == os.getpid():
                _cuda.unregister(used.start)
                used.locked = False
        self._deferred.clear()

    def _end_use(self, ref: _Ref) -> None:
        used = ref.range
        if used is None:  # there was nothing to use
            return
        used.uses.discard(ref)
        if used.uses or used.process != os.getpid():
            return
        if used in self._ranges:  # not where registering it failed
            self._ranges.remove(used)
        self._unlock(used)

    def _unlock(self, used: Range) -> None:
        if used.locked and torch.cuda.is_current_stream_capturing():
            self._deferred.append(used)  # any such call now would spoil the capture; the memory stays until later
            return
        if used.locked:
            _cuda.unregister(used.start)
            used.locked = False
        used.keep = None

    def _may_settle(self) -> bool:
        return bool(self.ended) or (bool(self._deferred) and not torch.cuda.is_current_stream_capturing())

    def _touching(self, start: int, end: int) -> list[Range]:
        at = bisect.bisect(self._ranges, start, key=_by_start)
        first = at - 1 if at and self._ranges[at - 1].end > start else at
        last = bisect.bisect_left(self._ranges, end, key=_by_start)
        return self._ranges[first:last]


def _within(start: int, end: int, found: Range) -> bool:
    return found.start <= start and end <= found.end


registry = Registry()
os.register_at_fork(after_in_child=registry.forget)
weakref.finalize(Registry, registry.release_all)  # at exit, after all that was made later and may still use memory
