"""Claims and what became of them: an append-only ledger in which every printed number leads to the records that it was computed from.

Kinds of entries (schema 1; runs/ledger.py has the envelope):
    claim     id, text, metric, subject, value, unit, interval, n, basis, null, conditions, scope, grade
    evidence  claim, how, files, pointers, command, transcribed
    status    claim, status (supported, weak, unresolved, retracted, superseded), reason, by (the claim that takes its place), scope

Nothing is ever changed: a claim that was wrong is retracted, and stays readable with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import EvidenceError, RunError
from posttrain.runs.claim import Claim, agrees, check_claim, claim_from_json, claims_agree, figure, grade, mismatch, printed
from posttrain.runs.evidence import Evidence, evidence_from_json, recompute
from posttrain.runs.ledger import append, read_entries, short

Status = Literal["supported", "weak", "unresolved", "retracted", "superseded"]
STATUSES: tuple[Status, ...] = ("supported", "weak", "unresolved", "retracted", "superseded")


@dataclass(frozen=True, slots=True)
class Change:
    """One change of status. Example: Change("2026-01-01T00:00:00+00:00", "retracted", "one seed", by=None, scope="")"""

    at: str
    status: Status
    reason: str
    by: str | None = None
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A claim with everything that the ledger says about it. Example: held.claim.id, held.status, held.evidence[0].how"""

    claim: Claim
    at: str
    evidence: tuple[Evidence, ...] = ()
    changes: tuple[Change, ...] = ()
    supersedes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """Where the claim stands by its own entries; `Claims.status` also knows of contradicting claims."""
        return self.changes[-1].status if self.changes else initial_status(self.claim.grade)

    @property
    def live(self) -> bool:
        """Neither retracted nor superseded."""
        return self.status not in ("retracted", "superseded")


@dataclass(frozen=True, slots=True)
class Claims:
    """All claims of a ledger in the order they were made. Example: Claims.read("evidence/claims.jsonl").held["ladder.grpo"].status"""

    path: Path
    held: Mapping[str, Held]
    head: str
    """Digest of the last entry."""

    @classmethod
    def read(cls, path: str | Path) -> Claims:
        """Raises RunError naming file and line of the first entry that is not as it was written."""
        held: dict[str, Held] = {}
        entries = read_entries(path)
        for entry in entries:
            where = f"{path}:{entry.line}"
            if entry.kind == "claim":
                claim = claim_from_json(entry.body, where)
                if claim.id in held:
                    raise RunError(f"{where}: '{claim.id}' was claimed before; a correction is a new claim that supersedes the old one")
                held[claim.id] = Held(claim, entry.at)
            elif entry.kind in ("evidence", "status"):
                _apply(held, entry.kind, entry.body, entry.at, where)
            else:
                raise RunError(f"{where}: '{short(entry.kind)}' is no kind of entry; known are claim, evidence, status")
        return cls(Path(path), held, entries[-1].digest if entries else "")

    @property
    def root(self) -> Path:
        """The folder that evidence paths are relative to."""
        return self.path.parent

    def get(self, name: str) -> Held:
        """The claim `name`; EvidenceError with the nearest name when there is none."""
        if name not in self.held:
            from difflib import get_close_matches

            near = get_close_matches(name, self.held, n=1)
            raise EvidenceError(f"no claim '{short(name)}' in {self.path}" + (f"; did you mean '{near[0]}'?" if near else ""))
        return self.held[name]

    def status(self, name: str) -> Status:
        """The status in force: a live claim that another live one contradicts is unresolved."""
        own = self.get(name).status
        return "unresolved" if own in ("supported", "weak") and self.contradictions(name) else own

    def contradictions(self, name: str) -> list[str]:
        """Live claims on the same subject and metric whose number differs by more than both intervals explain."""
        mine = self.get(name)
        if not mine.live:
            return []
        key = (mine.claim.subject, mine.claim.metric)
        others = [held.claim for held in self.held.values() if held.live and held.claim.id != name]
        return [other.id for other in others if (other.subject, other.metric) == key and not claims_agree(mine.claim, other)]

    def add(self, claim: Claim, evidence: Evidence) -> Held:
        """Enter a claim with its evidence. The number must follow from the evidence; the grade is computed, not taken from the claim."""
        check_claim(claim, str(self.path))
        if claim.id in self.held:
            raise EvidenceError(f"'{claim.id}' was claimed before; enter the correction under another id and supersede the old one")
        found = recompute(self.root, evidence)
        if problem := mismatch(claim, found):
            raise EvidenceError(f"claim '{claim.id}': {problem}")
        graded = replace(claim, grade=grade(claim, found, evidence.transcribed))
        append(self.path, [("claim", graded.to_json()), ("evidence", {"claim": claim.id, **evidence.to_json()})])
        return Claims.read(self.path).held[claim.id]

    def link(self, name: str, evidence: Evidence) -> Held:
        """Add another record. When it disagrees with the claim by more than their intervals explain, the claim becomes unresolved."""
        held = self.get(name)
        if not held.live:
            raise EvidenceError(f"'{name}' is {held.status}; enter a new claim instead")
        found = recompute(self.root, evidence)
        records: list[tuple[str, Mapping[str, Any]]] = [("evidence", {"claim": name, **evidence.to_json()})]
        if not agrees(held.claim, found) and held.status != "unresolved":
            reason = f"two records disagree: {figure(held.claim)} against {printed(held.claim, found.value)}"
            records.append(("status", {"claim": name, "status": "unresolved", "reason": reason, "by": None, "scope": ""}))
        append(self.path, records)
        return Claims.read(self.path).held[name]

    def retract(self, name: str, reason: str) -> Held:
        """Withdraw a claim; it stays in the ledger, and in every text struck through with the reason."""
        return self._change(name, "retracted", reason)

    def mark(self, name: str, status: Status, reason: str) -> Held:
        """Set a live claim to supported, weak or unresolved, with the reason."""
        if status not in ("supported", "weak", "unresolved"):
            raise EvidenceError(f"a claim is marked supported, weak or unresolved, not '{short(status)}'; see retract and supersede")
        return self._change(name, status, reason)

    def supersede(self, name: str, by: str, reason: str, scope: str = "") -> Held:
        """Put a live claim in the place of an older one, retracted or not; `scope` says where the new one holds."""
        if by == name:
            raise EvidenceError(f"'{name}' cannot take its own place; enter the correction under another id")
        if not self.get(by).live:
            raise EvidenceError(f"'{by}' is {self.get(by).status} and cannot take another's place")
        return self._change(name, "superseded", reason, by, scope)

    def _change(self, name: str, status: Status, reason: str, by: str | None = None, scope: str = "") -> Held:
        held = self.get(name)
        if not reason.strip():
            raise EvidenceError(f"say why '{name}' is {status}; a change without a reason helps nobody")
        if held.status == "superseded" or (held.status == "retracted" and status != "superseded"):
            raise EvidenceError(f"'{name}' is {held.status} since {held.changes[-1].at}; enter a new claim instead")
        append(self.path, [("status", {"claim": name, "status": status, "reason": reason, "by": by, "scope": scope})])
        return Claims.read(self.path).held[name]


def status_named(name: str) -> Status:
    """The status called `name`; EvidenceError lists them."""
    for status in STATUSES:
        if status == name:
            return status
    raise EvidenceError(f"'{short(name)}' is no status; choose among {', '.join(STATUSES)}")


def initial_status(grade_: str) -> Status:
    """The status of a claim that nothing was said about yet."""
    return "supported" if grade_ in ("defensible", "strong") else "weak"


def _apply(held: dict[str, Held], kind: str, body: Mapping[str, Any], at: str, where: str) -> None:
    name = body.get("claim")
    if not isinstance(name, str) or name not in held:
        raise RunError(f"{where}: speaks of the claim {short(repr(name))}, which was never made; restore the file from a copy")
    old = held[name]
    if kind == "evidence":
        found = evidence_from_json(body, where)
        held[name] = Held(old.claim, old.at, (*old.evidence, found), old.changes, old.supersedes)
        return
    status, reason, by, scope = (body.get(part) for part in ("status", "reason", "by", "scope"))
    if status not in STATUSES or not isinstance(reason, str) or not isinstance(scope, str) or not _successor(status, by, name, held):
        raise RunError(f"{where}: not a change of status ({short(repr(status))}, by {short(repr(by))}); restore the file from a copy")
    if not (reason + scope).isprintable():
        raise RunError(f"{where}: the reason holds a line end or another control character; restore the file from a copy")
    held[name] = Held(old.claim, old.at, old.evidence, (*old.changes, Change(at, status, reason, by, scope)), old.supersedes)
    if by is not None:
        new = held[by]
        held[by] = Held(new.claim, new.at, new.evidence, new.changes, (*new.supersedes, name))


def _successor(status: Any, by: Any, name: str, held: Mapping[str, Held]) -> bool:
    """Whether `by` is what the status needs: another live claim exactly when superseded."""
    return by is None if status != "superseded" else isinstance(by, str) and by in held and by != name and held[by].live
