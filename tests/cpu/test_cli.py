"""The command line: what it offers is frozen, what it says goes where it belongs, and its status tells how it ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from freight import cli
from freight.errors import ArgumentError

OPTIONS = {
    "bench": {"names", "--only", "--quick", "--json", "--tune", "--update"},
    "demo": set(),
    "doctor": {"--json", "--quick", "--refresh", "--directory"},
    "report": {"--results", "--out"},
}
WORK = {
    "bench": "freight.bench._main.main",
    "demo": "freight._demo.main",
    "doctor": "freight.machine._doctor.main",
    "report": "freight.bench.report._main.main",
}


def run(*arguments: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freight", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def test_commands_and_options_are_frozen() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    found = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("status", [0, 1, 130])
def test_status_is_the_rooms_own(name: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORK[name], lambda *args, **kwargs: status)
    assert CliRunner().invoke(cli.app, [name]).exit_code == status


@pytest.mark.parametrize("name", OPTIONS)
def test_foreseen_error_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise ArgumentError("got this, expected that; do so.")

    monkeypatch.setattr(WORK[name], fail)
    result = CliRunner().invoke(cli.app, [name])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "freight: got this, expected that; do so.\n"


@pytest.mark.parametrize("name", OPTIONS)
def test_interrupt_is_130(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(WORK[name], interrupt)
    assert CliRunner().invoke(cli.app, [name]).exit_code == 130


def test_unforeseen_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*args: object, **kwargs: object) -> int:
        raise ZeroDivisionError("a fault of freight's")

    monkeypatch.setattr(WORK["demo"], break_down)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_options_reach_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[tuple[object, ...], dict[str, object]]] = []
    monkeypatch.setattr(WORK["bench"], lambda *args, **kwargs: got.append((args, kwargs)) or 0)
    words = ["bench", "links", "disk", "--only", "copy/*", "--quick", "--json", "here", "--tune", "--update"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    settings = {"only": "copy/*", "quick": True, "json_dir": Path("here"), "tune": True, "update": True}
    assert got == [((["links", "disk"],), settings)]


def test_version() -> None:
    import freight

    assert run("--version").stdout == f"freight {freight.__version__}\n"


@pytest.mark.parametrize("arguments", [["bench", "--only"], ["doctor", "--nope"], ["nope"]])
def test_wrong_words_are_status_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert arguments[-1] in done.stderr


def test_help_starts_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from freight.cli import app;"
        "CliRunner().invoke(app, ['bench', '--help']);"
        "print(sorted({'torch', 'triton', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_doctor_prints_json_alone() -> None:
    done = run("doctor", "--quick", "--json")
    assert json.loads(done.stdout).keys() == {"machine", "findings", "versions"}


def test_unwritable_report_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "links.cpu.json"
    file.write_text("{}")
    done = run("report", "--results", str(tmp_path), "--out", str(file / "page.html"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("freight: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_full_standard_output_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "freight", "doctor", "--quick", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
