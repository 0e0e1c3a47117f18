"""Measuring one cell: every way checked first, then all of them in turn, round after round."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freight.bench._clock import CLOCKS, Clock, host
from freight.bench._record import Cell, Measured, Rival, Target
from freight.bench._run import Case, Goal, Way, Work
from freight.bench._stats import median_interval, quartiles, ratio_interval
from freight.errors import ArgumentError

_LEAST = 3  # rounds, however long they take: two say next to nothing of how sure they are


class WrongResult(Exception):  # noqa: N818  # a finding; it never leaves the benchmarks
    """A way to do the work gave a wrong result, or failed; nothing of its cell is recorded."""


@dataclass(frozen=True)
class Stamp:
    """What every cell of a run carries: which code, which software, when, and whether it was in haste."""

    commit: str
    dirty: bool
    code: str
    date: Callable[[], str]
    versions: Mapping[str, str]
    quick: bool


def measure(
    case: Case,
    stamp: Stamp,
    *,
    clock: Clock | None = None,
    now: Callable[[], float] = time.monotonic,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Cell:
    """Check and measure `case`; `told` hears how many of its rounds are done. A Skip passes through."""
    with case.work() as work:
        ways = [work.subject, *(rival for rival in work.rivals if rival.call is not None)]
        _check_goals(case, work)
        for way in ways:
            _check(work, way)
        values = _rounds(case, work, ways, clock or CLOCKS[case.clock], now, told)
        subject = _measured(work.subject.name, values[work.subject.name])
        rivals = tuple(_rival(case, subject, rival, values.get(rival.name)) for rival in work.rivals)
        return Cell(
            id=case.id,
            group=case.group,
            axes=dict(case.axes),
            unit=case.unit,
            better=case.better,
            subject=subject,
            rivals=rivals,
            targets=tuple(_judged(goal, case, subject, rivals) for goal in case.targets),
            checked=work.checked,
            commit=stamp.commit,
            dirty=stamp.dirty,
            date=stamp.date(),
            code=stamp.code,
            versions=stamp.versions,
            quick=stamp.quick,
            extra={"clock": case.clock, **work.extra},
            note=case.note,
        )


def _check_goals(case: Case, work: Work) -> None:
    known = [rival.name for rival in work.rivals]
    for goal in case.targets:
        if goal.of is not None and goal.of not in known:
            raise ArgumentError(f"cell {case.id!r} has a target against {goal.of!r}; its rivals are: {known}.")


def _check(work: Work, way: Way) -> None:
    """One call of `way`, untimed, with inputs of its own, and its result looked at; it also serves to warm up."""
    inputs = work.prepare()
    try:
        _, right = _call(way, inputs, host, lambda output: work.check(inputs, output))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise WrongResult(f"{way.name} failed the check: {problem} (checked: {work.checked})") from error
    if right is not None and not right:
        raise WrongResult(f"{way.name} gave a wrong result (checked: {work.checked})")


def _rounds(
    case: Case,
    work: Work,
    ways: Sequence[Way],
    clock: Clock,
    now: Callable[[], float],
    told: Callable[[int, int], None],
) -> dict[str, list[float]]:
    """The values of every way, one a round; who goes first rotates, and within a round all get the same inputs."""
    values: dict[str, list[float]] = {way.name: [] for way in ways}
    start = last = now()
    longest = 0.0
    for done in range(case.pairs):
        if done >= _LEAST and last - start + longest > case.seconds:
            break
        told(done, case.pairs)
        inputs = work.prepare()
        first = done % len(ways)
        for way in (*ways[first:], *ways[:first]):
            seconds, _ = _call(way, inputs, clock, lambda output: None)
            values[way.name].append(case.value(seconds))
        last, before = now(), last
        longest = max(longest, last - before)
    return values


def _call(way: Way, inputs: Any, clock: Clock, look: Callable[[Any], Any]) -> tuple[float, Any]:
    """The seconds of one call, and what `look` says of its output; the output itself is let go here."""
    call = way.call
    assert call is not None
    if way.before is not None:
        way.before()
    seconds, output = clock(lambda: call(inputs))
    try:
        return seconds, look(output)
    finally:
        if way.after is not None:
            way.after(output)


def _measured(name: str, values: Sequence[float]) -> Measured:
    low, median, high = quartiles(values)
    return Measured(name, median, low, high, len(values), tuple(values))


def _rival(case: Case, subject: Measured, way: Way, values: Sequence[float] | None) -> Rival:
    if values is None:
        return Rival(way.name, absent=way.absent)
    ratio = ratio_interval(subject.values, values, case.better)
    return Rival(way.name, None, _measured(way.name, values), ratio.middle, ratio.low, ratio.high)


def _judged(goal: Goal, case: Case, subject: Measured, rivals: Sequence[Rival]) -> Target:
    """Whether the interval's worse end reaches the goal; not judged, and not met, where the rival is absent."""
    if goal.of is None:
        kind, what = "value", f"{subject.name}, {case.unit}"
        interval = median_interval(subject.values)
        low, high = interval.low, interval.high
    else:
        kind, what = "ratio", f"against {goal.of}"
        rival = next(rival for rival in rivals if rival.name == goal.of)
        low, high = rival.ratio_low, rival.ratio_high
    worse_end = low if goal.at_least is not None else high
    if worse_end is None:
        met = False
    elif goal.at_least is not None:
        met = worse_end >= goal.at_least
    else:
        met = goal.at_most is not None and worse_end <= goal.at_most
    return Target(what, kind, goal.at_least, goal.at_most, worse_end, met)
