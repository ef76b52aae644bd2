"""Confidence intervals: Wilson or exact for one 0/1 outcome per item, cluster-t for several samples per item, Student-t for plain values.

All refuse fewer than two items, because one item says nothing about the spread between items, and none ever returns an interval of
zero width: identical outcomes are little evidence, not certainty (spec/faults.md section 5). Every interval carries the name of its
method; `same_method` keeps those of two methods out of one table. Resampling intervals are in `bootstrap`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from posttrain.core.errors import EvidenceError

UNIT = (0.0, 1.0)
"""Bounds of a success rate."""

ALL_EQUAL = "(all equal)"
"""Ends the name of an interval that had to be made another way because every value was the same."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval and how it was made.

    Example: Interval(low=0.47, high=0.78, level=0.95, method="wilson")
    """

    low: float
    high: float
    level: float
    method: str

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"interval [{self.low}, {self.high}] is empty")

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(successes: float, n: int, level: float = 0.95) -> Interval:
    """Wilson score interval of a success rate, inside [0, 1] for every n (Wilson 1927).

    >>> interval = wilson(15, 30)
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.332, 0.668)
    """
    _check(n, level)
    if not 0 <= successes <= n:
        raise EvidenceError(f"{successes} successes in {n} trials is impossible; count each trial once")
    z = float(special.ndtri(0.5 + level / 2))
    rate, shrink = successes / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At 0 and n the end is exactly the bound; computed, it misses it by a rounding error and may exclude the estimate.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low, high, level, "wilson")


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Exact interval of a success rate (Clopper and Pearson 1934): it covers at least `level`, and for small n clearly more.

    >>> interval = clopper_pearson(0, 10)  # high = 1 - .025 ** (1 / 10)
    >>> interval.low, round(interval.high, 4)
    (0.0, 0.3085)
    """
    _check(n, level)
    if successes != int(successes) or not 0 <= successes <= n:
        raise EvidenceError(f"{successes} successes in {n} trials is impossible; count each trial once")
    tail = (1 - level) / 2
    low = 0.0 if successes == 0 else float(special.betaincinv(successes, n - successes + 1, tail))
    high = 1.0 if successes == n else float(special.betaincinv(successes + 1, n - successes, 1 - tail))
    return Interval(low, high, level, "clopper-pearson")


def half_width(n: int, p: float = 0.5, level: float = 0.95) -> float:
    """Half the width that a success rate near p will have over n items, by the normal approximation: for planning, not for reporting.

    36 items +-16.3 points, 50 13.9, 100 9.8, 200 6.9, 500 4.4, 1000 3.1. Two models differ by more than this before it says anything
    about their difference: that is `power.items_needed`.

    >>> round(half_width(500), 4)  # 1.96 sqrt(.25 / 500)
    0.0438
    """
    if n < 1:
        raise EvidenceError(f"an evaluation of {n} items has no width; plan at least 1")
    if not 0 <= p <= 1:
        raise EvidenceError(f"success rate {p} is not between 0 and 1")
    return normal_quantile(0.5 + checked_level(level) / 2) * math.sqrt(p * (1 - p) / n)


def student_t(values: Sequence[float], level: float = 0.95, bounds: tuple[float, float] | None = None) -> Interval:
    """Student-t interval of the mean of independent values: one per run, or one per item; clipped into `bounds`.

    Values that are all equal are refused without bounds and treated as in `cluster_t` with them.

    >>> interval = student_t([1.0, 2.0, 3.0])  # mean 2, sd 1, se .5774, t(2) 4.3027
    >>> round(interval.low, 3), round(interval.high, 3)
    (-0.484, 4.484)
    """
    return _t_interval(values, level, bounds, "student-t")


def cluster_t(item_means: Sequence[float], level: float = 0.95, bounds: tuple[float, float] | None = UNIT) -> Interval:
    """Student-t interval of the mean over items, where each item is one cluster of samples; clipped into `bounds`.

    Samples of one item are not independent, so only their mean counts, with n - 1 degrees of freedom for n items.

    If all means are the same value v, the t interval would have zero width and read as certainty. Then the share u of items that
    would have deviated from v is bounded by Wilson's upper end for 0 of n, and each of them could lie anywhere within the bounds:
    [v - u (v - lower), v + u (upper - v)]. For v = 0 or 1 within [0, 1] this is exactly Wilson on the item count. Without bounds
    nothing can be said, which is an EvidenceError.

    >>> interval = cluster_t([0.0, 0.5, 1.0, 0.5])  # mean .5, sd .408, se .204, t(3) 3.182
    >>> interval.low, interval.high
    (0.0, 1.0)
    """
    return _t_interval(item_means, level, bounds, "cluster-t")


def all_equal(values: np.ndarray) -> bool:
    """Whether values differ by no more than rounding: the same difference computed from other numbers is not a spread."""
    return float(np.ptp(values)) <= 1e-9 * max(1.0, float(np.abs(values).max()))


def item_clustered_se(correct: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all samples, clustered by item (arXiv 2411.00640, appendix A, with the C/(C-1) correction).

    `correct[i]` holds the sample values of item i; items may have different numbers of samples. With equal numbers it is the sample
    standard deviation of the item means over sqrt(items).

    >>> round(item_clustered_se([[1, 1], [0, 0], [1, 0]]), 4)  # item means 1, 0, .5: sd .5 / sqrt(3)
    0.2887
    """
    clusters = [np.asarray(values, dtype=np.float64) for values in correct if len(values)]
    count = len(clusters)
    _check(count, 0.95)
    everything = np.concatenate(clusters)
    residuals = np.array([np.sum(values - everything.mean()) for values in clusters])
    return float(math.sqrt(count / (count - 1) * np.sum(residuals**2)) / len(everything))


def same_method(intervals: Iterable[Interval]) -> str:
    """The one method and level of intervals that are to stand in one table, as "wilson 95%"; an EvidenceError names those that differ.

    An interval that was made another way because its values were all equal says so itself and is no obstacle.

    >>> same_method([wilson(1, 4), wilson(2, 4)])
    'wilson 95%'
    """
    kept = [interval for interval in intervals if not interval.method.endswith(ALL_EQUAL)]
    found = sorted({f"{interval.method} {interval.level:.4g}" for interval in kept})
    if len(found) > 1:
        raise EvidenceError(f"one table would mix intervals of {', '.join(found)}; recompute all with one method and level")
    return f"{kept[0].method} {100 * kept[0].level:.4g}%" if kept else "none"


def normal_quantile(probability: float) -> float:
    """The z below which a standard normal variable lies with this probability: 1.96 for 0.975."""
    return float(special.ndtri(probability))


def checked_level(level: float) -> float:
    """The confidence level itself, refused outside (0, 1)."""
    if not 0 < level < 1:
        raise EvidenceError(f"confidence level {level} is not between 0 and 1; 0.95 is usual")
    return level


def finite_values(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The values as one float64 row; NaN, infinities and tables are refused."""
    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1:
        raise EvidenceError(f"one series of values is expected, got an array of shape {row.shape}; pass one row")
    if not np.all(np.isfinite(row)):
        raise EvidenceError("a value or item mean is not a finite number; leave out the items that were never scored and state how many")
    return row


def _t_interval(values: Sequence[float], level: float, bounds: tuple[float, float] | None, method: str) -> Interval:
    row = finite_values(values)
    n = len(row)
    _check(n, level)
    if bounds is not None and (row.min() < bounds[0] or row.max() > bounds[1]):
        raise EvidenceError(f"values reach [{row.min():g}, {row.max():g}], outside the bounds {bounds}; pass the true bounds")
    if all_equal(row):
        return _identical(float(np.clip(row.mean(), row.min(), row.max())), n, level, bounds)
    mean = float(row.mean())
    half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * float(row.std(ddof=1)) / math.sqrt(n)
    low, high = mean - half, mean + half
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(low, high, level, method)


def _identical(value: float, n: int, level: float, bounds: tuple[float, float] | None) -> Interval:
    if bounds is None:
        raise EvidenceError(
            f"all {n} values equal {value:g} and no bounds are known, so no width can be stated; pass bounds or more values"
        )
    unseen = wilson(0, n, level).high
    low = value - unseen * (value - bounds[0])
    high = value + unseen * (bounds[1] - value)
    return Interval(low, high, level, f"wilson on items {ALL_EQUAL}")


def _check(n: int, level: float) -> None:
    if n < 2:
        raise EvidenceError(f"an interval needs at least 2 items, got {n}; evaluate more items")
    checked_level(level)
