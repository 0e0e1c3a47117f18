"""Which code was measured: a fingerprint of its source, and the commit of the checkout it came from."""

import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import freight
from freight.errors import ArgumentError

_COMMIT_VARIABLE = "FREIGHT_COMMIT"  # for copies of a checkout without its .git; "<commit>-dirty" where it was changed


def fingerprint(modules: Iterable[str]) -> str:
    """A hash of the source of `modules` and packages, without blank lines and lines that are only a comment.

    The text is hashed, not what Python makes of it, so every version of Python gives the same.

    >>> fingerprint(["freight._units"]) == fingerprint(["freight._units"])
    True
    """
    digest = hashlib.sha256()
    for module in sorted(set(modules)):
        for name, path in _sources(module):
            digest.update(f"# {name}\n".encode())
            digest.update("".join(_code_lines(path)).encode())
    return f"sha256:{digest.hexdigest()[:32]}"


def commit() -> tuple[str, bool]:
    """The checkout's commit, and whether its source differs from it; ("unknown", False) where nothing tells.

    Git is asked first, then the environment variable FREIGHT_COMMIT, read here and nowhere else.
    """
    root = checkout()
    head = _git(root, "rev-parse", "--verify", "HEAD") if root else None
    if root and head:
        return head, bool(_git(root, "status", "--porcelain", "--", "src"))
    told = os.environ.get(_COMMIT_VARIABLE, "").strip()
    return told.removesuffix("-dirty") or "unknown", told.endswith("-dirty")


def checkout() -> Path | None:
    """The root of the checkout that freight is imported from, or None where it is installed by itself."""
    package = Path(freight.__file__).resolve().parent
    root = package.parents[1]
    return root if package.parent.name == "src" and (root / "pyproject.toml").is_file() else None


def _sources(module: str) -> list[tuple[str, Path]]:
    """The dotted name and file of every module in `module`; found without importing it."""
    root, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except ValueError:  # a script or a prompt: it runs as __main__, and no module has its source
        spec = None
    if spec is None or not (spec.submodule_search_locations or str(spec.origin).endswith(".py")):
        raise ArgumentError(f"cannot fingerprint {module!r}: there is no module {root!r} that is a file of Python.")
    if not rest and not spec.submodule_search_locations:
        return [(module, Path(str(spec.origin)))]
    base = Path(next(iter(spec.submodule_search_locations or ())), *rest)
    if base.is_dir():
        files = sorted(path for path in base.rglob("*.py") if "__pycache__" not in path.parts)
        return [(f"{module}/{path.relative_to(base).as_posix()}", path) for path in files]
    if base.with_suffix(".py").is_file():
        return [(module, base.with_suffix(".py"))]
    raise ArgumentError(f"cannot fingerprint {module!r}: neither {base}.py nor the folder {base} exists.")


def _code_lines(path: Path) -> list[str]:
    lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line + "\n" for line in lines if line and not line.lstrip().startswith("#")]


def _git(root: Path, *arguments: str) -> str | None:
    """What a git command that only reads says; None where there is no git or it fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # `status` would refresh the index otherwise
    command = ["git", "-C", str(root), *arguments]
    try:
        top = subprocess.run([*command[:3], "rev-parse", "--show-toplevel"], **_quiet(environment))
        if top.returncode != 0 or Path(top.stdout.strip()).resolve() != root:  # someone else's repository around us
            return None
        done = subprocess.run(command, **_quiet(environment))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _quiet(environment: dict[str, str]) -> dict:
    return {"env": environment, "capture_output": True, "text": True, "timeout": 20}
