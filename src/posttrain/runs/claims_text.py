"""Numbers of README and docs out of the ledger, and the page that lists every claim with what became of it.

A text names a claim in a pair of comments, which Markdown does not show: <!-- claim:ID -->the number<!-- /claim -->. What stands between
them is written by `fill`, so that a number changed by hand is noticed. ID:PART takes one part: value, interval, n, text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from posttrain.core.errors import EvidenceError
from posttrain.runs.claim import Claim, figure
from posttrain.runs.claims import STATUSES, Claims, Held

MARKER = re.compile(
    r"(?P<open><!-- claim:(?P<id>[^\s:>]+)(?::(?P<part>\w+))? -->)(?P<body>(?:(?!<!-- /?claim).)*)(?P<close><!-- /claim -->)", re.DOTALL
)
_LOOSE = re.compile(r"<!-- /?claim\b.*?(?:-->|$)", re.MULTILINE)
PARTS = ("figure", "value", "interval", "n", "text")


def fill(text: str, claims: Claims, name: str = "text") -> str:
    """`text` with every marked number as the ledger has it. Raises EvidenceError naming the line of a marker that cannot be filled."""
    rest = MARKER.sub(lambda found: "\n" * found.group().count("\n"), text)
    if loose := _LOOSE.search(rest):
        line = rest[: loose.start()].count("\n") + 1
        raise EvidenceError(f"{name}:{line}: '{loose.group()}' is not a pair of <!-- claim:ID --> and <!-- /claim -->")

    def filled(found: re.Match[str]) -> str:
        try:
            return found["open"] + shown(claims, found["id"], found["part"] or "figure") + found["close"]
        except EvidenceError as error:
            raise EvidenceError(f"{name}:{text[: found.start()].count(chr(10)) + 1}: {error}") from None

    return MARKER.sub(filled, text)


def stale(text: str, claims: Claims, name: str = "text") -> list[str]:
    """The ids whose number in `text` is not the ledger's."""
    old, new = (list(MARKER.finditer(version)) for version in (text, fill(text, claims, name)))
    return [was["id"] for was, now in zip(old, new, strict=True) if was["body"] != now["body"]]


def shown(claims: Claims, name: str, part: str = "figure") -> str:
    """A claim as a text shows it: its number, or what became of it.

    A retracted number is struck through with the reason, a superseded one with its successor; an unresolved one is not shown at all, so
    that no headline can quote it.
    """
    held = claims.get(name)
    if part not in PARTS:
        raise EvidenceError(f"a claim has no part '{part}'; choose among {', '.join(PARTS)}")
    if claims.status(name) == "unresolved":
        return f"(unresolved: {name})"
    text = _cell(_part(held.claim, part))
    if held.live or part in ("n", "interval"):
        return text
    if held.status == "retracted":
        return f"~~{text}~~ (retracted: {_cell(held.changes[-1].reason)})"
    by = held.changes[-1].by
    return f"~~{text}~~ (superseded by {by}, see docs/claims.md)"


def claims_page(claims: Claims) -> str:
    """The whole of docs/claims.md."""
    counts = [(status, sum(claims.status(name) == status for name in claims.held)) for status in STATUSES]
    told = ", ".join(f"{status} {count}" for status, count in counts if count)
    lines = ["# What is claimed, and on what evidence", "", *_INTRODUCTION, "", f"{len(claims.held)} claims: {told}.", ""]
    lines += ["| Claim | | n | Grade | Status | Evidence |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [_row(claims, held) for held in claims.held.values()]
    if withdrawn := [line for held in claims.held.values() for line in _course(held)]:
        lines += ["", "## What became of claims", "", *withdrawn]
    scopes: dict[str, list[str]] = {}
    for held in claims.held.values():
        scopes.setdefault(held.claim.scope, []).append(f"`{held.claim.id}`")
    if scopes.keys() - {""}:
        lines += ["", "## Where claims end", "", *(f"- {_cell(scope)}: {', '.join(names)}" for scope, names in scopes.items() if scope)]
    return "\n".join([*lines, "", f"Entries end with `{claims.head}`.", ""])


def claim_lines(claims: Claims, held: Held) -> list[str]:
    """One claim for the terminal, with its evidence and its course."""
    claim = held.claim
    lines = [f"{claim.id}  {claims.status(claim.id)}  grade {claim.grade}  n {claim.n or '-'} {claim.basis}", f"  {claim.text}"]
    lines.append(f"  {claim.metric} of {claim.subject}" + (f"; {_conditions(claim.conditions)}" if claim.conditions else ""))
    lines += [f"  only: {claim.scope}"] if claim.scope else []
    for evidence in held.evidence:
        files = ", ".join(path for path, _ in evidence.files.values())
        copied = ", figures copied from a log" if evidence.transcribed else ""
        lines.append(f"  {evidence.how} of {files}{copied}; made by: {evidence.command}")
    lines += [f"  in place of: {name}" for name in held.supersedes]
    lines += [f"  contradicted by: {name}" for name in claims.contradictions(claim.id)]
    return lines + [f"  {line}" for line in history_lines(held)[1:]]


def history_lines(held: Held) -> list[str]:
    """What happened to a claim, oldest first."""
    lines = [f"{held.at}  claimed: {held.claim.text}"]
    for change in held.changes:
        by = f" by {change.by}" if change.by else ""
        scope = f" (holds for: {change.scope})" if change.scope else ""
        lines.append(f"{change.at}  {change.status}{by}: {change.reason}{scope}")
    return lines


_INTRODUCTION = (
    "Generated from `evidence/claims.jsonl` by `python docs/update_claims.py`; do not edit. `posttrain claims check` reads the raw",
    "records again and computes every number anew. The grade says what the evidence can carry: a level is *weak* below 500 items,",
    "*defensible* from 500 and *strong* from 1000; a paired change is *defensible* from 500 items when its interval and p exclude no",
    "effect; a ratio of repeated measurements when its interval excludes 1; what was seen in three training runs is *suggestive*, and so",
    "is, at best, a figure copied from a log whose records are gone. A number whose records disagree is *unresolved* and shown in no",
    "headline; what was retracted stays here.",
)


def _part(claim: Claim, part: str) -> str:
    if part == "interval":
        return f"[{', '.join(claim.interval)}]" if claim.interval else ""
    return figure(claim) if part == "figure" else str(getattr(claim, part) or "")


def _row(claims: Claims, held: Held) -> str:
    claim, status = held.claim, claims.status(held.claim.id)
    text = _cell(claim.text)
    text = text if status in ("supported", "weak") else f"{text} (no figure may be quoted)" if status == "unresolved" else f"~~{text}~~"
    evidence = "; ".join(
        f"{e.how} of {', '.join(f'`{path}`' for path, _ in e.files.values())}" + (" (copied)" if e.transcribed else "")
        for e in held.evidence
    )
    return f"| `{claim.id}` | {text} | {claim.n or '-'} {claim.basis} | {claim.grade} | {status} | {_cell(evidence) or 'none'} |"


def _course(held: Held) -> list[str]:
    """Changes of status as list items, and for a successor what it took the place of."""
    lines = []
    for change in held.changes:
        by = f" by `{change.by}`" if change.by else ""
        scope = f" (holds for: {_cell(change.scope)})" if change.scope else ""
        lines.append(f"- {change.at[:10]}: `{held.claim.id}` {change.status}{by}: {_cell(change.reason)}{scope}")
    return lines + [f"- `{held.claim.id}` stands in the place of `{name}`" for name in held.supersedes]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _conditions(conditions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())


def read_text(path: Path) -> str:
    """A page as text; EvidenceError names one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: cannot be read ({error}); restore it") from None
