"""What is known without measuring: this computer's own figures, else those of its GPU model, else nothing."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

import freight
from freight._config import current
from freight.machine import Gpu, Machine, _budget, _disk, _gpu, _known, _probe, probe
from freight.machine._cache import Identity
from freight.machine._known import forget, known, shipped

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def _an_h200(h200: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that this computer says it has."""
    monkeypatch.setattr(_gpu, "facts", lambda: h200.gpu)


@pytest.fixture
def _never_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(_probe, "_measure", measured)
    monkeypatch.setattr(_disk, "measure", measured)


@pytest.mark.usefixtures("_never_measures")
def test_nothing_is_known_of_a_machine_never_met() -> None:
    assert known() is None


@pytest.mark.usefixtures("_an_h200", "_never_measures")
def test_defaults_for_a_known_model(h200: Machine) -> None:
    found = known()
    assert found is not None
    assert (found.source, found.link.h2d_gbs, found.compute.bf16_tflops) == ("shipped", 55.5, 675.0)
    assert found.gpu == h200.gpu  # the GPU itself is the one that is here
    assert found.host.cores == len(os.sched_getaffinity(0))
    assert found.software.python.startswith("3.")
    assert (found.disk.directory, found.disk.write_gbs) == (None, 4.4)


@pytest.mark.usefixtures("_never_measures")
def test_no_defaults_for_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu, "facts", lambda: Gpu(name="NVIDIA Z9", slug="z9", uuid="GPU-1"))
    assert known() is None


def test_what_is_shipped() -> None:
    assert shipped(None) is None
    assert shipped("z9") is None
    assert shipped("cpu") is None
    found = shipped("h200")
    assert found is not None
    assert found.source == "shipped"
    assert found.reads.reach_bytes == 256 * 2**20


def test_every_file_that_is_shipped_can_be_read() -> None:
    files = sorted((Path(_known.__file__).parent / "defaults").iterdir())
    assert [file.name for file in files] == ["h200.json"]
    for file in files:
        found = shipped(file.stem)
        assert found is not None
        assert found.gpu.slug == file.stem
        assert found.complete


@pytest.mark.usefixtures("small")
def test_what_was_measured_here_is_known(tmp_path: Path) -> None:
    with freight.config(disk_dir=tmp_path):
        assert known() is None
        measured = probe(quick=True)
        found = known()
    assert found is not None
    assert found.source == "measured"
    assert (found.host.memcpy_gbs, found.disk.rates) == (measured.host.memcpy_gbs, measured.disk.rates)
    assert found.date == measured.date


@pytest.mark.usefixtures("small")
def test_a_disk_that_was_not_measured_is_not_known(tmp_path: Path) -> None:
    probe(quick=True, directory=tmp_path)
    (tmp_path / "other").mkdir()
    with freight.config(disk_dir=tmp_path):
        here = known()
    with freight.config(disk_dir=tmp_path / "other"):
        there = known()
    assert here is not None
    assert there is not None
    assert here.disk.directory == str(tmp_path)
    assert there.disk.absent == f"{tmp_path / 'other'} was not measured; run `freight doctor`"
    assert (there.disk.rates, there.host.memcpy_gbs) == ((), here.host.memcpy_gbs)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("path", ["here/../here", "here/.", "./here"])
def test_a_directory_goes_by_one_name(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with freight.config(disk_dir=path):
        probe(quick=True)
        found = known()
    assert found is not None
    assert found.disk.directory == str(tmp_path / "here")


@pytest.mark.usefixtures("small")
def test_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with freight.config(disk_dir=tmp_path):
        probe(quick=True)
        first = known()
        monkeypatch.setattr(_known, "_look", lambda: pytest.fail("the cache was read again"))
        assert known() is first


@pytest.mark.usefixtures("small")
def test_each_cache_directory_has_its_own(tmp_path: Path) -> None:
    probe(quick=True, directory=tmp_path)
    with freight.config(cache_dir=tmp_path / "empty"):
        assert known() is None
    assert known() is not None


@pytest.mark.usefixtures("small")
def test_a_new_probe_is_seen_at_once(tmp_path: Path) -> None:
    with freight.config(disk_dir=tmp_path):
        probe(quick=True)
        assert known() is not None
        assert known().quick  # type: ignore[union-attr]
        probe()
        assert not known().quick  # type: ignore[union-attr]


@pytest.mark.usefixtures("small", "_an_h200")
def test_a_corrupt_cache_gives_the_defaults(h200: Machine) -> None:
    software, host = _probe.facts().software, _probe.facts().host
    file = Identity.of(software, h200.gpu, host).file
    file.parent.mkdir(parents=True)
    file.write_text("{ not JSON")
    found = known()
    assert found is not None
    assert found.source == "shipped"


@pytest.mark.usefixtures("small")
def test_what_changes_from_hour_to_hour_is_read_afresh(tmp_path: Path) -> None:
    """The file's own figures for free memory and free disk are never believed."""
    with freight.config(disk_dir=tmp_path):
        probe(quick=True)
        [file] = current().cache_home.glob("machine/*.json")
        data = json.loads(file.read_text())
        data["machine"]["host"]["available_bytes"] = 12345
        for disk in (data["machine"]["disk"], *data["disks"]):  # none is kept where it has no direct I/O
            disk["free_bytes"] = 12345
        file.write_text(json.dumps(data))
        forget()
        found = known()
    assert found is not None
    assert 12345 not in (found.host.available_bytes, found.disk.free_bytes)
    assert found.disk.free_bytes


def test_budgets_are_ordered() -> None:
    """What quick measures, full measures too; so figures of both can be compared."""
    quick, full = _budget.QUICK, _budget.FULL
    for field in dataclasses.fields(quick):
        few, many = getattr(quick, field.name), getattr(full, field.name)
        if isinstance(few, tuple):
            assert set(few) <= set(many), field.name
        elif field.name != "quick":
            assert few <= many, field.name
