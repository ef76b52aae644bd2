"""Which alarms would have been raised over a finished run, when, and with what lead over the reward's fall and over the end.

An alarm at a step sees that step and earlier ones only, so a replay is what a live run with this catalog would have said. The fall is
judged afterwards, from both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.errors import ConfigError
from posttrain.doctor.alarms import Alarm, replayed
from posttrain.doctor.changes import first_fall
from posttrain.doctor.entries import Entry
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.frame import Frame, Kind
from posttrain.doctor.suspects import names_entry
from posttrain.doctor.text import plain_json, printable
from posttrain.doctor.windows import shown

GOALS: Mapping[Kind, tuple[str, ...]] = {
    "rl": ("reward_mean", "reward_primary", "heldout_mean"),
    "preference": ("accuracy", "heldout_mean"),
    "sft": ("token_accuracy", "heldout_mean"),
    "distill": ("heldout_mean", "reward_mean"),
    "other": ("reward_mean", "heldout_mean", "accuracy"),
}
"""What a kind of training is after; the first that was recorded is watched for its fall."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The first lasting fall of what a stage is after.

    Example: Drop("grpo", "reward_mean", 212, 0.62, 0.20)
    """

    stage: str
    metric: str
    step: int
    peak: float
    after: float


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm with its lead, in steps of its stage.

    Example: Raised(Alarm("grpo", 41, "F1", ...), over_fall=171, over_end=258, live=41)
    """

    alarm: Alarm
    over_fall: int | None
    """Steps from the alarm to the fall, negative when it came after; None when nothing fell."""
    over_end: int
    """Steps from the alarm to the last one recorded."""
    live: int | None
    """The step at which it was raised while the run trained; None when it was not."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The alarms of a run as its records give them today.

    Example: Replay((Raised(...),), (Drop(...),), ("grpo: F4 kv cache leak at step 12",), {"grpo": "reward_mean"})
    """

    raised: tuple[Raised, ...]
    drops: tuple[Drop, ...]
    only_live: tuple[str, ...]
    """Alarms that were raised while the run trained and are not by this catalog."""
    watched: Mapping[str, str]
    """Stage to the metric that was watched for a fall."""

    def lead(self, id: str) -> int | None:
        """Steps by which an entry's first alarm came before the fall; None without either."""
        return next((item.over_fall for item in self.raised if item.alarm.id == id), None)


@np.errstate(all="ignore")  # a log may hold 1e308; what overflows is not finite, and no sign holds for it
def replay(evidence: Evidence, catalog: Mapping[str, Entry], reward: str | None = None) -> Replay:
    """Every alarm of every stage, in order. `reward` names another metric to watch for the fall; ConfigError when no stage has it."""
    if reward is not None and not any(reward in frame.columns for frame in evidence.frames.values()):
        names = sorted({name for frame in evidence.frames.values() for name in frame.columns})
        raise ConfigError(f"no stage recorded '{reward[:80]}'; recorded are {', '.join(names[:12])}{' and more' if names[12:] else ''}")
    raised: list[Raised] = []
    drops: list[Drop] = []
    watched: dict[str, str] = {}
    for name, frame in evidence.frames.items():
        metric = _goal(frame, reward)
        fallen = None if metric is None else drop_of(frame, metric)
        if metric is not None:
            watched[name] = metric
        drops += [fallen] if fallen else []
        raised += [_raised(alarm, frame, fallen, evidence.alarms, catalog) for alarm in replayed(frame, catalog.values())]
    ours = {item.alarm.id for item in raised}
    other = [line for line in evidence.alarms if not any(names_entry(line, catalog[id]) for id in ours)]
    return Replay(tuple(raised), tuple(drops), tuple(dict.fromkeys(map(_live_words, other))), watched)


def drop_of(frame: Frame, metric: str) -> Drop | None:
    """The first lasting fall of a metric, or None."""
    column = frame.columns.get(metric)
    fall = None if column is None else first_fall(column.values)
    if column is None or fall is None:
        return None
    return Drop(frame.stage, metric, frame.steps[int(column.positions[fall.position])], fall.peak, fall.after)


def replay_lines(found: Replay) -> list[str]:
    """The falls, then every alarm with its leads, then what only the live run said."""
    lines = []
    for stage, metric in found.watched.items():
        drop = next((drop for drop in found.drops if drop.stage == stage), None)
        if drop is None:
            lines.append(f"{stage}: {metric} never falls for good")
        else:
            lines.append(f"{stage}: {metric} falls for good at step {drop.step}, from {shown(drop.peak)} to {shown(drop.after)} after it")
    lines += ["", f"{len(found.raised)} alarm(s) would be raised" + (":" if found.raised else "")]
    for item in found.raised:
        alarm = item.alarm
        lines.append(f"  {alarm.stage} step {alarm.step}: {alarm.id} {alarm.name} ({alarm.action.value}); {_leads(item)}")
        lines.append(f"      {alarm.detail}")
    lines += [f"  only while it trained: {line}" for line in found.only_live]
    return printable(lines)


def replay_json(found: Replay) -> dict[str, Any]:
    """The same as plain JSON values."""
    return plain_json(
        {
            "schema": 1,
            "watched": dict(found.watched),
            "falls": [{"stage": d.stage, "metric": d.metric, "step": d.step, "peak": d.peak, "after": d.after} for d in found.drops],
            "alarms": [
                {
                    "stage": item.alarm.stage,
                    "step": item.alarm.step,
                    "id": item.alarm.id,
                    "name": item.alarm.name,
                    "action": item.alarm.action.value,
                    "detail": item.alarm.detail,
                    "lead_over_fall": item.over_fall,
                    "lead_over_end": item.over_end,
                    "live_step": item.live,
                }
                for item in found.raised
            ],
            "only_live": list(found.only_live),
        }
    )


def _goal(frame: Frame, wanted: str | None) -> str | None:
    names = (wanted,) if wanted is not None else GOALS[frame.kind]
    return next((name for name in names if name in frame.columns), None)


def _raised(alarm: Alarm, frame: Frame, drop: Drop | None, live: Sequence[Mapping[str, Any]], catalog: Mapping[str, Entry]) -> Raised:
    entry = catalog[alarm.id]
    then = [line["step"] for line in live if names_entry(line, entry) and line.get("stage") == alarm.stage and _is_step(line.get("step"))]
    nearest = min(then, key=lambda step: abs(step - alarm.step), default=None)
    return Raised(alarm, None if drop is None else drop.step - alarm.step, frame.steps[-1] - alarm.step, nearest)


def _leads(item: Raised) -> str:
    parts = []
    if item.over_fall is not None:
        parts.append(f"{item.over_fall} steps before the fall" if item.over_fall >= 0 else f"{-item.over_fall} steps after the fall")
    parts.append(f"{item.over_end} before the end")
    if item.live is None:
        return ", ".join([*parts, "not raised while it trained"])
    return ", ".join([*parts, "raised then as well" if item.live == item.alarm.step else f"raised then at step {item.live}"])


def _live_words(line: Mapping[str, Any]) -> str:
    return f"{line.get('stage')} step {line.get('step')}: {line.get('name')}"


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
