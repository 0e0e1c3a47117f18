"""How much memory there is: the machine's, or the container's where that has less."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def memory() -> tuple[int, int]:
    """Bytes of memory in all, and available now.

    >>> total, available = memory()
    >>> 0 < available <= total
    True
    """
    machine = psutil.virtual_memory()
    for folder, limit_file, used_file in (
        (_CGROUP, "memory.max", "memory.current"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None and limit < machine.total:
            return limit, min(machine.available, max(0, limit - used + _file_cache(folder / "memory.stat")))
    return machine.total, machine.available


def _file_cache(statistics: Path) -> int:
    """Bytes of files in the page cache, which a container counts as used and gives up on demand."""
    try:
        lines = dict(line.split() for line in statistics.read_text().splitlines())
        return int(lines.get("inactive_file", 0)) + int(lines.get("active_file", 0))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
