"""Rules of the house that a reader would otherwise have to watch over."""

import re
import statistics
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").glob("freight/**/*.py"))
TEXT = {".py", ".md", ".toml", ".yml", ".cff", ".txt", ".svg", ".json", ".html", ".css", ".js", ""}
MACHINE = re.compile(r"(?<![\w./~-])/(?:work|root|home|Users|mnt|scratch)/[\w.-]+")  # a path that only one machine has


def tracked() -> list[Path]:
    """The files of the project, whether git has seen them yet or not."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout to know which files are the project's")
    return [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]


def readme_line(begin: str) -> str:
    [line] = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(begin)]
    return line


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > 600} == {}
    assert statistics.median(lengths.values()) <= 200


def test_no_file_names_a_machine() -> None:
    found = {
        str(path.relative_to(ROOT)): MACHINE.findall(path.read_text())
        for path in tracked()
        if path.suffix in TEXT and path != Path(__file__)
    }
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_rule_of_machine_paths_can_fail() -> None:
    assert MACHINE.search("see /home/somebody/data")
    assert not MACHINE.search("docs/home/page and ~/work/here")


def test_every_module_says_what_it_is() -> None:
    assert [path.name for path in SOURCES if not path.read_text().startswith('"""')] == []


def test_private_modules_stay_behind_their_room() -> None:
    """A module that shows no underscore is a door: a namespace, a program, or a registered benchmark or kernel."""
    doors = {"__init__", "__main__", "errors", "cli"}
    rooms = {path.parent.name for path in SOURCES}
    public = {path.stem for path in SOURCES if not path.stem.startswith("_") and path.parent.name == "freight"}
    assert public <= doors | rooms


def test_ci_runs_what_the_readme_says() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for begin in ("python3 -m venv ", "pip install "):
        assert f"grep -m1 '^{begin}' README.md" in ci
        assert readme_line(begin)
    recipe = re.search(r"^test \*args:\n    (\w+) \{\{ args \}\}$", (ROOT / "justfile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert readme_line(recipe[1]) == recipe[1] == "pytest"
    assert "just check" in ci


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/contributing.md", "docs/set-up.md"])
def test_set_up_is_told_the_same_everywhere(page: str) -> None:
    text = (ROOT / page).read_text()
    assert f"{readme_line('python3 -m venv ')}\n{readme_line('pip install ')}\n" in text


def test_constraints_are_exact_and_name_no_index() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.]*", line)] == []
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(lines)
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0].lower())


def test_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "END OF TERMS AND CONDITIONS" in text
    assert "Copyright 2026 The freight authors" in text
