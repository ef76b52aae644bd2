"""pass@k, the chance that at least one of k samples solves an item, and pass^k, that all k do; both without bias from n >= k samples.

pass@k rises with k and measures what a model can reach; pass^k falls with k and measures what it can be relied on for. `counts[i]` is
always (samples, correct) of item i.

Standard errors come in two kinds. Over items drawn from a larger set ("sampled"), the items are the clusters: sd of the item values over
sqrt(items), which is also their jackknife. For these very items, asked again with other samples ("fixed"), each item's own error is
jackknifed over its samples; it is smaller, and right only for a statement about this set of items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from posttrain.core.errors import EvidenceError

Counts = Sequence[tuple[int, int]]
Items = Literal["sampled", "fixed"]


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k) for c correct of n samples (Chen et al. 2021, arXiv 2107.03374), as a product that cannot overflow.

    >>> round(pass_at_k(4, 1, 2), 4)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    0.5
    """
    _check(n, c, k, "pass@")
    if n - c < k:
        return 1.0
    all_fail = 1.0
    for i in range(n - c + 1, n + 1):
        all_fail *= 1 - k / i
    return 1 - all_fail


def pass_hat_k(n: int, c: int, k: int) -> float:
    """C(c, k) / C(n, k): the chance that k different ones of the n samples are all correct (pass^k of arXiv 2406.12045).

    >>> round(pass_hat_k(4, 3, 2), 4)  # C(3,2)/C(4,2) = 3/6
    0.5
    """
    _check(n, c, k, "pass^")
    all_pass = 1.0
    for i in range(k):
        all_pass *= max(0, c - i) / (n - i)
    return all_pass


def mean_pass_at_k(counts: Counts, k: int) -> float:
    """Mean over items of pass@k.

    >>> mean_pass_at_k([(4, 1), (4, 4)], 2)  # (0.5 + 1) / 2
    0.75
    """
    return _mean(pass_at_k, counts, k, "pass@")


def mean_pass_hat_k(counts: Counts, k: int) -> float:
    """Mean over items of pass^k.

    >>> mean_pass_hat_k([(4, 3), (4, 4), (4, 1)], 2)  # (0.5 + 1 + 0) / 3
    0.5
    """
    return _mean(pass_hat_k, counts, k, "pass^")


def pass_at_k_se(counts: Counts, k: int, items: Items = "sampled") -> float:
    """Standard error of `mean_pass_at_k`.

    >>> round(pass_at_k_se([(4, 1), (4, 4)], 2), 4)  # values .5 and 1: sd .3536 / sqrt(2)
    0.25
    """
    return _se(pass_at_k, counts, k, items)


def pass_hat_k_se(counts: Counts, k: int, items: Items = "sampled") -> float:
    """Standard error of `mean_pass_hat_k`.

    >>> round(pass_hat_k_se([(4, 3), (4, 4)], 2), 4)  # values .5 and 1
    0.25
    """
    return _se(pass_hat_k, counts, k, items)


Estimator = Callable[[int, int, int], float]


def _mean(estimator: Estimator, counts: Counts, k: int, name: str) -> float:
    if not counts:
        raise EvidenceError(f"{name}{k} of no items is undefined; evaluate at least one item")
    return sum(estimator(n, c, k) for n, c in counts) / len(counts)


def _se(estimator: Estimator, counts: Counts, k: int, items: Items) -> float:
    if len(counts) < 2:
        raise EvidenceError(f"a standard error needs at least 2 items, got {len(counts)}; evaluate more items")
    if items == "fixed":
        return math.sqrt(sum(_jackknife_variance(estimator, n, c, k) for n, c in counts)) / len(counts)
    values = [estimator(n, c, k) for n, c in counts]
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _jackknife_variance(estimator: Estimator, n: int, c: int, k: int) -> float:
    """Variance of one item's estimate, from leaving out each sample: c of them are correct, n - c are not."""
    if n <= k:
        raise EvidenceError(f"the error at k={k} for fixed items needs at least {k + 1} samples per item, got {n}; draw more samples")
    without_right = estimator(n - 1, c - 1, k) if c else 0.0
    without_wrong = estimator(n - 1, c, k) if c < n else 0.0
    centre = (c * without_right + (n - c) * without_wrong) / n
    return (n - 1) / n * (c * (without_right - centre) ** 2 + (n - c) * (without_wrong - centre) ** 2)


def _check(n: int, c: int, k: int, name: str) -> None:
    if k < 1:
        raise EvidenceError(f"{name}{k} is undefined; k starts at 1")
    if not 0 <= c <= n:
        raise EvidenceError(f"{c} correct of {n} samples is impossible; count each sample once")
    if k > n:
        raise EvidenceError(f"{name}{k} needs at least {k} samples per item, got {n}; draw more samples or ask for k <= {n}")
