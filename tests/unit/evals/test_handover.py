"""Handing a rung over: what is found, at which bound, and what is not held against it."""

import pytest

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.handover import findings, of_rung
from posttrain.evals.record import Conditions, EvalRecord, ItemResult, Outcome

RIGHT = Outcome(1.0, RewardStatus.SCORED, StopReason.END, 3)
WRONG = Outcome(0.0, RewardStatus.SCORED, StopReason.END, 3)
FORMLESS = Outcome(0.0, RewardStatus.UNPARSEABLE, StopReason.END, 3)
CUT = Outcome(0.0, RewardStatus.TRUNCATED, StopReason.LENGTH, 3)


def record(outcomes: list[Outcome], label: str = "sft", suite: str = "arithmetic") -> EvalRecord:
    conditions = Conditions(suite, "items", len(outcomes), 1, Sampling(), "g/1", "template", 0)
    return EvalRecord(conditions, label, label, tuple(ItemResult(f"i{n}", (outcome,)) for n, outcome in enumerate(outcomes)))


def names(skill: list[Outcome], after: list[Outcome], before: list[Outcome] | None = None) -> list[str]:
    earlier = record(before, "before", "retention") if before else None
    return [finding.name for finding in findings(record(skill), record(after, suite="retention"), earlier)]


def test_a_healthy_rung_has_no_findings():
    assert names([RIGHT] * 80 + [WRONG] * 20, [RIGHT] * 50 + [WRONG] * 50, [RIGHT] * 50 + [WRONG] * 50) == []


@pytest.mark.parametrize(("formless", "found"), [(20, []), (21, ["form"])])
def test_form_is_missing_below_four_fifths_parsed(formless, found):
    # 80 of 100 parsed is the bound itself; 79 of 100 is below it
    assert names([RIGHT] * (100 - formless) + [FORMLESS] * formless, [RIGHT, WRONG]) == found


@pytest.mark.parametrize(("cut", "found"), [(1, []), (2, ["truncation"])])
def test_truncation_counts_from_two_percent(cut, found):
    assert names([RIGHT] * (100 - cut) + [CUT] * cut, [RIGHT, WRONG]) == found


@pytest.mark.parametrize(("lost", "found"), [(1, []), (20, ["forgetting"]), (-20, [])])
def test_forgetting_needs_the_whole_interval_below_zero(lost, found):
    before = [RIGHT] * 50 + [WRONG] * 50
    after = [RIGHT] * (50 - lost) + [WRONG] * (50 + lost)
    assert names([RIGHT, WRONG], after, before) == found


def test_a_rung_is_not_held_against_itself():
    rungs = {
        name: {"arithmetic": record([RIGHT, WRONG], name), "retention": record(kept, name, "retention")}
        for name, kept in {"sft": [RIGHT] * 60 + [WRONG] * 40, "grpo": [WRONG] * 100}.items()
    }
    assert of_rung(rungs, "sft", "sft") == []
    assert [finding.evidence["delta"] for finding in of_rung(rungs, "grpo", "sft")] == [pytest.approx(-0.6)]
