"""Signs that are no figures of a metric: settings, facts, recorded events; and signs made of signs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from posttrain.doctor.frame import Frame
from posttrain.doctor.signals import OPS, Signal

_FAR = re.compile(r"over (\d+) ")
"""How far back a sign looks, in its words."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A resolved setting, or another fact of the run, has a value. Without the name nothing holds.

    Example: Setting("optim.schedule", "==", "constant"), Setting("eval.after.parse_rate", "<", 0.8, where="facts")
    """

    name: str
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in"]
    value: Any
    where: Literal["settings", "facts"] = "settings"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    def _held(self, frame: Frame) -> Mapping[str, Any]:
        return frame.settings if self.where == "settings" else frame.facts

    def since(self, frame: Frame) -> int:
        return len(frame) if self._held(frame).get(self.name) is None else 0

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        found = self._held(frame).get(self.name)
        return np.full(len(frame) - start, found is not None and self._true(found))

    def _true(self, found: Any) -> bool:
        if self.op == "==":
            return found == self.value
        if self.op == "!=":
            return found != self.value
        if self.op == "in":
            return found in self.value
        return isinstance(found, int | float) and bool(OPS[self.op](found, self.value))

    def said(self, frame: Frame, row: int) -> str:
        return f"{self.name} = {self._held(frame).get(self.name)!r}"

    def words(self) -> str:
        if self.op == "in":
            return f"{self.name} is one of {', '.join(map(str, self.value))}"
        if self.op == "==" and isinstance(self.value, bool):
            return self.name if self.value else f"not {self.name}"
        return f"{self.name} {'=' if self.op == '==' else self.op} {self.value}"


@dataclass(frozen=True, slots=True)
class Event:
    """The program recorded something by this name.

    Example: Event("sampler_trainer_mismatch")
    """

    name: str

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    def since(self, frame: Frame) -> int:
        return 0

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        row = frame.events.get(self.name)
        return np.arange(start, len(frame)) >= (len(frame) if row is None else row)

    def said(self, frame: Frame, row: int) -> str:
        at = frame.events.get(self.name)
        return f"{self.name} was not recorded" if at is None else f"{self.name} recorded at step {frame.steps[at] if frame.steps else 0}"

    def words(self) -> str:
        return f"{self.name} was recorded"


@dataclass(frozen=True, slots=True)
class Early:
    """A sign that counts only within the first rows, for what is wrong from the start.

    Example: Early(Level("grad_norm", ">", 100), rows=3)
    """

    sign: Signal
    rows: int

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.sign.metrics

    def since(self, frame: Frame) -> int:
        return self.sign.since(frame)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return self.sign.holds(frame, start) & (np.arange(start, len(frame)) < self.rows)

    def said(self, frame: Frame, row: int) -> str:
        return f"within the first {self.rows} steps: {self.sign.said(frame, row)}"

    def words(self) -> str:
        return f"within the first {self.rows} steps {self.sign.words()}"


@dataclass(frozen=True, slots=True)
class Lasting:
    """A sign that held on each of the last `rows` rows, or, with `some`, on at least one of them.

    Example: Lasting(Level("zero_variance", ">", 0.9), rows=5)
    """

    sign: Signal
    rows: int
    some: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.sign.metrics

    def since(self, frame: Frame) -> int:
        return self.sign.since(frame) + (0 if self.some else self.rows - 1)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        first = max(0, start - self.rows + 1)
        inner = self.sign.holds(frame, first)
        lead = np.full(first - (start - self.rows + 1), False)
        windows = sliding_window_view(np.concatenate([lead, inner]), self.rows) if len(frame) > start else np.empty((0, self.rows), bool)
        return np.asarray(windows.any(axis=1) if self.some else windows.all(axis=1))

    def said(self, frame: Frame, row: int) -> str:
        return f"{self.sign.said(frame, row)}, {'at some time in' if self.some else 'throughout'} the last {self.rows} steps"

    def words(self) -> str:
        return f"{_bracketed(self.sign)}, {'at some time in' if self.some else 'throughout'} the last {self.rows} steps"


@dataclass(frozen=True, slots=True)
class OneOf:
    """At least one of several signs. Example: OneOf((Level("errors", ">", 0.05, last=3), Event("grader_broken")))"""

    signs: Sequence[Signal]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name for sign in self.signs for name in sign.metrics)

    def since(self, frame: Frame) -> int:
        return min(sign.since(frame) for sign in self.signs)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return np.asarray(np.stack([sign.holds(frame, start) for sign in self.signs]).any(axis=0))

    def said(self, frame: Frame, row: int) -> str:
        holding = [sign for sign in self.signs if row < len(frame) and sign.holds(frame, row)[0]]
        return "; ".join(sign.said(frame, row) for sign in (holding or [s for s in self.signs if s.since(frame) <= row] or self.signs))

    def words(self) -> str:
        return " or ".join(_spans(_bracketed(sign) for sign in self.signs))


@dataclass(frozen=True, slots=True)
class Not:
    """A sign can be told and does not hold. Example: Not(Change("heldout_mean", ">=", 0.02, over=6))"""

    sign: Signal

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.sign.metrics

    def since(self, frame: Frame) -> int:
        return self.sign.since(frame)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return ~self.sign.holds(frame, start) & (np.arange(start, len(frame)) >= self.since(frame))

    def said(self, frame: Frame, row: int) -> str:
        return self.sign.said(frame, row)

    def words(self) -> str:
        return f"not ({self.sign.words()})"


@dataclass(frozen=True, slots=True)
class Late:
    """A sign that counts only after the first rows, for what sets in later.

    Example: Late(Level("reward_mean", "<", 0.1, last=5), rows=40)
    """

    sign: Signal
    rows: int

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.sign.metrics

    def since(self, frame: Frame) -> int:
        return max(self.rows, self.sign.since(frame))

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return self.sign.holds(frame, start) & (np.arange(start, len(frame)) >= self.rows)

    def said(self, frame: Frame, row: int) -> str:
        return f"after the first {self.rows} steps: {self.sign.said(frame, row)}"

    def words(self) -> str:
        return f"after the first {self.rows} steps {self.sign.words()}"


@dataclass(frozen=True, slots=True)
class Ever:
    """A sign that held here or on any row before.

    Example: Not(Ever(Level("reward_mean", ">", 0))): nothing was ever earned.
    """

    sign: Signal

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.sign.metrics

    def since(self, frame: Frame) -> int:
        return self.sign.since(frame)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return np.logical_or.accumulate(self.sign.holds(frame))[start:]

    def said(self, frame: Frame, row: int) -> str:
        held = np.flatnonzero(self.sign.holds(frame)[: row + 1])
        if not len(held):
            return f"never: {self.sign.words()}"
        return f"at step {frame.steps[held[0]]}: {self.sign.said(frame, int(held[0]))}"

    def words(self) -> str:
        return f"at any time so far {self.sign.words()}"


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of several signs at once, inside OneOf or against an entry.

    Example: AllOf((Level("all_right", ">", 0.5), Level("all_wrong", "<", 0.1)))
    """

    signs: Sequence[Signal]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name for sign in self.signs for name in sign.metrics)

    def since(self, frame: Frame) -> int:
        return max(sign.since(frame) for sign in self.signs)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        found = np.ones(len(frame) - start, dtype=bool)
        for sign in self.signs:
            if not found.any():
                break
            found &= sign.holds(frame, start)
        return found

    def said(self, frame: Frame, row: int) -> str:
        return "; ".join(sign.said(frame, row) for sign in self.signs)

    def words(self) -> str:
        return " and ".join(_bracketed(sign) for sign in self.signs)


def _bracketed(sign: Signal) -> str:
    """The words of a sign that is a part of another; in brackets when it has several parts itself."""
    said = sign.words()
    parts = list(_spans(part.words() for part in sign.signs)) if isinstance(sign, OneOf | AllOf) else []
    return f"({said})" if len(parts) > 1 else said


def _spans(said: Iterable[str]) -> list[str]:
    """Parts that differ only in how far they look back, as one.

    Example: _spans(["a over 3 values", "a over 6 values"])  # ["a over 3 or 6 values"]
    """
    found: dict[str, list[str]] = {}
    for words in said:
        far = _FAR.findall(words)
        found.setdefault(_FAR.sub("over # ", words, count=1), []).append(far[0] if far else "")
    return [words.replace("over # ", f"over {' or '.join(far)} ", 1) for words, far in found.items()]
