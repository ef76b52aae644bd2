"""Comparisons of two sets of values that share no items: runs of two configurations, or scores on different items.

Two checkpoints measured on the same items belong into `paired`: an unpaired test of them throws the pairing away and misses changes that
are there (spec/faults.md 75). Every result here says "unpaired" in its method.

Example: welch([0.50, 0.52, 0.51], [0.58, 0.55, 0.56]).delta is 0.0533, over two sets of 3 seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import Interval, all_equal, checked_level, finite_values, wilson


@dataclass(frozen=True, slots=True)
class TwoSample:
    """A difference between two independent sets.

    Example: TwoSample(delta=0.053, interval=Interval(0.016, 0.09, 0.95, "welch-t"), p_value=0.017, n_a=3, n_b=3, method="unpaired welch-t")
    """

    delta: float
    """mean(b) - mean(a): positive when b is higher."""
    interval: Interval
    p_value: float
    """Two-sided, of the hypothesis that the means are equal."""
    n_a: int
    n_b: int
    method: str


def welch(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> TwoSample:
    """Difference of two means whose spreads may differ, with Welch's t and the degrees of freedom of Satterthwaite.

    Without any spread in either set (one value repeated) the error is unknown and the comparison is refused.

    >>> result = welch([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])  # se sqrt(1/3 + 4/3) = 1.291, df 2.94
    >>> result.delta, round(result.interval.low, 2), round(result.interval.high, 2)
    (3.0, -1.16, 7.16)
    """
    first, second = finite_values(a), finite_values(b)
    for name, row in (("first", first), ("second", second)):
        if len(row) < 2:
            raise EvidenceError(f"the {name} set has {len(row)} value(s), which say nothing about its spread; add runs or items")
    if all_equal(first) and all_equal(second):
        raise EvidenceError("neither set varies, so the error of the difference is unknown; are the runs copies with one seed?")
    n_a, n_b, delta = len(first), len(second), float(second.mean() - first.mean())
    v_a, v_b = float(first.var(ddof=1)) / n_a, float(second.var(ddof=1)) / n_b
    error = math.sqrt(v_a + v_b)
    freedom = (v_a + v_b) ** 2 / (v_a**2 / (n_a - 1) + v_b**2 / (n_b - 1))
    half = float(special.stdtrit(freedom, 0.5 + checked_level(level) / 2)) * error
    p_value = float(2 * special.stdtr(freedom, -abs(delta) / error))
    return TwoSample(delta, Interval(delta - half, delta + half, level, "welch-t"), p_value, n_a, n_b, "unpaired welch-t")


def unpaired_proportions(successes_a: int, n_a: int, successes_b: int, n_b: int, level: float = 0.95) -> TwoSample:
    """Difference of two success rates over different items: Newcombe's interval from two Wilson intervals, Fisher's exact p-value.

    The interval (Newcombe 1998, method 10) stays within [-1, 1]. The exact test is the more cautious of the two, so near the border an
    interval without 0 may come with p above 1 - level.

    >>> result = unpaired_proportions(3, 30, 8, 30)
    >>> round(result.delta, 3), round(result.p_value, 2)
    (0.167, 0.18)
    """
    low_a, low_b = wilson(successes_a, n_a, level), wilson(successes_b, n_b, level)
    rate_a, rate_b = successes_a / n_a, successes_b / n_b
    delta = rate_b - rate_a
    low = delta - math.hypot(rate_b - low_b.low, low_a.high - rate_a)
    high = delta + math.hypot(low_b.high - rate_b, rate_a - low_a.low)
    interval = Interval(max(-1.0, low), min(1.0, high), level, "newcombe")
    return TwoSample(delta, interval, fisher_exact(successes_a, n_a, successes_b, n_b), n_a, n_b, "unpaired newcombe, fisher exact")


def fisher_exact(successes_a: int, n_a: int, successes_b: int, n_b: int) -> float:
    """Two-sided exact p-value of equal success rates: the tables with these margins that are no more likely than the one seen.

    >>> round(fisher_exact(0, 3, 3, 3), 4)  # 2 of C(6, 3) = 20 tables
    0.1
    """
    for successes, n in ((successes_a, n_a), (successes_b, n_b)):
        if n < 1 or not 0 <= successes <= n or successes != int(successes):
            raise EvidenceError(f"{successes} successes in {n} trials is impossible; count each trial once")
    total, solved = n_a + n_b, successes_a + successes_b
    in_a = np.arange(max(0, solved - n_b), min(n_a, solved) + 1)
    log_weight = _log_choose(n_a, in_a) + _log_choose(n_b, solved - in_a) - float(_log_choose(total, np.array(solved)))
    seen = log_weight[in_a == successes_a]
    return min(1.0, float(np.exp(log_weight[log_weight <= seen + 1e-7]).sum()))


def _log_choose(n: int, k: np.ndarray) -> np.ndarray:
    return np.asarray(special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1))
