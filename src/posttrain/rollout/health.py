"""What a step's rollouts say about the run, before any filter: leading signals, each with the population it is taken over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.trajectory import Group, RewardStatus
from posttrain.objectives.advantages import degenerate


def health(groups: Sequence[Group]) -> dict[str, float]:
    """Shares in [0, 1] over all groups or rollouts generated in the step, degenerate ones included.

    reward_mean, reward_std: over scored rollouts.  zero_variance, all_right, all_wrong: share of groups.
    unparseable, truncated, errors: share of rollouts.  length: mean sampled tokens.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = np.array([r.score.value for r in rollouts if r.score.value is not None], dtype=np.float64)
    lengths = np.array([len(r.trajectory.ids) for r in rollouts], dtype=np.float64)
    scored = [[v for v in group.rewards if v is not None] for group in groups]

    def share(status: RewardStatus) -> float:
        return float(np.mean([r.score.status is status for r in rollouts]))

    return {
        "reward_mean": float(values.mean()) if len(values) else 0.0,
        "reward_std": float(values.std()) if len(values) else 0.0,
        "zero_variance": float(np.mean([degenerate(group.rewards) for group in groups])),
        "all_right": float(np.mean([bool(v) and min(v) >= 1.0 for v in scored])),
        "all_wrong": float(np.mean([bool(v) and max(v) <= 0.0 for v in scored])),
        "unparseable": share(RewardStatus.UNPARSEABLE),
        "truncated": share(RewardStatus.TRUNCATED),
        "errors": share(RewardStatus.ERROR),
        "length": float(lengths.mean()),
    }
