"""One claim: a statement with a number as it is printed, what its evidence can carry, and whether another number is the same one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from typing import Any

from posttrain.core.errors import EvidenceError, RunError
from posttrain.runs.evidence import Measured
from posttrain.runs.ledger import short
from posttrain.stats.grade import (
    FEW_SEEDS,
    PUBLICATION_ITEMS,
    PULSE_ITEMS,
    SELECTION_ITEMS,
    Grade,
    grade_of_comparison,
    grade_of_runs,
)

GRADES = tuple(grade.value for grade in Grade)
"""In the order of stats/grade.py, which says what each means."""
BASES = ("items", "seeds", "rounds")
"""What n counts: items of an evaluation, independent training runs, repetitions of a measurement."""
_ID = re.compile(r"[a-z0-9][a-z0-9_.-]{0,79}")
_NUMBER = re.compile(r"[+-]?\d{1,15}(\.\d{1,12})?")
FEW_ROUNDS = 3
"""Repetitions below which a measurement shows no spread worth the name."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement with one number, as it is printed.

    Example: Claim("ladder.grpo", "GRPO reaches 0.964 [0.944, 0.977] (n 500)", "pass@1 on arithmetic", "ladder, seed 0, rung grpo",
        value="0.964", interval=("0.944", "0.977"), n=500, grade="defensible")
    """

    id: str
    text: str
    metric: str
    subject: str
    """What was measured: which weights, run or version. Two claims on one subject and metric must agree."""
    value: str
    unit: str = ""
    """Units "%" and "points" are hundredths; any other is only printed."""
    interval: tuple[str, str] | None = None
    n: int | None = None
    basis: str = "items"
    null: str | None = None
    """The value that would mean "no effect" (0 for a change, 1 for a ratio), or None for a level."""
    conditions: Mapping[str, str] = field(default_factory=dict)
    scope: str = ""
    """Where the claim ends: what it says nothing about."""
    grade: str = "anecdote"

    def to_json(self) -> dict[str, Any]:
        """The body of its ledger entry."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {"interval": list(self.interval) if self.interval else None, "conditions": dict(self.conditions)}

    @property
    def scale(self) -> float:
        """What a measured number is multiplied with to be printed."""
        return 100.0 if self.unit in ("%", "points") else 1.0


def draft(template: Claim, found: Measured, digits: int, with_interval: bool = True) -> Claim:
    """`template` with the number, interval and n of the evidence in place of its own, and {figure}, {value} and {n} of its text filled in.

    `template.value` is ignored, so that nobody types a number.
    """
    sign = "+" if template.null is not None and float(template.null) == 0 else ""
    texts = [f"{number * template.scale:{sign}.{digits}f}" for number in (found.value, *_ends(found))]
    interval = (texts[1], texts[2]) if with_interval and found.interval is not None else None
    filled = replace(template, value=texts[0], interval=interval, n=found.n)
    parts = {"{figure}": figure(filled), "{value}": filled.value, "{n}": str(filled.n)}
    text = template.text
    for name, value in parts.items():
        text = text.replace(name, value)
    return replace(filled, text=text)


def grade(claim: Claim, found: Measured, transcribed: bool = False) -> str:
    """What the evidence can carry, from its numbers alone.

    A change over items and a difference over seeds are graded by stats/grade.py. A level over items is an anecdote below 100, weak below
    500, defensible below 1000; over seeds weak below 3 and suggestive below 8. A ratio or change over rounds is defensible when its
    interval excludes no effect, strong when it is so large that as many rounds would find it again with 80 % power. Without an interval
    everything is an anecdote, and figures copied from a log, whose records are gone, are suggestive at best.
    """
    graded = _grade(claim, found)
    return Grade.SUGGESTIVE.value if transcribed and graded.claimable else graded.value


def mismatch(claim: Claim, found: Measured) -> str | None:
    """What of the printed numbers does not follow from the evidence, or None."""
    if not equal_as_printed(claim.value, found.value * claim.scale):
        return f"claims {claim.value}{claim.unit and ' ' + claim.unit}, the evidence gives {printed(claim, found.value)}"
    if claim.interval is not None:
        if found.interval is None:
            return f"claims the interval [{', '.join(claim.interval)}], the evidence gives none"
        ends = (found.interval.low * claim.scale, found.interval.high * claim.scale)
        if not all(equal_as_printed(text, end) for text, end in zip(claim.interval, ends, strict=True)):
            shown = ", ".join(printed(claim, end / claim.scale) for end in ends)
            return f"claims the interval [{', '.join(claim.interval)}], the evidence gives [{shown}]"
    if claim.n is not None and found.n is not None and claim.n != found.n:
        return f"claims n {claim.n}, the evidence has {found.n}"
    return None


def agrees(claim: Claim, found: Measured) -> bool:
    """Whether another measurement is the same number: as printed, or within the spread of the two intervals."""
    if equal_as_printed(claim.value, found.value * claim.scale):
        return True
    if claim.interval is None or found.interval is None:
        return False
    theirs = (found.interval.high - found.interval.low) / 2 * claim.scale
    return abs(float(claim.value) - found.value * claim.scale) <= (_half(claim) ** 2 + theirs**2) ** 0.5


def equal_as_printed(text: str, value: float) -> bool:
    """Whether `value` rounds to `text`, either way where it lies in the middle.

    >>> equal_as_printed("0.96", 0.9649), equal_as_printed("0.96", 0.9651)
    (True, False)
    """
    exponent = Decimal(text).as_tuple().exponent
    unit = 10.0 ** (exponent if isinstance(exponent, int) else 0)
    return abs(float(text) - value) <= unit / 2 * (1 + 1e-9) + 1e-12


def printed(claim: Claim, value: float) -> str:
    """`value` with the digits of the claim's."""
    digits = len(claim.value.partition(".")[2])
    sign = "+" if claim.value[0] in "+-" and claim.null is not None else ""
    return f"{value * claim.scale:{sign}.{digits}f}"


def figure(claim: Claim) -> str:
    """The number as it stands in a text: "96.4 % [94.4, 97.7]"."""
    unit = f" {claim.unit}" if claim.unit else ""
    return f"{claim.value}{unit}" + (f" [{', '.join(claim.interval)}]" if claim.interval else "")


def claim_from_json(body: Mapping[str, Any], where: str) -> Claim:
    """The claim of a ledger entry; RunError starts with `where`."""
    texts = ("id", "text", "metric", "subject", "value", "unit", "basis", "scope", "grade")
    for name in texts:
        if not isinstance(body.get(name), str):
            raise RunError(f"{where}: '{name}' of a claim is {short(repr(body.get(name)))}, not a text; restore the file from a copy")
    interval, n, null, conditions = (body.get(name) for name in ("interval", "n", "null", "conditions"))
    pair = isinstance(interval, list) and len(interval) == 2 and all(isinstance(end, str) for end in interval)
    if not (interval is None or pair) or not (null is None or isinstance(null, str)):
        raise RunError(f"{where}: 'interval' must be two texts or null, and 'null' a text or null; restore the file from a copy")
    if not (n is None or (isinstance(n, int) and not isinstance(n, bool) and n > 0)):
        raise RunError(f"{where}: 'n' of a claim is {short(repr(n))}, not a count; restore the file from a copy")
    if not isinstance(conditions, dict) or not all(isinstance(value, str) for value in conditions.values()):
        raise RunError(f"{where}: 'conditions' of a claim must map names to texts; restore the file from a copy")
    given = {name: body[name] for name in texts}
    ends = (interval[0], interval[1]) if isinstance(interval, list) else None
    claim = Claim(**given, interval=ends, n=n, null=null, conditions=conditions)
    try:
        check_claim(claim, where)
    except EvidenceError as error:
        raise RunError(str(error)) from None
    return claim


def check_claim(claim: Claim, where: str) -> None:
    """Raise EvidenceError, beginning with `where`, for a claim that could not be printed or does not say what it is about."""
    if not _ID.fullmatch(claim.id):
        raise EvidenceError(f"{where}: '{short(claim.id)}' cannot be a claim's id; use small letters, digits and . _ -")
    for name, number in (("value", claim.value), ("null", claim.null), *(("interval", end) for end in claim.interval or ())):
        if number is not None and not _NUMBER.fullmatch(number):
            raise EvidenceError(f"{where}: {name} of '{claim.id}' is '{short(number)}', not a decimal number as it is printed")
    if figure(claim) not in claim.text and claim.value not in claim.text:
        raise EvidenceError(
            f"{where}: the text of '{claim.id}' does not contain its number {claim.value}; write {{figure}} where it belongs"
        )
    said = {name: getattr(claim, name) for name in ("text", "metric", "subject", "unit", "scope")}
    said |= {"conditions": "".join(part for pair in claim.conditions.items() for part in pair)}
    if broken := [name for name, text in said.items() if not text.isprintable()]:
        raise EvidenceError(f"{where}: {broken[0]} of '{claim.id}' holds a line end or another control character")
    if not claim.metric or not claim.subject:
        raise EvidenceError(f"{where}: '{claim.id}' must say what was measured (metric) and of what (subject)")
    if claim.basis not in BASES or claim.grade not in GRADES:
        raise EvidenceError(
            f"{where}: '{claim.id}' has basis '{short(claim.basis)}' and grade '{short(claim.grade)}'; n counts one of {', '.join(BASES)}"
        )


def _grade(claim: Claim, found: Measured) -> Grade:
    if found.interval is None or found.n is None or found.n < 2:
        return Grade.ANECDOTE
    if claim.basis == "items":
        if claim.null is not None and found.p_value is not None:
            return grade_of_comparison(found.value, found.interval, found.p_value, found.n)
        steps = ((PULSE_ITEMS, Grade.ANECDOTE), (SELECTION_ITEMS, Grade.WEAK), (PUBLICATION_ITEMS, Grade.DEFENSIBLE))
        return next((graded for below, graded in steps if found.n < below), Grade.STRONG)
    if claim.basis == "seeds":
        if found.sigma is not None:
            return grade_of_runs(found.value, found.n, found.sigma)
        return Grade.WEAK if found.n < 3 else Grade.SUGGESTIVE if found.n < FEW_SEEDS else Grade.DEFENSIBLE
    if found.n < FEW_ROUNDS or claim.null is None:
        return Grade.ANECDOTE if found.n < FEW_ROUNDS else Grade.DEFENSIBLE
    null = float(claim.null) / claim.scale
    if null in found.interval:
        return Grade.UNDERPOWERED
    half = (found.interval.high - found.interval.low) / 2
    return Grade.STRONG if abs(found.value - null) >= (1.96 + 0.84) / 1.96 * half else Grade.DEFENSIBLE


def _ends(found: Measured) -> tuple[float, ...]:
    return (found.interval.low, found.interval.high) if found.interval is not None else ()


def _half(claim: Claim) -> float:
    assert claim.interval is not None
    return (float(claim.interval[1]) - float(claim.interval[0])) / 2


def claims_agree(a: Claim, b: Claim) -> bool:
    """Whether two claims on one subject can both be true: equal as printed, or within the spread of the two intervals."""
    if a.unit != b.unit:
        return False
    if equal_as_printed(a.value, float(b.value)) or equal_as_printed(b.value, float(a.value)):
        return True
    if a.interval is None or b.interval is None:
        return False
    return abs(float(a.value) - float(b.value)) <= (_half(a) ** 2 + _half(b) ** 2) ** 0.5
