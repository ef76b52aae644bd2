"""The catalog as a page: docs/catalog.md is written by this, and by nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from posttrain.doctor.entries import Action, Entry, FoundBy, Layer, Status, Tier, Verdict

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
FOUND: Mapping[FoundBy, str] = {
    "metrics": "the run's metrics: alarms while it trains, `posttrain doctor RUN` afterwards",
    "settings": "its settings: `posttrain lint`",
    "records": "its records (evaluations, manifest, checkpoints, rollouts): `posttrain doctor`, `runs verify`, `runs diff`, `compare`",
    "preflight": "`posttrain preflight MODEL`, before the run",
    "probe": "`posttrain probe MODEL`, before the run",
    "certify": "the laws of `posttrain certify`",
    "delivery": "the proof of every weight delivery, which ends the run",
    "reading": "the reader of run directories, which says what is damaged",
    "refusal": "a refusal before anything is computed",
}
"""What finds an entry, in words."""
LAYERS: Mapping[Layer, str] = {
    Layer.DATA: "What the model practises on, and what masking leaves of it.",
    Layer.REWARD: "What is paid for, and by whom.",
    Layer.EVALUATION: "What is claimed, and how it was measured.",
    Layer.SEAM: "Where text becomes tokens, tokens become a loss, and weights go from the trainer to the sampler.",
    Layer.INFRASTRUCTURE: "Machines, memory, files, and taking up a run again.",
    Layer.CONFIGURATION: "What the settings ask for.",
    Layer.ALGORITHM: "What is left when all of the above is cleared.",
}
"""What belongs to a layer."""


def catalog_page(entries: Iterable[Entry]) -> str:
    """The whole page as Markdown: a table of contents by layer, then every entry."""
    rows = list(entries)
    by_layer = {layer: sorted((entry for entry in rows if entry.layer is layer), key=_order) for layer in Layer}
    parts = ["# What goes wrong, and how it is told apart", _opening(rows), "## Contents"]
    names = {entry.id: entry.name for entry in rows}
    parts += [_contents(layer, inside) for layer, inside in by_layer.items() if inside]
    for layer, inside in by_layer.items():
        if inside:
            parts += [f"## {layer.value.capitalize()}", LAYERS[layer], *(_entry(entry, names) for entry in inside)]
    return "\n\n".join(parts) + "\n"


def _order(entry: Entry) -> tuple[int, int]:
    """F, P, S, L, U, C, and by number within each."""
    return list(PREFIXES).index(entry.id[0]), int(entry.id[1:])


def _opening(rows: Sequence[Entry]) -> str:
    counts = {letter: sum(entry.id.startswith(letter) for entry in rows) for letter in PREFIXES}
    letters = _table(("Ids", "Entries", "Where they come from"), [(f"{k}...", n, PREFIXES[k]) for k, n in counts.items() if n])
    found = {name: sum(entry.found_by == name for entry in rows if not entry.same_as) for name in FOUND}
    finders = _table(("Found by", "Entries", "What that is"), [(name, found[name], words) for name, words in FOUND.items() if found[name]])
    statuses = "; ".join(f"*{status.value}*: {words}" for status, words in STATUS.items())
    return "\n\n".join(
        [
            "Written by `python docs/update_catalog.py` from `src/posttrain/doctor/catalog/`, which alarms, doctor and linter read. Ids "
            'are permanent. `posttrain doctor explain ID` prints an entry, `posttrain doctor lookup "what you see"` finds one.',
            letters,
            f"Status says what an entry is known from. {statuses}.",
            finders,
            "Entries that are another name for one are not counted in the second table. The order of the layers is the one in which the "
            "doctor looks: data, reward, evaluation, seam, infrastructure and configuration before the algorithm. An entry with signs is "
            "suspected when all of them hold and nothing that speaks against it does. A threshold with a name in brackets can be "
            "calibrated per family of runs; `posttrain promote --calibrate` sets those of KL and entropy from your own stable runs.",
        ]
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _contents(layer: Layer, inside: Sequence[Entry]) -> str:
    links = [f"- [{entry.id}](#{_anchor(entry)}) {entry.name}{f' (= {entry.same_as})' if entry.same_as else ''}" for entry in inside]
    return "\n".join([f"**[{layer.value.capitalize()}](#{layer.value})** ({len(inside)})", "", *links])


def _anchor(entry: Entry) -> str:
    """The anchor that the usual renderers give to the entry's heading."""
    return re.sub(r"[^\w\- ]", "", f"{entry.id} {entry.name}".lower()).replace(" ", "-")


def _entry(entry: Entry, names: Mapping[str, str]) -> str:
    lines = [f"### {entry.id} {entry.name}", "", _words(_sentence(entry.symptom)), ""]
    if entry.same_as:
        lines.append(f"- Another name for **{entry.same_as} {names.get(entry.same_as, '')}**, which is what is reported.")
    lines += _facts(entry)
    if entry.signs:
        lines += ["- Suspected when", *(f"  - {_words(sign.words())}" for sign in entry.signs)]
    if entry.against:
        lines += ["- Not when", *(f"  - {_words(sign.words())}" for sign in entry.against)]
    texts = {"Onset": entry.onset, "Cause": entry.cause, "First fix": entry.fix, "Cheapest check": entry.check}
    lines += [f"- {title}: {_words(text)}" for title, text in texts.items()]
    lines += [f"- Not to be confused with {other} *{names.get(other, '')}*: {_words(how)}" for other, how in entry.confused.items()]
    return "\n".join([*lines, f"- Source: {entry.source}"])


def _facts(entry: Entry) -> list[str]:
    """Verdict, status and so on in one line; what an alarm does only where there is one."""
    said = [f"Verdict: {entry.verdict.value}", f"status: {entry.status.value}", f"found by: {entry.found_by}"]
    if entry.tier is not Tier.STATIC:
        said.append(f"evidence: {entry.tier.value}")
    if entry.verdict is Verdict.HEALTHY:
        said[0] = "Verdict: none of its own"
    if entry.signs:
        said += [f"in {', '.join(entry.kinds)}", "a note only" if entry.action is Action.NOTE else f"action: {entry.action.value}"]
    return [f"- {'; '.join(said)}"]


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a name in code, and a full stop."""
    begun = text[0].upper() + text[1:] if re.match(r"[a-z]+[ ,'-]", text) else text
    return begun if begun.endswith((".", "!", "?")) else f"{begun}."


_CODE = re.compile(
    r"(?<![\w`./\[])(?!e\.g\b|i\.e\b)"
    r"([a-z]+(?:[._][A-Za-z0-9_]+)+(?:=(?:[\w.+-]*\d|[\w.+-]*\w\w))?"  # optim.lr=1e-4, heldout_mean
    r"|[^\s*]+\*(?:[\w./]*\w)?)(?![\w`*])"  # rollouts/*.jsonl, left_*
)


def _words(text: str) -> str:
    """Names of metrics, settings and files as code, so that their underscores and stars mean nothing."""
    return _CODE.sub(r"`\1`", text)
