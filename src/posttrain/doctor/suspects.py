"""Which failures of the catalog fit a run, with the figures for and against each, ranked.

A suspect is confirmed when all of its signs held at some step and nothing spoke against it there. Where signs could not be told because a
metric was not recorded, it is only possible, and the metric is named: a possible suspect never decides what a run is. One whose signs are
all settings is a risk that the run was started with, not something that happened to it.

The order among the confirmed is that of their confidence (how steadily the signs held since, whether they hold at the end, what speaks
against) with credit for leading evidence, for a layer that has to be cleared earlier (data first, the algorithm last), for more signs, for
an earlier start, and for agreeing with what the stage is as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.doctor.alarms import QUIET
from posttrain.doctor.combined import Early, Not, Setting
from posttrain.doctor.entries import Action, Entry, Layer, Status, Tier, Verdict, suspected
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.frame import Frame
from posttrain.doctor.signals import Signal
from posttrain.doctor.triage import SICK, Reading
from posttrain.runs.reading import plain

LAYERS = tuple(Layer)
_TIERS = {Tier.LEADING: 0.15, Tier.MIDDLE: 0.05, Tier.LAGGING: 0.0, Tier.STATIC: -0.1}
DECIDES = 0.5
"""Confidence from which a confirmed suspect may decide what the run is."""
_DOUBT, _PROVISIONAL, _APART, _AT_ODDS = 0.9, 0.8, 0.85, 0.5
"""Factors on the confidence: something that would clear it was not recorded; the thresholds are provisional; a look-alike fits as well; the
stage as a whole says otherwise."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One failure that fits a stage.

    Example: Suspect(F1, "grpo", 120, 410, True, True, ("step 120: entropy 0.04 ...",), ("...",), (), ("F2 ...",), 0.9)
    """

    entry: Entry
    stage: str
    first_step: int | None
    """Step at which all signs first held; None for a possible suspect."""
    last_step: int | None
    still: bool
    """Whether they hold at the end."""
    confirmed: bool
    evidence_for: tuple[str, ...]
    evidence_against: tuple[str, ...]
    unknown: tuple[str, ...]
    """Metrics and records that would tell."""
    apart: tuple[str, ...]
    """How look-alikes are told from it, with this run's figures."""
    confidence: float
    weight: float = 0.0
    """What it is ranked by among its equals."""

    @property
    def risk(self) -> bool:
        """Whether it is a matter of settings alone."""
        return all(_is_setting(sign) for sign in self.entry.signs)

    @property
    def decides(self) -> bool:
        """Whether it may decide what the run is."""
        return self.confirmed and self.entry.action is not Action.NOTE and not self.risk and self.confidence >= DECIDES


def find_suspects(evidence: Evidence, catalog: Mapping[str, Entry], readings: Mapping[str, Reading]) -> list[Suspect]:
    """Every suspect of every stage, likeliest first. `readings` are what the stages are as a whole."""
    found: list[Suspect] = []
    said_before: set[tuple[str, tuple[str, ...]]] = set()
    for frame in evidence.frames.values():
        confirmed = [s for entry in catalog.values() if (s := _confirmed(entry, frame, catalog)) is not None]
        confirmed = _once(confirmed, catalog)
        ids = {suspect.entry.id for suspect in confirmed}
        alike = {suspect.entry.id for suspect in confirmed if suspect.still and suspect.confidence >= DECIDES and not suspect.risk}
        reading = readings.get(frame.stage)
        for suspect in confirmed:
            same = (suspect.entry.id, suspect.evidence_for)
            if same not in said_before or not _of_the_run(suspect.entry):
                found.append(_weighed(suspect, alike, reading, evidence))
            said_before.add(same)
        found += [s for entry in catalog.values() if entry.id not in ids and (s := _possible(entry, frame)) is not None]
    return sorted(found, key=_rank)


def state(sign: Signal, frame: Frame, row: int) -> bool | None:
    """Whether a sign holds at a row; None when that cannot be told."""
    if sign.since(frame) > row:
        return None
    return bool(sign.holds(frame, row)[0])


def said(sign: Signal, frame: Frame, row: int) -> str:
    """The figures of a sign at a row; those of a negated one are marked as such."""
    return f"not so: {sign.sign.said(frame, row)}" if isinstance(sign, Not) else sign.said(frame, row)


def names_entry(alarm: Mapping[str, Any], entry: Entry) -> bool:
    """Whether a line of alarms.jsonl is the alarm of an entry."""
    return entry.id in (alarm.get("id"), alarm.get("name")) or alarm.get("name") == entry.name


def _rank(suspect: Suspect) -> tuple[float, ...]:
    kind = 0 if suspect.decides else 1 if suspect.confirmed and not suspect.risk else 2 if suspect.confirmed else 3
    return (kind, suspect.entry.verdict not in SICK, -suspect.weight)


def _weight(suspect: Suspect, frame: Frame, reading: Reading | None) -> float:
    """What a confirmed suspect is ranked by."""
    entry = suspect.entry
    row = frame.row_of(suspect.first_step or 0)
    credit = _TIERS[entry.tier] + 0.12 * (1 - LAYERS.index(entry.layer) / (len(LAYERS) - 1))
    credit += 0.05 * min(5, len(entry.signs)) / 5 + 0.10 * (1 - row / len(frame))
    agrees = reading is not None and reading.verdict is entry.verdict
    return suspect.confidence + credit + (0.15 if agrees else 0.0)


def _confirmed(entry: Entry, frame: Frame, catalog: Mapping[str, Entry]) -> Suspect | None:
    rows = np.flatnonzero(suspected(entry, frame))
    if not len(rows):
        return None
    first, last, end = int(rows[0]), int(rows[-1]), len(frame) - 1
    early = any(_early(sign) for sign in entry.signs)
    still = early or end - last <= max(QUIET, len(frame) // 10)
    fixed = [sign for sign in entry.signs if all(isinstance(leaf, Setting) for leaf in leaves(sign))]
    told = [sign for sign in entry.signs if sign not in fixed]
    lines = [f"step {frame.steps[first]}: {said(sign, frame, first)}" for sign in told]
    lines += [said(sign, frame, first) for sign in fixed]
    if still and last - first >= 10:
        changed = [sign for sign in told if not early and said(sign, frame, last) != said(sign, frame, first)]
        lines += [f"step {frame.steps[last]}: {said(sign, frame, last)}" for sign in changed]
    lines += [f"not cleared: {said(sign, frame, last)}" for sign in entry.against if state(sign, frame, last) is False]
    held = 1.0 if early else len(rows) / (len(frame) - first)
    since = f"held at {len(rows)} of {len(frame) - first} rows since, last at step {frame.steps[last]}"
    doubts = () if held > 0.9 else (since + ("" if still else ", not at the end"),)
    blind = tuple(name for sign in entry.against if state(sign, frame, last) is None for name in _names(sign))
    confidence = (0.75 + 0.25 * held if still else 0.3 + 0.4 * held) * (_DOUBT if blind else 1.0)
    confidence *= _PROVISIONAL if entry.status is Status.PROVISIONAL else 1.0
    apart = tuple(_told_apart(entry, frame, last, catalog))
    steps = frame.steps
    return Suspect(entry, frame.stage, steps[first], steps[last], still, True, tuple(lines), doubts, _unique(blind), apart, confidence)


def _possible(entry: Entry, frame: Frame) -> Suspect | None:
    """An entry half or more of whose signs hold at the end, while the others cannot be told."""
    if not entry.signs or frame.kind not in entry.kinds or not len(frame) or entry.same_as or entry.verdict not in SICK:
        return None
    end = len(frame) - 1
    states = [state(sign, frame, end) for sign in entry.signs]
    holding = [sign for sign, found in zip(entry.signs, states, strict=True) if found]
    cleared = any(state(sign, frame, end) for sign in entry.against)
    if False in states or 2 * len(holding) < len(states) or cleared or all(_is_setting(sign) or _negative(sign) for sign in holding):
        return None
    blind = _unique(name for sign, found in zip(entry.signs, states, strict=True) if found is None for name in _names(sign))
    if not blind:
        return None
    lines = tuple(said(sign, frame, end) for sign in holding)
    share = len(holding) / len(states)
    return Suspect(entry, frame.stage, None, None, True, False, lines, (), blind, (), 0.4 * share, weight=share)


def _once(confirmed: Sequence[Suspect], catalog: Mapping[str, Entry]) -> list[Suspect]:
    """Entries that are another name for one are reported under that one's."""
    found: dict[str, Suspect] = {}
    for suspect in confirmed:
        target = catalog.get(suspect.entry.same_as or "", suspect.entry)
        if target.id not in found or suspect.entry is target:
            found[target.id] = replace(suspect, entry=target)
    return list(found.values())


def _weighed(suspect: Suspect, alike: set[str], reading: Reading | None, evidence: Evidence) -> Suspect:
    """A suspect in the light of the others, of the stage as a whole, and of what was recorded while it trained."""
    entry, confidence = suspect.entry, suspect.confidence
    lines, doubts = list(suspect.evidence_for), list(suspect.evidence_against)
    live = [alarm for alarm in evidence.alarms if names_entry(alarm, entry) and alarm.get("stage") == suspect.stage]
    if live:
        lines.append(f"its alarm was raised while the run trained, at step {live[0].get('step')}")
    both = sorted(set(entry.confused) & alike)
    if both:
        doubts.append(f"{', '.join(both)} fits as well")
        confidence *= _APART
    if reading is not None and reading.verdict is not None and _at_odds(entry, reading.verdict):
        doubts.append(f"the stage as a whole is {reading.verdict.value}: {reading.why[0]}")
        confidence *= _AT_ODDS if entry.verdict is not reading.verdict else 1.0
    found = replace(suspect, evidence_for=tuple(lines), evidence_against=tuple(doubts), confidence=confidence)
    return replace(found, weight=_weight(found, evidence.frames[suspect.stage], reading))


_BY_CURVES = frozenset({Verdict.COLLAPSED, Verdict.DEAD})


def _at_odds(entry: Entry, whole: Verdict) -> bool:
    """Whether an entry says of the reward's course what the stage as a whole denies. A broken seam may well hide behind a good curve."""
    return entry.verdict in _BY_CURVES and whole not in SICK


def _told_apart(entry: Entry, frame: Frame, row: int, catalog: Mapping[str, Entry]) -> list[str]:
    """One line per look-alike: how to tell, and what its own signs show here."""
    lines = []
    for other, how in entry.confused.items():
        alike = catalog.get(other)
        if alike is None:
            continue
        words = {True: "holds", False: "does not hold", None: "cannot be told"}
        shown = [f"{plain(said(sign, frame, row), 120)} ({words[state(sign, frame, row)]})" for sign in alike.signs[:3]]
        lines.append(f"{other} {alike.name}: {how}" + (f"; here: {'; '.join(shown)}" if shown and frame.kind in alike.kinds else ""))
    return lines


def leaves(sign: Signal) -> tuple[Signal, ...]:
    """The plain signs that a sign is made of. Example: leaves(Not(OneOf((a, b)))) -> (a, b)."""
    inner = getattr(sign, "signs", None) or ((sign.sign,) if hasattr(sign, "sign") else ())  # type: ignore[attr-defined]
    return tuple(leaf for part in inner for leaf in leaves(part)) if inner else (sign,)


def _early(sign: Signal) -> bool:
    """Whether a sign looks at the first rows only, so that what it said then stays true."""
    parts = getattr(sign, "signs", None) or ((sign.sign,) if hasattr(sign, "sign") else ())  # type: ignore[attr-defined]
    return isinstance(sign, Early) or any(_early(part) for part in parts)


def _negative(sign: Signal) -> bool:
    """Whether a sign only says that something is not so, which by itself suspects nothing."""
    return isinstance(sign, Not) or (hasattr(sign, "sign") and _negative(sign.sign))  # type: ignore[attr-defined]


def _is_setting(sign: Signal) -> bool:
    return all(getattr(leaf, "where", None) == "settings" for leaf in leaves(sign))


def _of_the_run(entry: Entry) -> bool:
    """Whether an entry looks at settings and facts only, which may be those of the whole run: said once is enough."""
    return all(hasattr(leaf, "where") for sign in entry.signs for leaf in leaves(sign))


def _names(sign: Signal) -> tuple[str, ...]:
    """What would have to be recorded for a sign to be told."""
    return tuple(name for leaf in leaves(sign) for name in ((leaf.name,) if isinstance(leaf, Setting) else leaf.metrics))


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
