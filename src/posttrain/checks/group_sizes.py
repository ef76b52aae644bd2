"""How many siblings a task needs: the chance that a group of G disagrees, from how often the model is right.

A group teaches when its rewards differ. With success probability p on one prompt that happens with 1 - p^G - (1-p)^G; over prompts of
unequal difficulty it is the mean of that, which is lower than the formula at the mean p. Source: spec/book-1 1.7 H6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from posttrain.stats.power import p_mixed

SIZES = (2, 4, 8, 16, 32, 64)
WANTED = 0.5
"""Share of mixed groups at which a size is enough: half of what is drawn teaches."""
LEAST = 4
"""Smallest size that is recommended: below, the mean of the siblings is too poor a baseline."""


@dataclass(frozen=True, slots=True)
class SizeRow:
    """What to expect of one group size.

    Example: SizeRow(siblings=8, mixed=0.57, cost=14.0, measured=True): 57% of the groups disagree, 14 completions per group that teaches
    """

    siblings: int
    mixed: float
    cost: float | None
    """Completions drawn per mixed group; None when none is expected."""
    measured: bool
    """From the probe's own completions without a model of them; otherwise from a beta distribution of difficulty fitted to them."""


def size_table(outcomes: Sequence[tuple[int, int]], sizes: Sequence[int] = SIZES) -> list[SizeRow]:
    """The expected share of mixed groups for each size; `outcomes` holds (answers, right answers) per prompt.

    Up to the number of answers the estimate is exact and unbiased: of n answers with c right, a random subset of G is unanimous with
    probability [C(c, G) + C(n - c, G)] / C(n, G). Beyond it a beta distribution of the success probability is fitted by moments.

    Example: outcomes [(2, 1), (2, 2)]: at size 2 one of the two prompts always disagrees and the other never: 0.5.
    """
    usable = [(n, c) for n, c in outcomes if n]
    if not usable:
        return []
    fitted = _beta(usable)
    smallest = min(n for n, _ in usable)
    rows = []
    for size in sizes:
        exact = size <= smallest
        mixed = float(np.mean([_subset(n, c, size) for n, c in usable])) if exact else _beta_mixed(fitted, size)
        rows.append(SizeRow(size, mixed, size / mixed if mixed > 0 else None, exact))
    return rows


def recommended(rows: Sequence[SizeRow]) -> int | None:
    """The smallest size of at least 4 at which half of the groups are expected to teach; None when no size gets there."""
    return next((row.siblings for row in rows if row.siblings >= LEAST and row.mixed >= WANTED), None)


def _subset(n: int, c: int, size: int) -> float:
    return 1.0 - (math.comb(c, size) + math.comb(n - c, size)) / math.comb(n, size)


def _beta(outcomes: Sequence[tuple[int, int]]) -> tuple[float, float | None]:
    """Mean success and a + b of the fitted beta distribution; None for no spread beyond the binomial's, 0 for prompts that are each always
    right or always wrong."""
    n = np.array([answers for answers, _ in outcomes], dtype=np.float64)
    p = np.array([right / answers for answers, right in outcomes])
    mean = float(np.average(p, weights=n))
    noise = mean * (1 - mean)
    if noise == 0.0 or len(p) < 2:
        return mean, None
    size = float(n.mean())
    # Var(observed share) = noise/size + (1 - 1/size) * noise * rho, with rho = 1 / (a + b + 1)
    rho = (float(p.var(ddof=1)) / noise - 1 / size) / (1 - 1 / size) if size > 1 else 0.0
    if rho <= 0:
        return mean, None
    return mean, 1 / rho - 1 if rho < 1 else 0.0


def _beta_mixed(fitted: tuple[float, float | None], size: int) -> float:
    mean, total = fitted
    if total is None:
        return p_mixed(mean, size)
    if total <= 0:
        return 0.0
    a, b = mean * total, (1 - mean) * total
    logs = [special.betaln(a + size, b) - special.betaln(a, b), special.betaln(a, b + size) - special.betaln(a, b)]
    return max(0.0, 1.0 - float(sum(np.exp(logs))))
