"""What a benchmark function is given: a `Run`, in which it declares cells. Nothing is made or measured while it does.

    @benchmark("copies", title="Copies", measures=["freight.memory"])
    def copies(run: Run) -> None:
        run.cell("h2d", group="copy", axes={"bytes": GiB}, unit="GB/s", amount=GiB, clock="gpu", work=...,
                 targets=[at_least(0.98, of="torch")])

A cell's `work` is a function that makes what the cell needs, yields a `Work` and frees everything afterwards (a
generator under `contextlib.contextmanager`). It is entered when the cell's turn comes and left when it is over, however
it ends. A Work holds the subject, the rivals and the check that each of them must pass before anything is timed.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from freight.bench._clock import CLOCKS
from freight.bench._record import Scalar
from freight.errors import ArgumentError

PAIRS = 30  # rounds, in each of which the subject and every rival are measured once
QUICK_PAIRS = 7
SECONDS = 20.0  # after which a cell has had its time
QUICK_SECONDS = 3.0

_TIMES = {"s": 1.0, "ms": 1e3, "µs": 1e6}
_RATES = {"GB/s": 1e-9, "TFLOP/s": 1e-12, "1/s": 1.0}


class Skip(Exception):  # noqa: N818  # a decision of the benchmark's, and no error
    """Raised by a cell's work where this machine cannot do it; the cell is listed with the reason, unmeasured."""


@dataclass(frozen=True)
class Way:
    """One way to do a cell's work: freight's, or a rival's.

    `call` gets the round's inputs and is what the clock sees; `before` and `after` are not timed, and `after` gets
    what `call` returned. A rival that cannot run has no `call` and says why it is `absent`.
    """

    name: str
    call: Callable[[Any], Any] | None = None
    absent: str | None = None
    before: Callable[[], object] | None = None
    after: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if (self.call is None) == (self.absent is None):
            raise ArgumentError(f"{self.name!r} must have either a call, or a reason for which it is absent.")

    @classmethod
    def importing(cls, name: str, make: Callable[[], "Way"]) -> "Way":
        """What `make` returns, or an absent rival where it fails to import something.

        >>> def make():
        ...     import a_package_that_nobody_has
        >>> Way.importing("another library", make).absent
        "No module named 'a_package_that_nobody_has'"
        """
        try:
            return make()
        except ImportError as error:
            return cls(name, absent=str(error))


@dataclass(frozen=True)
class Work:
    """A cell ready to be measured.

    Each round `prepare` makes fresh inputs, outside the timed region; each way is called with them. `check` is called
    with inputs and what a way returned, for every way before anything is timed, with inputs of its own each: it
    raises or returns False where the result is wrong. `checked` says in words what it looks at. `extra` goes into the
    record as it is when the cell is done.
    """

    subject: Way
    check: Callable[[Any, Any], bool | None]
    checked: str
    rivals: tuple[Way, ...] = ()
    prepare: Callable[[], Any] = lambda: None
    extra: dict[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [way.name for way in (self.subject, *self.rivals)]
        if len(set(names)) < len(names):
            raise ArgumentError(f"the ways of a cell need names that differ; got {', '.join(names)}.")
        if self.subject.call is None:
            raise ArgumentError(f"the subject {self.subject.name!r} is absent; raise Skip with the reason instead.")
        if not self.checked:
            raise ArgumentError("checked must say in words what the check looks at.")


@dataclass(frozen=True)
class Goal:
    """A bound that a cell must reach: on the subject's value, or on its ratio to the rival `of`."""

    at_least: float | None
    at_most: float | None
    of: str | None


def at_least(bound: float, *, of: str | None = None) -> Goal:
    """The subject's value, or with `of` its ratio to that rival (above 1: better), is to be `bound` or more."""
    return Goal(bound, None, of)


def at_most(bound: float, *, of: str | None = None) -> Goal:
    """The subject's value, or with `of` its ratio to that rival, is to be `bound` or less."""
    return Goal(None, bound, of)


@dataclass(frozen=True)
class Case:
    """A declared cell."""

    id: str
    group: str
    axes: Mapping[str, Scalar]
    unit: str
    amount: float
    clock: str
    work: Callable[[], AbstractContextManager[Work]]
    targets: tuple[Goal, ...]
    pairs: int
    seconds: float
    in_quick: bool
    note: str

    @property
    def better(self) -> str:
        """Times are better lower, rates higher."""
        return "lower" if self.unit in _TIMES else "higher"

    def value(self, seconds: float) -> float:
        """A measured time in the cell's unit."""
        return seconds * _TIMES[self.unit] if self.unit in _TIMES else self.amount * _RATES[self.unit] / seconds


class Run:
    """The cells of one benchmark, declared by its function.

    A benchmark declares the same ids whether the run is `quick` or not, so that quick cells find their place in a full
    record. It makes the work smaller where `quick` is true, and leaves out what cannot be small by `in_quick=False`.
    """

    def __init__(self, *, quick: bool, gpu: bool) -> None:
        self.quick = quick
        self.gpu = gpu
        self.cases: list[Case] = []

    def cell(
        self,
        id: str,
        *,
        group: str,
        axes: Mapping[str, Scalar],
        unit: str,
        clock: str,
        work: Callable[[], AbstractContextManager[Work]],
        amount: float = 0.0,
        targets: Iterable[Goal] = (),
        pairs: int = PAIRS,
        seconds: float = SECONDS,
        in_quick: bool = True,
        note: str = "",
    ) -> None:
        """Declare a cell.

        `unit` is a time (s, ms, µs) or a rate (GB/s, TFLOP/s, 1/s) of `amount` bytes, operations or things. `clock` is
        "gpu", CUDA events around the call; "host", the host's clock with the GPU idle before and after; or "submit",
        the host's clock until the call returns. There are `pairs` rounds, fewer where they would take longer than
        `seconds`.
        """
        if any(case.id == id for case in self.cases):
            raise ArgumentError(f"cell {id!r} is declared twice.")
        if unit not in (*_TIMES, *_RATES):
            raise ArgumentError(f"cell {id!r}: unit must be one of {', '.join((*_TIMES, *_RATES))}; got {unit!r}.")
        if (unit in _RATES) != (amount > 0):
            raise ArgumentError(f"cell {id!r}: a rate needs its amount, and a time has none; got {amount} in {unit}.")
        if pairs < 2:
            raise ArgumentError(f"cell {id!r}: an interval needs at least two pairs; got {pairs}.")
        if clock not in CLOCKS or (clock != "host" and not self.gpu):
            raise ArgumentError(
                f"cell {id!r}: clock must be 'host', or 'gpu' or 'submit' where there is a GPU; got {clock!r}."
            )
        pairs = min(pairs, QUICK_PAIRS) if self.quick else pairs
        seconds = min(seconds, QUICK_SECONDS) if self.quick else seconds
        self.cases.append(
            Case(id, group, axes, unit, amount, clock, work, tuple(targets), pairs, seconds, in_quick, note)
        )
