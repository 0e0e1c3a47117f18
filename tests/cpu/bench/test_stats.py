"""Intervals against values worked out by hand, and against what 95 % means: how often they enclose the truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.bench._stats import Interval, median_interval, quartiles, ratio_interval
from freight.errors import ArgumentError

DRAWS = 10_000  # the share of hits is then known to 0.0022
POSITIVE = st.floats(1e-6, 1e6)


def test_quartiles() -> None:
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert quartiles([3.0, 1.0, 2.0, 4.0]) == (1.75, 2.5, 3.25)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        # By their order: 6 values enclose with 62/64 from first to last and with 50/64 one further in.
        (range(1, 7), 1 + 0.5 / 1.4, 6 - 0.5 / 1.4),
        # 10 values: 1002/1024 from the second on, 912/1024 from the third on.
        (range(1, 11), 2.657658, 8.342342),
        # Few of them, by Student: mean 2 and deviation 1; 4.303 is the 97.5 % point for two degrees of freedom.
        ([1, 2, 3], 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)),
        ([1, 2, 3, 4], 2.5 - 3.182 * math.sqrt(5 / 12), 2.5 + 3.182 * math.sqrt(5 / 12)),
    ],
    ids=lambda values: f"{len(values)} values" if hasattr(values, "__len__") else None,
)
def test_known_intervals(values: range, low: float, high: float) -> None:
    got = median_interval([float(value) for value in values])
    assert (got.low, got.high) == pytest.approx((low, high), rel=1e-6)
    assert got.middle == np.median(values)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 10, 12, 30])
def test_normal_values_are_enclosed_95_times_of_100(n: int) -> None:
    assert 0.942 <= hits(np.random.default_rng(n).normal(size=(DRAWS, n)), 0.0) <= 0.958


@pytest.mark.parametrize("n", [7, 10, 12, 30])
@pytest.mark.parametrize(("draw", "median"), [("standard_exponential", math.log(2)), ("standard_cauchy", 0.0)])
def test_order_supposes_no_distribution(n: int, draw: str, median: float) -> None:
    values = getattr(np.random.default_rng(n), draw)((DRAWS, n))
    assert 0.942 <= hits(values, median) <= 0.958


def hits(rows: np.ndarray, truth: float) -> float:
    """In what share of the rows the interval encloses `truth`."""
    found = [median_interval(row) for row in rows]
    return sum(interval.low <= truth <= interval.high for interval in found) / len(rows)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_interval_is_around_the_median(values: list[float]) -> None:
    got = median_interval(values)
    assert got.low <= got.middle <= got.high


def test_ratio_is_of_pairs() -> None:
    """The machine slows down tenfold on the way; within each pair the subject stays twice as fast."""
    drift = np.linspace(1, 10, 30)
    ratio = ratio_interval(list(2 * drift), list(drift), "higher")
    assert (ratio.middle, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_ratio_says_how_many_times_better() -> None:
    assert ratio_interval([1.0] * 7, [4.0] * 7, "lower").middle == pytest.approx(4)
    assert ratio_interval([1.0] * 7, [4.0] * 7, "higher").middle == pytest.approx(1 / 4)


@given(pairs=st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=40))
def test_ratio_is_the_same_from_the_other_side(pairs: list[tuple[float, float]]) -> None:
    """Who is called the rival does not matter, and nor does whether time or rate is measured."""
    ours, theirs = zip(*pairs, strict=True)
    ratio = ratio_interval(ours, theirs, "higher")
    other = ratio_interval(theirs, ours, "higher")
    lower = ratio_interval(theirs, ours, "lower")
    assert (1 / other.middle, 1 / other.high, 1 / other.low) == pytest.approx((ratio.middle, ratio.low, ratio.high))
    assert (lower.middle, lower.low, lower.high) == pytest.approx((ratio.middle, ratio.low, ratio.high))


def test_noise_alone_is_level() -> None:
    rng = np.random.default_rng(0)
    found = [ratio_interval(*np.exp(0.1 * rng.normal(size=(2, 30))), "higher") for _ in range(DRAWS)]
    assert 0.942 <= sum(one.low <= 1 <= one.high for one in found) / DRAWS <= 0.958


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: median_interval([1.0]), "at least two values; got one"),
        (lambda: median_interval([]), "at least one value and only finite ones; got"),
        (lambda: median_interval([1.0, math.nan]), "only finite ones"),
        (lambda: quartiles([math.inf, 1.0]), "only finite ones"),
        (lambda: ratio_interval([1.0, 2.0], [1.0], "higher"), "as many values of each; got 2 and 1"),
        (lambda: ratio_interval([1.0, 0.0], [1.0, 1.0], "higher"), "above 0"),
        (lambda: ratio_interval([1.0, 1.0], [1.0, -1.0], "higher"), "above 0"),
        (lambda: ratio_interval([1.0, 1.0], [1.0, 1.0], "faster"), "'higher' or 'lower'; got 'faster'"),
    ],
)
def test_what_has_no_interval(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_equal_values_leave_no_doubt() -> None:
    for n in range(2, 40):
        assert median_interval([3.5] * n) == Interval(3.5, 3.5, 3.5)
