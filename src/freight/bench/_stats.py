"""Medians, quartiles, and how sure they are: 95 % intervals by resampling, with a fixed seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freight.errors import ArgumentError

CONFIDENCE = 0.95
_RESAMPLES = 4000
_SEED = 20240229  # the same values give the same interval, in every run


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
    and leaves their ratio. The ratio is the median over the pairs; it is resampled as a logarithm, where twice and
    half are equally far from 1.

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
    generator = np.random.default_rng(_SEED)
    drawn = generator.integers(len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(values[drawn], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(values)), float(low), float(high))


def _checked(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ArgumentError(f"statistics need at least one value and only finite ones; got {values!r}.")
    return array
