"""Every knob, once: a frozen dataclass, `FREIGHT_*` environment variables, and `freight.config(...)`.

A setting comes from, first to last: its default below, the environment variable `FREIGHT_<NAME>` (read at first use,
never at import; an empty one counts as unset), and the `freight.config(...)` blocks that are open, the innermost last.
Settings hold for the whole process, like torch's own backend flags: worker threads and autograd's threads see them too.
"""

import dataclasses
import difflib
import logging
import operator
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from freight._units import MiB, parse_bytes
from freight.errors import ArgumentError, ArgumentTypeError, FreightError

_log = logging.getLogger(__name__)
_COMMIT = "FREIGHT_COMMIT"  # no setting: it tells benchmarks which commit a copy without .git is of


def _flag(value: object, what: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("0", "false", "no", "off"):
        return False
    raise ArgumentError(f"{what} must be true or false; got {value!r}.")


def _count(value: object, what: str) -> int:
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ArgumentError(f"{what} must be a whole number of at least 1; got {value!r}.")
    return number


def _share(value: object, what: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not 0 < number <= 1 or isinstance(value, bool):
        raise ArgumentError(f"{what} must be a number above 0 and at most 1; got {value!r}.")
    return number


def _size(value: Any, what: str) -> int:
    nbytes = parse_bytes(value, what)
    if nbytes == 0:
        raise ArgumentError(f"{what} must be at least one byte; got {value!r}.")
    return nbytes


def _path(value: object, what: str) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{what} must be a path; got {value!r}.")
    if value == "" or "\0" in str(value):
        raise ArgumentError(f"{what} must name a directory; got {value!r}.")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ArgumentError(f"{what} begins with a home directory that is not known; got {value!r}.") from None


def _optional(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, what: None if value is None else parse(value, what)


def _knob(default: Any, parse: Callable[[Any, str], Any], doc: str) -> Any:
    return field(default=default, metadata={"parse": parse, "doc": doc})


@dataclass(frozen=True)
class Config:
    """freight's settings at one moment."""

    host_bytes: int | None = _knob(
        None, _optional(parse_bytes), "Most bytes of host memory that freight may hold. Unset: `host_share` decides."
    )
    host_share: float = _knob(
        0.8, _share, "Share of the machine's memory that freight may hold where `host_bytes` is unset."
    )
    host_threads: int | None = _knob(
        None, _optional(_count), "Threads that fault host memory in. Unset: one per usable core, at most 16."
    )
    slab_bytes: int = _knob(256 * MiB, _size, "Size of the slabs that pools of short-lived host buffers grow by.")
    disk_dir: Path | None = _knob(
        None,
        _optional(_path),
        "Directory for freight's disk file. Unset: the first of `$TMPDIR`, `/var/tmp` and `/tmp` that is a real disk.",
    )
    disk_threads: int = _knob(16, _count, "Threads that read and write the disk.")
    disk_block_bytes: int = _knob(MiB, _size, "Size of one read or write of the disk.")
    direct_io: bool = _knob(
        True, _flag, "Keep freight's disk file out of the page cache; an error where the file system cannot."
    )
    checksum: bool = _knob(False, _flag, "Check every byte read back from disk against a checksum taken at writing.")
    check_ids: bool = _knob(
        False, _flag, "Wait after every gather and raise at once for an id outside its table; for finding such an id."
    )
    cache_dir: Path | None = _knob(
        None,
        _optional(_path),
        "Directory for what was measured and tuned. Unset: `$XDG_CACHE_HOME/freight`, or `~/.cache/freight`.",
    )

    def __post_init__(self) -> None:
        for knob in dataclasses.fields(self):
            parsed = knob.metadata["parse"](getattr(self, knob.name), knob.name)
            object.__setattr__(self, knob.name, parsed)

    @property
    def cache_home(self) -> Path:
        """The cache directory in force, `cache_dir` or the user's own."""
        if self.cache_dir is not None:
            return self.cache_dir
        if home := os.environ.get("XDG_CACHE_HOME"):
            return Path(home) / "freight"
        try:
            return Path.home() / ".cache" / "freight"
        except RuntimeError:  # a user without a home, as in some containers
            return Path(tempfile.gettempdir()) / f"freight-{os.getuid()}"


def variable(name: str) -> str:
    """The environment variable of a knob: `disk_dir` is `FREIGHT_DISK_DIR`."""
    return f"FREIGHT_{name.upper()}"


_lock = threading.RLock()
_layers: list["_Layer"] = []
_from_environment: Config | None = None
_current: Config | None = None


def current() -> Config:
    """The settings in force now."""
    global _current
    settings = _current
    if settings is None:
        with _lock:
            settings = _current = _merged()
    return settings


def _merged() -> Config:
    settings = _environment()
    for layer in _layers:
        settings = dataclasses.replace(settings, **layer.changes)
    return settings


def _environment() -> Config:
    global _from_environment
    if _from_environment is None:
        known = {variable(name): name for name in _names()}
        _warn_of_strangers(known)
        given = {name: os.environ[var] for var, name in known.items() if os.environ.get(var)}
        for name, text in given.items():
            try:
                Config(**{name: text})  # type: ignore[arg-type]
            except FreightError as error:
                raise type(error)(f"environment variable {variable(name)}={text!r}: {error}") from None
        _from_environment = Config(**given)  # type: ignore[arg-type]
    return _from_environment


def _warn_of_strangers(known: Iterable[str]) -> None:
    """A misspelt variable would be ignored silently."""
    for var in sorted(os.environ):
        if var.startswith("FREIGHT_") and var not in known and var != _COMMIT:
            _log.warning("environment variable %s is none of freight's and is ignored.%s", var, _near(var, known))


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _names() -> list[str]:
    return [knob.name for knob in dataclasses.fields(Config)]


class _Layer:
    """One `with freight.config(...)` block; leaving it takes back its own changes and nobody else's."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes = changes

    def __enter__(self) -> Config:
        global _current
        with _lock:
            settings = dataclasses.replace(_merged(), **self.changes)  # first: a bad environment raises here
            _layers.append(self)
            _current = settings
            return settings

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        global _current
        with _lock:
            mine = [at for at, layer in enumerate(_layers) if layer is self]  # several where a block is entered again
            del _layers[mine[-1]]
            _current = _merged()


def config(**changes: Any) -> AbstractContextManager[Config]:
    """Change settings inside a `with` block; entering it gives the settings in force.

    >>> import freight
    >>> with freight.config(host_bytes="8GiB") as settings:
    ...     settings.host_bytes
    8589934592
    """
    known = _names()
    for name in changes:
        if name not in known:
            raise ArgumentTypeError(
                f"freight.config has no setting {name!r}.{_near(name, known)} It has: {', '.join(known)}."
            )
    Config(**changes)  # a wrong value is an error here, not where it is first used
    return _Layer(changes)


def reset() -> None:
    """Forget the environment and every open block, as in a new process; for tests."""
    global _from_environment, _current
    with _lock:
        _layers.clear()
        _from_environment = _current = None


def _forget_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)  # another thread of the parent may have held it
