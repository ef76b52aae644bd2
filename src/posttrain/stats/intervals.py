"""Confidence intervals for scores of evaluations: Wilson for one 0/1 outcome per item, cluster-t for several samples per item.

Both refuse fewer than two items, because one item says nothing about the spread between items, and neither ever returns an interval
of zero width: identical outcomes are little evidence, not certainty (spec/faults.md section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from posttrain.core.errors import EvidenceError

UNIT = (0.0, 1.0)
"""Bounds of a success rate."""


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
    values = np.asarray(item_means, dtype=np.float64)
    n = len(values)
    _check(n, level)
    if not np.all(np.isfinite(values)):
        raise EvidenceError("an item mean is not a finite number; leave out the items that were never scored and state how many")
    if bounds is not None and (values.min() < bounds[0] or values.max() > bounds[1]):
        raise EvidenceError(f"item means reach [{values.min():g}, {values.max():g}], outside the bounds {bounds}; pass the true bounds")
    if all_equal(values):
        return _identical(float(values[0]), n, level, bounds)
    mean = float(values.mean())
    half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * float(values.std(ddof=1)) / math.sqrt(n)
    low, high = mean - half, mean + half
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(low, high, level, "cluster-t")


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


def _identical(value: float, n: int, level: float, bounds: tuple[float, float] | None) -> Interval:
    if bounds is None:
        raise EvidenceError(
            f"all {n} item means equal {value:g} and no bounds are known, so no width can be stated; pass bounds or more items"
        )
    unseen = wilson(0, n, level).high
    low = value - unseen * (value - bounds[0])
    high = value + unseen * (bounds[1] - value)
    return Interval(low, high, level, "wilson on items (all equal)")


def _check(n: int, level: float) -> None:
    if n < 2:
        raise EvidenceError(f"an interval needs at least 2 items, got {n}; evaluate more items")
    if not 0 < level < 1:
        raise EvidenceError(f"confidence level {level} is not between 0 and 1; 0.95 is usual")
