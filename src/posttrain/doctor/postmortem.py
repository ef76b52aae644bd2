"""The postmortem of a run, filled from its records: what changed, what was seen, what moved first, who did it, what to do, what to add."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core.digest import digest
from posttrain.doctor.diagnose import Diagnosis, diagnose
from posttrain.doctor.entries import Entry, Tier, Verdict
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.replay import Replay, replay
from posttrain.doctor.suspects import Suspect, leaves
from posttrain.doctor.text import suspect_json, verdict_word
from posttrain.doctor.triage import SICK
from posttrain.doctor.vocabulary import METRICS
from posttrain.doctor.windows import shown
from posttrain.runs.manifest import identity_digest, run_id
from posttrain.runs.reading import mapping, plain, strings

MOST_HYPOTHESES = 6
_SURE = 0.8
"""Confidence from which the likeliest suspect is called the cause."""
_CLOCKS = ("seconds.step", "seconds.sample", "seconds.train", "seconds.checkpoint")
NOT_SICK, OPEN = "nothing to explain", "open"
_GUARDS: Mapping[str, str] = {
    "metrics": "let its alarm pause the run: {signs}",
    "settings": "refuse the settings before launch: {signs}",
    "records": "read the records after every stage: {signs}",
    "preflight": "run the preflight before launch; it finds this",
    "probe": "probe the data set before launch; it finds this",
    "certify": "certify the objective (posttrain certify); it finds this",
    "delivery": "keep the proof of weight delivery on; it finds this",
    "reading": "verify the records after every run (posttrain runs verify)",
    "refusal": "keep the refusal at the start; do not override it",
}


@dataclass(frozen=True, slots=True)
class Postmortem:
    """What a postmortem says.

    Example: Postmortem(run="3f9a01bc", name="lr-high", verdict="collapsed", because="F1 ...", failures=("F1",), ...)
    """

    run: str
    name: str
    verdict: str
    because: str
    parent: Mapping[str, Any]
    """id, label and digest of the parent and the variables that differ from it; {} for a run without one."""
    symptom: str
    first: Mapping[str, Any]
    """metric, stage, step and id of what moved first; {} when nothing did."""
    time_to_symptom: Mapping[str, Any]
    """stage, step, rows and, where recorded, seconds until it showed; {} when it did not."""
    hypotheses: tuple[Mapping[str, Any], ...]
    root_cause: str | None
    """Id of the likeliest failure; None when it is not known."""
    fix: str
    guard: str
    status: str
    failures: tuple[str, ...]
    reached: Mapping[str, int]
    """Stage to its last recorded step."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Digests and revision that identify what ran."""


def postmortem_of(evidence: Evidence, catalog: Mapping[str, Entry], *, live: bool = False) -> Postmortem:
    """The postmortem of a run. Raises EvidenceError when there is nothing to look at."""
    found, again = diagnose(evidence, catalog, live=live), replay(evidence, catalog)
    ill = [suspect for suspect in found.suspects if suspect.decides and suspect.entry.verdict in SICK]
    top = ill[0] if found.sick and ill else None
    sure = top is not None and top.confidence >= _SURE
    listed = [suspect for suspect in found.suspects if suspect.confirmed and not suspect.risk and suspect.entry.verdict in SICK]
    return Postmortem(
        run=run_id(evidence.manifest) if evidence.manifest else "unknown",
        name=plain(evidence.path.resolve().name, 80),
        verdict=verdict_word(found.verdict),
        because=found.because,
        parent=_parent(evidence.manifest),
        symptom=_symptom(found, top),
        first=_first(ill, again, evidence, catalog) if found.sick else {},
        time_to_symptom=_time(top, again, evidence) if found.sick else {},
        hypotheses=tuple(suspect_json(suspect) for suspect in listed[:MOST_HYPOTHESES]),
        root_cause=top.entry.id if top is not None and sure else None,
        fix=top.entry.fix if top is not None else found.next_check,
        guard=_guard(top),
        status=OPEN if found.sick else NOT_SICK,
        failures=found.failures if found.sick else (),
        reached={name: frame.steps[-1] for name, frame in evidence.frames.items() if frame.steps},
        manifest=_snapshot(evidence.manifest),
    )


def _parent(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of the parent, reduced to what this package writes; its path is not kept, because nobody vouches for it."""
    parent = manifest.get("parent")
    if isinstance(parent, str):
        return {"id": plain(parent, 80), "label": "unknown", "changed": {}, "drift": [], "digest": None}
    if not isinstance(parent, Mapping):
        return {}
    pairs = {plain(k, 120): v for k, v in mapping(parent.get("changed")).items() if isinstance(v, list) and len(v) == 2}
    changed = {name: [_small(pair[0]), _small(pair[1])] for name, pair in pairs.items()}
    of = plain(parent.get("id"), 40) + (f":{plain(parent['rung'], 40)}" if parent.get("rung") else "")
    drift = [plain(name, 80) for name in strings(parent.get("drift"))]
    return {
        "id": of,
        "label": plain(parent.get("label"), 40),
        "changed": changed,
        "drift": drift,
        "digest": plain(parent.get("digest"), 40),
    }


def _small(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) or value is None else plain(value, 120)


def _snapshot(manifest: Mapping[str, Any]) -> dict[str, Any]:
    if not manifest:
        return {}
    code = mapping(manifest.get("code"))
    named = {
        "digest": digest(manifest),
        "identity": identity_digest(manifest),
        "config_digest": manifest.get("config_digest"),
        "posttrain": manifest.get("posttrain"),
        "revision": code.get("revision"),
        "diff_digest": code.get("diff_digest"),
        "seeds": json.dumps(manifest.get("seeds"))[:200],
        "command": " ".join(strings(manifest.get("command")))[:400],
    }
    return {name: plain(value, 400) for name, value in named.items() if value not in (None, "")}


def _symptom(found: Diagnosis, top: Suspect | None) -> str:
    if top is None:
        return found.because
    whole = next((reading for reading in found.readings if reading.stage == top.stage), None)
    return f"{top.entry.symptom} Here: {'; '.join(whole.why) if whole else found.because}"


def _first(ill: Sequence[Suspect], again: Replay, evidence: Evidence, catalog: Mapping[str, Entry]) -> dict[str, Any]:
    """What moved first: the earliest of the failures' signs, the alarms over the same metrics (notes included), and the reward's fall."""
    order = list(evidence.frames)
    metrics = {name for suspect in ill for sign in suspect.entry.signs for name in sign.metrics}
    times = [(order.index(s.stage), s.first_step, _leading(s.entry), s.entry.id) for s in ill if s.first_step is not None]
    for item in again.raised:
        entry = catalog[item.alarm.id]
        related = {name for sign in entry.signs for name in sign.metrics} & metrics
        if related and entry.verdict is not Verdict.SATURATED and (entry.verdict in SICK or _only_sinks(entry)):
            times.append((order.index(item.alarm.stage), item.alarm.step, _leading(entry), entry.id))
    times += [(order.index(drop.stage), drop.step, drop.metric, "its fall") for drop in again.drops]
    if not times:
        return {}
    place, step, metric, by = min(times, key=lambda item: item[:2])
    return {"metric": metric, "stage": order[place], "step": step, "id": by}


def _only_sinks(entry: Entry) -> bool:
    """Whether a note is a warning of something to come: it names no good news, such as a score that rises."""
    return all(METRICS[name].tier is Tier.LEADING for sign in entry.signs for name in sign.metrics if name in METRICS)


def _leading(entry: Entry) -> str:
    """The metric of an entry that moves first by its nature, or the name of what its signs look at."""
    tiers = (Tier.LEADING, Tier.MIDDLE, Tier.LAGGING)
    names = [name for sign in entry.signs for name in sign.metrics]
    known = sorted((name for name in names if name in METRICS), key=lambda name: tiers.index(METRICS[name].tier))
    other = [leaf.words() for sign in entry.signs for leaf in leaves(sign)]
    return (known or names or other or ["unknown"])[0]


def _time(top: Suspect | None, again: Replay, evidence: Evidence) -> dict[str, Any]:
    """When the symptom showed: the fall of what the stage is after, or else the first step at which the likeliest failure was met."""
    stages = [top.stage] if top is not None else [drop.stage for drop in again.drops[:1]]
    if not stages:
        return {}
    frame = evidence.frames[stages[0]]
    drop = next((drop for drop in again.drops if drop.stage == frame.stage), None)
    step = drop.step if drop is not None else top.first_step if top is not None else None
    if step is None:
        return {}
    row = frame.row_of(step)
    found: dict[str, Any] = {"stage": frame.stage, "step": step, "rows": row}
    clocks = [frame.columns[name] for name in _CLOCKS if name in frame.columns]
    with np.errstate(over="ignore"):
        seconds = sum(float(column.values[column.positions <= row].sum()) for column in clocks)
    if clocks and math.isfinite(seconds):
        found["seconds"] = round(seconds, 1)
    if drop is not None:
        found["what"] = f"{drop.metric} {shown(drop.peak)} -> {shown(drop.after)}"
    return found


def _guard(top: Suspect | None) -> str:
    if top is None:
        return "none"
    signs = "; ".join(sign.words() for sign in top.entry.signs)
    return f"{top.entry.id}: " + _GUARDS[top.entry.found_by].format(signs=signs)
