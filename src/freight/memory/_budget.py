"""How much host memory freight may hold, how much it holds, and what is left.

Three limits, each named in the error that it causes: freight's own (`host_bytes`, or `host_share` of the machine's
memory), what the machine has available at the moment, and what the container allows.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from freight._config import current
from freight._units import show_bytes
from freight.errors import HostMemoryError

_CGROUP = Path("/sys/fs/cgroup")


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
        self._held = 0

    def take(self, nbytes: int, purpose: str) -> None:
        """Put `nbytes` on the account, or raise with what is left and what to do."""
        with self._lock:
            room = self._room()
            if nbytes > room.left:
                raise HostMemoryError(_refusal(nbytes, purpose, room))
            self._held += nbytes

    def give_back(self, nbytes: int) -> None:
        """Take `nbytes` off the account."""
        with self._lock:
            self._held -= nbytes

    def room(self) -> Room:
        """What is held and left now."""
        with self._lock:
            return self._room()

    def forget(self) -> None:
        """Start anew in a forked child, where another thread may have held the lock."""
        self._lock = threading.Lock()
        self._held = 0

    def _room(self) -> Room:
        settings = current()
        memory = psutil.virtual_memory()
        total, available = _within_container(memory.total, memory.available)
        if settings.host_bytes is not None:
            return Room(self._held, settings.host_bytes, available, f"host_bytes={show_bytes(settings.host_bytes)}")
        reason = f"host_share={settings.host_share:g} of {show_bytes(total)}"
        return Room(self._held, int(settings.host_share * total), available, reason)


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


def _within_container(total: int, available: int) -> tuple[int, int]:
    """The machine's memory, or the container's where that is less."""
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        limit = _number(_CGROUP / "memory" / "memory.limit_in_bytes")
        used = _number(_CGROUP / "memory" / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= total:
        return total, available
    return limit, min(available, max(0, limit - used))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


budget = Budget()
os.register_at_fork(after_in_child=budget.forget)
