"""`freight bench` as a whole, on a benchmark small enough for a test: exit statuses, records, what is printed."""

import dataclasses
import importlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import freight
from freight.bench import _code, _facts, _main, _registry
from freight.bench._main import main
from freight.bench._record import Record, load, save
from freight.bench.report import _markers
from freight.errors import ArgumentError, DiskError, RecordError

_numbers = itertools.count()
TINY = '''
"""Sums of a list, against a loop: cells sum/1 to sum/3, and in full runs sum/4; `on_call` is run by every call."""

import contextlib
from functools import partial

from freight.bench._registry import benchmark
from freight.bench._run import Way, Work, at_least, at_most

on_call = {}
calls = []


@benchmark("tiny", title="Tiny sums", measures=["freight._units"])
def tiny(run):
    for n in (1, 2, 3, 4):
        run.cell(f"sum/{n}", group="sum", axes={"n": n}, unit="ms", clock="host", work=partial(summing, n), pairs=3,
                 in_quick=n < 4, targets=[at_most(1e6), at_least(1e6, of="loop")] if n == 1 else [])


def summing(n):
    def call(inputs):
        calls.append(n)
        return on_call.get(n, sum)(inputs)

    rivals = (Way("loop", lambda inputs: sum(x for x in inputs)), Way("library", absent="nobody has it"))
    work = Work(Way("freight", call), lambda inputs, got: got == sum(inputs), "the sum", rivals, lambda: [n] * n)
    return contextlib.nullcontext(work)
'''


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the facts of this machine are kept from the first run on."""
    return tmp_path_factory.mktemp("machine")


@pytest.fixture(autouse=True)
def _probed_once(probed: Path) -> Iterator[None]:
    with freight.config(cache_dir=probed):
        yield


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"tiny_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(TINY)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "new" / "results"


def recorded(results: Path) -> Record:
    [file] = results.iterdir()  # and nothing else beside it
    return load(file)


def run(results: Path, **options: object) -> int:
    return main(["tiny"], json_dir=results, **options)  # type: ignore[arg-type]


# ---- what comes out --------------------------------------------------------------------------------


def test_record_says_everything(tiny: ModuleType, results: Path) -> None:
    assert run(results) == 0
    record = recorded(results)
    assert (record.benchmark, record.title) == ("tiny", "Tiny sums")
    assert [path.name for path in results.iterdir()] == [f"tiny.{record.gpu}.json"]
    assert record.gpu_name == _facts.gpu_name()
    assert record.machine["host"]["cores"] >= 1
    assert [cell.id for cell in record.cells] == [f"sum/{n}" for n in (1, 2, 3, 4)]
    for cell in record.cells:
        assert cell.subject.runs == 3
        assert [rival.absent for rival in cell.rivals] == [None, "nobody has it"]
        assert (cell.commit, cell.dirty) == _code.commit()
        assert cell.code == _registry.get("tiny").code()
        assert cell.versions.keys() >= {"python", "torch", "freight"}
        assert not cell.quick
        assert not _registry.stale(cell, "tiny")
    assert [target.met for target in record.cells[0].targets] == [True, False]


def test_print_says_what_matters(tiny: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(results)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("tiny · Tiny sums · ")
    assert "4 cells" in lines[0]
    assert "sum/1 ms, less is better, 3 rounds" in lines
    assert any(line.startswith("loop ") and "× (95 %: " in line for line in lines)
    assert "library absent: nobody has it" in lines
    assert any(line.startswith("met: ≤ 1,000,000 freight, ms; worse end ") for line in lines)
    assert any(line.startswith("missed: ≥ 1,000,000× against loop; worse end ") for line in lines)
    assert lines[-1] == f"tiny: 4 cells measured; 1 of 2 targets met; saved in {next(results.iterdir())}"


def test_parts_merge_into_one_record(tiny: ModuleType, results: Path) -> None:
    assert run(results, only="*/[13]") == 0
    before = recorded(results)
    assert [cell.id for cell in before.cells] == ["sum/1", "sum/3"]
    old = dataclasses.replace(before.cells[1], commit="older", date="2026-01-01T00:00:00+00:00")
    save(dataclasses.replace(before, cells=(before.cells[0], old)), next(results.iterdir()))
    assert run(results, only="tiny/sum/[12]") == 0  # with the benchmark's name or without it
    after = recorded(results)
    assert [cell.id for cell in after.cells] == ["sum/1", "sum/2", "sum/3"]
    assert after.cells[2] == old
    assert after.cells[0].subject.values != before.cells[0].subject.values


def test_cells_that_the_benchmark_no_longer_has_go(tiny: ModuleType, results: Path) -> None:
    run(results, only="sum/1")
    record = recorded(results)
    gone = dataclasses.replace(record.cells[0], id="sum/0")
    save(dataclasses.replace(record, cells=(gone, *record.cells)), next(results.iterdir()))
    run(results, only="sum/2")
    assert [cell.id for cell in recorded(results).cells] == ["sum/1", "sum/2"]


def test_quick_measures_less_and_never_replaces(
    tiny: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(results, only="sum/1")
    [full] = recorded(results).cells
    capsys.readouterr()
    assert run(results, quick=True) == 0
    after = recorded(results)
    assert [(cell.id, cell.quick) for cell in after.cells] == [("sum/1", False), ("sum/2", True), ("sum/3", True)]
    assert after.cells[0] == full
    printed = capsys.readouterr().out
    assert "quick: fewer and smaller, and marked so" in printed
    assert f"saved in {next(results.iterdir())}; 1 quick cell left out: " in printed
    run(results, quick=True, only="sum/1")
    assert "saved in" not in capsys.readouterr().out
    run(results, quick=True, only="sum/2")
    assert "left out" not in capsys.readouterr().out
    run(results)
    assert [cell.quick for cell in recorded(results).cells] == [False] * 4


def test_a_stale_cell_is_measured_anew(tiny: ModuleType, results: Path) -> None:
    run(results, only="sum/1")
    [cell] = recorded(results).cells
    module = Path(str(tiny.__file__))
    module.write_text(module.read_text() + "\nmore = 1\n")
    assert _registry.stale(cell, "tiny")
    run(results, only="sum/1")
    [again] = recorded(results).cells
    assert not _registry.stale(again, "tiny")


# ---- what goes wrong with a cell -------------------------------------------------------------------


def test_a_wrong_result_is_not_recorded(tiny: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.on_call[2] = lambda inputs: sum(inputs) + 1
    assert run(results) == 1
    assert [cell.id for cell in recorded(results).cells] == ["sum/1", "sum/3", "sum/4"]
    printed = capsys.readouterr().out
    assert "sum/2  FAILED: freight gave a wrong result (checked: the sum)" in printed
    assert "3 cells measured; 1 of 2 targets met; 1 cell FAILED, and not recorded; saved in" in printed


def test_a_wrong_result_leaves_the_cell_that_was_right(tiny: ModuleType, results: Path) -> None:
    run(results)
    before = recorded(results)
    tiny.on_call[2] = lambda inputs: None
    assert run(results, only="sum/2") == 1
    assert recorded(results) == before


def test_a_cell_that_breaks_says_where(tiny: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(inputs: list[int]) -> int:
        if tiny.calls.count(3) > 2:
            raise RuntimeError("the second round broke")
        return sum(inputs)

    tiny.on_call[3] = breaks
    assert run(results, only="sum/[34]") == 1
    assert [cell.id for cell in recorded(results).cells] == ["sum/4"]
    printed = capsys.readouterr().out
    assert "Traceback (most recent call last)" in printed
    assert "RuntimeError: the second round broke" in printed


def test_skipped_cells_are_listed(tiny: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from freight.bench._run import Skip

    def skip(n: int) -> None:
        raise Skip(f"no room for {n}")

    tiny.summing = skip
    assert run(results) == 0
    assert list(results.iterdir()) == []
    printed = capsys.readouterr().out
    assert "sum/1  not measured: no room for 1" in printed
    assert printed.endswith("tiny: 0 cells measured\n")


def test_interrupt_keeps_what_was_complete(tiny: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(inputs: list[int]) -> int:
        if tiny.calls.count(3) == 3:  # in the middle of its rounds
            os.kill(os.getpid(), signal.SIGINT)
        return sum(inputs)

    tiny.on_call[3] = interrupted
    assert run(results) == 130
    assert [cell.id for cell in recorded(results).cells] == ["sum/1", "sum/2"]
    assert "interrupted: 2 complete cells are saved in" in capsys.readouterr().out


# ---- what cannot begin -----------------------------------------------------------------------------


def test_unknown_name(tiny: ModuleType, results: Path) -> None:
    with pytest.raises(ArgumentError, match="no benchmark 'tinny'; did you mean 'tiny'"):
        main(["tiny", "tinny"], json_dir=results)
    assert tiny.calls == []


def test_pattern_that_matches_nothing(tiny: ModuleType, results: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no cell matches 'copy/\*'; quote a pattern (?s:.*)\n  tiny/sum/1\n"):
        run(results, only="copy/*")
    with pytest.raises(ArgumentError, match="no cell of a quick run matches 'sum/4'"):
        run(results, only="sum/4", quick=True)


def test_benchmark_without_cells(tiny: ModuleType, results: Path) -> None:
    _registry.benchmark("empty", title="Empty", measures=[])(lambda run: None)
    with pytest.raises(ArgumentError, match=r"^there is no cell in empty\.$"):
        main(["empty"], json_dir=results)


@pytest.mark.parametrize("text", ["", '{"schema": 1}', '{"schema": 99}'])
def test_corrupt_record_is_an_error_before_anything_is_measured(text: str, tiny: ModuleType, results: Path) -> None:
    run(results, only="sum/1")
    [file] = results.iterdir()
    file.write_text(text)
    tiny.calls.clear()
    with pytest.raises(RecordError, match=rf"record {file}.*Restore it from version control"):
        run(results)
    assert tiny.calls == []
    assert file.read_text() == text


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/self"])
def test_folder_that_cannot_be_written(place: str, tiny: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"; name another (folder )?with --json") as caught:
        run(tmp_path / place)
    assert caught.value.filename == str(tmp_path / place)
    assert tiny.calls == []


def test_disk_that_is_full_in_the_end(tiny: ModuleType, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved before stays whole."""
    real, turns = os.fsync, itertools.count()

    def fsync(fd: int) -> None:
        if next(turns) == 2:
            raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DiskError, match="record could not be saved"):
        run(results)
    assert [cell.id for cell in recorded(results).cells] == ["sum/1", "sum/2"]


# ---- tables, tuning --------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the test's own, with a table in its README."""
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("# x\n<!-- freight:table tiny/sum -->\n<!-- freight:end -->\n")
    for module in (_main, _markers):
        monkeypatch.setattr(module, "checkout", lambda: root)
    return root


def test_records_of_a_checkout_lie_in_it(tiny: ModuleType, checkout: Path) -> None:
    assert main(["tiny"], only="sum/1") == 0
    assert [cell.id for cell in recorded(checkout / "benchmarks" / "results").cells] == ["sum/1"]


def test_update_brings_tables_up_to_date(tiny: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny"], update=True) == 0
    assert "\nupdated README.md\n" in capsys.readouterr().out
    assert "| freight (ms) |" in (checkout / "README.md").read_text()
    tiny.calls.clear()
    assert main([], update=True) == 0  # and measures nothing
    assert tiny.calls == []
    assert capsys.readouterr().out == "every table is up to date\n"


def test_without_a_checkout(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_main, "checkout", lambda: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="tables are updated in a checkout of freight"):
        main(["tiny"], update=True)
    assert tiny.calls == []
    assert main(["tiny"], only="sum/1") == 0
    assert [cell.id for cell in recorded(tmp_path / "benchmarks" / "results").cells] == ["sum/1"]
    assert "freight is not run from a checkout: records go to" in capsys.readouterr().out


@pytest.mark.parametrize("names", [[], ["tiny"]])
def test_tune_alone_measures_no_benchmark(
    names: list[str], tiny: ModuleType, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from freight.kernels import _tune

    monkeypatch.setattr(_tune, "main", lambda: 1)
    assert main(names, tune=True, json_dir=results) == 1
    assert bool(tiny.calls) == bool(names)


def test_all_benchmarks_unless_named(tiny: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pattern that only one of them has leaves the others unmeasured, and makes no record of them."""
    assert main([], only="tiny/sum/1", json_dir=results) == 0
    assert [path.name.partition(".")[0] for path in results.iterdir()] == ["tiny"]
    assert "links" not in capsys.readouterr().out


def test_record_is_what_its_schema_says(tiny: ModuleType, results: Path) -> None:
    from jsonschema import Draft202012Validator

    schema = json.loads((Path(__file__).parents[3] / "benchmarks" / "schema.json").read_text(encoding="utf-8"))
    run(results, quick=True)
    data = json.loads(next(results.iterdir()).read_text(encoding="utf-8"))
    assert list(Draft202012Validator(schema).iter_errors(data)) == []
