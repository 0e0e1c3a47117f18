"""The doctor: a table that loses nothing however narrow, JSON that holds everything, a status for scripts."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import freight
from freight.machine import Disk, Link, Machine, Reads, _doctor
from freight.machine._judge import FAIL, PASS, WARN, Finding, judge

pytestmark = pytest.mark.usefixtures("alone")


def printed(machine: Machine, width: int = 100, findings: list[Finding] | None = None) -> str:
    out = io.StringIO()
    _doctor.show(machine, judge(machine) if findings is None else findings, Console(file=out, width=width))
    return out.getvalue()


def failing(machine: Machine) -> Machine:
    return dataclasses.replace(machine, link=Link("refused"), reads=Reads("refused"))


def test_a_table_for_people(h200: Machine) -> None:
    text = printed(failing(h200), 120)
    assert "\nGPU and link" in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert "ok    Python                  3.12.11" in lines
    [at] = [number for number, line in enumerate(lines) if line.startswith("FAIL  copies")]
    assert lines[at] == "FAIL  copies                  not measured: refused"
    assert lines[at + 1].startswith("                              -> Without page-locked memory")
    assert "22 pass, 0 warn, 1 fail" in lines
    assert f"freight {freight.__version__}; measured 2026-11-18T10:20:30+00:00 in 11.5 s" in lines
    assert "quickly measured" in printed(dataclasses.replace(h200, quick=True))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_nothing_is_lost_however_narrow(h200: Machine, width: int) -> None:
    """Lines are folded, never cut: each value and each remedy is there, letter by letter."""
    machine = failing(dataclasses.replace(h200, disk=Disk(absent="no such place", directory="/" + "d" * 150)))
    findings = judge(machine)
    text = printed(machine, width, findings)
    assert max(len(line) for line in text.splitlines()) <= width
    column = "".join(line[30:] for line in text.splitlines()).replace(" ", "")
    for finding in findings:
        assert finding.name in text
        for told in (finding.value, finding.remedy or ""):
            assert told.replace(" ", "") in column, told


def test_the_sample_on_the_page_is_what_is_printed(h200: Machine) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "machine.md").read_text()
    [sample] = re.findall(r"```text\n(Software\n.*?)```", page, re.DOTALL)
    few = dataclasses.replace(h200.host, lockable_bytes=65536, limit_ignored=True)
    with freight.config(cache_dir="/var/cache/freight"):
        text = printed(dataclasses.replace(h200, host=few))
    text = text.replace(f"freight {freight.__version__};", "freight 0.1.0;")
    assert [line.rstrip() for line in text.splitlines()] == sample.splitlines()


def test_marks_are_words(h200: Machine) -> None:
    """Neither colour nor a font is needed to tell them apart."""
    findings = [Finding("Group", verdict, verdict, "value") for verdict in (PASS, WARN, FAIL)]
    text = printed(h200, findings=findings)
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["ok", "warn", "FAIL"]


def test_brackets_are_no_markup(h200: Machine) -> None:
    assert "/data/[bold]x[/bold]" in printed(
        dataclasses.replace(h200, disk=Disk("gone", directory="/data/[bold]x[/bold]"))
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_of_any_encoding(h200: Machine, encoding: str) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    machine = dataclasses.replace(h200, disk=dataclasses.replace(h200.disk, directory="/caf\udce9"))
    with freight.config(cache_dir="/数"):
        _doctor.show(machine, judge(machine), Console(file=out, width=99))
    out.seek(0)
    text = out.read()
    assert ("9.1 µs" in text) == (encoding != "ascii")
    assert r"/caf\udce9" in text
    assert ("kept in /数;" in text) == (encoding == "utf-8")


def test_json_for_a_bug_report(h200: Machine) -> None:
    machine = failing(h200)
    data = json.loads(_doctor.report(machine, judge(machine)))
    assert Machine.from_json(json.dumps(data["machine"])) == machine
    assert [Finding(**finding) for finding in data["findings"]] == judge(machine)
    assert data["versions"] == {
        "freight": freight.__version__,
        "python": "3.12.11",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "cuda": "13.0",
        "driver": "580.95.05",
    }


# ---- on this machine ---------------------------------------------------------------------------------


@pytest.fixture
def _quick(small: None) -> None:
    """Measure in milliseconds."""


def doctor(*, as_json: bool = False, directory: Path | None = None) -> int:
    return _doctor.main(as_json=as_json, quick=True, refresh=False, directory=directory)


@pytest.mark.usefixtures("_quick")
def test_all_is_well_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(directory=tmp_path) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "warn  GPU " in said.out
    assert " 0 fail\n" in said.out


@pytest.mark.usefixtures("_quick")
def test_a_failure_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(directory=tmp_path / "none") == 1
    out = capsys.readouterr().out
    assert "FAIL  directory " in out
    assert "1 fail\n" in out


@pytest.mark.usefixtures("_quick")
def test_json_holds_what_the_table_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(as_json=True, directory=tmp_path / "none") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["disk"]["absent"] == "No such file or directory"
    assert doctor(directory=tmp_path / "none") == 1
    table = capsys.readouterr().out
    assert [finding["name"] for finding in told["findings"] if finding["name"] not in table] == []


@pytest.mark.usefixtures("_quick")
def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, unwritable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with freight.config(cache_dir=unwritable):
        assert doctor(directory=tmp_path) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "warn cache what is measured is not kept:" in out
    assert "Set FREIGHT_CACHE_DIR to a directory of yours." in out


def test_a_pipe_gets_json_and_nothing_else(tmp_path: Path) -> None:
    """In a process of its own, in a place whose encoding is as plain as can be."""
    code = (
        "import pathlib, sys; from freight.machine import _doctor; "
        "sys.exit(_doctor.main(as_json=True, quick=True, refresh=False, directory=pathlib.Path(sys.argv[1])))"
    )
    place = tmp_path / "caf\udce9"
    place.mkdir()
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], capture_output=True, env=environment, timeout=120, check=False
    )
    assert b"Traceback" not in done.stderr
    told = json.loads(done.stdout)
    assert told["machine"]["disk"]["directory"] == str(place)
    assert done.returncode == any(finding["verdict"] == FAIL for finding in told["findings"])
