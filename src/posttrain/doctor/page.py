"""The catalog as a page: docs/catalog.md is written by this, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from posttrain.doctor.entries import Entry, Layer, Status

PREFIXES: Mapping[str, str] = {
    "F": "the numbered failures of the book",
    "P": "its numbered pitfalls",
    "S": "signs in its text that have no number",
    "L": "what labs report of their own runs",
    "U": "what users of other trainers report",
    "C": "settings that are wrong before the run begins",
}
"""First letter of an id to where the entry comes from."""
STATUS: Mapping[Status, str] = {
    Status.LIVED: "seen in a run of the source",
    Status.MEASURED: "measured in the source",
    Status.EXTERNAL: "reported by others",
    Status.PROVISIONAL: "plausible, not measured",
}


def catalog_page(entries: Iterable[Entry]) -> str:
    """The whole page as Markdown."""
    rows = list(entries)
    parts = ["# What goes wrong, and how it is told apart", _opening(rows)]
    for layer in Layer:
        inside = [entry for entry in rows if entry.layer is layer]
        if inside:
            parts += [f"## {layer.value.capitalize()}", *(_entry(entry) for entry in inside)]
    return "\n\n".join(parts) + "\n"


def _opening(rows: list[Entry]) -> str:
    counts = {letter: sum(entry.id.startswith(letter) for entry in rows) for letter in PREFIXES}
    letters = "; ".join(f"{letter}: {PREFIXES[letter]} ({count})" for letter, count in counts.items() if count)
    statuses = "; ".join(f"{status.value}: {words}" for status, words in STATUS.items())
    return (
        "Written by `python docs/update_catalog.py` from `src/posttrain/doctor/catalog/`, which alarms, doctor and linter read. Ids are "
        f"permanent. {letters}.\n\nStatus says what an entry is known from. {statuses}.\n\nThe order is the one in which the doctor looks: "
        "data, reward, evaluation, seam, infrastructure and configuration before the algorithm. An entry with signs is suspected when all "
        "of them hold and nothing that speaks against it does. Thresholds that are calibrated per family carry a name; `posttrain "
        "promote --calibrate` sets those of KL and entropy from your own stable runs."
    )


def _entry(entry: Entry) -> str:
    lines = [f"### {entry.id} {entry.name}", "", f"{entry.symptom}", ""]
    if entry.same_as:
        lines.append(f"- Another name for {entry.same_as}, which is what the doctor reports.")
    lines.append(f"- Status: {entry.status.value}. Found by: {entry.found_by}. Moves: {entry.tier.value}. Verdict: {entry.verdict.value}.")
    if entry.signs:
        lines.append(f"- In: {', '.join(entry.kinds)}. Action of its alarm: {entry.action.value}.")
        lines += [f"- Sign: {sign.words()}" for sign in entry.signs]
        lines += [f"- Speaks against it: {sign.words()}" for sign in entry.against]
    lines += [f"- Onset: {entry.onset}", f"- Cause: {entry.cause}", f"- First fix: {entry.fix}", f"- Cheapest check: {entry.check}"]
    lines += [f"- Not to be confused with {other}: {how}" for other, how in entry.confused.items()]
    return "\n".join([*lines, f"- Source: {entry.source}"])
