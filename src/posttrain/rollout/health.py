"""What a step's rollouts say about the run, before any filter: leading signals, each with the population it is taken over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.trajectory import Group, RewardStatus, Rollout, StopReason
from posttrain.objectives.advantages import degenerate
from posttrain.rollout.behaviour import behaviour

TOP = 1.0
"""Reward of a right answer."""
KINDS: tuple[str, ...] = ("mixed", "all_right", "all_wrong", "unanimous_partial", "unanimous_unparseable")


def health(groups: Sequence[Group]) -> dict[str, float]:
    """Figures over all groups and rollouts generated in the step, degenerate ones included; names and units in doctor/vocabulary.py.

    Groups (shares that add up to 1): mixed, all_right, all_wrong, unanimous_partial, unanimous_unparseable; zero_variance is all but mixed.
    Rollouts: rewards over the scored ones, what became of the others, lengths in sampled tokens, what they did.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {**kinds(groups), **_rewards(groups, rollouts), **_endings(rollouts), **_lengths(rollouts), **behaviour(groups)}


def kinds(groups: Sequence[Group]) -> dict[str, float]:
    """Every group is of exactly one kind. A group in which the grader failed on all but one rollout counts as partial: it says nothing."""
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    for group in groups:
        counts[kind_of_group(group)] += 1
    shares = {name: count / len(groups) for name, count in counts.items()}
    return {"zero_variance": 1.0 - shares["mixed"], **shares}


def kind_of_group(group: Group) -> str:
    """mixed, all_right, all_wrong, unanimous_partial or unanimous_unparseable."""
    scored = [value for value in group.rewards if value is not None]
    if not degenerate(group.rewards):
        return "mixed"
    if all(rollout.score.status is RewardStatus.UNPARSEABLE for rollout in group.rollouts):
        return "unanimous_unparseable"
    if scored and min(scored) >= TOP:
        return "all_right"
    return "all_wrong" if scored and max(scored) <= 0.0 else "unanimous_partial"


def _rewards(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean and spread of the reward; over mixed groups only; by channel, where the reward has several."""
    values = np.array([r.score.value for r in rollouts if r.score.value is not None], dtype=np.float64)
    mixed = [value for group in groups if not degenerate(group.rewards) for value in group.rewards if value is not None]
    found = {
        "reward_mean": float(values.mean()) if len(values) else 0.0,
        "reward_std": float(values.std()) if len(values) else 0.0,
    }
    if mixed:
        found["reward_mixed"] = float(np.mean(mixed))
    return found | channels(rollouts)


def channels(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean, spread and share of every named channel of the reward over scored rollouts.

    The share is the channel's covariance with the total over the total's variance: what it contributes to what is learned. Shares of an
    additive reward add up to 1. The first channel is the primary one, by which the run is judged.

    Example: totals (1.2, 0.2, 0.1), correct (1, 0, 0), form (.2, .2, .1): variances give shares .94 and .06.
    """
    scored = [(r.score.value, dict(r.score.parts)) for r in rollouts if r.score.value is not None and r.score.parts]
    if not scored:
        return {}
    total = np.array([value for value, _ in scored])
    spread = float(total.var())
    found: dict[str, float] = {}
    for place, name in enumerate(scored[0][1]):
        part = np.array([parts.get(name, 0.0) for _, parts in scored])
        found[f"channel_{name}_mean"], found[f"channel_{name}_std"] = float(part.mean()), float(part.std())
        if spread > 0:
            found[f"channel_{name}_share"] = float(np.mean((part - part.mean()) * (total - total.mean()))) / spread
        if place == 0:
            found["reward_primary"] = float(part.mean())
    return found


def _endings(rollouts: Sequence[Rollout]) -> dict[str, float]:
    def share(*statuses: RewardStatus) -> float:
        return float(np.mean([r.score.status in statuses for r in rollouts]))

    return {
        "parsed": share(RewardStatus.SCORED),
        "unparseable": share(RewardStatus.UNPARSEABLE),
        "truncated": share(RewardStatus.TRUNCATED),
        "errors": share(RewardStatus.ERROR),
        "control": float(np.mean([r.trajectory.stop is StopReason.CONTROL for r in rollouts])),
        "turn_capped": float(np.mean([r.trajectory.stop is StopReason.TURNS for r in rollouts])),
    }


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = np.array([r.trajectory.completion.trained for r in rollouts], dtype=np.float64)
    right = np.array([r.score.value is not None and r.score.value >= TOP for r in rollouts])
    wrong = np.array([r.score.value is not None and r.score.value <= 0.0 for r in rollouts])
    found = {
        "length": float(lengths.mean()),
        "length_p50": float(np.median(lengths)),
        "length_p95": float(np.percentile(lengths, 95)),
    }
    if right.any():
        found["length_right"], found["tokens_per_correct"] = float(lengths[right].mean()), float(lengths.sum() / right.sum())
    if wrong.any():
        found["length_wrong"] = float(lengths[wrong].mean())
    return found
