"""The probe against plain torch, measured in the same process right before and right after; and what it leaves behind.

Rates drift by some percent within a minute, so a figure is right where it is within 5 % of the nearer of the two.
"""

import contextlib
import dataclasses
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import freight
from freight import memory
from freight._config import current
from freight._units import KiB, MiB, show_bytes
from freight.errors import ForkedError, UnsupportedError
from freight.machine import Machine, _budget, _doctor, _known, _tables, probe

BOUND = 0.05
FULL = _budget.FULL
RATES = ["h2d", "d2h", "both", "hbm", "fp32", "tf32", "bf16", "sequential"]
ROWS = [(table, row) for table in FULL.table_bytes for row in FULL.row_bytes]


# ---- plain torch -------------------------------------------------------------------------------------------


def fastest(work: Callable[[], object], calls: int = 4, rounds: int = 3, seconds: float = 0.2) -> float:
    """Seconds for one call: the fastest of several rounds, in each of which calls are queued one behind the other."""
    work()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, until = [], time.perf_counter() + seconds
    while len(times) < rounds or time.perf_counter() < until:
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return min(times)


def copies() -> Iterator[tuple[str, float]]:
    size = FULL.copy_bytes
    up, down = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    to, back = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    sides = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        for side, target, source in ((sides[0], to, up), (sides[1], down, back)):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)
        for side in sides:
            torch.cuda.current_stream().wait_stream(side)

    yield "h2d", size / fastest(lambda: to.copy_(up, non_blocking=True)) / 1e9
    yield "d2h", size / fastest(lambda: down.copy_(back, non_blocking=True)) / 1e9
    yield "both", 2 * size / fastest(both) / 1e9


def inside_the_gpu() -> Iterator[tuple[str, float]]:
    source, target = (torch.zeros(FULL.hbm_bytes // 4, device="cuda") for _ in range(2))
    yield "hbm", 2 * source.nbytes / fastest(lambda: target.copy_(source)) / 1e9


@contextlib.contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def products() -> Iterator[tuple[str, float]]:
    n = FULL.matmul_size
    for name, dtype, precision, calls in (
        ("fp32", torch.float32, "ieee", 1),
        ("tf32", torch.float32, "tf32", 8),
        ("bf16", torch.bfloat16, "ieee", 8),
    ):
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        with fp32_products(precision):
            yield name, 2 * n**3 / fastest(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), calls) / 1e12


def sequential(table: Tensor) -> Iterator[tuple[str, float]]:
    """The faster of two operators that read a table once, from its beginning to its end."""
    part = table[: min(FULL.table_bytes) // 4]
    out = torch.empty_like(part)
    yield "sequential", part.nbytes / min(fastest(part.sum), fastest(lambda: torch.neg(part, out=out))) / 1e9


def random_rows(table: Tensor) -> Iterator[tuple[tuple[int, int], float]]:
    space = torch.empty(FULL.gather_bytes // 4, device="cuda")
    for table_bytes, row_bytes in ROWS:
        rows = table[: table_bytes // 4].view(-1, row_bytes // 4)
        count = min(FULL.ids, FULL.gather_bytes // row_bytes, len(rows) // 2)
        out = space[: count * row_bytes // 4].view(count, -1)
        draws = iter([torch.randint(len(rows), (count,), device="cuda") for _ in range(1 + 3 * 4)])

        def gather(rows: Tensor = rows, draws: Iterator[Tensor] = draws, out: Tensor = out) -> None:
            torch.index_select(rows, 0, next(draws), out=out)

        seconds = fastest(gather, calls=4, rounds=3, seconds=0.0)
        if row_bytes <= 128:  # with 4-byte elements, rows so narrow are limited by torch's own instructions
            wide, wide_out = rows.view(torch.complex128), out.view(torch.complex128)
            draws = iter([torch.randint(len(rows), (count,), device="cuda") for _ in range(1 + 3 * 4)])
            by_16_bytes = partial(gather, wide, draws, wide_out)
            seconds = min(seconds, fastest(by_16_bytes, calls=4, rounds=3, seconds=0.0))
        yield (table_bytes, row_bytes), out.nbytes / seconds / 1e9


Figures = dict[object, float]


def by_torch(block: memory.HostBlock) -> Figures:
    table = block.alias(torch.float32)
    figures = {
        **dict(products()),
        **dict(inside_the_gpu()),
        **dict(copies()),
        **dict(sequential(table)),
        **dict(random_rows(table)),
    }
    gc.collect()
    torch.cuda.empty_cache()
    return figures


def by_freight(machine: Machine) -> Figures:
    link, compute = machine.link, machine.compute
    return {
        "h2d": link.h2d_gbs or 0.0,
        "d2h": link.d2h_gbs or 0.0,
        "both": link.both_gbs or 0.0,
        "hbm": compute.hbm_gbs or 0.0,
        "fp32": compute.fp32_tflops or 0.0,
        "tf32": compute.tf32_tflops or 0.0,
        "bf16": compute.bf16_tflops or 0.0,
        "sequential": machine.reads.sequential_gbs or 0.0,
        **{(read.table_bytes, read.row_bytes): read.gbs for read in machine.reads.random},
    }


@dataclass(frozen=True)
class Run:
    """A full probe between two measurements by plain torch."""

    before: Figures
    machine: Machine
    after: Figures
    seconds: float


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    places = {"cache_dir": tmp_path_factory.mktemp("cache"), "disk_dir": tmp_path_factory.mktemp("disk")}
    with freight.config(**places), memory.allocate(max(FULL.table_bytes), purpose="the table of the test") as block:
        before = by_torch(block)
        start = time.perf_counter()
        machine = probe()
        seconds = time.perf_counter() - start
        return Run(before, machine, by_torch(block), seconds)


def check(run: Run, name: object) -> None:
    found = by_freight(run.machine)[name]
    torchs = run.before[name], run.after[name]
    off = min(abs(found / other - 1) for other in torchs)
    assert off <= BOUND, f"the probe has {found:.4g}, torch has {torchs[0]:.4g} before and {torchs[1]:.4g} after"


@pytest.mark.parametrize("name", RATES)
def test_rate_is_what_torch_has(full: Run, name: str) -> None:
    check(full, name)


@pytest.mark.parametrize(
    ("table", "row"), ROWS, ids=[f"{show_bytes(row)} of {show_bytes(table)}" for table, row in ROWS]
)
def test_random_rows_come_as_fast_as_by_torch(full: Run, table: int, row: int) -> None:
    check(full, (table, row))


def test_nothing_is_missing(full: Run) -> None:
    machine = full.machine
    assert machine.complete
    assert not machine.quick
    assert set(by_freight(machine)) == {*RATES, *ROWS}
    assert 1 < (machine.link.latency_us or 0) < 1000
    assert (machine.host.memcpy_gbs or 0) > 1
    assert machine.disk.absent is None or machine.disk.direct is False, machine.disk.absent
    assert Machine.from_json(machine.json()) == machine


def test_the_gpu_is_described(full: Run) -> None:
    found, told = full.machine.gpu, torch.cuda.get_device_properties()
    assert (found.name, found.sms, found.capability) == (
        told.name,
        told.multi_processor_count,
        torch.cuda.get_device_capability(),
    )
    assert found.uuid == f"GPU-{told.uuid}"
    assert found.l2_bytes == told.L2_cache_size
    assert found.memory_bytes == torch.cuda.mem_get_info()[1]
    assert re.match(r"\d+\.\d+", full.machine.software.driver or "")
    assert full.machine.software.cuda == torch.version.cuda


def test_a_full_probe_takes_less_than_20_s(full: Run) -> None:
    assert full.seconds < 20


def test_a_quick_probe_takes_less_than_3_s(full: Run, tmp_path: Path) -> None:
    """After a full one, so that CUDA has started and kernels are compiled."""
    start = time.perf_counter()
    machine = probe(quick=True, directory=tmp_path)
    seconds = time.perf_counter() - start
    assert machine.quick
    assert machine.complete
    assert seconds < 3


def test_the_doctor_finds_nothing_that_fails(full: Run) -> None:
    findings = _doctor.judge(full.machine, usual=_known.shipped(full.machine.gpu.slug))
    assert [finding for finding in findings if finding.verdict == "fail" and finding.group != "Disk"] == []


# ---- what it leaves behind -----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A quick probe in a fraction of a second, on a directory of the test's own."""
    little = dataclasses.replace(
        _budget.QUICK,
        table_bytes=(64 * MiB,),
        row_bytes=(256, 4 * KiB),
        copy_bytes=16 * MiB,
        matmul_size=2048,
        hbm_bytes=64 * MiB,
        memcpy_bytes=16 * MiB,
        seconds=0.01,
        disk_bytes=16 * MiB,
        disk_seconds=0.02,
    )
    monkeypatch.setattr(_budget, "QUICK", little)
    (tmp_path / "disk").mkdir()
    with freight.config(disk_dir=tmp_path / "disk"):
        yield


def cache_files() -> list[Path]:
    return sorted(path for path in current().cache_home.glob("**/*") if path.is_file())


def status(*names: str) -> dict[str, int]:
    """Lines of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return {name: int(re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)[0]) * KiB for name in names}


def held() -> tuple[object, ...]:
    gc.collect()
    freights = memory.stats()
    return torch.cuda.memory_allocated(), freights.held, freights.locked, status("VmLck", "VmPin")


def multiply_once() -> None:
    """Have torch set aside what it keeps for products on the current stream."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(2048, 2048, dtype=dtype, device="cuda")
        x.mm(x)
    torch.cuda.synchronize()


def test_nothing_stays_allocated_or_locked(tmp_path: Path) -> None:
    """The full sizes of a quick probe: 1 GiB of page-locked memory, and as much in the GPU."""
    multiply_once()
    probe(quick=True, directory=tmp_path)
    torch.cuda.empty_cache()
    before, shared, reserved = held(), status("RssShmem")["RssShmem"], torch.cuda.memory_reserved()
    probe(quick=True, refresh=True, directory=tmp_path)
    assert held() == before
    assert torch.cuda.memory_reserved() <= reserved
    assert status("RssShmem")["RssShmem"] - shared < 64 * MiB
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_once()
    probe(quick=True)
    for file in cache_files():
        file.unlink()
    before, shared = held(), status("RssShmem")["RssShmem"]
    with monkeypatch.context() as patched:
        patched.setattr(_tables, "_best_gather", lambda *args: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            probe(quick=True, refresh=True)
    assert held() == before
    assert status("RssShmem")["RssShmem"] - shared < 16 * MiB
    assert cache_files() == []
    assert list((tmp_path / "disk").iterdir()) == []
    assert probe(quick=True).complete


def settings() -> list[object]:
    return [
        torch.backends.cuda.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.cuda.current_stream(),
        torch.cuda.current_device(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state().tolist(),
    ]


@pytest.mark.usefixtures("small")
def test_settings_are_as_they_were(poisoned_memory: None) -> None:
    """Under deterministic algorithms and autocast, on a stream of the caller's, which measuring must not heed."""
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.stream(torch.cuda.Stream()):
        before = settings()
        assert probe(quick=True).complete
        assert settings() == before


# ---- the cache ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_figures_are_kept_for_this_gpu_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "freight.machine")
    uuid = str(torch.cuda.get_device_properties().uuid)
    measured = probe(quick=True)
    [file] = cache_files()
    assert uuid in file.name
    data = json.loads(file.read_text())
    assert (data["identity"]["gpu"], data["identity"]["uuid"]) == (torch.cuda.get_device_name(), f"GPU-{uuid}")
    assert (data["identity"]["torch"], data["identity"]["driver"]) == (torch.__version__, measured.software.driver)

    data["machine"]["link"]["h2d_gbs"] = 1.25  # which nobody would measure here
    file.write_text(json.dumps(data))
    assert probe(quick=True).link.h2d_gbs == 1.25
    for field, other in (("driver", "1.0"), ("torch", "1.0"), ("uuid", "GPU-0"), ("cores", 1)):
        file.write_text(json.dumps(data | {"identity": data["identity"] | {field: other}}))
        caplog.clear()
        assert probe(quick=True).link.h2d_gbs != 1.25
        assert f"{file} is outdated: {field} was {other} and is {data['identity'][field]}" in caplog.text
        assert json.loads(file.read_text())["identity"] == data["identity"]


@pytest.mark.usefixtures("small")
def test_what_is_known_without_measuring() -> None:
    before = _known.known()
    defaults = _known.shipped(probe(quick=True).gpu.slug)
    assert (before is None) == (defaults is None)
    assert before is None or before.source == "shipped"
    after = _known.known()
    assert after is not None
    assert after.source == "measured"
    assert after.gpu.name == torch.cuda.get_device_name()


# ---- where it cannot work ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_a_forked_child_is_refused() -> None:
    torch.zeros(1, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
        pid = os.fork()
    if pid == 0:
        refused = 1
        try:
            signal.alarm(60)
            probe(quick=True)
        except ForkedError:
            refused = 0
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert probe(quick=True).complete


@pytest.mark.usefixtures("small")
def test_a_graph_cannot_capture_it() -> None:
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1  # an empty graph would be a warning
        with pytest.raises(UnsupportedError, match="a CUDA graph cannot capture; call it before"):
            probe(quick=True)
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 1000
    assert probe(quick=True).complete


def test_64_kib_that_can_be_locked(tmp_path: Path) -> None:
    """Drivers differ: some refuse to lock more, others do not heed the limit. Either is told, neither is an error."""
    few = 64 * KiB
    code = (
        f"import pathlib, resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, ({few}, {few})); "
        "from freight.machine import _doctor; "
        "sys.exit(_doctor.main(as_json=True, quick=True, refresh=False, directory=pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    host, link = told["machine"]["host"], told["machine"]["link"]
    [lockable] = [finding for finding in told["findings"] if finding["name"] == "lockable memory"]
    assert host["lockable_bytes"] == few
    if host["lock_exempt"]:
        assert (lockable["verdict"], link["absent"]) == ("pass", None)
    elif link["absent"] is None:
        assert (lockable["verdict"], host["limit_ignored"]) == ("warn", True)
    else:
        assert (lockable["verdict"], done.returncode) == ("fail", 1)
        assert "lockable memory is 64 KiB" in lockable["value"]
        assert "ulimit -l" in lockable["remedy"]
