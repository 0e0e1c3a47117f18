"""freight's own benchmarks: what they declare, and what they do on a computer without a GPU."""

import itertools
import os
from functools import partial
from pathlib import Path

import pytest
import torch

import freight
from freight import _direct
from freight._units import KiB, MiB
from freight.bench import _registry, disk, links
from freight.bench._main import main
from freight.bench._measure import Stamp, WrongResult, measure
from freight.bench._record import Cell, load
from freight.bench._run import Case, Run, Skip
from freight.errors import DirectIOError
from freight.memory import DiskFile

STAMP = Stamp("unknown", False, "sha256:0", lambda: "2026-11-18T10:20:30+00:00", {}, quick=True)


def declared(name: str, *, quick: bool, gpu: bool) -> list[Case]:
    """The cells; whether there is a GPU does not matter to declaring them."""
    run = Run(quick=quick, gpu=gpu)
    _registry.get(name).function(run)
    return run.cases


# ---- what is declared ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", _registry._BUILT_IN)
def test_quick_or_not_the_cells_are_the_same(name: str, gpu: bool) -> None:
    full, quick = (declared(name, quick=quick, gpu=gpu) for quick in (False, True))
    for part in ("id", "group", "unit", "clock", "targets"):
        assert [getattr(case, part) for case in full] == [getattr(case, part) for case in quick]
    assert any(case.in_quick for case in quick)
    assert sum(case.seconds for case in quick if case.in_quick) <= 60
    assert all(one.amount >= other.amount for one, other in zip(full, quick, strict=True))
    assert [case.axes.keys() for case in full] == [case.axes.keys() for case in quick]


def test_links_has_what_must_be_reached() -> None:
    """Copies each way at 98 % of torch, both at once at 95 GB/s, pinning 32 GiB at 4 GB/s."""
    goals = {case.id: [(g.at_least, g.of) for g in case.targets] for case in declared("links", quick=False, gpu=True)}
    for direction in ("h2d", "d2h"):
        assert goals[f"copy/{direction}/1GiB"] == goals[f"copy/{direction}/256MiB"] == [(0.98, "torch pin_memory")]
    assert goals["copy/both/1GiB"] == [(95.0, None)]
    assert goals["pin/32GiB"] == [(4.0, None)]


def test_disk_has_what_must_be_reached() -> None:
    cases = declared("disk", quick=False, gpu=True)
    assert {case.id: [(g.at_least, g.of) for g in case.targets] for case in cases if case.targets} == {
        "write": [(0.9, "raw O_DIRECT")],
        "read": [(0.9, "raw O_DIRECT")],
    }
    assert {case.axes["tensor_on"] for case in cases} == {"cuda"}


def test_without_a_gpu_nothing_needs_one() -> None:
    for name in _registry._BUILT_IN:
        for case in declared(name, quick=False, gpu=False):
            assert case.clock == "host"
            assert case.targets == ()


# ---- links, for real -------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the gpu lane runs its cells")
def test_links_runs(tmp_path: Path) -> None:
    assert main(["links"], quick=True, json_dir=tmp_path) == 0
    record = load(tmp_path / "links.cpu.json")
    assert [cell.id for cell in record.cells] == ["copy/host/64MiB", "pin/256MiB"]
    for cell in record.cells:
        assert cell.subject.median > 0.05
        assert cell.rivals[0].measured is not None


@pytest.mark.parametrize("nbytes", [4 * KiB, MiB])
def test_host_copy_of_any_size(nbytes: int) -> None:
    cell = measured("copy", partial(links._copying_on_host, nbytes), nbytes)
    assert [rival.name for rival in cell.rivals] == ["torch"]


def test_host_copy_that_copies_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real, turns = torch.Tensor.copy_, itertools.count()
    first = lambda to, of: real(to, of) if next(turns) == 0 else to  # noqa: E731  # the one that fills the source
    monkeypatch.setattr(torch.Tensor, "copy_", first)
    with pytest.raises(WrongResult, match="freight gave a wrong result"):
        measured("copy", partial(links._copying_on_host, MiB), MiB)


def test_pinning_needs_room() -> None:
    with pytest.raises(Skip, match=r"it takes 512 TiB of host memory and .* are available"):
        measured("pin", partial(links._pinning, 2**49, on_gpu=False), 1)


def measured(name: str, work, nbytes: int) -> Cell:
    run = Run(quick=True, gpu=False)
    run.cell(name, group=name, axes={}, unit="GB/s", amount=nbytes, clock="host", work=work, pairs=3)
    return measure(run.cases[0], STAMP)


# ---- disk, for real --------------------------------------------------------------------------------


@pytest.fixture
def real_disk() -> None:
    directory = _direct.default_directory()
    try:
        DiskFile(MiB, directory=directory).close()
    except DirectIOError as error:
        pytest.skip(f"needs a disk with O_DIRECT: {error}")


@pytest.mark.usefixtures("real_disk")
@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("against", [disk._RAW, disk._TORCH])
def test_disk_runs(operation: str, against: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [disk._Setting(2, 256 * KiB), disk._Setting(3, 128 * KiB)]  # so that each thread has several blocks
    monkeypatch.setattr(disk, "_SETTINGS", small)
    work = {"write": disk._writing, "read": disk._reading}[operation]
    cell = measured(operation, partial(work, against, 2 * MiB, MiB // 4, "cpu"), 2 * MiB)
    [rival] = cell.rivals
    assert rival.measured
    assert rival.name.startswith(against)
    of_raw = {"raw_threads", "raw_block_bytes"} if against == disk._RAW else set()
    assert cell.extra.keys() == {"clock", "file_system"} | of_raw


@pytest.mark.usefixtures("real_disk")
@pytest.mark.parametrize(
    ("call", "guilty"), [("write", "freight"), ("move", "raw O_DIRECT"), ("save", "torch.save, fsync")]
)
def test_disk_write_that_writes_nothing_is_found_out(call: str, guilty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"write": disk._Place, "move": disk._RawFile, "save": disk._SavedFile}[call]
    monkeypatch.setattr(place, call, lambda *_, **__: None)
    against = disk._TORCH if call == "save" else disk._RAW
    with pytest.raises(WrongResult, match=f"^{guilty} "):
        measured("write", partial(disk._writing, against, 2 * MiB, MiB, "cpu"), 2 * MiB)


@pytest.mark.usefixtures("real_disk")
def test_what_was_written_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for the best setting writes the file; a check that came upon those bytes would see nothing wrong."""
    real, turns = disk._RawFile.move, itertools.count()

    def move(self, call, setting, nbytes=None) -> None:
        if call is os.preadv or nbytes is not None or next(turns) == 0:
            real(self, call, setting, nbytes)

    monkeypatch.setattr(disk._RawFile, "move", move)
    with pytest.raises(WrongResult, match=r"^raw O_DIRECT gave a wrong result"):
        measured("write", partial(disk._writing, disk._RAW, 2 * MiB, MiB, "cpu"), 2 * MiB)


@pytest.mark.usefixtures("real_disk")
def test_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with freight.config(disk_dir=tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        measured("read", partial(disk._reading, disk._RAW, MiB, MiB // 4, "cpu"), MiB)
        assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def test_disk_needs_direct_io() -> None:
    with freight.config(disk_dir="/dev/shm", direct_io=False), pytest.raises(Skip, match="direct I/O is not in force"):
        measured("write", partial(disk._writing, disk._RAW, MiB, MiB, "cpu"), MiB)


def test_disk_needs_room() -> None:
    with pytest.raises(Skip, match=r"it takes 3584 TiB of disk and .* free"):
        measured("write", partial(disk._writing, disk._RAW, 2**50, MiB, "cpu"), 1)
