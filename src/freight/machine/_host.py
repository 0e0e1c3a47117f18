"""The processor, its memory, how much of it may be locked, and how fast it copies."""

import os
import platform
import resource
from pathlib import Path

import torch

from freight._ram import memory
from freight._units import MiB, show_bytes
from freight.errors import HostMemoryError
from freight.machine._budget import Budget
from freight.machine._facts import Host, short
from freight.machine._timing import best_seconds

_PROC = Path("/proc")
_CAP_IPC_LOCK = 14


def facts() -> Host:
    """What can be read without measuring."""
    total, available = memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=total,
        available_bytes=available,
        lockable_bytes=None if soft == resource.RLIM_INFINITY else soft,
        lock_exempt=_may_lock_any(),
    )


def memcpy_gbs(available: int, budget: Budget) -> float:
    """Bytes copied a second between two pageable buffers, by torch's threads."""
    size = min(budget.memcpy_bytes, available // 8) // MiB * MiB
    if not size:
        raise HostMemoryError(f"{show_bytes(available)} of host memory are available, too little to measure a copy.")
    src, dst = (torch.full((size,), 1, dtype=torch.uint8, device="cpu") for _ in range(2))
    return short(size / best_seconds(lambda: dst.copy_(src), budget.seconds) / 1e9)


def _cpu_name() -> str:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _may_lock_any() -> bool:
    """Whether this process may pass the limit on locked memory: it holds CAP_IPC_LOCK, and not only in a user namespace
    of its container, where the kernel does not count it.
    """
    try:
        status = (_PROC / "self" / "status").read_text()
        users = (_PROC / "self" / "uid_map").read_text().split()
    except OSError:
        return False
    held = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) >> _CAP_IPC_LOCK & 1) and users == ["0", "0", str(2**32 - 1)]
