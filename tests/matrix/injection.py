"""What the catalog matrix is made of: faults that are injected, and what names them afterwards.

    injected fault, seed -> run directory (or the answer of a check) -> ids that were named

A fault is detected when its own id is named. Everything else that is named is kept beside it, so that look-alikes show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.combined import Event
from posttrain.doctor.diagnose import diagnose
from posttrain.doctor.entries import Action, Entry
from posttrain.doctor.lint import lint
from posttrain.doctor.reading import read_evidence
from posttrain.doctor.replay import replay
from posttrain.doctor.suspects import leaves

How = Literal["run", "trace", "settings", "records", "check"]
"""run: a real small training run made sick; trace: a generated run directory; settings: judged by the linter; records: files of a run that
were damaged or contradict each other; check: the answer of preflight, probe, delivery or certify on a sick part."""


@dataclass(frozen=True, slots=True)
class Named:
    """What was named. Example: Named(("F1", "S8"), first="F1", alarms=(("F1", 41),), lead=17)"""

    ids: tuple[str, ...]
    """All ids above a note, likeliest first."""
    first: str | None
    """The likeliest; None when nothing was named."""
    alarms: tuple[tuple[str, int], ...] = ()
    """Id and step of the alarms that a watch raises on the run, in order."""
    lead: int | None = None
    """Steps between the first alarm of the injected id and the reward's fall; None where the reward does not fall."""
    notes: tuple[str, ...] = ()
    """Ids that are only noted."""
    leads: Mapping[str, int] = field(default_factory=dict)
    """Id to the steps from its first alarm to the reward's fall, where there is one."""
    disagree: tuple[str, ...] = ()
    """Ids that the live run and the replay of its records do not raise at the same steps."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Example: Fault("F1", "run", "rl at a rate of 3e-3 on one task", make=collapse, name=by_doctor)
    """

    id: str
    how: How
    what: str
    """What makes it sick, in words."""
    make: Callable[[Path, int], Path]
    """(an empty folder, seed) -> what `name` looks at, usually the run directory."""
    name: Callable[[Path], Named]
    seconds: float = 1.0
    """About how long one injection takes; those above 2 are not in the quick suite."""


def by_doctor(path: Path) -> Named:
    """Ids that `posttrain doctor` names for a run directory."""
    found = diagnose(read_evidence(path), CATALOG)
    sure = [suspect for suspect in found.suspects if suspect.confirmed]
    loud = [suspect.entry for suspect in sure if suspect.entry.action is not Action.NOTE]
    quiet = [suspect.entry.id for suspect in sure if suspect.entry.action is Action.NOTE]
    ids = tuple(dict.fromkeys(entry.same_as or entry.id for entry in loud))
    return Named(ids, ids[0] if ids else None, notes=tuple(dict.fromkeys(quiet)))


def by_run(path: Path) -> Named:
    """As `by_doctor`, for a run that was watched while it trained: with its alarms, their leads, and whether a replay gives the same."""
    evidence = read_evidence(path)
    found = replay(evidence, CATALOG)
    live = sorted({(str(line["name"]), int(line["step"])) for line in evidence.alarms if line["name"] in CATALOG})
    again = sorted({(raised.alarm.id, raised.alarm.step) for raised in found.raised if not beyond_metrics(CATALOG[raised.alarm.id])})
    told = [alarm for alarm in live if not beyond_metrics(CATALOG[alarm[0]])]
    disagree = tuple(dict.fromkeys(id for id, _ in set(told) ^ set(again)))
    leads = {id: lead for id in dict(live) if (lead := found.lead(id)) is not None}
    return replace(by_doctor(path), alarms=tuple(sorted(live, key=lambda alarm: alarm[1])), leads=leads, disagree=disagree)


def beyond_metrics(entry: Entry) -> bool:
    """Whether an entry looks at what no row of a training run shows: settings, which the linter judges, facts of its records, events."""
    if entry.found_by == "settings":
        return True
    every = [leaf for sign in (*entry.signs, *entry.against) for leaf in leaves(sign)]
    return any(isinstance(leaf, Event) or getattr(leaf, "where", "") == "facts" for leaf in every)


def by_linter(path: Path) -> Named:
    """Ids that the linter names for the config.yaml in a folder."""
    import yaml

    config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    found = lint(config, CATALOG.values())
    ids = tuple(dict.fromkeys(advice.id for advice in found))
    return Named(ids, ids[0] if ids else None)
