"""pass@k: the chance that at least one of k samples solves an item, estimated without bias from n >= k samples."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.errors import EvidenceError


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k) for c correct of n samples (Chen et al. 2021, arXiv 2107.03374), as a product that cannot overflow.

    >>> round(pass_at_k(4, 1, 2), 4)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    0.5
    """
    if k < 1:
        raise EvidenceError(f"pass@{k} is undefined; k starts at 1")
    if not 0 <= c <= n:
        raise EvidenceError(f"{c} correct of {n} samples is impossible; count each sample once")
    if k > n:
        raise EvidenceError(f"pass@{k} needs at least {k} samples per item, got {n}; draw more samples or ask for k <= {n}")
    if n - c < k:
        return 1.0
    all_fail = 1.0
    for i in range(n - c + 1, n + 1):
        all_fail *= 1 - k / i
    return 1 - all_fail


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Mean over items of pass@k, where `counts[i]` is (samples, correct) of item i.

    >>> mean_pass_at_k([(4, 1), (4, 4)], 2)  # (0.5 + 1) / 2
    0.75
    """
    if not counts:
        raise EvidenceError(f"pass@{k} of no items is undefined; evaluate at least one item")
    return sum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
