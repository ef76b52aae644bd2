"""Handing a rung over: what is found, at which bound, and how sure one has to be."""

import pytest
from eval_records import record

from posttrain.evals.handover import forgetting, form, handover, of_rung, truncation


def rung(label: str = "sft", suite: str = "arithmetic", **counts: int):
    """So many items of each kind, one sample each."""
    return record([[kind] for kind, count in counts.items() for _ in range(count)], label, suite=suite)


def test_a_healthy_rung_passes():
    same = rung(suite="retention", right=50, wrong=50)
    checks = handover(rung(right=80, wrong=20), same, rung("before", "retention", right=50, wrong=50))
    assert [(check.name, check.passed) for check in checks] == [("form", True), ("truncation", True), ("forgetting", True)]


@pytest.mark.parametrize(
    ("parsed", "of", "passed"),
    [
        (80, 100, True),  # the bound itself
        (79, 100, None),  # below it, and Wilson's interval of 79/100 ends at 0.858
        (73, 100, None),  # ends at 0.807
        (72, 100, False),  # ends at 0.7986: below the bound as a whole
        (5, 8, None),  # 8 items prove nothing: up to 0.86
        (0, 8, False),  # up to 0.32
    ],
)
def test_form_fails_only_where_the_items_are_enough_to_tell(parsed, of, passed):
    found = form(rung(right=parsed, garbled=of - parsed))
    assert found.passed is passed
    assert found.value == pytest.approx(parsed / of)


@pytest.mark.parametrize(("cut", "passed"), [(1, True), (2, None), (24, None), (25, False)])
def test_truncation_is_looked_at_from_two_percent_and_fails_from_a_quarter(cut, passed):
    assert truncation(rung(right=100 - cut, cut=cut)).passed is passed


@pytest.mark.parametrize(
    ("kept", "passed"),
    [
        (100, True),
        (99, True),  # one item of 200: the interval holds 0
        (85, None),  # -7.5 points, certainly a loss and perhaps a small one
        (50, False),  # -25 points, certainly more than 10
    ],
)
def test_forgetting_needs_the_whole_interval_below_zero(kept, passed):
    before = rung("before", "retention", right=100, wrong=100)
    assert forgetting(before, rung(suite="retention", right=kept, wrong=200 - kept)).passed is passed


def test_a_gain_is_no_loss():
    before = rung("before", "retention", right=50, wrong=50)
    assert forgetting(before, rung(suite="retention", right=70, wrong=30)).passed is True


def test_a_rung_is_not_held_against_itself():
    rungs = {
        name: {"arithmetic": rung(name, right=60, wrong=40), "retention": rung(name, "retention", right=kept, wrong=100 - kept)}
        for name, kept in {"sft": 60, "grpo": 0}.items()
    }
    assert [check.name for check in of_rung(rungs, "sft", "sft").checks] == ["form", "truncation"]
    last = of_rung(rungs, "grpo", "sft")
    assert last.passed is False
    assert last.gate == "handover.grpo"
    assert last.of("forgetting").value == pytest.approx(-0.6)
    assert "forgetting" in last.reason
