"""Group-relative advantages: how much better a sibling did than its group.

Computed in float64 on plain numbers. Rewards that are all equal give exactly zero: in float32 eight times 0.1 has a mean that differs
from 0.1 by 7e-9, and dividing by a spread of the same size turns that rounding into a full-sized update (spec/ladder-at-100m.md B15).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Advantage = Literal["mean", "mean_std", "leave_one_out"]


def group_advantages(rewards_G: Sequence[float | None], how: Advantage, *, ddof: int = 0, eps: float = 1e-6) -> list[float]:
    """One advantage per sibling.

    Args:
        rewards_G: None marks a sibling that was never scored: it gets advantage 0 and does not enter the baseline.
        how: "mean" (R - mean; Dr. GRPO), "mean_std" ((R - mean) / (std + eps); GRPO), "leave_one_out" (R - mean of the others; RLOO,
            which equals n / (n - 1) times "mean").
        ddof: 0 for the population standard deviation, 1 for the sample one.
        eps: added to the standard deviation.

    Example: rewards [1, 0, 0, 1, 0] have mean 0.4 and population std 0.4899: "mean_std" gives +1.2247 and -0.8165.

    Raises:
        ValueError: a group of one sibling has no baseline.
    """
    if len(rewards_G) < 2:
        raise ValueError(f"a group of {len(rewards_G)} has no siblings to compare with; sample at least 2 completions per prompt")
    scored = np.array([reward is not None for reward in rewards_G])
    values = np.array([0.0 if reward is None else reward for reward in rewards_G], dtype=np.float64)
    advantages = np.zeros(len(rewards_G))
    n = int(scored.sum())
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
    return advantages.tolist()


def degenerate(rewards_G: Sequence[float | None]) -> bool:
    """Whether the group carries no signal: fewer than two scored siblings, or all their primary rewards equal."""
    scored = [reward for reward in rewards_G if reward is not None]
    return len(scored) < 2 or max(scored) == min(scored)
