"""The processor and its memory as the system tells them, in containers of both kinds and with any capabilities."""

import math
import os
import resource
from pathlib import Path

import psutil
import pytest
import torch

from freight import _ram
from freight._units import GiB, MiB
from freight.errors import HostMemoryError
from freight.machine import _budget, _host

IPC_LOCK = 1 << 14


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


# ---- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_ram, "_CGROUP", tmp_path)
    return tmp_path


def test_a_machine_without_limits(cgroup: Path) -> None:
    total, available = _host.memory()
    assert total == psutil.virtual_memory().total
    assert 0 < available <= total


def test_a_container_has_less(cgroup: Path) -> None:
    write(cgroup, memory__max=100 * MiB, memory__current=70 * MiB)
    assert _host.memory() == (100 * MiB, 30 * MiB)


def test_an_older_container_has_less(cgroup: Path) -> None:
    write(cgroup / "memory", memory__limit_in_bytes=100 * MiB, memory__usage_in_bytes=60 * MiB)
    assert _host.memory() == (100 * MiB, 40 * MiB)


@pytest.mark.parametrize("older", [False, True])
def test_files_in_the_page_cache_are_not_in_the_way(cgroup: Path, older: bool) -> None:
    """A container that has read large files counts them as used, and gives them up for anything else."""
    statistics = f"anon {5 * MiB}\ninactive_file {60 * MiB}\nactive_file {20 * MiB}"
    if older:
        used = {"memory__limit_in_bytes": 100 * MiB, "memory__usage_in_bytes": 95 * MiB}
        write(cgroup / "memory", **used, memory__stat=statistics)
    else:
        write(cgroup, memory__max=100 * MiB, memory__current=95 * MiB, memory__stat=statistics)
    assert _host.memory() == (100 * MiB, 85 * MiB)


@pytest.mark.parametrize(
    "files",
    [
        {"memory__max": "max", "memory__current": 5},
        {"memory__max": 2**62, "memory__current": 5},
        {"memory__max": 100 * MiB},
        {"memory__max": "", "memory__current": ""},
    ],
)
def test_limits_that_are_none(cgroup: Path, files: dict) -> None:
    write(cgroup, **files)
    assert _host.memory()[0] == psutil.virtual_memory().total


def test_a_limit_that_was_passed_leaves_nothing(cgroup: Path) -> None:
    write(cgroup, memory__max=100 * MiB, memory__current=101 * MiB, memory__stat="not a table at all")
    assert _host.memory() == (100 * MiB, 0)


def test_a_container_cannot_have_more_than_the_machine(cgroup: Path) -> None:
    total = psutil.virtual_memory().total
    write(cgroup, memory__max=total - 1, memory__current=0)
    assert _host.memory()[1] < total - 1


# ---- locking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "users", "exempt"),
    [
        (f"{IPC_LOCK:016x}", "0 0 4294967295", True),
        ("000001ffffffffff", "         0          0 4294967295", True),
        (f"{0x1FFFFFFFFFF & ~IPC_LOCK:016x}", "0 0 4294967295", False),
        ("0000000000000000", "0 0 4294967295", False),
        ("000001ffffffffff", "0 1000 1", False),  # root of a user namespace is nobody to the kernel
        ("000001ffffffffff", "0 100000 65536", False),
    ],
)
def test_who_may_lock_any_amount(
    capabilities: str, users: str, exempt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "self", status=f"Name:\tpython\nCapPrm:\tffff\nCapEff:\t{capabilities}\nSeccomp:\t0", uid_map=users
    )
    monkeypatch.setattr(_host, "_PROC", tmp_path)
    assert _host.facts().lock_exempt == exempt


def test_a_system_that_says_nothing_of_capabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "_PROC", tmp_path)
    found = _host.facts()
    assert not found.lock_exempt
    assert found.cpu  # told by Python's platform module


def test_the_limit_is_that_of_this_process() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    few = 65536 if before[1] == resource.RLIM_INFINITY else min(65536, before[1])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (few, before[1]))
    try:
        assert _host.facts().lockable_bytes == few
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_no_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert _host.facts().lockable_bytes is None


# ---- the processor -----------------------------------------------------------------------------------


def test_the_processor_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Fine: CPU @ 3 GHz\n\nmodel name\t: Another\n")
    monkeypatch.setattr(_host, "_PROC", tmp_path)
    assert _host.facts().cpu == "A Fine: CPU @ 3 GHz"


def test_cores_are_those_that_may_be_used() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert _host.facts().cores == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert _host.facts().cores == len(allowed)


@pytest.mark.usefixtures("small")
def test_a_copy_has_a_rate() -> None:
    rate = _host.memcpy_gbs(GiB, _budget.FULL)
    assert 0.01 < rate < 10_000
    assert math.isclose(rate, float(f"{rate:.4g}"))


def test_a_copy_never_takes_more_than_a_quarter_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = [], torch.full

    def full(shape: tuple[int, ...], *args, **kwargs) -> torch.Tensor:
        sizes.append(math.prod(shape))
        return real(shape, *args, **kwargs)

    monkeypatch.setattr(torch, "full", full)
    _host.memcpy_gbs(16 * MiB, _budget.QUICK)
    assert sizes == [2 * MiB, 2 * MiB]


def test_a_copy_needs_some_memory() -> None:
    with pytest.raises(HostMemoryError, match="4 MiB of host memory are available, too little to measure a copy"):
        _host.memcpy_gbs(4 * MiB, _budget.QUICK)
