"""What watches over a run while it trains: gates between stages, alarms, and pulses on held-out items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from posttrain.core.config import Config


class Guard(Config):
    """How strictly a run is watched. The thresholds are fixed before it begins."""

    gates: Literal["stop", "warn", "off"] = "stop"
    """What a failed gate does: stop before the next stage, warn, or nothing is judged."""
    alarms: Literal["act", "warn", "off"] = "act"
    """Whether an alarm may pause or stop the run, only warn, or nothing is watched."""
    pulse_every: int = Field(default=10, ge=0)
    """Steps of reinforcement learning between two measurements on held-out items that the run reports nothing on; 0 takes none."""
    pulse_items: int = Field(default=64, ge=2)
    """Held-out items of a measurement. It shows a trend, and decides nothing by itself."""
    calibration: str | None = None
    """Bounds from stable runs of the same family (posttrain promote --calibrate RUN RUN RUN --family FILE); the catalog's without."""


class Raised(Protocol):
    """An alarm, as a loop sees it."""

    @property
    def id(self) -> str:
        """Of the catalog entry."""
        ...

    @property
    def detail(self) -> str:
        """What was seen and what to do first, in one line."""
        ...

    @property
    def evidence(self) -> Mapping[str, Any]:
        """The figures that raised it."""
        ...

    @property
    def action(self) -> str:
        """note, warn, pause or stop."""
        ...


class Watcher(Protocol):
    """Is told every metrics line and raises alarms."""

    def begin(self, stage: str, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """A stage begins, or goes on after these lines (step, values)."""
        ...

    def see(self, stage: str, step: int, values: Mapping[str, Any]) -> Sequence[Raised]:
        """A line was written; what it raises."""
        ...
