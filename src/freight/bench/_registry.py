"""The benchmarks there are: functions registered by name, and freight's own, imported when they are asked for."""

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freight.bench._code import fingerprint
from freight.bench._record import Cell
from freight.errors import ArgumentError

if TYPE_CHECKING:
    from freight.bench._run import Run

_BUILT_IN = {name: f"freight.bench.{name}" for name in ("links", "disk", "gather", "hot")}

_registered: dict[str, "Benchmark"] = {}


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark; `measures` names the modules and packages whose speed its cells are."""

    name: str
    title: str
    measures: tuple[str, ...]
    function: Callable[["Run"], None]

    def code(self) -> str:
        """The fingerprint of the measured code as it is now."""
        return fingerprint(self.measures)


def benchmark(
    name: str, *, title: str, measures: Sequence[str]
) -> Callable[[Callable[["Run"], None]], Callable[["Run"], None]]:
    """Register the decorated function as benchmark `name`.

    `measures` are the modules or packages (dotted names) whose source the cells measure: where it has changed since,
    a cell is stale. The module of the function itself always counts.
    """

    def register(function: Callable[["Run"], None]) -> Callable[["Run"], None]:
        known = _registered.get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ArgumentError(f"there is a benchmark {name!r} already, in {known.function.__module__}.")
        modules = tuple(sorted({*measures, function.__module__}))
        _registered[name] = Benchmark(name, title, modules, function)
        return function

    return register


def names() -> list[str]:
    """The names of all benchmarks.

    >>> set(names()) >= {"links", "disk"}
    True
    """
    return list(dict.fromkeys([*_BUILT_IN, *_registered]))


def get(name: str) -> Benchmark:
    """Benchmark `name`, imported first where it is one of freight's own."""
    if name not in _registered and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _registered:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ArgumentError(f"there is no benchmark {name!r}; {hint}There are: {', '.join(names())}.")
    return _registered[name]


def stale(cell: Cell, benchmark_name: str) -> bool:
    """Whether the code that `cell` measured has changed since, or the benchmark is gone."""
    try:
        return cell.code != get(benchmark_name).code()
    except ArgumentError:
        return True
