"""Medians, quartiles, and how sure they are: 95 % intervals of a median from the order of the values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freight.errors import ArgumentError

CONFIDENCE = 0.95
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % points of Student's t for so many values


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95 % interval."""

    middle: float
    low: float
    high: float


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile.

    >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    low, middle, high = np.quantile(_checked(values), [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def median_interval(values: Sequence[float]) -> Interval:
    """The median of `values` and its 95 % interval.

    >>> median_interval([2.0] * 7)
    Interval(middle=2.0, low=2.0, high=2.0)
    """
    return _interval_of_median(_checked(values))


def ratio_interval(subject: Sequence[float], rival: Sequence[float], better: str) -> Interval:
    """How many times better the subject is than the rival, above 1 where it is better, and the 95 % interval.

    The values are pairs measured one right after the other, so what slows the machine down for a while slows both
    and leaves their ratio. The ratio is the median over the pairs, taken of logarithms, where twice and half are
    equally far from 1.

    >>> ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], "higher").middle
    2.0
    >>> ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], "lower").middle
    0.5
    """
    ours, theirs = _checked(subject), _checked(rival)
    if len(ours) != len(theirs):
        raise ArgumentError(f"pairs need as many values of each; got {len(ours)} and {len(theirs)}.")
    if (ours <= 0).any() or (theirs <= 0).any():
        raise ArgumentError("ratios need values above 0.")
    if better not in ("higher", "lower"):
        raise ArgumentError(f"better must be 'higher' or 'lower'; got {better!r}.")
    sign = 1.0 if better == "higher" else -1.0
    logs = _interval_of_median(sign * (np.log(ours) - np.log(theirs)))
    return Interval(*(float(np.exp(end)) for end in (logs.middle, logs.low, logs.high)))


def _interval_of_median(values: np.ndarray) -> Interval:
    """The interval of the sign test, which supposes nothing of how the values are distributed.

    The k-th smallest and k-th largest of n values enclose the median unless fewer than k fall on one side of it: a
    matter of n tosses of a coin. Between the two k whose chances enclose 95 %, Hettmansperger and Sheather's
    interpolation is taken. Fewer than six values cannot be that sure by their order alone; for them it is Student's
    interval around the mean, which is wide, supposes a normal distribution, and always has the median inside it. One
    value has no interval.
    """
    n = len(values)
    middle = float(np.median(values))
    if n < 2:
        raise ArgumentError("an interval needs at least two values; got one.")
    if n in _STUDENT:
        mean, half = float(np.mean(values)), _STUDENT[n] * float(np.std(values, ddof=1)) / math.sqrt(n)
        return Interval(middle, min(mean - half, middle), max(mean + half, middle))  # but for rounding, no min, no max
    ordered = np.sort(values)
    k = next(k for k in range(1, n) if _chance(n, k + 1) < CONFIDENCE)
    surer, less_sure = _chance(n, k), _chance(n, k + 1)
    part = (surer - CONFIDENCE) / (surer - less_sure)
    inwards = (n - k) * part / (k + (n - 2 * k) * part)
    low = ordered[k - 1] + inwards * (ordered[k] - ordered[k - 1])
    high = ordered[n - k] + inwards * (ordered[n - k - 1] - ordered[n - k])
    return Interval(middle, float(low), float(high))


def _chance(n: int, k: int) -> float:
    """How likely the k-th smallest and k-th largest of n values enclose the median they were drawn around."""
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n


def _checked(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ArgumentError(f"statistics need at least one value and only finite ones; got {values!r}.")
    return array
