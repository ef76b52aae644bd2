"""Does this data teach this model? Groups of siblings, sorted by what they would do to a policy gradient, before anything is trained.

A group whose rewards all agree teaches nothing, and why they agree decides what to do about it. Truncation and the parser are looked at
before difficulty: a task whose answers are cut or not understood looks exactly like one that is too hard. A unanimous group is judged
against the range of the reward, not against zero: a common 0.3 is neither right nor wrong.
Sources: spec/book-1 1.7, 1.10 K1, K2, J10; spec/book-6 1.M.6.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from posttrain.checks.group_sizes import SizeRow, size_table
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Group, RewardStatus, Rollout
from posttrain.stats.intervals import Interval, cluster_t, wilson

QUANTILES = (0.5, 0.9, 0.99)


class Bucket(StrEnum):
    """What a group would do to the update."""

    MIXED = "mixed"
    """Parsed answers were scored differently: this is what teaches a skill."""
    MIXED_BY_FORM = "mixed_by_form"
    """Scores differ only because some answers were cut or could not be parsed: this teaches form."""
    ALL_RIGHT = "all_right"
    ALL_WRONG = "all_wrong"
    UNANIMOUS_PARTIAL = "unanimous_partial"
    """All the same, between right and wrong."""
    UNPARSEABLE = "unparseable"
    """Most answers could not be parsed, whatever the scores are."""
    TRUNCATED = "truncated"
    """Most answers were cut."""
    UNSCORED = "unscored"
    """The grader failed on all answers but one, or on all."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of a reward, and the difference below which two rewards are one.

    Example: Scale(-1.0, 1.0).right(0.9999999999) is True
    """

    low: float = 0.0
    high: float = 1.0
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not self.low + self.tolerance < self.high:
            raise ConfigError(f"the reward's range {self.low:g} to {self.high:g} is empty; give the worst and the best reward")

    def right(self, value: float) -> bool:
        """Whether a value is the best there is."""
        return value >= self.high - self.tolerance

    def wrong(self, value: float) -> bool:
        """Whether a value is the worst there is."""
        return value <= self.low + self.tolerance

    def outside(self, value: float) -> bool:
        """Whether a value cannot be, if the range is what it is said to be."""
        return value < self.low - self.tolerance or value > self.high + self.tolerance


@dataclass(frozen=True, slots=True)
class Probe:
    """What was drawn and how it came out; shares are of rollouts unless they say groups.

    Example, 3 prompts x 2 siblings, rewards (1, 0), (0, 0), (1, 1): buckets mixed, all_wrong, all_right once each; success 0.5
    """

    prompts: int
    siblings: int
    scale: Scale
    sampling: Sampling
    buckets: Mapping[Bucket, int]
    outcomes: tuple[tuple[int, int], ...]
    """Per prompt: scored answers, and right ones."""
    reward: float
    """Mean over prompts of the mean reward, in the grader's units."""
    outside: tuple[float, ...]
    """Rewards that lie outside of the range, at most ten."""
    statuses: Mapping[str, float]
    """Share of each status."""
    unread: float
    """Share of rollouts that were unparseable although the right answer stands in them."""
    lengths: Mapping[str, float]
    """Quantiles of the tokens of answers that ended by themselves; {} when none did."""
    identical: float
    """Share of groups whose completions are all the same text."""
    distinct: int
    """Different texts over all prompts."""
    answers: int
    """Different gold answers over all prompts."""

    @property
    def success(self) -> float | None:
        """Mean over prompts of the share of right answers; None when nothing was scored."""
        shares = self._shares()
        return sum(shares) / len(shares) if shares else None

    def success_interval(self, level: float = 0.95) -> Interval | None:
        """Cluster-t over prompts: siblings of one prompt are not independent."""
        shares = self._shares()
        return cluster_t(shares, level) if len(shares) > 1 else None

    def share(self, *buckets: Bucket) -> float:
        """Share of groups in any of these buckets."""
        return sum(self.buckets.get(bucket, 0) for bucket in buckets) / self.prompts

    def mixed_interval(self, level: float = 0.95) -> Interval:
        """Wilson interval of the share of groups that teach: mixed, by skill or by form."""
        return wilson(self.teaching, self.prompts, level)

    @property
    def teaching(self) -> int:
        """Groups that give a gradient."""
        return self.buckets.get(Bucket.MIXED, 0) + self.buckets.get(Bucket.MIXED_BY_FORM, 0)

    @property
    def table(self) -> list[SizeRow]:
        """Expected share of mixed groups by group size."""
        return size_table(self.outcomes)

    def _shares(self) -> list[float]:
        return [right / scored for scored, right in self.outcomes if scored]


def bucket_of(group: Group, scale: Scale) -> Bucket:
    """Sort one group.

    Example: rewards (0.3, 0.3) on the range 0 to 1 are UNANIMOUS_PARTIAL; (-1, -1) on -1 to 1 are ALL_WRONG.
    """
    half = len(group.rollouts) / 2
    values = [value for value in group.rewards if value is not None]
    if len(values) < min(2, len(group.rollouts)):
        return Bucket.UNSCORED
    if _count(group, RewardStatus.UNPARSEABLE) > half:
        return Bucket.UNPARSEABLE
    if _count(group, RewardStatus.TRUNCATED) > half:
        return Bucket.TRUNCATED
    low, high = min(values), max(values)
    if high - low > scale.tolerance:
        parsed = [rollout.score.value for rollout in group.rollouts if rollout.score.status is RewardStatus.SCORED]
        known = [value for value in parsed if value is not None]
        return Bucket.MIXED if max(known) - min(known) > scale.tolerance else Bucket.MIXED_BY_FORM
    if scale.right(low):
        return Bucket.ALL_RIGHT
    return Bucket.ALL_WRONG if scale.wrong(high) else Bucket.UNANIMOUS_PARTIAL


def probe_of(groups: Sequence[Group], sampling: Sampling, scale: Scale | None = None) -> Probe:
    """Sort the groups and measure what surrounds them. Raises ConfigError below two groups: an interval needs two prompts."""
    if len(groups) < 2:
        raise ConfigError(f"a probe of {len(groups)} prompt(s) says nothing about the data; draw at least 2, 64 are usual")
    scale = scale or Scale()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [[value for value in group.rewards if value is not None] for group in groups]
    means = [float(np.mean(values)) for values in scored if values]
    lengths = [len(rollout.trajectory.ids) for rollout in rollouts if not rollout.trajectory.truncated]
    texts = [[_text(rollout) for rollout in group.rollouts] for group in groups]
    statuses = Counter(rollout.score.status for rollout in rollouts)
    return Probe(
        prompts=len(groups),
        siblings=max(len(group.rollouts) for group in groups),
        scale=scale,
        sampling=sampling,
        buckets=dict(Counter(bucket_of(group, scale) for group in groups)),
        outcomes=tuple((len(values), sum(map(scale.right, values))) for values in scored),
        reward=float(np.mean(means)) if means else 0.0,
        outside=tuple(value for values in scored for value in values if scale.outside(value))[:10],
        statuses={status.value: statuses[status] / len(rollouts) for status in RewardStatus},
        unread=float(np.mean([_unread(group, rollout) for group in groups for rollout in group.rollouts])),
        lengths={f"p{q * 100:g}": float(np.quantile(lengths, q)) for q in QUANTILES} if lengths else {},
        identical=float(np.mean([len(set(of_group)) == 1 < len(of_group) for of_group in texts])),
        distinct=len({text for of_group in texts for text in of_group}),
        answers=len({group.task.answer for group in groups}),
    )


def _count(group: Group, status: RewardStatus) -> int:
    return sum(rollout.score.status is status for rollout in group.rollouts)


def _text(rollout: Rollout) -> str:
    return rollout.trajectory.transcript or rollout.trajectory.text


def _unread(group: Group, rollout: Rollout) -> bool:
    """Whether the gold answer stands in a completion that no answer was found in. What the prompt says already proves nothing."""
    answer = group.task.answer.strip()
    if rollout.score.status is not RewardStatus.UNPARSEABLE or not answer:
        return False
    word = re.compile(rf"(?<![\w.]){re.escape(answer)}(?![\w]|\.\d)")
    return bool(word.search(_text(rollout))) and not any(word.search(message.content) for message in group.task.prompt)
