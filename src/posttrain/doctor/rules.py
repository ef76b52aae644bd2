"""Signs over settings that are compared with each other, which the linter evaluates before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.doctor.frame import Frame
from posttrain.runs.reading import plain

_UNFIT = (TypeError, ValueError, KeyError, ArithmeticError, AttributeError)
"""What arithmetic on a setting of the wrong type raises."""


def short(value: Any) -> str:
    """A setting on one line, whatever it holds. Example: short(1e-06) -> "1e-06", short("mean") -> "'mean'"."""
    return plain(repr(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else value, 60)


@dataclass(frozen=True, slots=True)
class Rule:
    """A relation between settings, or between settings and facts such as the probe's. It is told only when all that it reads is known.

    Example: Rule(("siblings",), lambda s: s["siblings"] < 4, "fewer than 4 siblings")
    """

    reads: Sequence[str]
    """Names of the settings, or facts, that `test` looks at."""
    test: Callable[[Mapping[str, Any]], bool]
    said_as: str
    """The relation in words."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    @property
    def where(self) -> str:
        """Like a Setting: known before the run."""
        return "settings"

    def _values(self, frame: Frame) -> dict[str, Any] | None:
        known = {**frame.facts, **frame.settings}
        values = {name: known.get(name) for name in self.reads}
        return None if any(value is None for value in values.values()) else values

    def since(self, frame: Frame) -> int:
        return len(frame) if self._values(frame) is None else 0

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        values = self._values(frame)
        return np.full(len(frame) - start, values is not None and self._true(values))

    def _true(self, values: Mapping[str, Any]) -> bool:
        try:
            return bool(self.test(values))
        except _UNFIT:  # a run directory, or another trainer's file, may hold anything where a number belongs
            return False

    def said(self, frame: Frame, row: int) -> str:
        values = self._values(frame) or {}
        return f"{self.said_as}: {', '.join(f'{name} = {short(value)}' for name, value in values.items())}"

    def words(self) -> str:
        return self.said_as


@dataclass(frozen=True, slots=True)
class Missing:
    """None of some settings has a value, while another one, that goes with them, has.

    Example: Missing(("objective.limit.cap", "objective.limit.dual"), beside="objective.limit.kind")
    """

    names: Sequence[str]
    beside: str
    """Without this one nothing is known of the others either."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    @property
    def where(self) -> str:
        """Like a Setting: known before the run."""
        return "settings"

    def since(self, frame: Frame) -> int:
        return len(frame) if frame.settings.get(self.beside) is None else 0

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        known = frame.settings.get(self.beside) is not None
        return np.full(len(frame) - start, known and all(frame.settings.get(name) is None for name in self.names))

    def said(self, frame: Frame, row: int) -> str:
        return f"{' and '.join(self.names)} not set"

    def words(self) -> str:
        return f"{' and '.join(self.names)} not set"
