"""Measuring a cell on a clock that the test moves: what runs when, on which inputs, and what becomes of the values."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from freight.bench._measure import Stamp, WrongResult, measure
from freight.bench._record import Cell, Record, Target, dump, parse
from freight.bench._run import Case, Goal, Run, Skip, Way, Work, at_least, at_most
from freight.errors import ArgumentError

STAMP = Stamp("85f547b", True, "sha256:0", lambda: "2026-11-18T10:20:30+00:00", {"torch": "2.13.0"}, quick=False)


@dataclass
class Bench:
    """A cell whose ways sum the inputs, and take as long as they are told to; everything done is logged."""

    costs: dict[str, Callable[[int], float]] = field(default_factory=lambda: {"freight": lambda turn: 1.0})
    time: float = 0.0
    log: list[tuple[str, Any]] = field(default_factory=list)
    wrong: dict[str, Callable[[list[int]], Any]] = field(default_factory=dict)
    rounds: Iterator[int] = field(default_factory=itertools.count)

    def clock(self, call: Callable[[], Any]) -> tuple[float, Any]:
        start = self.time
        output = call()
        return self.time - start, output

    def prepare(self) -> list[int]:
        self.log.append(("prepare", None))
        number = next(self.rounds)
        return [number, 2 * number]

    def way(self, name: str) -> Way:
        turns = itertools.count(-1)  # the check is a call of its own, before the first round

        def call(inputs: list[int]) -> Any:
            self.log.append((name, inputs))
            self.time += self.costs[name](next(turns))
            return self.wrong.get(name, sum)(inputs)

        return Way(name, call)

    def work(self, rivals: Sequence[Way] = (), check: Callable[[Any, Any], bool | None] | None = None) -> Work:
        right = check or (lambda inputs, output: output == sum(inputs))
        mine = [self.way(name) for name in self.costs]
        return Work(mine[0], right, "the sum", rivals=(*mine[1:], *rivals), prepare=self.prepare, extra={"why": "test"})

    def measure(self, case: Case) -> Cell:
        return measure(case, STAMP, clock=self.clock, now=lambda: self.time)

    def turns(self, checks: int) -> list[list[tuple[str, Any]]]:
        """What was called in each round, after as many checks."""
        rounds: list[list[tuple[str, Any]]] = []
        for name, inputs in self.log:
            rounds.append([]) if name == "prepare" else rounds[-1].append((name, inputs))
        return rounds[checks:]


def case(work: Work | Callable[[], Any], *targets: Goal, unit: str = "s", **more: Any) -> Case:
    run = Run(quick=more.pop("quick", False), gpu=False)
    make = work if callable(work) else lambda: contextlib.nullcontext(work)
    run.cell("sum", group="g", axes={"n": 2}, unit=unit, clock="host", work=make, targets=targets, **more)
    return run.cases[0]


def ways(**costs: float) -> Bench:
    """Ways that take as many seconds each time; the first is the subject."""
    return Bench({name: (lambda turn, cost=cost: cost) for name, cost in costs.items()})


# ---- what runs when --------------------------------------------------------------------------------


def test_every_way_is_checked_before_anything_is_timed() -> None:
    bench = ways(freight=0.1, torch=0.2, raw=0.3)
    bench.measure(case(bench.work(), pairs=4))
    first = [name for name, _ in bench.log[:6]]
    assert first == ["prepare", "freight", "prepare", "torch", "prepare", "raw"]
    assert len(bench.turns(checks=3)) == 4


def test_who_goes_first_rotates() -> None:
    bench = ways(freight=0.1, torch=0.2, raw=0.3)
    bench.measure(case(bench.work(), pairs=4))
    orders = [[name for name, _ in turn] for turn in bench.turns(checks=3)]
    assert orders == [
        ["freight", "torch", "raw"],
        ["torch", "raw", "freight"],
        ["raw", "freight", "torch"],
        ["freight", "torch", "raw"],
    ]


def test_within_a_round_all_get_the_same_inputs_and_each_round_fresh_ones() -> None:
    bench = ways(freight=1, torch=2)
    bench.measure(case(bench.work(), pairs=5))
    inputs = [[given for _, given in turn] for turn in bench.turns(checks=2)]
    assert all(one is other for one, other in inputs)
    assert [one for one, _ in inputs] == [[n, 2 * n] for n in range(2, 7)]


def test_before_and_after_are_not_timed() -> None:
    bench = ways(freight=1)
    seen: list[Any] = []

    def spend(*output: Any) -> None:
        bench.time += 100
        seen.append(output)

    plain = bench.way("freight")
    way = Way("freight", plain.call, before=spend, after=spend)
    work = Work(way, lambda inputs, output: output == sum(inputs), "the sum", prepare=bench.prepare)
    cell = bench.measure(case(work, pairs=3, seconds=1e9))
    assert cell.subject.values == (1.0, 1.0, 1.0)
    assert seen == [(), (0,), (), (3,), (), (6,), (), (9,)]


def test_after_frees_even_what_was_wrong() -> None:
    held: list[str] = []
    way = Way("freight", lambda _: "memory", before=lambda: held.append("memory"), after=held.remove)
    with pytest.raises(WrongResult):
        measure(case(Work(way, lambda _, output: False, "nothing")), STAMP)
    assert held == []


@pytest.mark.parametrize(
    ("cost", "pairs"),
    [
        (1.0, 30),  # 30 rounds of two seconds: all of them
        (3.0, 20),  # the 20th ends at 120 s
        (50.0, 3),  # however long they take
    ],
)
def test_a_cell_ends_when_it_has_had_its_time(cost: float, pairs: int) -> None:
    bench = ways(freight=cost, torch=cost)
    cell = bench.measure(case(bench.work(), seconds=120))
    assert (cell.subject.runs, cell.rivals[0].measured.runs) == (pairs, pairs)  # type: ignore[union-attr]


def test_time_is_kept_for_the_longest_round() -> None:
    """The fourth round took 50 s: after 60 s one may begin that takes as long again, after 61 s none."""
    bench = Bench({"freight": lambda turn: 50.0 if turn == 3 else 1.0})
    assert bench.measure(case(bench.work(), seconds=110)).subject.runs == 12


def test_rounds_are_told() -> None:
    bench = ways(freight=1)
    told: list[tuple[int, int]] = []
    measure(case(bench.work(), pairs=3), STAMP, clock=bench.clock, told=lambda done, of: told.append((done, of)))
    assert told == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("broken", [None, RuntimeError("no"), KeyboardInterrupt()])
def test_what_a_cell_holds_is_freed_however_it_ends(broken: BaseException | None) -> None:
    steps: list[str] = []

    @contextlib.contextmanager
    def work() -> Iterator[Work]:
        steps.append("made")
        turns = itertools.count()

        def call(_: None) -> int:
            if broken is not None and next(turns) == 3:
                raise broken
            return 1

        try:
            yield Work(Way("freight", call), lambda _, output: output == 1, "one")
        finally:
            steps.append("freed")

    declared = case(work, pairs=5)
    assert steps == []
    with pytest.raises(type(broken)) if broken else contextlib.nullcontext():
        measure(declared, STAMP)
    assert steps == ["made", "freed"]


# ---- wrong, absent, skipped ------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", ["freight", "torch"])
@pytest.mark.parametrize("wrong", [lambda inputs: sum(inputs) + 1, lambda inputs: None], ids=["off by one", "nothing"])
def test_a_wrong_result_is_never_timed(guilty: str, wrong: Callable[[list[int]], Any]) -> None:
    bench = ways(freight=1, torch=2)
    bench.wrong[guilty] = wrong
    with pytest.raises(WrongResult, match=rf"^{guilty} gave a wrong result \(checked: the sum\)$"):
        bench.measure(case(bench.work()))
    assert bench.turns(checks=2) == []


def test_a_way_that_fails_is_a_wrong_result() -> None:
    bench = ways(freight=1, torch=2)
    bench.wrong["torch"] = lambda inputs: 1 / 0
    with pytest.raises(WrongResult, match=r"^torch failed the check: ZeroDivisionError: division by zero"):
        bench.measure(case(bench.work()))


def test_a_check_may_raise() -> None:
    def check(inputs: list[int], output: int) -> None:
        assert output == -1, f"got {output}"

    bench = ways(freight=1)
    with pytest.raises(WrongResult, match=r"^freight failed the check: AssertionError: got 0"):
        bench.measure(case(bench.work(check=check)))


@pytest.mark.parametrize("verdict", [None, True, np.True_, 1])
def test_what_passes_a_check(verdict: Any) -> None:
    bench = ways(freight=1)
    assert bench.measure(case(bench.work(check=lambda inputs, output: verdict))).checked == "the sum"


@pytest.mark.parametrize("verdict", [False, np.False_, 0])
def test_what_fails_a_check(verdict: Any) -> None:
    bench = ways(freight=1)
    with pytest.raises(WrongResult):
        bench.measure(case(bench.work(check=lambda inputs, output: verdict)))


def test_an_absent_rival_is_listed_with_its_reason() -> None:
    def library() -> Way:
        import a_package_that_nobody_has

        return Way("library", a_package_that_nobody_has.sum)

    bench = ways(freight=1, torch=2)
    gone = Way.importing("library", library)
    cell = bench.measure(case(bench.work(rivals=[gone]), at_least(1.5, of="library"), at_least(1.5, of="torch")))
    assert [(rival.name, rival.absent) for rival in cell.rivals] == [
        ("torch", None),
        ("library", "No module named 'a_package_that_nobody_has'"),
    ]
    assert cell.rivals[1].measured is cell.rivals[1].ratio is None
    assert cell.targets[0] == Target("against library", "ratio", 1.5, None, worse_end=None, met=False)
    assert cell.targets[1].met


def test_a_rival_that_is_there_is_not_absent() -> None:
    assert Way.importing("torch", lambda: Way("torch", sum)).call is sum
    with pytest.raises(ZeroDivisionError):  # only what cannot be imported is absent
        Way.importing("torch", lambda: Way(str(1 // 0), sum))


def test_skip_passes_through() -> None:
    @contextlib.contextmanager
    def work() -> Iterator[Work]:
        raise Skip("it takes 32 GiB")
        yield

    with pytest.raises(Skip, match="it takes 32 GiB"):
        measure(case(work), STAMP)


# ---- values, ratios, targets -----------------------------------------------------------------------


def test_cell_says_all_that_was_measured() -> None:
    bench = Bench({"freight": lambda turn: 1.0 + turn, "torch": lambda turn: 4.0 * (1 + turn)})
    cell = bench.measure(case(bench.work(), pairs=5, note="a note", seconds=1e9))
    assert cell.subject.values == (1, 2, 3, 4, 5)
    assert (cell.subject.low, cell.subject.median, cell.subject.high) == (2, 3, 4)
    [rival] = cell.rivals
    assert rival.measured is not None
    assert rival.measured.values == (4, 8, 12, 16, 20)
    assert (rival.ratio, rival.ratio_low, rival.ratio_high) == pytest.approx((4, 4, 4))
    assert (cell.id, cell.group, cell.axes, cell.unit, cell.better) == ("sum", "g", {"n": 2}, "s", "lower")
    assert (cell.checked, cell.note, cell.extra) == ("the sum", "a note", {"clock": "host", "why": "test"})
    assert (cell.commit, cell.dirty, cell.code, cell.quick) == ("85f547b", True, "sha256:0", False)
    assert (cell.date, cell.versions) == ("2026-11-18T10:20:30+00:00", {"torch": "2.13.0"})
    record = Record("sums", "Sums", "cpu", "", (cell,))
    assert parse(dump(record)) == parse(dump(parse(dump(record))))


@pytest.mark.parametrize(
    ("unit", "amount", "want", "better"),
    [
        ("s", 0, 0.5, "lower"),
        ("ms", 0, 500, "lower"),
        ("µs", 0, 5e5, "lower"),
        ("GB/s", 2e9, 4, "higher"),
        ("TFLOP/s", 3e12, 6, "higher"),
        ("1/s", 7, 14, "higher"),
    ],
)
def test_units(unit: str, amount: float, want: float, better: str) -> None:
    bench = ways(freight=0.5, torch=1.0)
    cell = bench.measure(case(bench.work(), unit=unit, amount=amount, pairs=3))
    assert cell.subject.median == pytest.approx(want)
    assert cell.better == better
    assert cell.rivals[0].ratio == pytest.approx(2), "twice as fast is 2, be it by time or by rate"


NOISE = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.05, 0.95]


@pytest.mark.parametrize(
    ("goal", "end"),
    [
        (lambda bound: at_least(bound, of="torch"), "low"),
        (lambda bound: at_most(bound, of="torch"), "high"),
    ],
)
def test_ratio_is_judged_by_the_worse_end(goal: Callable[[float], Goal], end: str) -> None:
    bench = Bench({"freight": lambda turn: NOISE[turn], "torch": lambda turn: 2.0})
    probe = bench.measure(case(bench.work(), pairs=len(NOISE))).rivals[0]
    assert probe.ratio_low < probe.ratio < probe.ratio_high  # type: ignore[operator]
    worse = probe.ratio_low if end == "low" else probe.ratio_high
    assert worse is not None
    for bound in (worse * 1.01, worse * 0.99):
        bench = Bench(bench.costs)
        [target] = bench.measure(case(bench.work(), goal(bound), pairs=len(NOISE))).targets
        assert target.worse_end == worse
        assert target.met == (bound < worse if end == "low" else bound > worse)
        assert (target.what, target.kind) == ("against torch", "ratio")


@pytest.mark.parametrize("make", [at_least, at_most])
def test_value_is_judged_by_the_worse_end(make: Callable[[float], Goal]) -> None:
    low, middle, high = 0.85, 1.0, 1.15  # the median's interval lies within: its ends decide, not the median
    for bound in (low, middle, high):
        bench = Bench({"freight": lambda turn: NOISE[turn]})
        [target] = bench.measure(case(bench.work(), make(bound), pairs=len(NOISE))).targets
        assert target.worse_end is not None
        assert low < target.worse_end < high
        assert (target.worse_end < middle) == (make is at_least)
        assert target.met == (bound == (low if make is at_least else high))
        assert (target.what, target.kind) == ("freight, s", "value")


def test_a_goal_is_met_at_its_bound() -> None:
    bench = ways(freight=1, torch=2)
    cell = bench.measure(case(bench.work(), at_most(1.0), at_least(1.0), at_least(2.0, of="torch"), pairs=7))
    assert [target.met for target in cell.targets] == [True, True, True]


# ---- what cannot be declared -----------------------------------------------------------------------


def test_a_goal_against_nobody() -> None:
    bench = ways(freight=1, torch=2)
    with pytest.raises(ArgumentError, match=r"cell 'sum' has a target against 'raw'; its rivals are: \['torch'\]"):
        bench.measure(case(bench.work(), at_least(1.0, of="raw")))
    assert bench.log == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "hours"}, "unit must be one of s, ms, µs, GB/s, TFLOP/s, 1/s; got 'hours'"),
        ({"unit": "GB/s"}, "a rate needs its amount, and a time has none; got 0"),
        ({"amount": 5.0}, "a rate needs its amount, and a time has none; got 5.0 in s"),
        ({"clock": "gpu"}, "clock must be 'host', or 'gpu' or 'submit' where there is a GPU; got 'gpu'"),
        ({"clock": "sun"}, "got 'sun'"),
        ({"pairs": 1}, "an interval needs at least two pairs; got 1"),
        ({"id": "first"}, "cell 'first' is declared twice"),
    ],
)
def test_cells_that_cannot_be_declared(changes: dict[str, Any], message: str) -> None:
    run = Run(quick=False, gpu=False)
    good: dict[str, Any] = {"id": "cell", "group": "g", "axes": {}, "unit": "s", "clock": "host", "work": Work}
    run.cell(**{**good, "id": "first"})
    with pytest.raises(ArgumentError, match=message):
        run.cell(**{**good, **changes})
    assert len(run.cases) == 1


def test_in_haste_there_are_fewer_pairs_and_less_time() -> None:
    full, quick = (case(Work, pairs=30, seconds=20, quick=quick) for quick in (False, True))
    assert (full.pairs, full.seconds) == (30, 20)
    assert (quick.pairs, quick.seconds) == (7, 3)
    short = case(Work, pairs=3, seconds=1, quick=True)
    assert (short.pairs, short.seconds) == (3, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Way("torch"), "'torch' must have either a call, or a reason"),
        (lambda: Way("torch", sum, absent="gone"), "'torch' must have either a call, or a reason"),
        (lambda: Work(Way("freight", absent="gone"), max, "all"), "subject 'freight' is absent; raise Skip"),
        (lambda: Work(Way("a", sum), max, ""), "checked must say in words"),
        (lambda: Work(Way("a", sum), max, "all", rivals=(Way("a", sum),)), "names that differ; got a, a"),
    ],
)
def test_ways_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
