"""What each advantage estimator is documented to climb, in closed form where there is one, and the estimators once more in plain Python.

A group of G siblings answers a prompt once each, from a categorical policy p over a few answers. The estimator's expected gradient is

    E[(1/G) sum_i A_i grad log pi(y_i)]

and for rewards of 0 and 1 it is w(p) grad p for every estimator that treats siblings alike, p being the success rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from posttrain.checks.tabular import derivative, softmax
from posttrain.objectives.axes import Advantage, Batch, LeaveOneOut, MaxRL, Mean, MeanStd, MedianMAD, PassAtK, Reward

Estimate = Callable[[Sequence[float]], Sequence[float]]


def expected_gradient(estimate: Estimate, rewards_V: Sequence[float], p_V: np.ndarray, size: int) -> np.ndarray:
    """E[(1/G) sum_i A_i (onehot(y_i) - p)] over all groups of `size` answers, [answers]."""
    remembered = lru_cache(maxsize=None)(lambda rewards: tuple(estimate(list(rewards))))
    total_V = np.zeros(len(p_V))
    for answers in product(range(len(p_V)), repeat=size):
        chance = math.prod(p_V[answer] for answer in answers)
        advantages = remembered(tuple(rewards_V[answer] for answer in answers))
        for answer, advantage in zip(answers, advantages, strict=True):
            total_V[answer] += chance * advantage / size
            total_V -= chance * advantage / size * p_V
    return total_V


def reward_gradient(rewards_V: Sequence[float], logits_V: np.ndarray) -> np.ndarray:
    """Derivative of E[R] by the logits."""
    return derivative(lambda logits: (softmax(logits) * np.asarray(rewards_V)).sum(), logits_V)


def best_of_gradient(rewards_V: Sequence[float], logits_V: np.ndarray, k: int) -> np.ndarray:
    """Derivative of E[max of k independent answers] = sum_j r_j (F_j^k - F_(j-1)^k), answers in the order of their rewards."""
    order = np.argsort(rewards_V)
    sorted_V = np.asarray(rewards_V, dtype=np.float64)[order]

    def best(logits: np.ndarray) -> complex:
        below_V = np.cumsum(softmax(logits)[order])
        chances_V = np.diff(np.concatenate([[0.0], below_V**k]))
        return (sorted_V * chances_V).sum()

    return derivative(best, logits_V)


def success_weight(advantage: Advantage, size: int, p: float) -> float | None:
    """w(p): closed form, or the binomial sum over how many of the other siblings succeed; None where rewards make no group."""
    match advantage:
        case Reward() | LeaveOneOut():
            return 1.0
        case Mean():
            return (size - 1) / size
        case MaxRL():
            return (1 - (1 - p) ** (size - 1)) / p
        case PassAtK():
            return advantage.k * (1 - p) ** (advantage.k - 1)
        case MeanStd() | MedianMAD() | Batch():
            estimate = plain(advantage)
            weight = 0.0
            for others in range(size):
                chance = math.comb(size - 1, others) * p**others * (1 - p) ** (size - 1 - others)
                rest = [1.0] * others + [0.0] * (size - 1 - others)
                weight += chance * (estimate([1.0, *rest])[0] - estimate([0.0, *rest])[0])
            return weight
        case _:
            return None


def plain(advantage: Advantage) -> Callable[[Sequence[float]], list[float]]:
    """The estimator from its definition, with the standard library only."""

    def scaled(rewards: Sequence[float], centre: float, spread: float) -> list[float]:
        return [0.0 if len(set(rewards)) == 1 else (reward - centre) / spread for reward in rewards]

    def mean_std(rewards: Sequence[float]) -> list[float]:
        sample = isinstance(advantage, MeanStd) and advantage.ddof == 1
        eps = advantage.eps if isinstance(advantage, (MeanStd, Batch)) else 0.0
        deviation = statistics.stdev(rewards) if sample else statistics.pstdev(rewards)
        return scaled(rewards, statistics.fmean(rewards), deviation + eps)

    def median_mad(rewards: Sequence[float]) -> list[float]:
        eps = advantage.eps if isinstance(advantage, MedianMAD) else 0.0
        centre = statistics.median(rewards)
        away = [abs(reward - centre) for reward in rewards]
        return scaled(rewards, centre, (statistics.median(away) or statistics.fmean(away)) + eps)

    def max_rl(rewards: Sequence[float]) -> list[float]:
        mean = statistics.fmean(rewards)
        return scaled(rewards, mean, mean)

    chosen = {"mean_std": mean_std, "batch": mean_std, "median_mad": median_mad, "max_rl": max_rl}
    return chosen[advantage.kind]
