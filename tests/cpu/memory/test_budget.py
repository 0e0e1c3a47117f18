"""What freight may hold: its own limits, the machine's, a container's, and what each says when it is reached."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import freight
from freight import _ram, memory
from freight._units import GiB, KiB, MiB
from freight.errors import HostMemoryError
from freight.memory._budget import Budget


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine of 16 GiB with 10 GiB available and no container; a test may change it."""
    ram = SimpleNamespace(total=16 * GiB, available=10 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: ram)
    monkeypatch.setattr(_ram, "_CGROUP", tmp_path)
    return ram


def container(folder: Path, limit: object, used: int, names: tuple[str, str], statistics: str | None = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    if statistics is not None:
        (folder / "memory.stat").write_text(statistics)


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def test_a_share_of_the_machine_unless_told() -> None:
    with freight.config(host_share=0.25):
        room = Budget().room()
    assert (room.held, room.limit, room.available, room.left) == (0, 4 * GiB, 10 * GiB, 4 * GiB)
    assert room.limited_by == "host_share=0.25 of 16 GiB"


def test_bytes_go_before_the_share() -> None:
    with freight.config(host_share=0.25, host_bytes="6GiB"):
        room = Budget().room()
    assert (room.limit, room.limited_by) == (6 * GiB, "host_bytes=6 GiB")


def test_what_is_available_bounds_what_is_left(machine: SimpleNamespace) -> None:
    machine.available = GiB
    with freight.config(host_bytes="6GiB"):
        assert Budget().room().left == GiB


def test_taken_and_given_back() -> None:
    budget = Budget()
    with freight.config(host_bytes=100):
        budget.take(60, "one")
        budget.take(40, "two")
        assert budget.room().left == 0
        with pytest.raises(HostMemoryError):
            budget.take(1, "three")
        budget.take(0, "nothing")
        budget.give_back(60)
        assert (budget.room().held, budget.room().left) == (40, 60)
        budget.take(60, "three")


def test_a_lower_limit_than_what_is_held_leaves_nothing() -> None:
    budget = Budget()
    budget.take(100, "one")
    with freight.config(host_bytes=50):
        assert budget.room().left == 0


def test_the_refusal_of_freights_own_limit() -> None:
    budget = Budget()
    with freight.config(host_bytes="10MiB"):
        budget.take(6 * MiB, "features")
        with pytest.raises(HostMemoryError) as caught:
            budget.take(5 * MiB, "labels")
    assert str(caught.value) == (
        "labels asked for 5 MiB of host memory, and 4 MiB are left: freight holds 6 MiB of the 10 MiB that "
        "host_bytes=10 MiB allows. Close what is no longer needed, or raise the limit: FREIGHT_HOST_BYTES or "
        "freight.config(host_bytes=...)."
    )
    assert isinstance(caught.value, MemoryError)


def test_the_refusal_of_the_machine(machine: SimpleNamespace) -> None:
    machine.available = 3 * MiB
    with freight.config(host_bytes="10MiB"), pytest.raises(HostMemoryError) as caught:
        Budget().take(5 * MiB, "labels")
    assert str(caught.value) == (
        "labels asked for 5 MiB of host memory, and 3 MiB are left: the machine has 3 MiB available (freight holds "
        "0 B of the 10 MiB that host_bytes=10 MiB allows). Ask for less, or stop what else uses its memory."
    )


@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
def test_a_container_has_less(names: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "memory" if names is V1 else tmp_path
    container(folder, 4 * GiB, 3 * GiB, names, "anon 5\ninactive_file 1048576\nactive_file 2097152\n")
    with freight.config(host_share=0.5):
        room = Budget().room()
    assert (room.limit, room.available) == (2 * GiB, GiB + 3 * MiB)  # files in the page cache make way
    assert room.limited_by == "host_share=0.5 of 4 GiB"


@pytest.mark.parametrize("statistics", [None, "nonsense", "inactive_file many\n"])
def test_a_container_that_tells_little(statistics: str | None, tmp_path: Path) -> None:
    container(tmp_path, 4 * GiB, GiB, V2, statistics)
    assert Budget().room().available == 3 * GiB


@pytest.mark.parametrize("limit", ["max", 9223372036854771712, 32 * GiB, "nonsense"])
def test_a_container_without_a_limit_of_its_own(limit: object, tmp_path: Path) -> None:
    container(tmp_path, limit, GiB, V2)
    container(tmp_path / "memory", limit, GiB, V1)
    with freight.config(host_share=1.0):
        room = Budget().room()
    assert (room.limit, room.available) == (16 * GiB, 10 * GiB)


def test_a_container_that_is_full_has_nothing(tmp_path: Path) -> None:
    container(tmp_path, 4 * GiB, 5 * GiB, V2)
    assert Budget().room().left == 0


def test_blocks_are_on_the_account_in_whole_pages(held_before: int) -> None:
    with freight.config(host_bytes=held_before + 12 * KiB):
        block = memory.allocate(5000, purpose="features")
        assert memory.stats().left == 4 * KiB
        for shareable in (False, True):
            with pytest.raises(HostMemoryError, match="labels asked for 8 KiB of host memory, and 4 KiB are left"):
                memory.allocate(5000, purpose="labels", shareable=shareable)
        block.close()
        memory.allocate(12 * KiB).close()
    stats = memory.stats()
    assert stats.held == held_before
    assert (stats.limit, stats.limited_by) == (int(0.8 * 16 * GiB), "host_share=0.8 of 16 GiB")


def test_the_callers_own_memory_is_not_on_the_account(held_before: int) -> None:
    with memory.register(torch.zeros(5000)):
        assert memory.stats().held == held_before


def test_a_forked_child_starts_with_nothing() -> None:
    with memory.allocate(MiB):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if memory.stats().held == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert memory.stats().held >= MiB
