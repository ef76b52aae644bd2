"""What the doctor looks at: one stage of a run as columns of numbers, with the settings and facts that go with it.

A live run appends one row per step, a finished one is read at once; both give the same frame, so that what fires afterwards is what would
have fired then.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

LARGEST = sys.float_info.max
Kind = Literal["sft", "preference", "rl", "distill", "other"]
"""What sort of training a stage is; entries of the catalog say which kinds they can occur in."""


class Column:
    """The known values of one metric: `positions` are row numbers, ascending, `values` the numbers there. Growing it is cheap.

    Example, a held-out score measured on rows 0 and 10: positions [0, 10], values [0.31, 0.40].
    """

    __slots__ = ("_positions", "_values", "size")

    def __init__(self) -> None:
        self._positions = np.empty(16, dtype=np.int64)
        self._values = np.empty(16, dtype=np.float64)
        self.size = 0

    @property
    def positions(self) -> np.ndarray:
        return self._positions[: self.size]

    @property
    def values(self) -> np.ndarray:
        return self._values[: self.size]

    def append(self, position: int, value: float) -> None:
        """Add the value of a row after all rows so far."""
        if self.size == len(self._values):
            self._positions = np.resize(self._positions, 2 * self.size)
            self._values = np.resize(self._values, 2 * self.size)
        self._positions[self.size], self._values[self.size] = position, value
        self.size += 1


def is_known(value: Any) -> bool:
    """Whether a recorded value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


@dataclass(slots=True)
class Frame:
    """One stage: rows are its metrics lines in order.

    Example: frame = Frame("grpo", "rl"); frame.append(0, {"reward_mean": 0.4}); frame.append(1, {"reward_mean": 0.5})
             frame.columns["reward_mean"].values  # [0.4, 0.5]
    """

    stage: str
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Resolved settings of this stage under plain dotted names: steps, siblings, optim.lr, objective.limit.kind, sampling.max_tokens."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of the run: finished, eval.before.parse_rate, manifest.packages.torch."""
    events: dict[str, int] = field(default_factory=dict)
    """First row at which an event was recorded, by name: alarms of the program itself, such as sampler_trainer_mismatch."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Thresholds calibrated for the family of this run, by name; others have the catalog's."""
    steps: list[int] = field(default_factory=list)
    """Step number of every row."""
    columns: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one row. Anything that is not a finite number counts as not known."""
        row = len(self.steps)
        self.steps.append(step)
        for name, value in values.items():
            if is_known(value):
                if name not in self.columns:
                    self.columns[name] = Column()
                self.columns[name].append(row, float(value))

    def event(self, name: str) -> None:
        """Note that `name` was recorded at the last row (or before the first)."""
        self.events.setdefault(name, max(0, len(self.steps) - 1))

    def row_of(self, step: int) -> int:
        """The last row at or before `step`; 0 when there is none."""
        return max(0, bisect_right(self.steps, step) - 1)


def frame_of(stage: str, kind: Kind, rows: Iterable[tuple[int, Mapping[str, Any]]], **fields: Any) -> Frame:
    """A frame from (step, values) rows. Example: frame_of("rl", "rl", [(0, {"entropy": 0.4})], settings={"siblings": 8})"""
    frame = Frame(stage, kind, **fields)
    for step, values in rows:
        frame.append(step, values)
    return frame


def kind_of(columns: Iterable[str]) -> Kind:
    """The kind of a stage from the names of its metrics."""
    names = set(columns)
    if "reverse_kl" in names or "teacher_kl" in names:
        return "distill"
    if names & {"reward_mean", "reward_std", "zero_variance"}:
        return "rl"
    if names & {"chosen_reward", "chosen_logp", "accuracy"} and names & {"rejected_reward", "rejected_logp"}:
        return "preference"
    return "sft" if "loss" in names else "other"
