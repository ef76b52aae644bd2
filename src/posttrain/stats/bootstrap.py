"""Bootstrap intervals for statistics that have no formula, and for clusters of unequal size.

A statistic reduces the last axis of an array, so that all resamples are computed at once: `mean`, `median`, `iqm`, or your own. The result
depends on the values and the seed, never on the order of the values. Fewer than 8 values are refused, because a bootstrap of so few
is far too narrow, and so is data whose resamples are all the same: that would read as certainty. Use Student-t, cluster-t or Wilson there.

Plain quantiles of resamples are too narrow for few values: they use the spread with n and not n - 1, and a normal instead of a t quantile.
All methods here therefore go out to Phi(sqrt(n / (n - 1)) t) instead of Phi(z), with n - 1 degrees of freedom (Hesterberg 2015,
arXiv 1411.5279, "expanded").

Example: bca([0.1, 0.4, 0.3, 0.9, 0.2, 0.5, 0.4, 0.6], mean, seed=0) is Interval(low=0.29, high=0.61, level=0.95, method="bca bootstrap").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from posttrain.core.errors import EvidenceError
from posttrain.core.seeds import numpy_rng
from posttrain.stats.intervals import Interval, all_equal, checked_level, finite_values, normal_quantile

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Reduces the last axis: [resamples, n] to [resamples]."""

FEWEST = 8
"""Values or clusters below which a bootstrap is refused."""

RESAMPLES = 10_000

_BLOCK = 1 << 20
"""Numbers drawn at a time, which bounds the memory."""


def mean(values: Floats) -> Floats:
    """Mean over the last axis."""
    return np.asarray(values.mean(axis=-1))


def median(values: Floats) -> Floats:
    """Median over the last axis."""
    return np.asarray(np.median(values, axis=-1))


@dataclass(frozen=True, slots=True)
class Resampled:
    """What a bias-corrected accelerated interval is made of (Efron 1987).

    Example: Resampled(estimate=0.4, draws=array([0.38, 0.43, ...]), bias=0.01, acceleration=0.02)
    """

    estimate: float
    draws: Floats
    """The statistic of every resample, ascending."""
    bias: float
    """z0: how far, in standard normal units, the median of the draws lies from the estimate."""
    acceleration: float
    """a: how the standard error changes with the estimate, from leaving out one value at a time."""

    def interval(self, level: float, n: int, method: str) -> Interval:
        """The quantiles of the draws at the corrected probabilities, for resamples of n values."""
        z = expanded_quantile(level, n)
        low, high = (self._corrected(self.bias + side) for side in (-z, z))
        ends = np.quantile(self.draws, [low, high])
        return Interval(float(ends[0]), float(ends[1]), level, method)

    def _corrected(self, u: float) -> float:
        shrink = 1 - self.acceleration * u
        if shrink <= 0:
            raise EvidenceError(f"acceleration {self.acceleration:.2g} is too large for a BCa interval; use percentile, or more values")
        return float(special.ndtr(self.bias + u / shrink))


def percentile(
    values: Sequence[float] | Floats, statistic: Statistic, seed: int, level: float = 0.95, resamples: int = RESAMPLES
) -> Interval:
    """The quantiles of the statistic over resamples: simple, and off centre for skewed data.

    >>> interval = percentile(list(range(20)), mean, seed=0)
    >>> 6.0 < interval.low < 8.0 and 11.0 < interval.high < 13.0
    True
    """
    row = _checked(values, level, resamples)
    draws = _draws(row, statistic, seed, resamples)
    beyond = float(special.ndtr(-expanded_quantile(level, len(row))))
    ends = np.quantile(draws, [beyond, 1 - beyond])
    return Interval(float(ends[0]), float(ends[1]), level, "percentile bootstrap")


def bca(values: Sequence[float] | Floats, statistic: Statistic, seed: int, level: float = 0.95, resamples: int = RESAMPLES) -> Interval:
    """Bias-corrected accelerated bootstrap interval (Efron 1987) for a smooth statistic; for a maximum or a mode it means nothing.

    >>> skewed = [0.0] * 10 + [0.1] * 5 + [1.0] * 2
    >>> bca(skewed, mean, seed=0).high > percentile(skewed, mean, seed=0).high  # the long tail counts
    True
    """
    row = _checked(values, level, resamples)
    draws = _draws(row, statistic, seed, resamples)
    left_out = _leave_one_out(row, statistic)
    return corrected(float(statistic(row[None, :])[0]), draws, left_out).interval(level, len(row), "bca bootstrap")


def cluster_bootstrap(clusters: Sequence[Sequence[float]], seed: int, level: float = 0.95, resamples: int = RESAMPLES) -> Interval:
    """BCa interval of the mean over all samples, where whole clusters are resampled: the samples of an item stay together.

    Clusters may differ in size; each sample weighs the same, so a larger cluster weighs more (for equal weights, take cluster means
    and `bca`). Empty clusters are left out.

    >>> interval = cluster_bootstrap([[1, 1], [0, 0], [1, 0], [1, 1], [0, 0], [1], [0, 1], [0, 0, 0]], seed=0)
    >>> interval.method, interval.low > 0.05, interval.high < 0.9
    ('cluster bootstrap (bca)', True, True)
    """
    rows = sorted((len(values), float(np.sum(finite_values(values)))) for values in clusters if len(values))
    sizes, totals = np.array([size for size, _ in rows], dtype=np.float64), np.array([total for _, total in rows])
    _check_count(len(rows), "clusters", checked_level(level), resamples)
    index, parts = numpy_rng(seed, "stats", "cluster-bootstrap"), []
    for block in _blocks(resamples, len(rows)):
        chosen = index.integers(0, len(rows), size=(block, len(rows)))
        parts.append(totals[chosen].sum(axis=1) / sizes[chosen].sum(axis=1))
    left_out = (totals.sum() - totals) / (sizes.sum() - sizes)
    draws = _spread_out(np.concatenate(parts))
    return corrected(float(totals.sum() / sizes.sum()), draws, left_out).interval(level, len(rows), "cluster bootstrap (bca)")


def expanded_quantile(level: float, n: int) -> float:
    """sqrt(n / (n - 1)) times the t quantile with n - 1 degrees of freedom: 2.53 for 95% and 8 values, 1.96 for very many."""
    return float(special.stdtrit(n - 1, 0.5 + level / 2)) * math.sqrt(n / (n - 1))


def corrected(estimate: float, draws: Floats, left_out: Floats) -> Resampled:
    """Bias from the share of draws below the estimate, acceleration from the statistics without one value each."""
    draws = np.sort(draws)
    tie = 1e-9 * max(1.0, abs(estimate))  # sums in another order differ by rounding and must still tie
    below = np.searchsorted(draws, estimate - tie, "left") + np.searchsorted(draws, estimate + tie, "right")
    share = below / (2 * len(draws))
    if not 0 < share < 1:
        raise EvidenceError(
            "every resample lies on one side of the estimate, so BCa is undefined; use a statistic like the mean, or percentile"
        )
    influence = left_out.mean() - left_out
    squares = float(np.sum(influence**2))
    acceleration = float(np.sum(influence**3)) / (6 * squares**1.5) if squares > 0 else 0.0
    return Resampled(estimate, draws, normal_quantile(share), acceleration)


def _draws(row: Floats, statistic: Statistic, seed: int, resamples: int) -> Floats:
    rng, parts = numpy_rng(seed, "stats", "bootstrap"), []
    for block in _blocks(resamples, len(row)):
        parts.append(_reduced(statistic, row[rng.integers(0, len(row), size=(block, len(row)))]))
    return _spread_out(np.concatenate(parts))


def _leave_one_out(row: Floats, statistic: Statistic) -> Floats:
    n = len(row)
    if statistic is mean:
        return (row.sum() - row) / (n - 1)
    parts, others = [], np.arange(n - 1)
    for start in range(0, n, max(1, _BLOCK // n)):
        left = np.arange(start, min(n, start + max(1, _BLOCK // n)))[:, None]
        parts.append(_reduced(statistic, row[others + (others >= left)]))
    return np.concatenate(parts)


def _reduced(statistic: Statistic, block: Floats) -> Floats:
    result = np.asarray(statistic(block), dtype=np.float64)
    if result.shape != block.shape[:-1]:
        raise ValueError(f"the statistic turned shape {block.shape} into {result.shape}; it must reduce the last axis only")
    return result


def _spread_out(draws: Floats) -> Floats:
    if not np.all(np.isfinite(draws)):
        raise EvidenceError("the statistic of a resample is not a finite number; use a statistic that is defined for repeated values")
    if all_equal(draws):
        raise EvidenceError("every resample gives the same value, so no width can be stated; use wilson, or cluster_t with bounds")
    return draws


def _blocks(resamples: int, n: int) -> list[int]:
    rows = max(1, _BLOCK // n)
    whole, rest = divmod(resamples, rows)
    return [rows] * whole + ([rest] if rest else [])


def _checked(values: Sequence[float] | Floats, level: float, resamples: int) -> Floats:
    row = np.sort(finite_values(values))
    _check_count(len(row), "values", checked_level(level), resamples)
    return row


def _check_count(n: int, what: str, level: float, resamples: int) -> None:
    if n < FEWEST:
        raise EvidenceError(f"a bootstrap of {n} {what} is far too narrow; take at least {FEWEST}, or student_t or cluster_t")
    if resamples < math.ceil(20 / (1 - level)):
        raise EvidenceError(
            f"{resamples} resamples cannot place the ends of a {level:g} interval; take at least {math.ceil(20 / (1 - level))}"
        )
