"""Signs over settings that are compared with each other, which the linter evaluates before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.doctor.frame import Frame


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
        except (TypeError, ValueError, ZeroDivisionError):  # a run directory may hold anything where a number belongs
            return False

    def said(self, frame: Frame, row: int) -> str:
        values = self._values(frame) or {}
        return f"{self.said_as}: {', '.join(f'{name} = {value!r}' for name, value in values.items())}"

    def words(self) -> str:
        return self.said_as
