"""What happened, and how it was scored: Trajectory -> Rollout -> Group -> Sample. Each stage adds a type; none mutates the one before.

Tokens are the truth: the ids that were sampled are the ids that are trained. Text is only a view. The loss mask is derived from who
wrote each token, never carried beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from posttrain.core.tasks import Task


class Owner(IntEnum):
    """Who wrote a token."""

    PADDING = 0
    SYSTEM = 1
    USER = 2
    TEMPLATE = 3
    """Role markers and separators that the chat template emits."""
    SAMPLED = 4
    """Drawn by the policy."""
    FORCED = 5
    """Put into the assistant's turn by the harness (a budget cut, a prefilled thought)."""
    TOOL = 6
    DEMONSTRATED = 7
    """Assistant text of a data set, with the token that ends the turn: what supervised fine-tuning imitates."""


TRAINED_OWNERS = frozenset({Owner.SAMPLED, Owner.DEMONSTRATED})


class StopReason(StrEnum):
    """Why a completion ended."""

    END = "end"
    """The policy closed its turn."""
    LENGTH = "length"
    """The token budget ran out: the completion is truncated, not finished."""
    CONTROL = "control"
    """The policy emitted a control token that only the harness may write (a role marker, padding)."""
    TURNS = "turns"
    """The world still had something to say when the most turns were taken."""
    PAUSED = "paused"
    """Not an ending: as many tokens were drawn as the caller asked for in one go. The rest is drawn later, perhaps by newer weights."""


class RewardStatus(StrEnum):
    """What the grader could do with a completion."""

    SCORED = "scored"
    UNPARSEABLE = "unparseable"
    """No answer in the required form. Scored 0 and counted."""
    TRUNCATED = "truncated"
    """Cut by the token budget. Scored 0 and counted."""
    ERROR = "error"
    """The grader itself failed: no value; the rollout leaves its group."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token sequence with the owner of each token; both have the same length.

    Example: Tokens(ids=(1, 5, 9), owners=(Owner.TEMPLATE, Owner.USER, Owner.TEMPLATE))
    """

    ids: tuple[int, ...]
    owners: tuple[Owner, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.owners):
            raise ValueError(f"{len(self.ids)} ids but {len(self.owners)} owners")

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.ids + other.ids, self.owners + other.owners)

    @property
    def trained(self) -> int:
        """How many tokens a loss may touch."""
        return sum(owner in TRAINED_OWNERS for owner in self.owners)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One completion of one task, as it happened.

    Example, a prompt of 3 tokens answered by 2, the second of which ends the turn:
        Trajectory("add-2-3", index=0, prompt=Tokens(...3...), ids=(40, 2), logps=(-0.1, -0.3), stop=StopReason.END, text="5", version=7)
    """

    task_id: str
    index: int
    """Which of the task's sibling samples this is."""
    prompt: Tokens
    ids: tuple[int, ...]
    """Sampled token ids, the stop token included."""
    logps: tuple[float, ...]
    """log-probability in nats of each sampled token under the sampling distribution (after temperature, top-k, top-p)."""
    stop: StopReason
    text: str
    """Decoded view of the completion, without the stop token; of several turns the last, which is the answer."""
    version: int
    """Policy version that sampled it: the number of optimizer steps taken. Of several versions the oldest."""
    owners: tuple[Owner, ...] = ()
    """Who wrote each of `ids`; empty means that the policy sampled them all. A forced token has log-probability 0 and is not trained."""
    versions: tuple[int, ...] = ()
    """Policy version of each of `ids`; empty means that `version` drew them all. Example: (7, 7, 8) after a swap before the third."""
    candidates: tuple[tuple[int, ...], ...] = ()
    """Ids that the cut (top-k, top-p, min-p) left at each of `ids`, the sampled one included; empty when nothing was cut."""
    transcript: str = ""
    """Decoded view of everything after the prompt when there were several turns."""

    @property
    def completion(self) -> Tokens:
        """The ids after the prompt with their owners."""
        return Tokens(self.ids, self.owners or (Owner.SAMPLED,) * len(self.ids))

    @property
    def truncated(self) -> bool:
        return self.stop is StopReason.LENGTH

    @property
    def tokens(self) -> Tokens:
        """Prompt and completion as one sequence."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Score:
    """A grader's outcome. `value` is None when nothing was scored, which is not the same as 0.0.

    Example: Score(1.0, RewardStatus.SCORED, parsed="5", grader="hash-marker/1")
    """

    value: float | None
    status: RewardStatus
    parsed: str | None = None
    grader: str = ""
    detail: str = ""
    parts: tuple[tuple[str, float], ...] = ()
    """Named channels that `value` was combined from, e.g. (("correct", 1.0), ("cost", -0.05)); empty when there is only one."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A trajectory that was scored.

    Example: Rollout(trajectory, Score(1.0, RewardStatus.SCORED, "5"))
    """

    trajectory: Trajectory
    score: Score


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling rollouts of one task instance, keyed by the task's identity, never by its content.

    Example: Group(task, (rollout_0, rollout_1))  with rewards (1.0, 0.0)
    """

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(rollout.score.value for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row to train: a prompt, a continuation, and per-token streams over the continuation.

    Example, an SFT row of 2 trained tokens:  Sample(prompt=Tokens(...), tokens=Tokens((40, 2), (DEMONSTRATED, DEMONSTRATED)))
    Example, an RL row with advantage +0.5:   Sample(prompt, Tokens((40, 2), (SAMPLED, SAMPLED)), advantages=(0.5, 0.5), logps=(-0.1, -0.3))
    """

    prompt: Tokens
    """Shared by siblings: rows with the same `group` are computed with one copy of the prompt."""
    tokens: Tokens
    group: str
    advantages: tuple[float, ...] = ()
    """One per token of `tokens`; empty for supervised rows."""
    logps: tuple[float, ...] = ()
    """Behaviour log-probabilities, one per token of `tokens`; empty for supervised rows."""
    sentences: tuple[int, ...] = ()
    """Sentence index of each token; empty unless an objective asks for it."""
    candidates: tuple[tuple[int, ...], ...] = ()
    """Ids that the sampler's cut left at each token; the trainer renormalises over the same ones. Empty when nothing was cut."""
