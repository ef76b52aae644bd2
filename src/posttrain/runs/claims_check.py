"""The gate run backwards over everything that was claimed: read the raw evidence again and see which claims it still carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.core.errors import EvidenceError
from posttrain.runs.claim import GRADES, agrees, figure, grade, mismatch, printed
from posttrain.runs.claims import Claims, Held
from posttrain.runs.evidence import recompute

Outcome = Literal["survived", "strengthened", "weakened", "unresolved", "retracted", "superseded", "broken"]
OUTCOMES: tuple[Outcome, ...] = ("survived", "strengthened", "weakened", "unresolved", "retracted", "superseded", "broken")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one claim.

    Example: Verdict("ladder.grpo", "broken", "claims 0.964, the evidence gives 0.946", grade=None)
    """

    id: str
    outcome: Outcome
    detail: str
    grade: str | None = None
    """The grade that the evidence has now; None where it could not be read."""


def check(claims: Claims) -> list[Verdict]:
    """One verdict per claim, in the order they were made. Broken: the evidence is gone, changed, or does not give the printed number."""
    return [_verdict(claims, held) for held in claims.held.values()]


def verdict_lines(verdicts: Sequence[Verdict], claims: Claims) -> list[str]:
    """What needs attention, then the counts by outcome and the head of the ledger."""
    lines = [f"{v.outcome:12} {v.id}: {v.detail}" for v in verdicts if v.outcome != "survived"]
    counts = Counter(v.outcome for v in verdicts)
    told = ", ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES if counts[outcome])
    lines.append(f"{len(verdicts)} claims: {told or 'none'}  (head {claims.head or '-'})")
    if verdicts and set(counts) <= {"survived", "strengthened"}:
        lines.append("every claim survived: a check that only ever confirms is worth a second look at how claims get in")
    return lines


def _verdict(claims: Claims, held: Held) -> Verdict:
    claim, status = held.claim, claims.status(held.claim.id)
    if status in ("retracted", "superseded"):
        return Verdict(claim.id, status, held.changes[-1].reason)
    if not held.evidence:
        return Verdict(claim.id, "broken", "no evidence was ever linked; link a record or retract the claim")
    try:
        found = [recompute(claims.root, evidence) for evidence in held.evidence]
    except EvidenceError as error:
        return Verdict(claim.id, "broken", str(error))
    now = grade(claim, found[0], held.evidence[0].transcribed)
    if problem := mismatch(claim, found[0]):
        return Verdict(claim.id, "broken", problem, now)
    if apart := [other for other in found[1:] if not agrees(claim, other)]:
        return Verdict(claim.id, "unresolved", f"records disagree: {figure(claim)} against {printed(claim, apart[0].value)}", now)
    if others := claims.contradictions(claim.id):
        theirs = figure(claims.get(others[0]).claim)
        return Verdict(claim.id, "unresolved", f"{figure(claim)}, but '{others[0]}' has {theirs} of the same subject", now)
    if status == "unresolved":
        return Verdict(claim.id, "unresolved", held.changes[-1].reason, now)
    moved = GRADES.index(now) - GRADES.index(claim.grade)
    if moved:
        return Verdict(claim.id, "strengthened" if moved > 0 else "weakened", f"entered as '{claim.grade}', now '{now}'", now)
    return Verdict(claim.id, "survived", f"{figure(claim)} ({now})", now)
