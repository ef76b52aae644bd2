"""Clip-Cov and KL-Cov: which tokens of an optimizer step lose (or are held back in) their update to keep entropy alive.

    cov_t = (A_t - mean A) (log pi_t - mean log pi)          means over all trained tokens of the step

A large positive value is a confident token that is rewarded, or a rare token that is punished: both sharpen the policy. Clip-Cov draws
max(int(fraction * N), 1) tokens among those with lower < cov < upper; KL-Cov takes that many from the top. The statistic and the count are
those of the whole optimizer step, so that the split into micro-batches and ranks changes nothing; peers take them per micro-batch, where
the floor of one token makes the real fraction depend on the split. Source: Cui et al. 2025 (arXiv 2505.22617); spec/book-2 1.9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posttrain.core.metrics import Mean, Metric, Sum
from posttrain.core.seeds import numpy_rng
from posttrain.objectives.axes import ClipCov, KLCov


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens were chosen (indices into the step's flat list) and how the choice came about.

    Example: 2,000 tokens, 30 of them eligible, fraction 0.0002: count = max(int(0.4), 1) = 1 chosen.
    """

    chosen: tuple[int, ...]
    eligible: int
    tokens: int
    positive: int
    """Chosen tokens in the positive quadrant: above-average advantage and above-average log-probability."""

    def metrics(self) -> dict[str, Metric]:
        """Shares of the step's tokens; `cov_positive` is the share of the chosen ones in the positive quadrant."""
        return {
            "cov_eligible": Mean(self.eligible, self.tokens),
            "cov_selected": Mean(len(self.chosen), self.tokens),
            "cov_positive": Mean(self.positive, len(self.chosen)),
            "cov_chosen": Sum(len(self.chosen)),
        }


def covariances(logp_N: np.ndarray, advantage_N: np.ndarray) -> np.ndarray:
    """Each token's contribution to the covariance of advantage and log-probability, in float64."""
    logp_N, advantage_N = np.asarray(logp_N, dtype=np.float64), np.asarray(advantage_N, dtype=np.float64)
    if not len(logp_N):
        return np.zeros(0)
    return (advantage_N - advantage_N.mean()) * (logp_N - logp_N.mean())


def select(logp_N: np.ndarray, advantage_N: np.ndarray, clipped_N: np.ndarray, limit: ClipCov | KLCov, seed: int) -> Selection:
    """Choose tokens of one optimizer step.

    Args:
        logp_N, advantage_N: over all trained tokens of the step, in an order that does not depend on the split into parts.
        clipped_N: True where the PPO clip has already taken the gradient; never chosen by Clip-Cov.
        seed: of this step; the draw among eligible tokens is uniform without replacement.
    """
    cov_N = covariances(logp_N, advantage_N)
    count = max(int(limit.fraction * len(cov_N)), 1)
    if isinstance(limit, ClipCov):
        eligible = np.flatnonzero((cov_N > limit.lower) & (cov_N < limit.upper) & ~np.asarray(clipped_N, dtype=bool))
        size = min(count, len(eligible))
        chosen = np.sort(numpy_rng(seed, "clip_cov").choice(eligible, size=size, replace=False)) if size else eligible
    else:
        eligible = np.flatnonzero(cov_N > 0)
        chosen = np.sort(eligible[np.argsort(-cov_N[eligible], kind="stable")[:count]])
    positive_N = (cov_N > 0) & (np.asarray(advantage_N, dtype=np.float64) > np.mean(advantage_N)) if len(cov_N) else cov_N > 0
    return Selection(tuple(int(i) for i in chosen), len(eligible), len(cov_N), int(positive_N[chosen].sum()))
