"""`probe()` without a GPU, really measured; and with one, as far as order and refusals go, that is played."""

import contextlib
import dataclasses
import json
import logging
import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import freight
from freight import _cuda, _direct
from freight._config import current
from freight._units import GiB, MiB
from freight.errors import ArgumentError, ArgumentTypeError, ForkedError, PinError, UnsupportedError
from freight.machine import (
    Compute,
    Link,
    Machine,
    Reads,
    _cache,
    _compute,
    _disk,
    _gpu,
    _host,
    _link,
    _probe,
    _tables,
    probe,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def _quickly(small: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """In milliseconds, on a directory of the test's own, with all that is logged."""
    caplog.set_level(logging.INFO, "freight.machine")
    (tmp_path / "disk").mkdir()
    with freight.config(disk_dir=tmp_path / "disk"):
        yield


def cache_files() -> list[Path]:
    return sorted(current().cache_home.glob("**/*"))


class Measured:
    """What was measured since the last look: the names of the parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._parts: list[str] = []
        for module, name, part in (
            (_host, "memcpy_gbs", "host"),
            (_compute, "measure", "compute"),
            (_link, "measure", "link"),
            (_tables, "measure", "reads"),
            (_disk, "measure", "disk"),
        ):
            self._watch(monkeypatch, module, name, part)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str, part: str) -> None:
        real = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            self._parts.append(part)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    def parts(self) -> list[str]:
        parts = self._parts.copy()
        self._parts.clear()
        return parts


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


# ---- without a GPU -----------------------------------------------------------------------------------


def test_it_reports_what_there_is(tmp_path: Path) -> None:
    machine = probe()
    assert machine.gpu.absent
    for part in (machine.link, machine.reads, machine.compute):
        assert part.absent == f"there is no GPU: {machine.gpu.absent}"
    assert machine.complete
    assert (machine.source, machine.quick) == ("measured", False)
    assert machine.software.torch == torch.__version__
    assert machine.host.cores == len(os.sched_getaffinity(0))
    assert 0 < (machine.host.available_bytes or 0) <= (machine.host.memory_bytes or 0) <= psutil.virtual_memory().total
    assert (machine.host.memcpy_gbs or 0) > 0
    assert machine.disk.directory == str(tmp_path / "disk")
    assert machine.disk.absent is None or machine.disk.direct is False
    assert machine.date
    assert machine.seconds is not None
    assert Machine.from_json(machine.json()) == machine
    assert list((tmp_path / "disk").iterdir()) == []


def test_the_second_call_measures_nothing(measured: Measured) -> None:
    first = probe()
    assert measured.parts() == ["host", "disk"]
    second = probe()
    if first.disk.absent is None:
        assert measured.parts() == []
    assert (second.date, second.host.memcpy_gbs, second.disk.rates) == (
        first.date,
        first.host.memcpy_gbs,
        first.disk.rates,
    )


def test_another_process_reads_the_file(measured: Measured) -> None:
    """All that a new process has is the file: here it is written by hand, with figures that nobody could measure."""
    probe()
    measured.parts()
    [file] = [path for path in cache_files() if path.is_file()]
    assert file.name.startswith("cpu-")
    data = json.loads(file.read_text())
    data["machine"]["host"]["memcpy_gbs"] = 123456.0
    file.write_text(json.dumps(data))
    assert probe().host.memcpy_gbs == 123456.0
    assert "host" not in measured.parts()


def test_refresh_measures_again(measured: Measured) -> None:
    probe()
    measured.parts()
    again = probe(refresh=True)
    assert measured.parts() == ["host", "disk"]
    assert not again.quick


def test_quick_and_then_full(measured: Measured) -> None:
    """A quick probe serves those who ask for one, a full one serves all, and none is replaced by a quicker one."""
    assert probe(quick=True).quick
    assert measured.parts() == ["host", "disk"]
    assert probe(quick=True).quick
    assert "host" not in measured.parts()
    assert not probe().quick
    assert measured.parts() == ["host", "disk"]
    assert not probe(quick=True).quick
    assert "host" not in measured.parts()

    full = probe()
    measured.parts()
    anew = probe(quick=True, refresh=True)
    assert measured.parts() == ["host", "disk"]
    assert anew.quick
    kept = probe()
    assert (kept.quick, kept.host.memcpy_gbs) == (False, full.host.memcpy_gbs)
    assert "host" not in measured.parts()


def test_a_corrupt_file_is_replaced(measured: Measured, caplog: pytest.LogCaptureFixture) -> None:
    first = probe()
    [file] = [path for path in cache_files() if path.is_file()]
    file.write_bytes(file.read_bytes()[:100])
    measured.parts()
    assert probe().complete
    assert "host" in measured.parts()
    assert f"{file} is ignored: machine facts are not JSON" in caplog.text
    caplog.clear()
    assert probe().software == first.software
    assert "host" not in measured.parts()
    assert "is ignored" not in caplog.text


def test_an_outdated_file_is_replaced(
    measured: Measured, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe()
    measured.parts()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert probe().software.torch == "9.9.9"
    assert "host" in measured.parts()
    assert "is outdated: torch was " in caplog.text
    probe()
    assert "host" not in measured.parts()


def test_a_cache_that_cannot_be_written_costs_a_warning(
    unwritable: Path, measured: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    with freight.config(cache_dir=unwritable):
        assert probe().complete
        measured.parts()
        assert probe().complete
    assert "host" in measured.parts()  # nothing was kept
    assert "what was measured is not kept" in caplog.text


def test_too_little_memory_is_a_reason_and_no_error(
    measured: Measured, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(_host, "memory", lambda: (GiB, 4 * MiB))
        machine = probe()
    assert machine.host.memcpy_gbs is None
    assert "too little to measure a copy" in (machine.host.absent or "")
    assert not machine.complete
    assert "host was not measured: 4 MiB of host memory are available" in caplog.text


def test_what_could_not_be_measured_is_tried_again(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(_host, "memcpy_gbs", lambda available, budget: 1 / 0)
        assert probe().host.absent == "division by zero"
    assert probe().host.absent is None
    measured.parts()
    assert probe().host.absent is None
    assert "host" not in measured.parts()


def test_random_numbers_go_on_as_they_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    probe(refresh=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), torch.get_num_threads()) == states[1:]


# ---- directories ------------------------------------------------------------------------------------------


def test_each_directory_is_measured_once(tmp_path: Path, measured: Measured) -> None:
    places = [tmp_path / "disk", tmp_path / "two"]
    places[1].mkdir()
    first = [probe(directory=place).disk for place in places]
    if any(disk.absent for disk in first):
        pytest.skip(f"needs a disk with O_DIRECT for temporary files: {first[0].absent}")
    assert measured.parts() == ["host", "disk", "disk"]
    assert [disk.directory for disk in first] == [str(place) for place in places]
    assert [probe(directory=str(place)).disk.rates for place in places] == [disk.rates for disk in first]
    assert measured.parts() == []


def test_a_directory_goes_by_its_absolute_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert {probe(directory=name).disk.directory for name in ("disk", "./disk/../disk", "~/disk")} == {
        str(tmp_path / "disk")
    }


def test_a_directory_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = probe(directory=tmp_path / "none")
    assert (machine.disk.absent, machine.disk.direct) == ("No such file or directory", None)
    assert machine.complete  # of the rest
    assert f"the disk under {tmp_path / 'none'} was not measured: No such file or directory" in caplog.text
    assert not (tmp_path / "none").exists()


def test_a_directory_that_has_gone(tmp_path: Path) -> None:
    """What was measured there once is not told of a place that is no more."""
    (tmp_path / "usb").mkdir()
    probe(directory=tmp_path / "usb")
    (tmp_path / "usb").rmdir()
    found = probe(directory=tmp_path / "usb").disk
    assert (found.absent, found.rates) == ("No such file or directory", ())


def test_a_directory_that_cannot_be_written(unwritable: Path) -> None:
    found = probe(directory=unwritable).disk
    assert found.direct is None
    assert (found.absent or "").startswith("freight's disk file cannot be made (")


def test_a_full_disk(mount) -> None:
    place = mount("tmpfs", "size=512k")
    found = probe(directory=place).disk
    assert (found.absent or "").startswith("only 512 KiB are free; free some")
    (place / "ballast").write_bytes(bytes(500 * 1024))
    assert probe(directory=place).disk.free_bytes == 12 * 1024


def test_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are a legal file name, and come back from the cache as they were."""
    place = tmp_path / "caf\udce9"
    place.mkdir()
    assert probe(directory=place).disk.directory == str(place)
    assert probe(directory=place).disk.directory == str(place)


@pytest.mark.parametrize("directory", [3, b"/tmp", ["/tmp"], True])
def test_what_is_no_path(directory: object) -> None:
    with pytest.raises(ArgumentTypeError, match="directory must be a path; got"):
        probe(directory=directory)  # type: ignore[arg-type]


@pytest.mark.parametrize("directory", ["", "a\0b"])
def test_what_names_nothing(directory: str) -> None:
    with pytest.raises(ArgumentError, match="directory must name a directory; got"):
        probe(directory=directory)


# ---- interruptions and forks ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_ctrl_c_in_the_middle_leaves_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    module, name = {"memory": (_host, "best_seconds"), "disk": (_direct, "open_nameless")}[where]
    real = getattr(module, name)

    def interrupted(*args: object, **kwargs: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            probe()
    assert [path for path in cache_files() if path.is_file()] == []
    assert list((tmp_path / "disk").iterdir()) == []
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
    assert probe().complete


def test_ctrl_c_keeps_what_was_known(monkeypatch: pytest.MonkeyPatch, measured: Measured) -> None:
    before = probe()
    with monkeypatch.context() as patched:
        patched.setattr(_disk, "measure", lambda *args, **rest: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            probe(refresh=True)
    measured.parts()
    assert probe().host.memcpy_gbs == before.host.memcpy_gbs
    assert "host" not in measured.parts()


def test_a_forked_child_is_refused(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch tells it in a child of a process that had used CUDA."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ForkedError, match=r"freight\.machine\.probe\(\) needs CUDA, which does not work in process"):
        probe()
    assert measured.parts() == []


def test_a_fork_without_cuda_is_nothing_special() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(60)
            torch.set_num_threads(1)  # as a DataLoader's workers do: OpenMP's threads did not come along
            status = 0 if probe().complete else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len([path for path in cache_files() if path.is_file()]) == 1


def test_many_threads_at_once() -> None:
    found, errors = [], []

    def run() -> None:
        try:
            found.append(probe())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(found) == 4
    assert all(machine.complete for machine in found)
    assert len([path for path in cache_files() if path.is_file()]) == 1


# ---- with a GPU that torch plays ----------------------------------------------------------------------------


class Played:
    """A GPU as far as order and refusals go: figures are given, and memory is locked on a list."""

    def __init__(self, h200: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = h200.gpu
        self.locked: list[int] = []
        self.refusal: Exception | None = None
        self.broken: dict[str, Exception] = {}
        for module, part in ((_compute, h200.compute), (_link, h200.link), (_tables, h200.reads)):
            monkeypatch.setattr(module, "measure", lambda *args, part=part: self._give(part))
        monkeypatch.setattr(_gpu, "facts", lambda: self.gpu)
        monkeypatch.setattr(_probe, "_undisturbed", contextlib.nullcontext)
        monkeypatch.setattr(_cuda, "register", self._register)
        monkeypatch.setattr(_cuda, "unregister", lambda address: address in self.locked and self.locked.remove(address))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def _give(self, part: Compute | Link | Reads) -> Compute | Link | Reads:
        name = type(part).__name__.lower()
        if name in self.broken:
            raise self.broken[name]
        assert bool(self.locked) == (name != "compute")
        return part

    def _register(self, address: int, nbytes: int) -> None:
        if self.refusal:
            raise self.refusal
        self.locked.append(address)


@pytest.fixture
def played(h200: Machine, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(h200, monkeypatch)


def test_everything_of_a_gpu_is_measured_once(played: Played, h200: Machine, measured: Measured) -> None:
    machine = probe(quick=True)
    assert measured.parts() == ["host", "compute", "link", "reads", "disk"]
    assert (machine.link, machine.reads, machine.compute) == (h200.link, h200.reads, h200.compute)
    assert machine.complete
    assert played.locked == []
    [file] = [path for path in cache_files() if path.is_file()]
    assert file.name == "nvidia-h200-gpu-3f1c.json"
    probe(quick=True)
    assert {"host", "compute", "link", "reads"} & set(measured.parts()) == set()


def test_another_gpu_is_another_machine(played: Played, measured: Measured) -> None:
    probe(quick=True)
    measured.parts()
    played.gpu = dataclasses.replace(played.gpu, uuid="GPU-77aa")
    probe(quick=True)
    assert "compute" in measured.parts()
    assert len([path for path in cache_files() if path.is_file()]) == 2


def test_free_memory_is_that_of_today(played: Played) -> None:
    probe(quick=True)
    played.gpu = dataclasses.replace(played.gpu, free_bytes=7)
    assert probe(quick=True).gpu.free_bytes == 7


@pytest.mark.parametrize("part", ["compute", "link", "reads"])
def test_one_part_that_fails_costs_no_other(part: str, played: Played, caplog: pytest.LogCaptureFixture) -> None:
    played.broken[part] = RuntimeError("CUDA error: it broke\nand many lines of advice")
    machine = probe(quick=True)
    absent = {name: getattr(machine, name).absent for name in ("compute", "link", "reads")}
    assert absent == {**dict.fromkeys(absent), part: "CUDA error: it broke"}
    assert not machine.complete
    assert f"{part} was not measured: CUDA error: it broke" in caplog.text
    assert played.locked == []
    played.broken.clear()
    assert probe(quick=True).complete


def test_memory_that_cannot_be_locked_is_told(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    """64 KiB lockable, and a driver that heeds it."""
    played.refusal = PinError("cudaHostRegister refused 67108864 bytes at 0x7f: error 2, out of memory")
    shared = psutil.Process().memory_info().shared
    machine = probe(quick=True)
    assert machine.link.absent == machine.reads.absent == str(played.refusal)
    assert machine.compute.absent is None
    assert not machine.host.limit_ignored
    assert f"no memory could be page-locked: {played.refusal}" in caplog.text
    assert psutil.Process().memory_info().shared - shared < 32 * MiB  # the block is gone


@pytest.mark.parametrize(
    ("limit", "exempt", "ignored"), [(64 * 1024, False, True), (64 * 1024, True, False), (None, False, False)]
)
def test_a_driver_that_ignores_the_limit_is_seen(
    limit: int | None, exempt: bool, ignored: bool, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _host.facts
    monkeypatch.setattr(_host, "facts", lambda: dataclasses.replace(real(), lockable_bytes=limit, lock_exempt=exempt))
    assert probe(quick=True).host.limit_ignored == ignored
    assert probe(quick=True).host.limit_ignored == ignored  # from the cache too


def test_too_little_memory_to_lock(played: Played) -> None:
    with freight.config(host_bytes=MiB):
        machine = probe(quick=True)
    assert "needs 64 MiB of page-locked memory" in (machine.link.absent or "")
    assert machine.reads.absent == machine.link.absent


def test_ctrl_c_leaves_nothing_locked(played: Played, measured: Measured) -> None:
    played.broken["reads"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        probe(quick=True)
    assert played.locked == []
    assert [path for path in cache_files() if path.is_file()] == []


def test_a_graph_cannot_capture_it(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="a CUDA graph cannot capture; call it before"):
        probe()
    assert measured.parts() == []


def test_the_cache_is_asked_for_the_machine_that_is_here(played: Played) -> None:
    probe(quick=True)
    now = _probe.facts()
    entry = _cache.load(_cache.Identity.of(now.software, now.gpu, now.host))
    assert entry is not None
    assert (entry.identity.uuid, entry.identity.gpu) == (played.gpu.uuid, "NVIDIA H200")
    assert entry.identity.torch == torch.__version__
