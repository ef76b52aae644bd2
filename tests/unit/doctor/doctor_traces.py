"""Traces of stages that the doctor's tests share: each says in a few numbers what a run of its kind looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from posttrain.doctor.entries import Action, Entry, Layer, Status, Tier, Verdict
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.frame import Frame, Kind, frame_of
from posttrain.doctor.signals import Level, Signal

Course = Callable[[int], float | None]


def frame(rows: int, kind: Kind = "rl", stage: str = "grpo", **columns: float | Course) -> Frame:
    """A stage whose columns are constants or functions of the row; None is a row without the metric."""
    lines = []
    for row in range(rows):
        values = {name: course(row) if callable(course) else course for name, course in columns.items()}
        lines.append((row, {name: value for name, value in values.items() if value is not None}))
    return frame_of(stage, kind, lines)


def wobble(level: float, by: float = 0.02) -> Course:
    """A level with a small saw around it: level - by, level, level + by, and again."""
    return lambda row: level + by * (row % 3 - 1)


def ramp(first: float, last: float, rows: int, by: float = 0.01) -> Course:
    """From one level to another in a straight line, with a small saw."""
    return lambda row: first + (last - first) * row / (rows - 1) + by * (row % 3 - 1)


def step(before: float, after: float, at: int, by: float = 0.01) -> Course:
    """One level up to a row and another from there on, with a small saw."""
    return lambda row: (before if row < at else after) + by * (row % 3 - 1)


def every(rows: int, course: Course) -> Course:
    """A column that is recorded on every n-th row only."""
    return lambda row: course(row) if row % rows == 0 else None


def groups(**shares: float | Course) -> dict[str, float | Course]:
    """The split of groups, the ones not named at 0."""
    return {"mixed": 0.0, "zero_variance": 0.0, "all_right": 0.0, "all_wrong": 0.0, **shares}


def evidence(*frames: Frame, finished: bool = True, **fields) -> Evidence:
    """A run that consists of these stages."""
    ended = {one.stage: {} for one in frames} if finished else {}
    return Evidence(Path("runs/a"), frames={one.stage: one for one in frames}, finished=ended, **fields)


def entry(id: str, *signs: Signal, layer: Layer = Layer.ALGORITHM, verdict: Verdict = Verdict.COLLAPSED, **fields) -> Entry:
    """A catalog entry with short texts."""
    defaults = {
        "name": f"failure {id}",
        "status": Status.LIVED,
        "symptom": f"the symptom of {id}",
        "onset": "",
        "cause": f"the cause of {id}",
        "fix": f"the fix of {id}",
        "check": f"the check of {id}",
        "source": "test",
        "tier": Tier.LEADING,
        "action": Action.WARN,
    }
    return Entry(id=id, layer=layer, verdict=verdict, signs=signs, **{**defaults, **fields})


LOW = Level("entropy", "<", 0.1, last=3, stat="every")
"""Three rows in a row below 0.1."""
