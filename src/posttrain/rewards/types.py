"""What a grader is, and how a trajectory gets its score."""

from __future__ import annotations

from typing import Protocol

from posttrain.core.tasks import Task
from posttrain.core.trajectory import RewardStatus, Score, Trajectory


class Grader(Protocol):
    """Judges a finished completion. `name` carries a version: a changed rule is a new name, so that old scores stay comparable."""

    @property
    def name(self) -> str: ...

    def __call__(self, task: Task, text: str) -> Score:
        """Score `text` as the answer to `task`: SCORED with 1.0 or 0.0 (or any value), or UNPARSEABLE with 0.0."""
        ...


def extractor_of(grader: Grader) -> str:
    """Version of the rule that finds the answer in a completion. A grader without an `extractor` finds and judges in one.

    Example: extractor_of(HashMarkerGrader())  ->  "hash/1";  of a user's own function named "contains/1"  ->  "inside contains/1"
    """
    return getattr(grader, "extractor", "") or f"inside {grader.name}"


def score(grader: Grader, task: Task, trajectory: Trajectory) -> Score:
    """Score one trajectory. A truncated completion is never parsed: what it would have answered is unknown, so it scores 0 and is counted.

    A grader that raises gives status ERROR and no value: a verifier's crash must not look like a wrong answer (spec/faults.md 55).
    """
    if trajectory.truncated:
        return Score(0.0, RewardStatus.TRUNCATED, grader=grader.name)
    try:
        return grader(task, trajectory.text)
    except Exception as error:  # noqa: BLE001 - user code: any failure becomes data, counted under its own status
        return Score(None, RewardStatus.ERROR, grader=grader.name, detail=f"{type(error).__name__}: {error}"[:200])
