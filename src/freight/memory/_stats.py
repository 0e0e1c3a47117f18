"""What freight holds of the host's memory at one moment."""

from dataclasses import dataclass

from freight.memory._budget import budget
from freight.memory._registry import registry


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of host memory: `held` by freight, `locked` for the GPU (callers' own included), `left` to be had."""

    held: int
    locked: int
    left: int
    limit: int
    limited_by: str


def stats() -> MemoryStats:
    """What freight holds now, and what is left of its limits.

    >>> stats().held >= 0
    True
    """
    locked = registry.held_bytes()  # first: it gives back what ended meanwhile
    room = budget.room()
    return MemoryStats(room.held, locked, room.left, room.limit, room.limited_by)
