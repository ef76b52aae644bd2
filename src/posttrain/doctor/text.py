"""A diagnosis and catalog entries as lines for a terminal, and as plain JSON values.

Every text that comes from a run directory is made printable and cut here, whatever it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from posttrain.doctor.diagnose import Diagnosis
from posttrain.doctor.entries import Entry, Verdict
from posttrain.doctor.suspects import Suspect
from posttrain.doctor.triage import SICK
from posttrain.doctor.walk import Step
from posttrain.runs.reading import plain

LONGEST = 400
"""Characters of one line."""
MOST_SUSPECTS, MOST_POSSIBLE, MOST_PROBLEMS, MOST_FIGURES = 5, 4, 6, 8
INCONCLUSIVE = "inconclusive"


def diagnosis_lines(found: Diagnosis, *, brief: bool = False) -> list[str]:
    """The verdict, the suspects with their figures, the walk, and the next check. `brief`: without the figures of all but the first."""
    lines = [f"{verdict_word(found.verdict)}: {found.because}"]
    lines += [f"  {name} has not ended: it is still running, or was stopped" for name in found.open_stages]
    seen = [suspect for suspect in found.suspects if suspect.confirmed and not suspect.risk]
    happened = [suspect for suspect in seen if suspect.entry.verdict in SICK]
    if happened:
        lines += ["", "suspects"]
        for place, suspect in enumerate(happened[:MOST_SUSPECTS], start=1):
            lines += suspect_lines(suspect, place, short=brief and place > 1)
        lines += _more(len(happened) - MOST_SUSPECTS, "suspects")
    lines += _notes([suspect for suspect in seen if suspect.entry.verdict not in SICK])
    if found.sick or found.verdict is None:
        lines += _possible([suspect for suspect in found.suspects if not suspect.confirmed])
    lines += _risks([suspect for suspect in found.suspects if suspect.confirmed and suspect.risk])
    lines += ["", "stage by stage"] if len(found.readings) > 1 else []
    if len(found.readings) > 1:
        lines += [f"  {r.stage:12} {verdict_word(r.verdict):16} {'; '.join(r.why[:2])}" for r in found.readings]
    lines += ["", "layers, in the order to clear them", *(step_line(step) for step in found.walk)]
    lines += ["", f"next: {found.next_check}"]
    if found.problems:
        lines += ["", *(f"not read: {problem}" for problem in found.problems[:MOST_PROBLEMS])]
        lines += _more(len(found.problems) - MOST_PROBLEMS, "problems")
    return printable(lines)


def suspect_lines(suspect: Suspect, place: int, *, short: bool = False) -> list[str]:
    """One suspect: when, how sure, the figures for and against it, what would tell, and the first fix."""
    entry = suspect.entry
    when = f"steps {suspect.first_step} to {suspect.last_step}" if suspect.first_step != suspect.last_step else f"step {suspect.first_step}"
    state = "still there at the end" if suspect.still else "not at the end"
    head = f"  {place}. {entry.id} {entry.name} ({entry.verdict.value}; {entry.layer.value})  {suspect.stage}, {when}, {state}"
    lines = [f"{head}; confidence {suspect.confidence:.0%}"]
    if short:
        return lines
    lines += [f"       for      {line}" for line in suspect.evidence_for[:MOST_FIGURES]]
    lines += [f"       against  {line}" for line in suspect.evidence_against[:MOST_FIGURES]]
    lines += [f"       unknown  {', '.join(suspect.unknown)} would tell"] if suspect.unknown else []
    lines += [f"       apart    {line}" for line in suspect.apart[:MOST_FIGURES]]
    return [*lines, f"       check    {entry.check}", f"       fix      {entry.fix}"]


def step_line(step: Step) -> str:
    """One layer of the walk."""
    return f"  {step.layer.value:15} {step.found:15} {step.looked}"


def entry_lines(entry: Entry) -> list[str]:
    """One entry of the catalog, whole."""
    lines = [f"{entry.id} {entry.name}", f"  {entry.verdict.value}; {entry.layer.value}; {entry.status.value}; found by {entry.found_by}"]
    fields = {"symptom": entry.symptom, "onset": entry.onset, "cause": entry.cause, "fix": entry.fix, "check": entry.check}
    lines += [f"  {name:10} {text}" for name, text in fields.items() if text]
    lines += [f"  {'sign':10} {sign.words()}" for sign in entry.signs]
    lines += [f"  {'unless':10} {sign.words()}" for sign in entry.against]
    lines += [f"  {'confused':10} with {other}: {how}" for other, how in entry.confused.items()]
    if entry.signs:
        lines.append(f"  {'alarm':10} {entry.action.value}; in {', '.join(entry.kinds)}; {entry.tier.value} evidence")
    lines += [f"  {'same as':10} {entry.same_as}"] if entry.same_as else []
    return printable([*lines, f"  {'source':10} {entry.source}"])


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain JSON values; texts are made printable."""
    value = {
        "schema": 1,
        "verdict": verdict_word(found.verdict),
        "sick": found.sick,
        "because": found.because,
        "failures": list(found.failures),
        "suspects": [suspect_json(suspect) for suspect in found.suspects],
        "walk": [{"layer": step.layer.value, "found": step.found, "looked": step.looked} for step in found.walk],
        "next_check": found.next_check,
        "stages": [
            {"stage": r.stage, "verdict": verdict_word(r.verdict), "why": list(r.why), "unknown": list(r.unknown)} for r in found.readings
        ],
        "open_stages": list(found.open_stages),
        "problems": list(found.problems),
    }
    return plain_json(value)


def suspect_json(suspect: Suspect) -> dict[str, Any]:
    """One suspect as plain JSON values."""
    return {
        "id": suspect.entry.id,
        "name": suspect.entry.name,
        "verdict": suspect.entry.verdict.value,
        "layer": suspect.entry.layer.value,
        "stage": suspect.stage,
        "confirmed": suspect.confirmed,
        "decides": suspect.decides,
        "risk": suspect.risk,
        "first_step": suspect.first_step,
        "last_step": suspect.last_step,
        "still": suspect.still,
        "confidence": round(suspect.confidence, 3),
        "evidence_for": list(suspect.evidence_for),
        "evidence_against": list(suspect.evidence_against),
        "unknown": list(suspect.unknown),
        "apart": list(suspect.apart),
    }


def verdict_word(verdict: Verdict | None) -> str:
    """The verdict in one word or two. Example: verdict_word(None) -> "inconclusive"."""
    return INCONCLUSIVE if verdict is None else verdict.value


def printable(lines: Iterable[str]) -> list[str]:
    """Lines that a terminal can take: nothing but printable characters, and none too long."""
    return [plain(line, LONGEST) for line in lines]


def plain_json(value: Any) -> Any:
    """A value of JSON whose texts are printable and whose numbers are finite."""
    if isinstance(value, dict):
        return {plain(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return plain(value, 4 * LONGEST) if isinstance(value, str) else value


def _notes(suspects: Sequence[Suspect]) -> list[str]:
    """What was seen and is no sickness: healthy states that look like one."""
    if not suspects:
        return []
    lines = ["", "seen, and no failure by itself"]
    for s in suspects[:MOST_POSSIBLE]:
        when = f"{s.stage}, steps {s.first_step} to {s.last_step}"
        lines.append(f"  {s.entry.id} {s.entry.name} ({s.entry.verdict.value}; {when}): {s.evidence_for[0]}")
    return lines + _more(len(suspects) - MOST_POSSIBLE, "notes")


def _possible(suspects: Sequence[Suspect]) -> list[str]:
    if not suspects:
        return []
    lines = ["", "possible, if only it had been recorded"]
    for suspect in suspects[:MOST_POSSIBLE]:
        missing = ", ".join(suspect.unknown)
        lines.append(
            f"  {suspect.entry.id} {suspect.entry.name} ({suspect.stage}): {'; '.join(suspect.evidence_for)}; {missing} would tell"
        )
    return lines + _more(len(suspects) - MOST_POSSIBLE, "possible")


def _risks(suspects: Sequence[Suspect]) -> list[str]:
    if not suspects:
        return []
    lines = ["", "settings that can make a run sick"]
    for suspect in suspects[:MOST_POSSIBLE]:
        lines.append(f"  {suspect.entry.id} {suspect.entry.name} ({suspect.stage}): {'; '.join(suspect.evidence_for)}; {suspect.entry.fix}")
    return lines + _more(len(suspects) - MOST_POSSIBLE, "settings")


def _more(n: int, what: str) -> list[str]:
    return [f"  and {n} more {what} (--json lists all)"] if n > 0 else []
