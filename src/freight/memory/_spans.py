"""Which parts of a range are taken: best fit, neighbours merged when a part comes back.

Slabs of host memory and the disk file are both cut up by this; it moves no bytes and owns none. A span goes back when
nobody holds it any more, so an error or Ctrl-C between taking one and handing it on loses nothing.
"""

import bisect
import weakref
from collections import deque

from freight._units import round_up


class Span:
    """A taken part of a range, `length` from `offset` on. Dropping it gives it back."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length


class _Place(weakref.ref[Span]):
    """Where a span is or was. When the span goes, no Python runs that an interrupt could stop: the place is queued."""

    offset: int
    length: int


class Spans:
    """A range of `size` units of which spans are taken; not thread-safe, its owner holds a lock."""

    def __init__(self, size: int, align: int) -> None:
        self.size = size
        self.align = align
        self._taken: dict[int, _Place] = {}  # the truth, changed last and in one step; what is free follows from it
        self._ended: deque[_Place] = deque()  # at any moment and from any thread
        self._starts: list[int] = []  # free spans, by offset
        self._sizes: dict[int, int] = {}
        self._whole = False  # whether the free spans agree with the taken ones

    @property
    def free(self) -> int:
        """Units not taken."""
        self._settle()
        return sum(self._sizes.values())

    @property
    def largest(self) -> int:
        """The longest span that could be taken now."""
        self._settle()
        return max(self._sizes.values(), default=0)

    @property
    def pieces(self) -> int:
        """How many separate spans the free part is in."""
        self._settle()
        return len(self._starts)

    @property
    def taken(self) -> int:
        """How many spans are out."""
        self._settle()
        return len(self._taken)

    def take(self, length: int) -> Span | None:
        """A span of `length`, rounded up to the alignment; None where no free span is long enough."""
        length = round_up(max(length, 1), self.align)
        self._settle()
        fitting = [(size, start) for start, size in self._sizes.items() if size >= length]
        if not fitting:
            return None
        size, start = min(fitting)
        span = Span(start, length)
        place = _Place(span, self._ended.append)
        place.offset, place.length = start, length
        self._whole = False
        self._remove(start)
        if size > length:
            self._insert(start + length, size - length)
        self._taken[start], self._whole = place, True
        return span

    def _settle(self) -> None:
        """Take back the spans that ended; where an interrupt left the free spans half changed, find them anew."""
        if not self._whole:
            self._find_free()
        while self._ended:
            place = self._ended[0]
            if self._taken.get(place.offset) is place:
                self._give_back(place.offset, place.length)
            self._ended.popleft()

    def _give_back(self, offset: int, length: int) -> None:
        self._whole = False
        start, at = offset, bisect.bisect(self._starts, offset)
        if at < len(self._starts) and self._starts[at] == start + length:
            length += self._sizes[self._starts[at]]
            self._remove(self._starts[at])
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] == start:
            start = self._starts[at - 1]
            length += self._sizes[start]
            self._remove(start)
        self._insert(start, length)
        del self._taken[offset]
        self._whole = True

    def _find_free(self) -> None:
        self._starts, self._sizes = [], {}
        end = 0
        for start in [*sorted(self._taken), self.size]:
            if start > end:
                self._insert(end, start - end)
            end = start + self._taken[start].length if start in self._taken else start
        self._whole = True

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self._starts, start)
        self._sizes[start] = size

    def _remove(self, start: int) -> None:
        del self._starts[bisect.bisect_left(self._starts, start)], self._sizes[start]
