"""Alarms: catalog entries that are watched while a run trains, and the same over a finished run.

An entry raises its alarm at the first row at which it is suspected, and again only after it has been clear for `QUIET` rows. Live and
replayed alarms are the same function of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from posttrain.doctor.derived import derived
from posttrain.doctor.entries import Action, Entry, suspected
from posttrain.doctor.frame import Frame, is_known, kind_of
from posttrain.doctor.windows import window_at

QUIET = 20
"""Rows without suspicion after which an entry may raise its alarm again."""
WINDOW = 12
"""Values per metric that an alarm stores as its evidence."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm.

    Example: Alarm("grpo", 41, "F1", "entropy collapse", "entropy 0.03 ...; Clip-Higher ...", {"entropy": [[32, 0.09], ...]}, Action.PAUSE)
    """

    stage: str
    step: int
    id: str
    """Of the catalog entry."""
    name: str
    detail: str
    evidence: Mapping[str, Any]
    """Metric to its last values as [step, value]; what was recorded when the alarm was raised."""
    action: Action


def alarm_at(entry: Entry, frame: Frame, row: int) -> Alarm:
    """The alarm of an entry that is suspected at a row, with its evidence window."""
    said = "; ".join(sign.said(frame, row) for sign in entry.signs)
    evidence: dict[str, Any] = {}
    for metric in dict.fromkeys(name for sign in (*entry.signs, *entry.against) for name in sign.metrics):
        values = window_at(frame, metric, row, WINDOW)
        if len(values):
            column = frame.columns[metric]
            end = int(np.searchsorted(column.positions, row, side="right"))
            steps = [frame.steps[i] for i in column.positions[end - len(values) : end]]
            evidence[metric] = [[step, float(value)] for step, value in zip(steps, values, strict=True)]
    return Alarm(frame.stage, frame.steps[row], entry.id, entry.name, f"{entry.name}: {said}; first: {entry.fix}", evidence, entry.action)


def replayed(frame: Frame, entries: Iterable[Entry]) -> list[Alarm]:
    """The alarms of a whole frame in the order in which they are raised."""
    found = []
    for place, entry in enumerate(entries):
        rows = np.flatnonzero(suspected(entry, frame))
        starts = rows[np.diff(rows, prepend=-QUIET - 2) > QUIET]
        found += [(int(row), place, entry) for row in starts]
    return [alarm_at(entry, frame, row) for row, _, entry in sorted(found, key=lambda item: item[:2])]


class Monitor:
    """Watches one stage row by row.

    Example: monitor = Monitor(Frame("grpo", "rl", settings), entries); monitor.see(0, {"entropy": 0.2})  # []
    """

    def __init__(self, frame: Frame, entries: Sequence[Entry]):
        self.frame, self.entries = frame, entries
        self._last: dict[str, int] = {}

    def see(self, step: int, values: Mapping[str, Any]) -> list[Alarm]:
        """Add a row; the alarms that it raises."""
        known = {name: float(value) for name, value in values.items() if is_known(value)}
        self.frame.append(step, known | derived(known))
        if any(_broken(value) for name, value in values.items() if not name.startswith("seconds.")):
            self.frame.event("non_finite")  # as the recorder notes it for those who read the run later
        row = len(self.frame) - 1
        raised = []
        for entry in self.entries:
            if suspected(entry, self.frame, row)[0]:
                if row - self._last.get(entry.id, -QUIET - 1) > QUIET:
                    raised.append(alarm_at(entry, self.frame, row))
                self._last[entry.id] = row
        return raised

    def forget(self, wanted: Callable[[Entry], bool]) -> None:
        """Let these entries raise their alarm at the next row at which they are suspected."""
        for entry in self.entries:
            if wanted(entry):
                self._last.pop(entry.id, None)


class Watch:
    """All stages of a run, for the loops: they tell it every metrics line and act on what it raises.

    Args:
        entries: the catalog; those with signs are watched.
        settings_of: stage name to its resolved settings.
        bounds: thresholds calibrated for the family of this run.
        act: False turns every pause and stop into a warning.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        settings_of: Callable[[str], Mapping[str, Any]],
        bounds: Mapping[str, float] | None = None,
        *,
        act: bool = True,
    ):
        watched = tuple(entry for entry in entries if entry.signs and entry.found_by != "settings")  # the linter has judged those
        self._entries, self._settings_of, self._bounds, self._act = watched, settings_of, bounds or {}, act
        self._monitors: dict[str, Monitor] = {}

    def begin(self, stage: str, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Start over with what is recorded of a stage: nothing, or the lines before the checkpoint that it goes on from.

        What has raised an alarm before does not raise it again at once, with the exception of a stop: a run that was stopped and is
        resumed unchanged stops again.
        """
        self._monitors.pop(stage, None)
        for step, values in lines:
            self._monitor(stage, values).see(step, values)
        if stage in self._monitors:
            self._monitors[stage].forget(lambda entry: entry.action is Action.STOP)

    def see(self, stage: str, step: int, values: Mapping[str, Any]) -> list[Alarm]:
        """Add a metrics line; the alarms that it raises."""
        raised = self._monitor(stage, values).see(step, values)
        return raised if self._act else [_milder(alarm) for alarm in raised]

    def _monitor(self, stage: str, values: Mapping[str, Any]) -> Monitor:
        if stage not in self._monitors:
            kind = kind_of(values)
            entries = [entry for entry in self._entries if kind in entry.kinds]
            frame = Frame(stage, kind, self._settings_of(stage), bounds=self._bounds)
            self._monitors[stage] = Monitor(frame, entries)
        return self._monitors[stage]


def _broken(value: Any) -> bool:
    return isinstance(value, float) and not isfinite(value)


def _milder(alarm: Alarm) -> Alarm:
    action = Action.WARN if alarm.action in (Action.PAUSE, Action.STOP) else alarm.action
    return Alarm(alarm.stage, alarm.step, alarm.id, alarm.name, alarm.detail, alarm.evidence, action)
