"""Group-relative advantages: how much better a sibling did than its group.

Everything is float64 on plain numbers; torch is not needed. Rewards that are all equal give exactly zero: in float32 eight times 0.1 has a
mean that differs from 0.1 by 7e-9, and dividing by a spread of the same size turns that rounding into a full-sized update
(spec/ladder-at-100m.md B15). An advantage per token, from a critic or a teacher, is in `credit.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

Advantage = Literal["none", "mean", "mean_std", "leave_one_out", "median_mad", "max_rl", "pass_at_k"]

TARGETS: dict[Advantage, str] = {
    "none": "E[R], exactly; no baseline, so the variance is the largest",
    "mean": "E[R] times (G - 1) / G: every sibling is part of its own baseline",
    "mean_std": "no objective in general; for 0/1 rewards about 2 arcsin(sqrt(p)), which pulls hardest at p near 0 and near 1",
    "leave_one_out": "E[R], exactly",
    "median_mad": "no objective in general; for 0/1 rewards log p where successes are few, -log(1 - p) where they are most",
    "max_rl": "for 0/1 rewards log p, its expansion in powers of (1 - p) cut after G - 1 terms",
    "pass_at_k": "E[best of k samples], exactly",
}
"""What the expected gradient of each estimator climbs; p is the success rate of the prompt. `success_weight` gives the numbers."""


def group_advantages(rewards_G: Sequence[float | None], how: Advantage, *, ddof: int = 0, eps: float = 1e-6, k: int = 1) -> list[float]:
    """One advantage per sibling.

    Args:
        rewards_G: None marks a sibling that was never scored: it gets advantage 0 and enters no statistic.
        how: with n scored siblings,
            "none": R. REINFORCE.
            "mean": R - mean. Dr. GRPO (Liu et al. 2025).
            "mean_std": (R - mean) / (std + eps). GRPO (Shao et al. 2024).
            "leave_one_out": R - mean of the others, which is n / (n - 1) times "mean". RLOO (Ahmadian et al. 2024).
            "median_mad": (R - median) / (MAD + eps), MAD = median |R - median|. MC-GRPO (2026). The source leaves open what to divide by
                when MAD is exactly 0 (more than half of the siblings on the median) and the rewards differ: here the mean of
                |R - median|. One success among 8 then gives 8 and seven zeros.
            "max_rl": (R - mean) / mean, for rewards >= 0. MaxRL (2026).
            "pass_at_k": k (expected best of this one and k - 1 others - expected best of k others), averaged over all choices of the
                others. Any real rewards; k = 1 is "leave_one_out". Subset maxima after Chen et al. 2021 and Walder & Karkhanis 2025 (PKPO).
        ddof: 0 for the population standard deviation, 1 for the sample one. Read by "mean_std".
        eps: added to the spread. Read by "mean_std" and "median_mad".
        k: read by "pass_at_k".

    Returns:
        Fewer than two scored siblings, or equal rewards, give exactly 0 everywhere, except for "none", which compares with nobody.

    Example: rewards [1, 0, 0, 1, 0] have mean 0.4 and population std 0.4899: "mean_std" gives +1.2247 and -0.8165.

    Raises:
        ValueError: a reward is NaN or infinite; "max_rl" with a negative reward; "pass_at_k" with n scored siblings and n - 1 < k.
    """
    scored = np.array([reward is not None for reward in rewards_G], dtype=bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards_G], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards {list(rewards_G)} hold a value that is not finite; mark a sibling that has no score with None")
    if how == "none":
        return values.tolist()
    advantages = np.zeros(len(values))
    n = int(scored.sum())
    if how == "max_rl" and (values < 0).any():
        raise ValueError(f"max_rl divides by the mean reward and needs rewards >= 0, got {values.min()}; shift or clip the reward")
    if how == "pass_at_k" and (k < 1 or 2 <= n <= k):
        raise ValueError(f"pass_at_k with k = {k} needs 1 <= k <= n - 1, the group has n = {n} scored siblings; lower k or sample more")
    if n < 2 or values[scored].max() == values[scored].min():
        return advantages.tolist()
    centred = values[scored] - values[scored].mean()
    match how:
        case "mean":
            advantages[scored] = centred
        case "mean_std":
            advantages[scored] = centred / (values[scored].std(ddof=ddof) + eps)
        case "leave_one_out":
            advantages[scored] = centred * n / (n - 1)
        case "median_mad":
            away = values[scored] - np.median(values[scored])
            mad = np.median(np.abs(away))
            advantages[scored] = away / ((mad if mad > 0 else np.abs(away).mean()) + eps)
        case "max_rl":
            advantages[scored] = centred / values[scored].mean()
        case "pass_at_k":
            advantages[scored] = _best_of_k(values[scored], k)
    return advantages.tolist()


def _best_of_k(values_G: np.ndarray, k: int) -> np.ndarray:
    """k (E[max(R_i, k - 1 others)] - E[max of k others]) per sibling; the subtracted term does not depend on R_i, so it is a baseline."""
    n = len(values_G)
    beside, without = _weight_of_rank(n - 1, k - 1), _weight_of_rank(n - 1, k)
    advantages = np.empty(n)
    for i, own in enumerate(values_G):
        others = np.sort(np.delete(values_G, i))
        best_with = own if k == 1 else np.maximum(others, own) @ beside
        advantages[i] = k * (best_with - others @ without)
    return advantages


def _weight_of_rank(n: int, k: int) -> np.ndarray:
    """Share of the k-subsets of n sorted values that have their maximum at each rank: C(rank, k - 1) / C(n, k).

    Example: 3 values, pairs: 0, 1/3, 2/3.
    """
    return np.array([math.comb(rank, k - 1) / math.comb(n, k) if k else 0.0 for rank in range(n)])


def degenerate(rewards_G: Sequence[float | None]) -> bool:
    """Whether the group carries no signal: fewer than two scored siblings, or all their primary rewards equal."""
    scored = [reward for reward in rewards_G if reward is not None]
    return len(scored) < 2 or max(scored) == min(scored)


def pivot(rewards_G: Sequence[float | None]) -> int | None:
    """Index of the sibling that MC-GRPO leaves out of the update: of an odd number of scored siblings, the first one at the median.

    MC-GRPO samples one sibling more than it trains, so that the median is one of them; its advantage is 0. None for an even number.
    Example: [0, None, 1, 1] has the median 1, first met at index 2.
    """
    scored = sorted(reward for reward in rewards_G if reward is not None)
    return rewards_G.index(scored[len(scored) // 2]) if len(scored) % 2 else None


def subgroup_advantages(
    rewards_G: Sequence[float | None],
    keys_G: Sequence[Hashable | None],
    how: Advantage,
    *,
    ddof: int = 0,
    eps: float = 1e-6,
    k: int = 1,
) -> list[float]:
    """Advantages within each subgroup: siblings with equal keys are compared with each other only, e.g. those told the same token budget.

    A sibling whose key is None belongs to no subgroup and gets 0. Alone in its subgroup, it gets what a group of one gets.
    Example: rewards [1, 0, 5, 3, 9], keys a a b b None, "mean": [0.5, -0.5, 1, -1, 0].

    Raises:
        ValueError: the numbers of rewards and keys differ, or what `group_advantages` raises.
    """
    if len(keys_G) != len(rewards_G):
        raise ValueError(f"{len(rewards_G)} rewards, {len(keys_G)} keys")
    advantages = [0.0] * len(rewards_G)
    for key in dict.fromkeys(key for key in keys_G if key is not None):
        members = [i for i, own in enumerate(keys_G) if own == key]
        within = group_advantages([rewards_G[i] for i in members], how, ddof=ddof, eps=eps, k=k)
        for i, advantage in zip(members, within, strict=True):
            advantages[i] = advantage
    return advantages


@dataclass(frozen=True, slots=True)
class Moments:
    """Token-weighted sums of one value per sequence. They add up, over ranks or micro-batches, to the moments of the whole step.

    Example: values 1 and 3 with 3 and 1 tokens: n 4, total 6, squares 12; mean 1.5, variance 12 / 4 - 1.5^2 = 0.75.
    """

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values_N: Sequence[float], counts_N: Sequence[int]) -> Moments:
        """Moments of values_N, the i-th counted counts_N[i] times; what counts 0 times may be anything."""
        pairs = [(value, count) for value, count in zip(values_N, counts_N, strict=True) if count]
        return cls(sum(counts_N), math.fsum(c * v for v, c in pairs), math.fsum(c * v * v for v, c in pairs))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.n + other.n, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """Token-weighted mean; 0 without tokens."""
        return self.total / self.n if self.n else 0.0

    @property
    def variance(self) -> float:
        """Token-weighted population variance. Below 1e-12 of the mean square it is rounding and reads as exactly 0."""
        if not self.n:
            return 0.0
        variance = self.squares / self.n - self.mean**2
        return variance if variance > 1e-12 * self.squares / self.n else 0.0


def normalise(values_N: Sequence[float], moments: Moments, eps: float = 1e-8) -> list[float]:
    """(value - mean) / (std + eps), with the moments of the whole optimizer step; exactly 0 where those have no variance."""
    if moments.variance == 0.0:
        return [0.0] * len(values_N)
    return [(value - moments.mean) / (math.sqrt(moments.variance) + eps) for value in values_N]


def normalise_batch(values_N: Sequence[float], counts_N: Sequence[int], eps: float = 1e-8) -> list[float]:
    """REINFORCE++ (Hu 2025): subtract the token-weighted mean of the whole step, divide by its token-weighted population std.

    Args:
        values_N: one value per sequence, which all its trained tokens share.
        counts_N: trained tokens of each sequence. Across ranks: add up `Moments.of` and call `normalise` (spec/faults.md 22).

    Example: values 1 and 3 with 3 and 1 tokens have mean 1.5 and std 0.8660: -0.5774 and 1.7321.
    """
    return normalise(values_N, Moments.of(values_N, counts_N), eps)


def channel_advantages(
    channels_CG: Mapping[str, Sequence[float | None]], weights: Mapping[str, float], ddof: int = 0, eps: float = 1e-6
) -> list[float]:
    """Sum over channels of weight times "mean_std" within the channel. A trap: kept as a negative control.

    Each channel is blown up to unit spread, however small it is, so that a minor cost can cancel the task. G = 2, f1 = (1, 0) and
    cost = (-0.05, 0) with weights 1: f1 gives (+1, -1), cost gives (-1, +1), the sum is (0, 0) (up to eps: 4e-5). The sum of the rewards,
    (0.95, 0), gives (+1, -1). Look at `channel_correlations` first. Source: GDPO; spec/book-2-search-agent-and-stability.md 75-77.

    Raises:
        ValueError: no channel, channels of different lengths, or weights for other channels.
    """
    sizes = {name: len(rewards) for name, rewards in channels_CG.items()}
    if len(set(sizes.values())) != 1 or set(sizes) != set(weights):
        raise ValueError(
            f"channels with sizes {sizes}, weights for {sorted(weights)}: every channel needs one weight and one reward per sibling"
        )
    parts_CG = [
        weights[name] * np.array(group_advantages(rewards, "mean_std", ddof=ddof, eps=eps)) for name, rewards in channels_CG.items()
    ]
    return np.sum(parts_CG, axis=0).tolist()


def channel_correlations(channels_CG: Mapping[str, Sequence[float | None]]) -> dict[tuple[str, str], float]:
    """Pearson correlation of each pair of channels over the siblings that both have scored, within one group.

    A pair of which one channel is constant there has no correlation and is left out.
    Example: f1 (1, 0, 1), cost (-3, -1, -3) -> {("f1", "cost"): -1.0}.
    """
    out = {}
    for (first, ours), (second, theirs) in combinations(channels_CG.items(), 2):
        both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
        if degenerate([a for a, _ in both]) or degenerate([b for _, b in both]):
            continue
        x, y = (np.array(side, dtype=np.float64) for side in zip(*both, strict=True))
        x, y = x - x.mean(), y - y.mean()
        out[first, second] = float(np.clip((x @ y) / math.sqrt((x @ x) * (y @ y)), -1.0, 1.0))
    return out


def effective_channels(channels_CG: Mapping[str, Sequence[float | None]]) -> float:
    """How many independent directions the channels span: (sum of eigenvalues)^2 / sum of squared eigenvalues of their correlation matrix.

    Five copies of one channel count 1, five uncorrelated ones 5, none that varies 0. Of a matrix with ones on its diagonal the two sums are
    the number of channels and the sum of all squared entries. A pair without correlation counts as uncorrelated.
    """
    varying = sum(not degenerate(rewards) for rewards in channels_CG.values())
    squares = varying + 2 * sum(r * r for r in channel_correlations(channels_CG).values())
    return varying**2 / squares if varying else 0.0


class Geometry(NamedTuple):
    """One row of the advantage-geometry table: what an estimator makes of `successes` ones among 0/1 rewards."""

    successes: int
    max_abs: float
    mean_abs: float
    sum_squares: float


def geometry(size: int, how: Advantage, ddof: int = 0, *, eps: float = 1e-6, k: int = 1) -> list[Geometry]:
    """The table for a group of `size`, by number of successes from 0 to size.

    "mean_std" gives every mixed group the same energy: of 8 siblings with ddof 1, 7 and 4 successes both have sum of squares 7.0.
    "mean" gives the lopsided group less: 0.875 against 2.0 (spec/book-1-foundations-and-math.md A2).
    """
    table = []
    for successes in range(size + 1):
        found = np.array(group_advantages(_outcomes(successes, size), how, ddof=ddof, eps=eps, k=k))
        table.append(Geometry(successes, float(np.abs(found).max()), float(np.abs(found).mean()), float(found @ found)))
    return table


def success_weight(how: Advantage, size: int, p: float, *, ddof: int = 0, eps: float = 1e-6, k: int = 1) -> float:
    """What multiplies grad p in the expected gradient when rewards are 0 or 1 and each of `size` siblings succeeds with probability p.

    E[(1/G) sum_i A_i grad log pi(y_i)] = w(p) grad p. Of the G - 1 other siblings j succeed, with binomial probability, and the sibling
    counts by how much its advantage changes when it succeeds too:

        w(p) = sum_{j < G} Binom(j; G - 1, p) [A_success(j + 1 successes) - A_failure(j successes)]

    none, leave_one_out    1
    mean                   (G - 1) / G
    mean_std               about 1 / sqrt(p (1 - p)) in large groups
    median_mad             about 1 / p below p = 1/2 and 1 / (1 - p) above, in large groups
    max_rl                 (1 - (1 - p)^(G - 1)) / p = sum_{j < G - 1} (1 - p)^j: 1 / p, the gradient of log p, cut off
    pass_at_k              k (1 - p)^(k - 1), the derivative of 1 - (1 - p)^k

    Raises:
        ValueError: p outside [0, 1], or what `group_advantages` raises.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p = {p} is no probability")
    weight = 0.0
    for j in range(size):
        chance = math.comb(size - 1, j) * p**j * (1 - p) ** (size - 1 - j)
        succeeding = group_advantages(_outcomes(j + 1, size), how, ddof=ddof, eps=eps, k=k)[0]
        failing = group_advantages(_outcomes(j, size), how, ddof=ddof, eps=eps, k=k)[-1]
        weight += chance * (succeeding - failing)
    return weight


def _outcomes(successes: int, size: int) -> list[float]:
    """Rewards of a group: ones first, then zeros."""
    return [1.0] * successes + [0.0] * (size - successes)
