"""Tests of a change measured twice on the same items.

The items' difficulty is common to both measurements and cancels in the differences; an unpaired test throws that away and misses
changes that are there (spec/faults.md 75: p = .080 unpaired, .008 paired, on the same data).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from posttrain.core.errors import EvidenceError
from posttrain.core.seeds import numpy_rng
from posttrain.stats.bootstrap import RESAMPLES, bca, mean
from posttrain.stats.intervals import Interval, all_equal, cluster_t, finite_values

_BLOCK = 1 << 20
"""Signs drawn at a time, which bounds the memory of a permutation test."""


@dataclass(frozen=True, slots=True)
class PairedResult:
    """A change from a to b over the same items.

    Example: PairedResult(delta=0.12, interval=Interval(0.03, 0.21, 0.95, "cluster-t"), n=100, p_value=0.009, method="paired cluster-t")
    """

    delta: float
    """mean(b) - mean(a): positive when b is higher."""
    interval: Interval
    n: int
    """Items that both measured."""
    p_value: float
    """Two-sided, of the hypothesis that nothing changed."""
    method: str


def paired_difference(
    a_means: Sequence[float], b_means: Sequence[float], level: float = 0.95, bounds: tuple[float, float] | None = (-1.0, 1.0)
) -> PairedResult:
    """The mean of b - a over items with a Student-t interval and test on the per-item differences.

    `a_means[i]` and `b_means[i]` are the means over samples of the same item; `bounds` is the range a difference can have. When every
    difference is the same value, a t test is undefined: the interval is that of `cluster_t` and the p-value that of flipping signs.
    """
    differences = _differences(a_means, b_means)
    interval = cluster_t(differences.tolist(), level, bounds)
    n, delta = len(differences), float(differences.mean())
    if all_equal(differences):
        p_value = 1.0 if abs(delta) <= 1e-9 else 2.0 ** (1 - n)
        return PairedResult(delta, interval, n, p_value, f"{interval.method}, sign-flip test")
    t = delta / (float(differences.std(ddof=1)) / math.sqrt(n))
    return PairedResult(delta, interval, n, float(2 * special.stdtr(n - 1, -abs(t))), "paired cluster-t")


def paired_bootstrap(
    a_means: Sequence[float],
    b_means: Sequence[float],
    seed: int,
    level: float = 0.95,
    bounds: tuple[float, float] | None = (-1.0, 1.0),
    resamples: int = RESAMPLES,
) -> PairedResult:
    """The mean of b - a over items with a BCa interval from resampled items, and the p-value of flipping signs.

    For differences that are skewed, such as a few large losses among many small gains; at least 8 items. The p-value comes from
    `sign_flip_test` and not from the resamples, which are too sure when few items differ at all (4 gains and no loss among 10 items: 0.125,
    as McNemar's test says, where the resamples say 0.02). So near the border p may exceed 1 - level while the interval leaves out 0. When
    every difference is the same value there is nothing to resample, and the answer is that of `paired_difference`.

    >>> result = paired_bootstrap([0, 0, 1, 0, 1, 0, 0, 1, 0, 0], [1, 0, 1, 1, 1, 0, 1, 1, 0, 1], seed=0)
    >>> result.delta, result.p_value, result.method
    (0.4, 0.125, 'paired bca bootstrap, sign-flip test')
    """
    differences = _differences(a_means, b_means)
    if len(differences) >= 2 and all_equal(differences):
        return paired_difference(a_means, b_means, level, bounds)
    interval = bca(differences, mean, seed, level, resamples)
    p_value = sign_flip_test(differences.tolist(), seed, resamples)
    return PairedResult(float(differences.mean()), interval, len(differences), p_value, "paired bca bootstrap, sign-flip test")


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact McNemar p-value from the discordant pairs: b items only the first solved, c items only the second.

    >>> round(mcnemar_exact(1, 5), 5)  # 2 * (C(6,0) + C(6,1)) / 2**6
    0.21875
    """
    if b < 0 or c < 0:
        raise EvidenceError(f"discordant counts must not be negative, got {b} and {c}")
    if b + c == 0:
        return 1.0
    return min(1.0, 2 * float(special.bdtr(min(b, c), b + c, 0.5)))


def sign_flip_test(differences: Sequence[float], seed: int, flips: int = 10_000) -> float:
    """Two-sided permutation p-value of the mean difference: under no change each item's sign is a coin toss.

    Exact when the 2**n sign patterns are no more than `flips`, otherwise (1 + extreme) / (1 + flips) over random patterns drawn from
    the stream (seed, "stats", "sign-flip").

    >>> sign_flip_test([1.0, 1.0, 1.0], seed=0)  # 2 of 8 patterns reach |mean| 1
    0.25
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n < 2:
        raise EvidenceError(f"a paired test needs at least 2 items, got {n}; evaluate more items")
    if flips < 1:
        raise EvidenceError(f"flips must be at least 1, got {flips}; 10000 is usual")
    observed = abs(values.sum()) - 1e-9 * np.abs(values).sum()  # sums in another order differ by rounding and must still tie
    if 2**n <= flips:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ values) >= observed))
    rng, extreme, left = numpy_rng(seed, "stats", "sign-flip"), 0, flips
    while left:
        rows = min(left, max(1, _BLOCK // n))
        signs = 1 - 2 * rng.integers(0, 2, size=(rows, n))
        extreme += int(np.count_nonzero(np.abs(signs @ values) >= observed))
        left -= rows
    return (1 + extreme) / (1 + flips)


def _differences(a_means: Sequence[float], b_means: Sequence[float]) -> NDArray[np.float64]:
    if len(a_means) != len(b_means):
        raise EvidenceError(f"{len(a_means)} items against {len(b_means)}: a paired test needs the same items in the same order")
    return finite_values(b_means) - finite_values(a_means)
