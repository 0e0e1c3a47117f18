"""The tuning table: which configuration a kernel is launched with, looked up by GPU, operator, shape bucket and dtype.

A bucket is a shape with every dimension rounded up to a power of two. The nearest bucket known, counted in powers of
two, serves at once: no lookup measures or compiles anything. First to last, a configuration comes from

    1. `<cache>/tuned/<gpu>-freight<version>-torch<version>-triton<version>.json`, which `freight bench --tune` writes,
    2. `tuned/<gpu>.json` beside this file, shipped with freight,
    3. the operator's own default.

The two files are one table, in which the first wins where both know the same bucket.
"""

import functools
import importlib.metadata
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import freight
from freight import _config
from freight._gpuname import slug
from freight.errors import ArgumentError, DiskError
from freight.kernels._launch import next_power_of_two

SCHEMA = 1
Config = Mapping[str, int]  # what a launch takes beside its inputs: block sizes, num_warps, num_stages
Shape = tuple[int, ...]

_log = logging.getLogger(__name__)
_SHIPPED = Path(__file__).parent / "tuned"
_registered: dict[str, "Tunable"] = {}


@dataclass(frozen=True)
class Tunable:
    """An operator whose launch has something to choose, and what `freight bench --tune` may try.

    Every distinct configuration of an operator is a compilation of its own. Where sizes vary from step to step, name
    as `dims` only what stays (a row's width), or give `cells` so far apart that a run stays in one of them.
    """

    op: str
    dims: tuple[str, ...]  # what the numbers of a shape are, such as ("rows", "columns")
    default: Config
    space: Mapping[str, tuple[int, ...]]  # the values to try; every combination of them is a candidate
    cells: tuple[tuple[Shape, str], ...]  # the shapes and dtypes to tune at
    inputs: Callable[[Shape, str, torch.device], tuple[Any, ...]]
    launch: Callable[..., Any]  # launch(*inputs, config=...)
    check: Callable[[tuple[Any, ...], Any], None]  # raises AssertionError where a result is wrong, before it is timed

    def __post_init__(self) -> None:
        if not self.offers(self.default):
            raise ArgumentError(f"tunable {self.op!r}: its default {dict(self.default)} is not in its space.")
        for shape, _ in self.cells:
            if len(shape) != len(self.dims):
                raise ArgumentError(f"tunable {self.op!r} has the dimensions {self.dims}; got a cell {shape}.")

    def candidates(self) -> Iterator[Config]:
        """Every configuration in `space`."""
        for values in itertools.product(*self.space.values()):
            yield dict(zip(self.space, values, strict=True))

    def offers(self, config: Config) -> bool:
        """Whether `config` is one of the candidates; an old table's is none where the operator has changed since."""
        return config.keys() == self.space.keys() and all(config[name] in self.space[name] for name in config)

    def config(self, shape: Shape, dtype: str, device: torch.device) -> Config:
        """The configuration for a launch of this shape and dtype on `device`; never measures."""
        if device.type != "cuda":
            return self.default
        return _lookup(self, bucket(shape), dtype, _gpu_of(device), _config.current())


def register(tunable: Tunable) -> Tunable:
    """Make `tunable` known to `freight bench --tune`."""
    if tunable.op in _registered:
        raise ArgumentError(f"there is a tunable operator {tunable.op!r} already.")
    _registered[tunable.op] = tunable
    return tunable


def registered() -> dict[str, Tunable]:
    """The tunable operators of the modules that have been imported."""
    return dict(_registered)


def bucket(shape: Shape) -> Shape:
    """`shape` with every dimension rounded up to a power of two.

    >>> bucket((1000, 64, 0))
    (1024, 64, 1)
    """
    return tuple(map(next_power_of_two, shape))


def distance(one: Shape, other: Shape) -> int:
    """How far two buckets are apart: the sum over dimensions of the powers of two between them.

    >>> distance((1024, 64), (256, 128))
    3
    """
    return sum(abs(a.bit_length() - b.bit_length()) for a, b in zip(one, other, strict=True))


# ---- looking up ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _known(gpu: str, settings: _config.Config) -> dict[tuple[str, Shape, str], Config]:
    """Both files as one table: read once, so that what is wrong with them is said once."""
    return {**_read(_SHIPPED / f"{gpu}.json", gpu), **_read(_tuned_file(gpu, settings), gpu)}


@functools.lru_cache(maxsize=4096)
def _lookup_cached(op: str, at: Shape, dtype: str, gpu: str, settings: _config.Config) -> Config | None:
    known = _known(gpu, settings).items()
    fitting = {shape: config for (name, shape, kind), config in known if (name, kind) == (op, dtype)}
    fitting = {shape: config for shape, config in fitting.items() if len(shape) == len(at)}
    return fitting[min(fitting, key=lambda shape: (distance(shape, at), shape))] if fitting else None


def _lookup(tunable: Tunable, at: Shape, dtype: str, gpu: str, settings: _config.Config) -> Config:
    found = _lookup_cached(tunable.op, at, dtype, gpu, settings)
    return found if found is not None and tunable.offers(found) else tunable.default


def _gpu_of(device: torch.device) -> str:
    return _gpu_at(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu_at(index: int) -> str:
    return slug(torch.cuda.get_device_name(index))


# ---- the files -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One tuned configuration and what was measured of it."""

    op: str
    shape: Shape
    dtype: str
    config: Config
    microseconds: float
    default_microseconds: float | None


def save(entries: Iterable[Entry], gpu_name: str) -> Path:
    """Put `entries` into this machine's own table, which is written whole or not at all; its path."""
    gpu = slug(gpu_name)
    path = _tuned_file(gpu, _config.current())
    kept = {(e["op"], *e["shape"], e["dtype"]): e for e in _entries(path, gpu)}
    for entry in entries:
        line = {**vars(entry), "shape": list(bucket(entry.shape)), "config": dict(entry.config)}
        kept[(entry.op, *bucket(entry.shape), entry.dtype)] = line
    data = {"schema": SCHEMA, "gpu": gpu_name, "versions": _versions(), "entries": list(kept.values())}
    _write(path, json.dumps(data, indent=2) + "\n")
    forget()
    return path


def forget() -> None:
    """Have the files read anew."""
    _known.cache_clear()
    _lookup_cached.cache_clear()


def _read(path: Path, gpu: str) -> dict[tuple[str, Shape, str], Config]:
    return {(e["op"], tuple(e["shape"]), e["dtype"]): e["config"] for e in _entries(path, gpu)}


def _entries(path: Path, gpu: str) -> list[dict[str, Any]]:
    """The entries of a table of `gpu`; none where there is no file, none and a word in the log where it is no table."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("the tuning table %s cannot be read and is ignored: %s", path, error)
        return []
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}, expected {SCHEMA}")
        if slug(str(data["gpu"])) != gpu:
            raise ValueError(f"it was tuned on {data['gpu']!r}")
        for entry in data["entries"]:
            _check_entry(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        _log.warning("the tuning table %s is ignored; `freight bench --tune` writes it anew (%s)", path, reason)
        return []
    return data["entries"]


def _check_entry(entry: Any) -> None:
    numbers = [*entry["shape"], *entry["config"].values()]
    names = [entry["op"], entry["dtype"], *entry["config"]]
    if not all(type(number) is int and number >= 0 for number in numbers) or not all(type(n) is str for n in names):
        raise ValueError(f"{entry} is not an entry")


def _tuned_file(gpu: str, settings: _config.Config) -> Path:
    versions = "-".join(f"{name}{version}" for name, version in _versions().items())
    return settings.cache_home / "tuned" / f"{gpu}-{versions}.json"


@functools.cache
def _versions() -> dict[str, str]:
    return {
        "freight": freight.__version__,
        "torch": str(torch.__version__),
        "triton": importlib.metadata.version("triton"),
    }


def _write(path: Path, text: str) -> None:
    folder, temporary = path.parent, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, prefix=".tuned-", delete=False) as file:
            temporary = file.name
            file.write(text)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DiskError(error.errno, f"the tuning table was not saved ({error.strerror})", str(path)) from None
        raise
