"""What a rung's measurements say about handing it to the next: a later rung rests on the form that the earlier one taught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.evals.compare import compare
from posttrain.evals.record import MAX_TRUNCATION, EvalRecord

LEAST_PARSED = 0.8
"""Below this share of parseable answers most of a reward is about form: every group of siblings fails alike."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at before going on.

    Example: Finding("form", "sft, answers to 'arithmetic': 41.0% could be parsed; ...", {"parse_rate": 0.41, "bound": 0.8})
    """

    name: str
    detail: str
    evidence: dict[str, Any]


def findings(skill: EvalRecord, retention: EvalRecord, retention_before: EvalRecord | None) -> list[Finding]:
    """Judge one rung.

    Args:
        skill: the in-distribution evaluation of this rung: form and endings are judged on it.
        retention: what should not be lost, on this rung.
        retention_before: the same on the rung it is compared with; a drop counts when the whole paired 95% interval is below 0.
    """
    found = []
    answers = f"{skill.label}, answers to '{skill.conditions.suite}'"
    if skill.parse_rate < LEAST_PARSED:
        detail = f"{answers}: {skill.parse_rate:.1%} could be parsed; show the form more often in SFT"
        found.append(Finding("form", detail, {"parse_rate": skill.parse_rate, "bound": LEAST_PARSED}))
    if skill.truncation_rate >= MAX_TRUNCATION:
        detail = (
            f"{skill.label}: {skill.truncation_rate:.1%} of the answers to '{skill.conditions.suite}' were cut; raise sampling.max_tokens"
        )
        found.append(Finding("truncation", detail, {"truncation_rate": skill.truncation_rate, "bound": MAX_TRUNCATION}))
    if retention_before is not None:
        change = compare(retention_before, retention)
        if change.interval.high < 0:
            detail = (
                f"{skill.label}: retention fell by {-change.delta:.1%} against {change.label_a}; lower the learning rate or raise kl_coef"
            )
            evidence = {"delta": change.delta, "low": change.interval.low, "high": change.interval.high, "n": change.n}
            found.append(Finding("forgetting", detail, evidence))
    return found


def of_rung(records: Mapping[str, Mapping[str, EvalRecord]], rung: str, against: str) -> list[Finding]:
    """`findings` for a rung of a ladder, on the suites 'arithmetic' and 'retention'; the rung `against` is not compared with itself."""
    before = records[against]["retention"] if rung != against else None
    return findings(records[rung]["arithmetic"], records[rung]["retention"], before)
