"""postmortem.md: a postmortem as Markdown, written so that a chain of runs can be read back and a person's edits are never lost.

The front matter is JSON, which is YAML as well, and holds a digest of the whole text: a file that somebody has edited since differs from
it, and is not overwritten without being told to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.core.digest import digest
from posttrain.core.errors import RunError
from posttrain.core.files import write_atomic
from posttrain.doctor.postmortem import OPEN, Postmortem
from posttrain.doctor.text import plain_json
from posttrain.runs.reading import exists, file_size, is_file, mapping, parse_json, plain, strings, within

FILE = "postmortem.md"
_LARGEST = 1 << 20
_KEPT = ("id", "stage", "first_step", "last_step", "still", "confidence", "decides")
"""Of a hypothesis, what the front matter keeps."""


def postmortem_text(found: Postmortem, parent_link: str | None = None) -> str:
    """The whole file. `parent_link` is a relative path to the parent's postmortem."""
    front = plain_json({**_front(found), "parent_postmortem": parent_link})
    body = "\n".join(_body(found, parent_link)) + "\n"
    return _joined({**front, "text_digest": _text_digest(front, body)}, body)


def parse_postmortem(text: str) -> tuple[Mapping[str, Any], bool] | None:
    """The front matter of a postmortem, and whether the text is as it was generated; None when it is no postmortem of this package."""
    if not text.startswith("---\n"):
        return None
    head, separator, body = text[4:].partition("\n---\n")
    front = mapping(parse_json(head).value)
    if not separator or front.get("postmortem") != 1:
        return None
    rest = {name: value for name, value in front.items() if name != "text_digest"}
    return front, front.get("text_digest") == _text_digest(rest, body) and text == _joined(front, body)


def read_postmortem(run: Path) -> tuple[Mapping[str, Any], bool] | None:
    """The postmortem in a run directory, or None. One that lies outside of it, behind a link, is not followed."""
    place = within(run, FILE)
    if place is None or not is_file(place) or file_size(place) > _LARGEST:
        return None
    try:
        return parse_postmortem(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def write_postmortem(run: Path, text: str, out: Path | None = None, *, force: bool = False) -> Path:
    """Write the file into the run directory, or to `out`. RunError when what is there was written or edited by a person."""
    place = out if out is not None else run / FILE
    if out is None and not run.is_dir():
        raise RunError(f"{plain(run)} is a log, not a directory; say where the postmortem goes with --out FILE")
    if place.is_dir():
        place = place / FILE
    if exists(place) and not force and not _generated(place):
        raise RunError(
            f"{plain(place)} was edited by hand, or is another file; keep it and write elsewhere with --out, or replace it with --force"
        )
    write_atomic(place, text)
    return place


def _generated(place: Path) -> bool:
    if not is_file(place) or file_size(place) > _LARGEST:
        return False
    try:
        found = parse_postmortem(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    return found is not None and found[1]


def _joined(front: Mapping[str, Any], body: str) -> str:
    return f"---\n{json.dumps(front, indent=1)}\n---\n{body}"


def _text_digest(front: Mapping[str, Any], body: str) -> str:
    return hashlib.sha256((digest(front) + body).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _front(found: Postmortem) -> dict[str, Any]:
    return {
        "postmortem": 1,
        "run": found.run,
        "name": found.name,
        "status": found.status,
        "verdict": found.verdict,
        "because": found.because,
        "failure_ids": list(found.failures),
        "root_cause": found.root_cause,
        "parent": dict(found.parent) or None,
        "first_metric": dict(found.first) or None,
        "time_to_symptom": dict(found.time_to_symptom) or None,
        "hypotheses": [{name: one[name] for name in _KEPT} for one in found.hypotheses],
        "fix": found.fix,
        "guard": found.guard,
        "reached": dict(found.reached),
        "manifest": dict(found.manifest),
    }


def _body(found: Postmortem, parent_link: str | None) -> list[str]:
    lines = [f"# Postmortem of {_md(found.name)}", "", f"**{_md(found.verdict)}**: {_md(found.because)}", ""]
    lines += ["## What changed", "", *_changed_lines(found.parent)]
    lines += [f"Postmortem of the parent: [{_md(parent_link)}]({parent_link})"] if parent_link else []
    lines += ["", "## Symptom", "", _md(found.symptom), "", "## First metric to move", ""]
    if found.first:
        f = found.first
        lines.append(_md(f"{f['metric']} in {f['stage']} at step {f['step']} ({f['id']})"))
    else:
        lines.append("None: no sign of a failure was met.")
    t = found.time_to_symptom
    took = f", {t['seconds']:.0f} s of recorded time" if "seconds" in t else ""
    lines += [
        "",
        "## Time to symptom",
        "",
        _md(f"step {t['step']} of {t['stage']}, after {t['rows']} rows{took}") if t else "It did not show.",
    ]
    lines += ["", "## Hypotheses, likeliest first", ""]
    for place, one in enumerate(found.hypotheses, start=1):
        when = f"{one['stage']}, steps {one['first_step']} to {one['last_step']}"
        sure = f"confidence {one['confidence']:.0%}"
        lines.append(f"{place}. " + _md(f"{one['id']} {one['name']}: {when}, {sure}"))
        lines += [f"   - for: {_md(line)}" for line in one["evidence_for"]] + [
            f"   - against: {_md(line)}" for line in one["evidence_against"]
        ]
        lines += [f"   - apart: {_md(line)}" for line in one["apart"]]
    lines += [] if found.hypotheses else ["None from the catalog."]
    cause = f"Most likely {found.root_cause}." if found.root_cause else "Unknown: no hypothesis is sure enough."
    lines += ["", "## Root cause", "", cause if found.status == OPEN else "Nothing to explain."]
    lines += ["", "## Fix", "", _md(found.fix), "", "## Guard to add", "", _md(found.guard), "", "## Status", "", f"{_md(found.status)}"]
    lines += ["", "## Manifest", ""]
    return lines + [f"- {_md(name)}: `{_md(value)}`" for name, value in found.manifest.items()]


def _changed_lines(parent: Mapping[str, Any]) -> list[str]:
    if not parent:
        return ["Nothing to compare with: this run names no parent."]
    who, label, changed = parent.get("id"), parent.get("label"), mapping(parent.get("changed"))
    lines = [_md(f"{label} from {who}")]
    if label == "bundle":
        lines[0] += f": {len(changed)} variables at once, so no single one can be blamed or credited."
    lines += [f"- `{_md(name)}`: {_md(pair[0])} -> {_md(pair[1])}" for name, pair in changed.items()]
    drift = strings(parent.get("drift"))
    return lines + ([_md(f"- and besides: {', '.join(drift)}")] if drift else [])


def _md(value: Any) -> str:
    """A text inside Markdown, whatever it holds: printable, one line, no link, no code, no tag."""
    return plain(value, 400).replace("`", "'").replace("<", "&lt;").replace("[", "\\[").replace("](", "]\\(")
