"""One failure of the catalog as data, and what it takes for it to be suspected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np

from posttrain.doctor.frame import Frame, Kind
from posttrain.doctor.signals import Signal


class Verdict(StrEnum):
    """What a run is, in one word."""

    HEALTHY = "healthy"
    SATURATED = "saturated"
    COLLAPSED = "collapsed"
    DEAD = "dead"
    BREAKOUT_LOADING = "breakout loading"
    HACKED = "hacked"
    DRIFTING = "drifting"
    BROKEN_SEAM = "broken seam"
    INFRASTRUCTURE = "infrastructure"


class Layer(StrEnum):
    """Where to look, in this order, before the algorithm is blamed."""

    DATA = "data"
    REWARD = "reward"
    EVALUATION = "evaluation"
    SEAM = "seam"
    INFRASTRUCTURE = "infrastructure"
    CONFIGURATION = "configuration"
    ALGORITHM = "algorithm"


class Status(StrEnum):
    """What a failure is known from."""

    LIVED = "lived"
    MEASURED = "measured"
    EXTERNAL = "external"
    PROVISIONAL = "provisional"


class Action(StrEnum):
    """What an alarm does, mildest first."""

    NOTE = "note"
    WARN = "warn"
    PAUSE = "pause"
    """Save a checkpoint and end in an orderly way; resuming goes on."""
    STOP = "stop"


class Tier(StrEnum):
    """When a signal moves relative to the reward."""

    STATIC = "static"
    """Visible before the run: settings, data, files."""
    LEADING = "leading"
    MIDDLE = "middle"
    LAGGING = "lagging"


FoundBy = Literal["metrics", "settings", "records", "preflight", "probe", "certify", "delivery", "reading", "refusal"]
"""What finds it: the run's metrics (alarms and doctor), its settings (linter), its records (evals, manifest, files: doctor), a check before
the run (preflight, dataset probe, laws of certify), the proof of weight delivery, the robust reader, or a refusal at start."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One failure.

    It is suspected at a row when all of `signs` hold and none of `against` does. Entries without signs are found by a check, or are
    documentation only.
    """

    id: str
    """F and P: the numbered failures and pitfalls of the book; L: what labs report; U: what users of other trainers report; S: signs
    without a number of their own. Permanent."""
    name: str
    status: Status
    layer: Layer
    verdict: Verdict
    symptom: str
    onset: str
    cause: str
    fix: str
    """What to do first."""
    check: str
    """The next cheapest check that confirms or clears it."""
    source: str
    tier: Tier = Tier.MIDDLE
    found_by: FoundBy = "metrics"
    kinds: tuple[Kind, ...] = ("rl",)
    signs: tuple[Signal, ...] = ()
    against: tuple[Signal, ...] = ()
    action: Action = Action.WARN
    confused: Mapping[str, str] = field(default_factory=dict)
    """Id of a look-alike to how the two are told apart."""
    same_as: str | None = None
    """The entry that this one is another name for; that one is reported."""


def suspected(entry: Entry, frame: Frame, start: int = 0) -> np.ndarray:
    """For each row from `start`, whether the entry is suspected there: all signs hold and nothing speaks against it."""
    rows = len(frame) - start
    if not entry.signs or frame.kind not in entry.kinds or rows <= 0:
        return np.zeros(max(0, rows), dtype=bool)
    found = np.ones(rows, dtype=bool)
    for sign in entry.signs:
        found &= sign.holds(frame, start)
        if not found.any():
            return found
    for sign in entry.against:
        found &= ~sign.holds(frame, start)
    return found


def checked(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Entries by id. Raises ValueError for an id used twice or a reference to none."""
    by_id = {entry.id: entry for entry in entries}
    if len(by_id) != len(entries):
        twice = next(entry.id for entry in entries if by_id[entry.id] is not entry)
        raise ValueError(f"two catalog entries are called {twice}")
    for entry in entries:
        for other in (*entry.confused, *((entry.same_as,) if entry.same_as else ())):
            if other not in by_id:
                raise ValueError(f"catalog entry {entry.id} refers to {other}, which does not exist")
    return by_id
