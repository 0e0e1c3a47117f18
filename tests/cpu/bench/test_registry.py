"""Benchmarks by name: freight's own, others, misspelt ones, and cells that are older than the code they measured."""

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freight.bench._record import Cell, Measured
from freight.bench._registry import benchmark, get, names, stale
from freight.errors import ArgumentError

_numbers = itertools.count()
ONE = Measured("freight", 1.0, 1.0, 1.0, 1, (1.0,))
BENCHMARK = """
from freight.bench._registry import benchmark

@benchmark("sums", title="Sums", measures=["{measured}"])
def sums(run):
    pass
"""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The files of a registered benchmark `sums` and of what it measures."""
    measuring, measured = (tmp_path / f"{name}_{next(_numbers)}.py" for name in ("sums", "adding"))
    measured.write_text("def add(a, b):\n    return a + b\n")
    measuring.write_text(BENCHMARK.format(measured=measured.stem))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(measuring.stem)
    yield measuring, measured
    del sys.modules[measuring.stem]


def cell(code: str) -> Cell:
    return Cell("a", "g", {}, "s", "lower", ONE, (), (), "all", "commit", False, "2026-11-18", code, {})


def test_own_benchmarks_are_there_before_they_are_imported() -> None:
    assert names()[:2] == ["links", "disk"]
    for name in ("links", "disk"):
        found = get(name)
        assert found.name == name
        assert found.title
        assert f"freight.bench.{name}" in found.measures


def test_registered_benchmark_is_found(sums: tuple[Path, Path]) -> None:
    measuring, measured = sums
    assert names()[-1] == "sums"
    assert get("sums").measures == tuple(sorted([measuring.stem, measured.stem]))


@pytest.mark.parametrize(("name", "near"), [("link", "links"), ("disks", "disk"), ("sum", "sums")])
def test_misspelt_name(name: str, near: str, sums: tuple[Path, Path]) -> None:
    with pytest.raises(ArgumentError, match=rf"no benchmark '{name}'; did you mean '{near}'\? There are: links, disk"):
        get(name)


def test_name_like_no_other() -> None:
    with pytest.raises(ArgumentError, match=r"^there is no benchmark 'qqq'; There are: links, disk"):
        get("qqq")


def test_a_name_is_taken_once(sums: tuple[Path, Path]) -> None:
    with pytest.raises(ArgumentError, match=rf"there is a benchmark 'sums' already, in {sums[0].stem}\."):
        benchmark("sums", title="Other", measures=[])(lambda run: None)
    before = get("sums")
    importlib.reload(sys.modules[sums[0].stem])  # the same module may register it again
    assert dataclasses.replace(get("sums"), function=before.function) == before


def test_stale_after_a_change_of_what_is_measured(sums: tuple[Path, Path]) -> None:
    _, measured = sums
    today = cell(get("sums").code())
    assert not stale(today, "sums")
    measured.write_text("# how sums are made\ndef add(a, b):\n\n    return a + b\n")
    assert not stale(today, "sums")
    measured.write_text("def add(a, b):\n    return b + a\n")
    assert stale(today, "sums")
    assert not stale(cell(get("sums").code()), "sums")


def test_stale_after_a_change_of_the_benchmark(sums: tuple[Path, Path]) -> None:
    measuring, _ = sums
    today = cell(get("sums").code())
    measuring.write_text(measuring.read_text().replace("pass", "return"))
    assert stale(today, "sums")


def test_stale_without_its_code(sums: tuple[Path, Path]) -> None:
    today = cell(get("sums").code())
    assert stale(today, "a benchmark that is gone")
    sums[1].unlink()
    assert stale(today, "sums")
