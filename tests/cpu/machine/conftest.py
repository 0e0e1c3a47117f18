"""A machine in good order, written by hand; small budgets; and no GPU, whatever the computer has."""

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from freight._units import GiB, KiB, MiB
from freight.machine import (
    Compute,
    Disk,
    DiskRate,
    Gpu,
    Host,
    Link,
    Machine,
    RandomRead,
    Reads,
    Software,
    _budget,
    _known,
    _nvml,
)

H200 = Machine(
    Software("3.12.11", "2.11.0+cu130", triton="3.6.0", cuda="13.0", driver="580.95.05"),
    date="2026-11-18T10:20:30+00:00",
    seconds=11.5,
    gpu=Gpu(
        name="NVIDIA H200",
        slug="h200",
        uuid="GPU-3f1c",
        capability=(9, 0),
        sms=132,
        l2_bytes=60 * MiB,
        memory_bytes=140 * GiB,
        free_bytes=139 * GiB,
    ),
    link=Link(
        pcie_generation=5,
        pcie_width=16,
        pcie_most_generation=5,
        pcie_most_width=16,
        h2d_gbs=55.5,
        d2h_gbs=55.3,
        both_gbs=101.0,
        latency_us=9.1,
    ),
    reads=Reads(
        sequential_gbs=51.3,
        random=tuple(
            RandomRead(table, row, gbs)
            for table, rates in (
                (256 * MiB, {64: 41.0, 256: 50.0, 4 * KiB: 50.0}),
                (8 * GiB, {64: 2.6, 256: 9.1, 4 * KiB: 50.0}),
            )
            for row, gbs in rates.items()
        ),
    ),
    compute=Compute(fp32_tflops=50.0, tf32_tflops=400.0, bf16_tflops=675.0, hbm_gbs=4300.0),
    host=Host(
        cpu="Intel Xeon",
        cores=16,
        memory_bytes=125 * GiB,
        available_bytes=120 * GiB,
        lock_exempt=False,
        memcpy_gbs=10.0,
    ),
    disk=Disk(
        directory="/var/tmp",
        kind="disk",
        name="ext4",
        free_bytes=500 * GiB,
        direct=True,
        rates=(DiskRate(1, MiB, 2.4, 4.2), DiskRate(16, 8 * MiB, 4.4, 2.7)),
        cufile="compatible",
    ),
)


@pytest.fixture(scope="session")
def h200() -> Machine:
    """A machine with everything in good order."""
    return H200


forget_driver = _nvml.driver_version.cache_clear  # the test may put something else in the place of the function


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU, no directory that others set, and nothing remembered from another test."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("FREIGHT_DISK_DIR", raising=False)
    forget_driver()
    _known.forget()
    yield
    forget_driver()
    _known.forget()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that take milliseconds; quick and full still differ."""
    sizes = {"memcpy_bytes": MiB, "seconds": 0.001, "disk_bytes": 4 * MiB, "disk_seconds": 0.01, "cufile": False}
    few = {"table_bytes": (64 * MiB,), "disk_threads": (1,), "disk_blocks": (MiB,)}
    more = {"table_bytes": (64 * MiB, 128 * MiB), "disk_threads": (1, 2), "disk_blocks": (MiB,)}
    quick = dataclasses.replace(_budget.QUICK, **sizes, **few)
    full = dataclasses.replace(_budget.FULL, **sizes, **more)
    monkeypatch.setattr(_budget, "QUICK", quick)
    monkeypatch.setattr(_budget, "FULL", full)


Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system of its own, `mount("tmpfs", "size=1m")`, and takes it down in the end."""
    mounted: list[Path] = []

    def mount(kind: str, options: str, source: str = "none") -> Path:
        place = tmp_path / f"mounted-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", kind, "-o", options, source, str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except OSError as error:
            pytest.skip(f"needs the command mount: {error}")
        if done.returncode:
            said = done.stderr.strip().partition("\n")[0].rpartition(": ")[2]
            pytest.skip(f"needs leave to mount a file system ({kind}): {said or f'status {done.returncode}'}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], timeout=60, check=True)


@pytest.fixture
def unwritable(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory in which nothing can be made; for root, whom modes do not bind, a mount for reading only."""
    if os.geteuid() == 0:
        yield request.getfixturevalue("mount")("tmpfs", "ro,size=64m")
        return
    place = tmp_path / "unwritable"
    place.mkdir(mode=0o500)
    yield place
    place.chmod(0o700)
