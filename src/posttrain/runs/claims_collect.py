"""A run's evaluations as evidence and claims: one level per rung and suite, and the paired change against the rung before."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.core.errors import EvidenceError, RunError
from posttrain.core.files import write_atomic, write_json
from posttrain.runs.claim import Claim, draft
from posttrain.runs.claims import Claims
from posttrain.runs.evidence import link, recompute
from posttrain.runs.ledger import parse, read_bytes, short
from posttrain.runs.reading import mapping, plain
from posttrain.runs.run import Run
from posttrain.runs.summary import p_text, percent

HEADER = ("Rung", "Suite", "pass@1 (95% interval)", "Paired change (95% interval)", "p", "Parsed", "Truncated", "n", "Grade")

_STATED = ("items_digest", "template_digest", "grader", "extractor", "verifier", "samples_per_item", "seed", "thinking")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


def collect(ledger: str | Path, run: str | Path, name: str, command: str) -> list[str]:
    """Copy the evaluation records of a run into the ledger's folder as `name`/, enter their claims as name.RUNG.SUITE, return the ids.

    The change against the rung before is name.RUNG.SUITE.change. The records are written without spaces, otherwise as they are.
    """
    source, folder = Run.open(run), Path(ledger).parent / _named(name)
    if not isinstance(source.manifest, dict):
        raise RunError(f"{source.path}: the manifest is no mapping; restore it from a copy")
    summary = parse(read_bytes(source.path / "summary.json"), str(source.path / "summary.json"))
    if folder.exists():
        raise RunError(f"{folder} exists already; choose another name, evidence is never overwritten")
    rungs = _rungs(summary, source.path)
    for rung, suites in rungs:
        for suite in suites:
            record = parse(read_bytes(source.eval_file(f"{rung}.{suite}")), f"{rung}.{suite}.json")
            write_atomic(folder / f"{rung}.{suite}.json", json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
    kept = ("created", "seeds", "digests", "config_digest", "posttrain", "code", "packages", "python", "cpu", "environment")
    write_json(folder / "run.json", {"schema": 1, "command": command} | {key: source.manifest.get(key) for key in kept})
    made = []
    for place, (rung, suites) in enumerate(rungs):
        for suite in suites:
            made.append(_level(ledger, name, rung, suite, command))
            if place and suite in rungs[place - 1][1]:
                made.append(_change(ledger, name, (rungs[place - 1][0], rung), suite, command))
    return made


def table(claims: Claims, name: str) -> str:
    """The claims of a collected run as a Markdown table; what is unresolved or withdrawn shows no number."""
    rows = []
    for held in claims.held.values():
        parts = held.claim.id.removeprefix(f"{name}.").split(".")
        if not held.claim.id.startswith(f"{name}.") or len(parts) != 2 or not held.evidence:
            continue
        shown = held.claim.value + f" [{', '.join(held.claim.interval or ())}]" if _quotable(claims, held.claim.id) else "(no figure)"
        evidence = held.evidence[0]
        rates = [recompute(claims.root, replace(evidence, how="score", pointers={"of": of})) for of in ("parsed", "truncated")]
        change = _change_cells(claims, f"{held.claim.id}.change")
        rows.append((*parts, shown, *change, *(percent(rate.value) for rate in rates), str(held.claim.n), held.claim.grade))
    if not rows:
        raise EvidenceError(f"the ledger has no claims named {name}.RUNG.SUITE; collect a run first: posttrain claims collect RUN {name}")
    return _markdown([HEADER, *rows])


def _change_cells(claims: Claims, name: str) -> tuple[str, str]:
    if name not in claims.held:
        return "-", "-"
    held = claims.held[name]
    if not _quotable(claims, name):
        return "(no figure)", "-"
    p_value = recompute(claims.root, held.evidence[0]).p_value
    ends = f" [{', '.join(held.claim.interval)}]" if held.claim.interval else ""
    return f"{held.claim.value}{ends} vs {held.claim.conditions['against']}", p_text(p_value) if p_value is not None else "-"


def _quotable(claims: Claims, name: str) -> bool:
    return claims.status(name) in ("supported", "weak")


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def _rungs(summary: Any, where: Path) -> list[tuple[str, Sequence[str]]]:
    try:
        return [(_named(rung["rung"]), [_named(suite) for suite in rung["suites"]]) for rung in summary["rungs"]]
    except (KeyError, TypeError):
        raise RunError(f"{where}/summary.json names no rungs and suites; the run is unfinished or of another version") from None


def _named(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise EvidenceError(f"{short(repr(name))} cannot be a part of a claim's id; use small letters, digits, _ and -")
    return name


def _level(ledger: str | Path, name: str, rung: str, suite: str, command: str) -> str:
    root = Path(ledger).parent
    template = Claim(
        f"{name}.{rung}.{suite}",
        f"{rung} on {suite}: pass@1 {{figure}}, n {{n}}",
        f"pass@1 on {suite}",
        f"{name}, rung {rung}",
        "0",
        scope="these weights; another seed or machine trains others",
    )
    template = replace(template, conditions=_conditions(parse(read_bytes(root / name / f"{rung}.{suite}.json"), suite)))
    evidence = link(root, "score", {"file": f"{name}/{rung}.{suite}.json"}, {}, command)
    Claims.read(ledger).add(draft(template, recompute(root, evidence), 3), evidence)
    return template.id


def _conditions(record: Any) -> dict[str, str]:
    """What a score depends on besides the suite, as far as the record says it."""
    stated = mapping(mapping(record).get("conditions"))
    found = {
        "model": mapping(record).get("model_digest"),
        **{name: stated.get(name) for name in _STATED},
        **mapping(stated.get("sampling")),
    }
    return {plain(name, 40): plain(value, 40) for name, value in found.items() if isinstance(value, str | int | float) and value != ""}


def _change(ledger: str | Path, name: str, rungs: tuple[str, str], suite: str, command: str) -> str:
    root, (before, after) = Path(ledger).parent, rungs
    template = Claim(
        f"{name}.{after}.{suite}.change",
        f"{before} to {after} on {suite}: {{figure}}, paired, n {{n}}",
        f"change of pass@1 on {suite}",
        f"{name}, rung {before} to {after}",
        "0",
        null="0",
        conditions={"against": before},
        scope="these weights; another seed or machine trains others",
    )
    evidence = link(root, "compare", {"a": f"{name}/{before}.{suite}.json", "b": f"{name}/{after}.{suite}.json"}, {}, command)
    Claims.read(ledger).add(draft(template, recompute(root, evidence), 3), evidence)
    return template.id
