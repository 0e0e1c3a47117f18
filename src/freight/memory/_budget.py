"""How much host memory freight may hold, how much it holds, and what is left.

Three limits, each named in the error that it causes: freight's own (`host_bytes`, or `host_share` of the machine's
memory), what the machine has available at the moment, and what the container allows.
"""

import os
import threading
from collections import deque
from dataclasses import dataclass

from freight._config import current
from freight._ram import memory
from freight._units import show_bytes
from freight.errors import HostMemoryError


@dataclass(frozen=True)
class Room:
    """What freight holds, what it may hold, and what the machine could still give, in bytes."""

    held: int
    limit: int
    available: int
    limited_by: str

    @property
    def left(self) -> int:
        """Bytes that can be had now."""
        return max(0, min(self.limit - self.held, self.available))


class Budget:
    """The process's account of host memory; thread-safe, and a forked child starts with nothing on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0
        self._returned: deque[int] = deque()  # by finalizers, which may run while this thread holds the lock

    def take(self, nbytes: int, purpose: str) -> None:
        """Put `nbytes` on the account, or raise with what is left and what to do."""
        with self._lock:
            room = self._room()
            if nbytes > room.left:
                raise HostMemoryError(_refusal(nbytes, purpose, room))
            self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """Take `nbytes` off the account; never waits, so that finalizers may call it."""
        self._returned.append(nbytes)

    def room(self) -> Room:
        """What is held and left now."""
        with self._lock:
            return self._room()

    def forget(self) -> None:
        """Start anew in a forked child, where another thread may have held the lock."""
        self.__init__()

    def _room(self) -> Room:
        while self._returned:
            self._taken -= self._returned.popleft()
        held = self._taken
        settings = current()
        total, available = memory()
        if settings.host_bytes is not None:
            return Room(held, settings.host_bytes, available, f"host_bytes={show_bytes(settings.host_bytes)}")
        reason = f"host_share={settings.host_share:g} of {show_bytes(total)}"
        return Room(held, int(settings.host_share * total), available, reason)


def _refusal(nbytes: int, purpose: str, room: Room) -> str:
    asked = f"{purpose} asked for {show_bytes(nbytes)} of host memory, and {show_bytes(room.left)} are left: "
    if room.limit - room.held <= room.available:
        return (
            f"{asked}freight holds {show_bytes(room.held)} of the {show_bytes(room.limit)} that {room.limited_by} "
            "allows. Close what is no longer needed, or raise the limit: FREIGHT_HOST_BYTES or "
            "freight.config(host_bytes=...)."
        )
    return (
        f"{asked}the machine has {show_bytes(room.available)} available (freight holds {show_bytes(room.held)} of the "
        f"{show_bytes(room.limit)} that {room.limited_by} allows). Ask for less, or stop what else uses its memory."
    )


budget = Budget()
os.register_at_fork(after_in_child=budget.forget)
