"""The account of asynchronous rollouts: nothing is lost, and who gets trained is who was offered.

    generated = trained + filtered + stale + errored + in flight          in rollouts and in tokens, at every step

The three sides are counted in different places: what samplers returned, what became of it in training, what lies in the buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core.trajectory import Group, Rollout
from posttrain.objectives.objective import Objective
from posttrain.rollout.asynchronous.jobs import Job
from posttrain.rollout.credit import policy_rows

WINDOW = 1024
"""Groups over which consumed and offered are compared: the cost of a step must not grow with the steps before it."""


class AccountError(RuntimeError):
    """Rollouts or tokens were lost or counted twice: a fault of this package."""


@dataclass(slots=True)
class Count:
    """Rollouts and the tokens in them. Example: Count(rollouts=2, tokens=9)."""

    rollouts: int = 0
    tokens: int = 0

    def add(self, rollouts: int, tokens: int) -> None:
        """Count some more."""
        self.rollouts += rollouts
        self.tokens += tokens


FATES = ("trained", "filtered", "stale", "errored")


@dataclass(slots=True)
class Ledger:
    """Cumulative counts of a stage.

    Example: generated (8, 40) with trained (4, 20), filtered (2, 10), in flight (2, 10) balances.
    """

    generated: Count = field(default_factory=Count)
    trained: Count = field(default_factory=Count)
    filtered: Count = field(default_factory=Count)
    """Whole groups without signal, and siblings that the objective leaves out."""
    stale: Count = field(default_factory=Count)
    """Too old when they were finished; their tasks were issued again."""
    errored: Count = field(default_factory=Count)
    """The grader failed on them."""
    offered: deque[str] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Task of each job as it was first issued."""
    consumed: deque[tuple[str, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Task and completion lengths of each group that reached a training step, whatever became of it there."""
    discarded: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Completion lengths of each job that had grown too old."""

    def settle(self, generated: Sequence[Group], kept: Sequence[Group], objective: Objective, budget: int) -> int:
        """Enter the groups of one training step by what became of each rollout; returns how many rollouts were trained."""
        alive = {id(group) for group in kept}
        trained = 0
        for group in generated:
            lengths = [drawn_of(rollout) for rollout in group.rollouts]
            rows = policy_rows([(0, group)], objective, budget).rows if id(group) in alive else ()
            used = Count(len(rows), sum(row.sample.tokens.trained for row in rows))
            failed = [] if objective.needs_teacher else [r for r in group.rollouts if r.score.value is None]
            errored = Count(len(failed), sum(drawn_of(rollout) for rollout in failed))
            self.trained.add(used.rollouts, used.tokens)
            self.errored.add(errored.rollouts, errored.tokens)
            self.filtered.add(len(lengths) - used.rollouts - errored.rollouts, sum(lengths) - used.tokens - errored.tokens)
            self.consumed.append((group.task.id, tuple(lengths)))
            trained += used.rollouts
        return trained

    def discard(self, job: Job) -> None:
        """Enter a job that had grown too old."""
        self.stale.add(len(job.rows), job.tokens)
        self.discarded.append(tuple(row.drawn for row in job.rows))

    def check(self, generated: Count, in_flight: Count) -> None:
        """Raise AccountError unless the law holds for what was `generated` and `in_flight` when this step's groups were taken."""
        for unit in ("rollouts", "tokens"):
            parts = {name: getattr(getattr(self, name), unit) for name in FATES} | {"in flight": getattr(in_flight, unit)}
            total = getattr(generated, unit)
            if total != sum(parts.values()) or min(parts.values()) < 0:
                shown = " + ".join(f"{name} {count}" for name, count in parts.items())
                raise AccountError(f"{total} {unit} were generated, and accounted for are {shown} = {sum(parts.values())}")

    def fairness(self, in_flight: Iterable[Sequence[int]]) -> dict[str, float]:
        """Kolmogorov distances in [0, 1] of what was consumed from what was offered, over the last WINDOW groups.

        ks_task: by task, in the order of task ids.  ks_length: by completion length; offered is everything drawn, with the lengths so far
        of what is in flight, so a completion that is long and never consumed shows.
        """
        if not self.consumed:
            return {"ks_task": 0.0, "ks_length": 0.0}
        lengths = [length for _, group in self.consumed for length in group]
        others = [length for group in (*self.discarded, *in_flight) for length in group]
        places = {task: place for place, task in enumerate(sorted({*self.offered, *(task for task, _ in self.consumed)}))}
        taken, offered = [places[task] for task, _ in self.consumed], [places[task] for task in self.offered]
        return {"ks_task": ks_distance(taken, offered), "ks_length": ks_distance(lengths, lengths + others)}

    def figures(self, generated: Count, in_flight: Count) -> dict[str, int]:
        """The account as metrics."""
        parts = {"generated": generated, **{name: getattr(self, name) for name in FATES}, "in_flight": in_flight}
        return {f"account_{name}_{unit}": getattr(count, unit) for name, count in parts.items() for unit in ("rollouts", "tokens")}

    def json(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        counts = {name: [getattr(self, name).rollouts, getattr(self, name).tokens] for name in ("generated", *FATES)}
        consumed = [[task, list(lengths)] for task, lengths in self.consumed]
        return {**counts, "offered": list(self.offered), "consumed": consumed, "discarded": [list(lengths) for lengths in self.discarded]}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Ledger:
        """The inverse of `json`."""
        counts: dict[str, Any] = {name: Count(*stored[name]) for name in ("generated", *FATES)}
        ledger = cls(**counts)
        ledger.offered.extend(stored["offered"])
        ledger.consumed.extend((task, tuple(lengths)) for task, lengths in stored["consumed"])
        ledger.discarded.extend(tuple(lengths) for lengths in stored["discarded"])
        return ledger


def drawn_of(rollout: Rollout) -> int:
    """Tokens that the policy drew; what a world said between its turns is not among them."""
    return rollout.trajectory.completion.trained


def ks_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference of the two empirical distribution functions.

    Example: (1, 1, 2) against (1, 2, 2): at 1 they stand at 2/3 and 1/3, so 1/3.
    """
    first, second = np.sort(np.asarray(one, dtype=np.float64)), np.sort(np.asarray(other, dtype=np.float64))
    if not len(first) or not len(second):
        return 0.0
    places = np.concatenate([first, second])
    gaps = np.searchsorted(first, places, side="right") / len(first) - np.searchsorted(second, places, side="right") / len(second)
    return float(np.abs(gaps).max())


def ages(groups: Sequence[Group], now: int) -> dict[str, float]:
    """How old the rollouts of a step are, in optimizer steps.

    age_mean, age_max: of each completion's oldest token.  old_tokens: share of tokens drawn by an earlier version than `now`.
    """
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    oldest = [now - trajectory.version for trajectory in trajectories] or [0]
    versions = [version for t in trajectories for version in (t.versions or (t.version,) * len(t.ids))]
    old = sum(version < now for version in versions)
    return {"age_mean": float(np.mean(oldest)), "age_max": max(oldest), "old_tokens": old / max(len(versions), 1)}
