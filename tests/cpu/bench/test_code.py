"""Which code was measured: the fingerprint sees every change of code and no other, the commit is the checkout's own."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest

import freight
from freight.bench._code import checkout, commit, fingerprint
from freight.errors import ArgumentError

_numbers = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a package in it. Its name is new each time, as Python remembers where it found a name."""
    folder = tmp_path / f"measured_{next(_numbers)}"
    (folder / "inner").mkdir(parents=True)
    for name in ("__init__.py", "one.py", "two.py", "inner/__init__.py", "inner/deep.py"):
        (folder / name).write_text(f'"""{name}"""\n\nx = 1  # one\n')
    monkeypatch.syspath_prepend(tmp_path)
    return folder


# ---- fingerprint -----------------------------------------------------------------------------------


def test_fingerprint_is_of_the_code(package: Path) -> None:
    one = f"{package.name}.one"
    before = fingerprint([one])
    assert before.startswith("sha256:")
    (package / "one.py").write_text('# what it is\n"""one.py"""\n\n\nx = 1  # one   \n    # and why\n')
    assert fingerprint([one]) == before, "comments, blank lines and spaces at line ends are no code"
    for code in ("x = 2  # one", "    x = 1  # one", "x = 1  # two", ""):
        (package / "one.py").write_text(f'"""one.py"""\n{code}\n')
        assert fingerprint([one]) != before


def test_fingerprint_is_of_what_is_named(package: Path) -> None:
    name = package.name
    one, inner, whole = fingerprint([f"{name}.one"]), fingerprint([f"{name}.inner"]), fingerprint([name])
    (package / "two.py").write_text("x = 2\n")
    assert fingerprint([f"{name}.one"]) == one
    assert fingerprint([f"{name}.inner"]) == inner
    assert fingerprint([name]) != whole


def test_fingerprint_is_of_every_file_of_a_package(package: Path) -> None:
    seen = {fingerprint([package.name])}
    (package / "inner" / "deep.py").write_text("x = 2\n")
    seen.add(fingerprint([package.name]))
    (package / "inner" / "new.py").write_text("")
    seen.add(fingerprint([package.name]))
    (package / "inner" / "new.py").rename(package / "inner" / "newer.py")
    seen.add(fingerprint([package.name]))
    assert len(seen) == 4
    before = fingerprint([package.name])
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "left_over.py").write_text("")
    (package / "notes.txt").write_text("not code")
    assert fingerprint([package.name]) == before


def test_order_and_repetition_do_not_count(package: Path) -> None:
    one, two = f"{package.name}.one", f"{package.name}.two"
    assert fingerprint([one, two]) == fingerprint([two, one, two]) != fingerprint([one])


def test_same_text_in_another_module_is_other_code(package: Path) -> None:
    (package / "two.py").write_text((package / "one.py").read_text())
    assert fingerprint([f"{package.name}.one"]) != fingerprint([f"{package.name}.two"])


def test_single_file_and_import_are_no_hindrance(package: Path) -> None:
    (package.parent / f"{package.name}_alone.py").write_text("raise RuntimeError('it is read, not imported')\n")
    assert fingerprint([f"{package.name}_alone"]) != fingerprint([package.name])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("a_package_that_nobody_has.inner", "there is no module 'a_package_that_nobody_has'"),
        ("freight.no_such_room", r"neither .*no_such_room\.py nor the folder .*no_such_room exists"),
        ("sys", "there is no module"),
        ("__main__", "there is no module"),
    ],
)
def test_what_has_no_source(module: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if module == "__main__":  # as in a script or at a prompt
        monkeypatch.setattr("__main__.__spec__", None)
    with pytest.raises(ArgumentError, match=f"cannot fingerprint '{module}': .*{message}"):
        fingerprint([module])


# ---- commit ----------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that freight seems to be imported from, without a history yet."""
    root = tmp_path / "copy"
    (root / "src" / "freight").mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    (root / "src" / "freight" / "__init__.py").write_text("")
    monkeypatch.setattr(freight, "__file__", str(root / "src" / "freight" / "__init__.py"))
    monkeypatch.delenv("FREIGHT_COMMIT", raising=False)
    for variable in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(variable)
    return root


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def committed(root: Path) -> str:
    """Make `root` a repository with everything in it committed; returns the commit."""
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return git(root, "rev-parse", "HEAD")


def test_commit_of_the_checkout(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = committed(copy)
    monkeypatch.setenv("FREIGHT_COMMIT", "told")
    assert checkout() == copy
    assert commit() == (head, False)
    (copy / "notes.md").write_text("new, and not source")
    assert commit() == (head, False)
    (copy / "src" / "freight" / "new.py").write_text("")
    assert commit() == (head, True)
    git(copy, "add", ".")
    assert commit() == (head, True)


@pytest.mark.parametrize(
    ("told", "want"),
    [
        (None, ("unknown", False)),
        ("", ("unknown", False)),
        ("85f547b", ("85f547b", False)),
        (" 85f547b-dirty\n", ("85f547b", True)),
    ],
)
def test_without_a_history_the_environment_tells(
    told: str | None, want: tuple[str, bool], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told is not None:
        monkeypatch.setenv("FREIGHT_COMMIT", told)
    assert commit() == want


def test_somebody_elses_history_is_not_ours(copy: Path) -> None:
    """A copy without its own history inside another repository, as on a machine that is sent the files."""
    committed(copy.parent)
    assert commit() == ("unknown", False)


def test_a_repository_without_a_commit(copy: Path) -> None:
    git(copy, "init", "--quiet")
    assert commit() == ("unknown", False)


def test_without_git(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(copy)
    monkeypatch.setenv("PATH", str(copy))
    monkeypatch.setenv("FREIGHT_COMMIT", "told-dirty")
    assert commit() == ("told", True)


def test_asking_changes_nothing(copy: Path) -> None:
    """`git status` would refresh the index, and take its lock, while somebody else works in the checkout."""
    committed(copy)
    os.utime(copy / "src" / "freight" / "__init__.py", (0, 0))  # the index is out of date now
    index = (copy / ".git" / "index").read_bytes()
    assert commit()[1] is False
    assert (copy / ".git" / "index").read_bytes() == index


def test_installed_freight_has_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in somebody's project, nor where it lies as in a checkout that is none."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").write_text("")
    for place in ("project/lib/freight", "elsewhere/src/freight"):
        monkeypatch.setattr(freight, "__file__", str(tmp_path / place / "__init__.py"))
        assert checkout() is None
