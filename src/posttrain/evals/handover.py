"""What a rung's measurements say about handing it to the next: a later rung rests on the form that the earlier one taught.

A few items prove little, so a check fails only when its whole 95 % interval is on the wrong side; before that it asks for a look.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.core.verdicts import Check, GateVerdict, bounded
from posttrain.evals.compare import compare
from posttrain.evals.record import MAX_TRUNCATION, EvalRecord
from posttrain.stats.intervals import wilson

LEAST_PARSED = 0.8
"""Below this share of parseable answers most of a reward is about form: every group of siblings fails alike."""
MOST_TRUNCATED = 0.25
"""From this share of cut answers on, what the others say is no measurement of the model."""
MOST_FORGOTTEN = 0.1
"""A loss of retention that is beyond this with certainty is not handed on."""


def form(skill: EvalRecord) -> Check:
    """Whether answers can be parsed. Items are what is counted: samples of one item are alike."""
    interval = wilson(skill.parse_rate * skill.conditions.n_items, skill.conditions.n_items)
    passed = True if skill.parse_rate >= LEAST_PARSED else False if interval.high < LEAST_PARSED else None
    detail = (
        f"{skill.label}, answers to '{skill.conditions.suite}': {skill.parse_rate:.1%} could be parsed "
        f"(95% [{interval.low:.1%}, {interval.high:.1%}])"
    )
    return Check("form", passed, skill.parse_rate, LEAST_PARSED, detail, "show the form more often in SFT", ("S58", "P33"))


def truncation(skill: EvalRecord) -> Check:
    """Whether answers were cut by the token budget."""
    detail = f"{skill.label}: {skill.truncation_rate:.1%} of the answers to '{skill.conditions.suite}' were cut"
    bounds = (MAX_TRUNCATION, MOST_TRUNCATED)
    return bounded("truncation", skill.truncation_rate, bounds, detail, "raise sampling.max_tokens", ("S53",))


def forgetting(before: EvalRecord, after: EvalRecord) -> Check:
    """Whether what should not be lost was lost: a drop counts when the whole paired 95% interval is below 0."""
    change = compare(before, after)
    low, high = change.interval.low, change.interval.high
    detail = f"{after.label}: retention changed by {change.delta:+.1%} against {change.label_a} (95% [{low:+.1%}, {high:+.1%}])"
    passed = True if high >= 0 else False if high < -MOST_FORGOTTEN else None
    return Check("forgetting", passed, change.delta, 0.0, detail, "lower the learning rate or raise kl_coef", ("S57", "F6"))


def handover(skill: EvalRecord, retention: EvalRecord | None = None, retention_before: EvalRecord | None = None) -> tuple[Check, ...]:
    """The checks of one rung.

    Args:
        skill: the in-distribution evaluation of this rung: form and endings are judged on it.
        retention: what should not be lost, on this rung.
        retention_before: the same on the rung it is compared with.
    """
    checks = [form(skill), truncation(skill)]
    if retention is not None and retention_before is not None:
        checks.append(forgetting(retention_before, retention))
    return tuple(checks)


def of_rung(records: Mapping[str, Mapping[str, EvalRecord]], rung: str, against: str) -> GateVerdict:
    """The gate behind a rung of a ladder, on the suites 'arithmetic' and 'retention'; the rung `against` is not compared with itself."""
    before = records[against]["retention"] if rung != against else None
    skill = records[rung]["arithmetic"]
    figures = {"items": skill.conditions.n_items, "pass_at_1": skill.pass_at_1, "model_digest": skill.model_digest}
    return GateVerdict(f"handover.{rung}", f"{rung}, measured", handover(skill, records[rung]["retention"], before), figures)
