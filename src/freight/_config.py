"""Every knob, once: a frozen dataclass, `FREIGHT_*` environment variables, and `freight.config(...)`.

A setting comes from, first to last: its default below, the environment variable `FREIGHT_<NAME>` (read at first use,
never at import), and the `freight.config(...)` blocks that are open, the innermost last. Settings hold for the whole
process, like torch's own backend flags: worker threads and autograd's threads see them too.
"""

import dataclasses
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from freight._units import MiB, parse_bytes
from freight.errors import ArgumentError, ArgumentTypeError, FreightError


def _flag(value: object, what: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ArgumentError(f"{what} must be true or false; got {value!r}.")


def _count(value: object, what: str) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ArgumentError(f"{what} must be a whole number; got {value!r}.") from None
    if number < 1 or (isinstance(value, float) and value != number):
        raise ArgumentError(f"{what} must be a whole number of at least 1; got {value!r}.")
    return number


def _share(value: object, what: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ArgumentError(f"{what} must be a number between 0 and 1; got {value!r}.") from None
    if not 0 < number <= 1:
        raise ArgumentError(f"{what} must be above 0 and at most 1; got {value!r}.")
    return number


def _path(value: object, what: str) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{what} must be a path; got {value!r}.")
    return Path(value).expanduser()


def _optional(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, what: None if value is None or value == "" else parse(value, what)


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
    slab_bytes: int = _knob(256 * MiB, parse_bytes, "Size of the slabs that pools of short-lived host buffers grow by.")
    disk_dir: Path | None = _knob(
        None,
        _optional(_path),
        "Directory for freight's disk file. Unset: the first of `$TMPDIR`, `/var/tmp` and `/tmp` that is a real disk.",
    )
    disk_threads: int = _knob(8, _count, "Threads that read and write the disk.")
    disk_block_bytes: int = _knob(8 * MiB, parse_bytes, "Size of one read or write of the disk.")
    checksum: bool = _knob(False, _flag, "Check every byte read back from disk against a checksum taken at writing.")
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
        home = os.environ.get("XDG_CACHE_HOME")
        return (Path(home) if home else Path.home() / ".cache") / "freight"


def variable(name: str) -> str:
    """The environment variable of a knob: `disk_dir` is `FREIGHT_DISK_DIR`."""
    return f"FREIGHT_{name.upper()}"


_lock = threading.Lock()
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
        names = [knob.name for knob in dataclasses.fields(Config)]
        given = {name: os.environ[variable(name)] for name in names if variable(name) in os.environ}
        for name, text in given.items():
            try:
                Config(**{name: text})  # type: ignore[arg-type]
            except FreightError as error:
                raise type(error)(f"environment variable {variable(name)}={text!r}: {error}") from None
        _from_environment = Config(**given)  # type: ignore[arg-type]
    return _from_environment


class _Layer:
    """One `with freight.config(...)` block; leaving it takes back its own changes and nobody else's."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes = changes

    def __enter__(self) -> Config:
        global _current
        with _lock:
            if any(layer is self for layer in _layers):
                raise FreightError("this freight.config(...) block is entered already; make a new one to nest it.")
            _layers.append(self)
            _current = _merged()
            return _current

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        global _current
        with _lock:
            _layers[:] = [layer for layer in _layers if layer is not self]
            _current = _merged()


def config(**changes: Any) -> _Layer:
    """Change settings inside a `with` block; entering it gives the settings in force.

    >>> import freight
    >>> with freight.config(host_bytes="8GiB") as settings:
    ...     settings.host_bytes
    8589934592
    """
    known = [knob.name for knob in dataclasses.fields(Config)]
    for name in changes:
        if name not in known:
            raise ArgumentTypeError(f"freight.config has no setting {name!r}; it has: {', '.join(known)}.")
    Config(**changes)  # a wrong value is an error here, not where it is first used
    return _Layer(changes)
