"""Which parts of a range are taken: spans with an offset and a length, best fit, neighbours merged when given back.

Slabs of host memory and the disk file are both cut up by this; it moves no bytes and owns none.
"""

import bisect

from freight._units import round_up
from freight.errors import ArgumentError


class Spans:
    """A range of `size` units of which spans are taken and given back; not thread-safe, its owner holds a lock."""

    def __init__(self, size: int, align: int) -> None:
        self.size = size
        self.align = align
        self._starts = [0] if size else []  # free spans, by offset
        self._sizes = {0: size} if size else {}
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Units not taken."""
        return sum(self._sizes.values())

    @property
    def largest(self) -> int:
        """The longest span that could be taken now."""
        return max(self._sizes.values(), default=0)

    @property
    def pieces(self) -> int:
        """How many separate spans the free part is in."""
        return len(self._starts)

    @property
    def taken(self) -> int:
        """How many spans are out."""
        return len(self._taken)

    def take(self, length: int) -> int | None:
        """The offset of a span of `length`, rounded up to the alignment; None where no free span is long enough."""
        length = round_up(max(length, 1), self.align)
        fitting = [(size, start) for start, size in self._sizes.items() if size >= length]
        if not fitting:
            return None
        size, start = min(fitting)
        self._remove(start)
        if size > length:
            self._insert(start + length, size - length)
        self._taken[start] = length
        return start

    def give_back(self, offset: int) -> None:
        """Return the span that starts at `offset`."""
        length = self._taken.pop(offset, None)
        if length is None:
            raise ArgumentError(f"no span starts at {offset}; it was given back already, or never taken.")
        at = bisect.bisect(self._starts, offset)
        if at < len(self._starts) and self._starts[at] == offset + length:
            length += self._sizes[self._starts[at]]
            self._remove(self._starts[at])
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] == offset:
            offset = self._starts[at - 1]
            length += self._sizes[offset]
            self._remove(offset)
        self._insert(offset, length)

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self._starts, start)
        self._sizes[start] = size

    def _remove(self, start: int) -> None:
        del self._starts[bisect.bisect_left(self._starts, start)], self._sizes[start]
