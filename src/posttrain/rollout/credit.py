"""From scored groups to rows with an advantage for every token: who is trained, and how much credit each token gets.

    groups -> policy_rows: unscored, cut-off and pivot siblings leave, by name
           -> (old, reference, teacher and value streams are scored by the loop, where an objective needs them)
           -> assign: one advantage per token, by the objective's advantage axis

Whether a group carries signal is judged on its primary rewards; shaping terms never create a signal where the primary sees none
(spec/ladder-at-100m.md EX6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core.errors import ConfigError
from posttrain.core.trajectory import TRAINED_OWNERS, Group, Rollout, Sample
from posttrain.objectives.advantages import (
    Moments,
    channel_advantages,
    degenerate,
    group_advantages,
    normalise,
    pivot,
    subgroup_advantages,
)
from posttrain.objectives.axes import Batch, Channels, Critic, Drop, MeanStd, MedianMAD, PassAtK, Ramp, Repetition, Reward, Teacher
from posttrain.objectives.credit import gae, reward_to_go, teacher_advantage, token_rewards
from posttrain.objectives.objective import Objective
from posttrain.objectives.shaping import repetition_penalty, soft_overlong

Gather = Callable[[Moments], Sequence[Moments]]
"""Every rank's moments, on every rank."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A rollout that will be trained, with the reward it is judged by.

    Example: PolicyRow(Sample(prompt, tokens, group="3"), reward=1.0)  with parts {"correct": 1.0, "cost": -0.05}
    """

    sample: Sample
    reward: float
    parts: Mapping[str, float]

    @property
    def trained_T(self) -> list[bool]:
        """Which of the row's tokens are trained."""
        return [owner in TRAINED_OWNERS for owner in self.sample.tokens.owners]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rows of a step, and why other rollouts are not among them: rollouts = rows + sum of `left`."""

    rows: tuple[PolicyRow, ...]
    left: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RowStreams:
    """What was scored for one row before the update, per token; None where the objective does not need it."""

    kl_T: np.ndarray | None = None
    """log old - log reference."""
    values_T: np.ndarray | None = None
    teacher_T: np.ndarray | None = None
    """log teacher - log old."""


def usable_rewards(group: Group, objective: Objective) -> list[float | None]:
    """Primary rewards; None for a rollout that was never scored, or that over-long filtering drops."""
    drop = isinstance(objective.overlong, Drop)
    return [None if drop and rollout.trajectory.truncated else rollout.score.value for rollout in group.rollouts]


def carries_signal(group: Group, objective: Objective) -> bool:
    """Whether a group is worth an update: mixed rewards when siblings are the baseline, anything scored otherwise."""
    if objective.needs_teacher:
        return any(rollout.trajectory.ids for rollout in group.rollouts)
    rewards = usable_rewards(group, objective)
    return not degenerate(rewards) if objective.group_relative else any(reward is not None for reward in rewards)


def policy_rows(keyed: Sequence[tuple[int, Group]], objective: Objective, budget: int, sentence_of: SentenceOf | None = None) -> Chosen:
    """Rows of a step. Groups are keyed by their place in the step: a task drawn twice is two groups.

    Args:
        budget: tokens a completion may have, for the over-long ramp.
        sentence_of: ids to sentence indices, when the ratio is per sentence.
    """
    rows: list[PolicyRow] = []
    left = {"unscored": 0, "overlong": 0, "pivot": 0, "no_signal": 0, "too_few": 0}
    for place, group in keyed:
        if not carries_signal(group, objective):
            left["no_signal"] += len(group.rollouts)
            continue
        rewards = usable_rewards(group, objective)
        if isinstance(objective.advantage, PassAtK) and sum(reward is not None for reward in rewards) <= objective.advantage.k:
            left["too_few"] += len(group.rollouts)
            continue
        middle = pivot(rewards) if isinstance(objective.advantage, MedianMAD) else None
        for index, (rollout, reward) in enumerate(zip(group.rollouts, rewards, strict=True)):
            if reward is None and not objective.needs_teacher:
                left["unscored" if rollout.score.value is None else "overlong"] += 1
            elif index == middle:
                left["pivot"] += 1
            else:
                rows.append(_row(rollout, f"{place}", objective, budget, sentence_of))
    return Chosen(tuple(rows), left)


SentenceOf = Callable[[Sequence[int]], tuple[int, ...]]


def _row(rollout: Rollout, key: str, objective: Objective, budget: int, sentence_of: SentenceOf | None) -> PolicyRow:
    trajectory, score = rollout.trajectory, rollout.score
    reward = score.value or 0.0  # a teacher needs no score
    if isinstance(objective.overlong, Ramp):
        reward += soft_overlong(len(trajectory.ids), budget, max(1, round(objective.overlong.buffer * budget)), objective.overlong.scale)
    sentences = sentence_of(trajectory.ids) if sentence_of else ()
    sample = Sample(
        trajectory.prompt,
        trajectory.completion,
        key,
        logps=trajectory.logps,
        sentences=sentences,
        candidates=trajectory.candidates,
    )
    return PolicyRow(sample, reward, dict(score.parts))


def assign(
    rows: Sequence[PolicyRow], streams: Sequence[RowStreams], objective: Objective, gather: Gather
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantage per token of each row, and the critic's returns (empty without one); 0 on untrained tokens.

    `rows` holds whole groups. Normalisation over the step covers all ranks through `gather`.
    """
    advantage = objective.advantage
    coef = objective.kl.coef if objective.kl.used and objective.kl.placement == "reward" else 0.0
    returns: list[np.ndarray] = []
    if isinstance(advantage, Teacher):
        found = [
            teacher_advantage(_need(s.teacher_T, "a teacher"), np.zeros(len(r.sample.tokens)), r.trained_T, advantage.clip)
            for r, s in zip(rows, streams, strict=True)
        ]
    elif isinstance(advantage, Critic):
        found, returns = _with_critic(rows, streams, advantage, coef)
        if advantage.whiten:
            found = _normalised(rows, found, gather, eps=1e-8)
    elif isinstance(advantage, Reward | Batch):
        found = _to_go(rows, streams, coef, centre=isinstance(advantage, Batch) and advantage.within == "group")
        if isinstance(advantage, Batch):
            found = _normalised(rows, found, gather, eps=advantage.eps)
    else:
        found = _among_siblings(rows, streams, objective, coef)
    return [_penalised(row, values, objective.repetition) for row, values in zip(rows, found, strict=True)], returns


def _need(values: np.ndarray | None, what: str) -> np.ndarray:
    if values is None:
        raise ValueError(f"this objective needs {what}, and the loop scored none")
    return values


def _rewards_T(row: PolicyRow, stream: RowStreams, coef: float, reward: float) -> np.ndarray:
    kl_T = _need(stream.kl_T, "a reference") if coef else np.zeros(len(row.sample.tokens))
    return token_rewards(reward, kl_T, row.trained_T, coef)


def _with_critic(
    rows: Sequence[PolicyRow], streams: Sequence[RowStreams], how: Critic, coef: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    pairs = [
        gae(_rewards_T(row, s, coef, row.reward), _need(s.values_T, "a critic"), row.trained_T, how.gamma, how.lam)
        for row, s in zip(rows, streams, strict=True)
    ]
    return [advantages for advantages, _ in pairs], [returns for _, returns in pairs]


def _to_go(rows: Sequence[PolicyRow], streams: Sequence[RowStreams], coef: float, centre: bool) -> list[np.ndarray]:
    means: dict[str, float] = {}
    if centre:
        for key, members in _by_group(rows).items():
            means[key] = float(np.mean([rows[i].reward for i in members]))
    return [
        reward_to_go(_rewards_T(row, s, coef, row.reward - means.get(row.sample.group, 0.0)), row.trained_T)
        for row, s in zip(rows, streams, strict=True)
    ]


def _among_siblings(rows: Sequence[PolicyRow], streams: Sequence[RowStreams], objective: Objective, coef: float) -> list[np.ndarray]:
    """One advantage per response; a KL in the reward is charged to the whole response, as RLOO does."""
    found = [np.zeros(len(row.sample.tokens)) for row in rows]
    for members in _by_group(rows).values():
        rewards = [rows[i].reward - (coef * float(np.sum(_masked(rows[i], streams[i])))) if coef else rows[i].reward for i in members]
        for i, value in zip(members, _baseline([rows[i] for i in members], rewards, objective), strict=True):
            found[i] = np.where(rows[i].trained_T, value, 0.0)
    return found


def _masked(row: PolicyRow, stream: RowStreams) -> np.ndarray:
    return np.where(row.trained_T, _need(stream.kl_T, "a reference"), 0.0)


def _baseline(members: Sequence[PolicyRow], rewards: Sequence[float], objective: Objective) -> list[float]:
    how = objective.advantage
    if isinstance(how, Channels):
        return _by_channel(members, how)
    extra: dict[str, float | int] = {}
    if isinstance(how, MeanStd):
        extra = {"ddof": how.ddof, "eps": how.eps}
    elif isinstance(how, MedianMAD):
        extra = {"eps": how.eps}
    elif isinstance(how, PassAtK):
        extra = {"k": how.k}
    if objective.subgroups == "length":
        lengths = [len(row.sample.tokens) for row in members]
        longer = [length > np.median(lengths) for length in lengths]
        return subgroup_advantages(rewards, longer, how.kind, **extra)  # type: ignore[arg-type]
    return group_advantages(rewards, how.kind, **extra)  # type: ignore[arg-type]


def _by_channel(members: Sequence[PolicyRow], how: Channels) -> list[float]:
    """A completion without channels (cut off, unparseable) scored 0 on each."""
    names = list(dict.fromkeys(name for row in members for name in row.parts))
    if not names:
        raise ConfigError(
            "advantage=channels needs a reward with named channels; return {channel: value} from the reward function, or use mean_std"
        )
    channels = {name: [row.parts.get(name, 0.0) for row in members] for name in names}
    return channel_advantages(channels, {name: how.weights.get(name, 1.0) for name in names}, how.ddof)


def _by_group(rows: Sequence[PolicyRow]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.sample.group, []).append(index)
    return groups


def _normalised(rows: Sequence[PolicyRow], values: Sequence[np.ndarray], gather: Gather, eps: float) -> list[np.ndarray]:
    """Zero mean and unit spread over all trained tokens of the step, on every rank alike."""
    flat = np.concatenate([v[np.array(row.trained_T)] for row, v in zip(rows, values, strict=True)]) if rows else np.zeros(0)
    moments = Moments.of(flat.tolist(), [1] * len(flat))
    total = sum(gather(moments), Moments())
    return [np.where(row.trained_T, normalise(v.tolist(), total, eps), 0.0) for row, v in zip(rows, values, strict=True)]


def _penalised(row: PolicyRow, values_T: np.ndarray, how: Repetition) -> np.ndarray:
    if not how.coef:
        return values_T
    return np.where(row.trained_T, values_T + np.array(repetition_penalty(row.sample.tokens.ids, how.n, how.coef)), 0.0)
