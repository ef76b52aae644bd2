"""Comparisons: the paired figures, and every refusal."""

from dataclasses import replace

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.compare import compare
from posttrain.evals.record import Conditions, EvalRecord, ItemResult, Outcome
from posttrain.stats.paired import mcnemar_exact, paired_difference


def outcome(value: float | None) -> Outcome:
    return Outcome(value, RewardStatus.ERROR if value is None else RewardStatus.SCORED, StopReason.END, 3)


def record(items: list[list[float | None]], label: str = "a") -> EvalRecord:
    conditions = Conditions("s", "items", len(items), len(items[0]), Sampling(), "g/1", "template", 0)
    return EvalRecord(conditions, label, label, tuple(ItemResult(f"i{n}", tuple(map(outcome, row))) for n, row in enumerate(items)))


def test_single_samples_use_mcnemar():
    # 10 items: 6 gained, 1 lost, 3 unchanged
    a = record([[0]] * 6 + [[1]] + [[1]] * 3)
    b = record([[1]] * 6 + [[0]] + [[1]] * 3, "b")
    result = compare(a, b)
    assert result.delta == pytest.approx(0.5)
    assert result.mcnemar is not None
    assert (result.mcnemar.lost, result.mcnemar.gained) == (1, 6)
    assert result.p_value == mcnemar_exact(1, 6) == pytest.approx(2 * 8 / 128)
    assert result.method == "cluster-t interval, exact McNemar test"
    assert (result.n, result.label_a, result.label_b, result.suite) == (10, "a", "b", "s")
    back = compare(b, a)
    assert (back.delta, back.mcnemar.lost) == (pytest.approx(-0.5), 6)


def test_several_samples_use_the_paired_t():
    a, b = record([[0, 0], [1, 0], [1, 1], [0, 0]]), record([[1, 0], [1, 1], [1, 1], [0, 0]], "b")
    result, expected = compare(a, b), paired_difference([0, 0.5, 1, 0], [0.5, 1, 1, 0])
    assert (result.delta, result.p_value, result.interval, result.mcnemar) == (0.25, expected.p_value, expected.interval, None)


def test_items_are_matched_by_id_not_position():
    a, b = record([[0], [1], [1]]), record([[0], [1], [1]], "b")
    shuffled = replace(b, items=b.items[::-1])
    assert compare(a, shuffled) == compare(a, b)
    assert compare(a, shuffled).mcnemar.gained == 0


def test_items_that_one_side_could_not_score_are_left_out():
    result = compare(record([[0], [1], [1]]), record([[1], [None], [1]], "b"))
    assert (result.n, result.delta) == (2, 0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"suite": "other"}, "suite is 's' against 'other'"),
        ({"items_digest": "x"}, "items_digest is 'items' against 'x'"),
        ({"sampling": Sampling(temperature=0.5)}, r"sampling.temperature is 1.0 against 0.5"),
        ({"sampling": Sampling(max_tokens=64)}, "sampling.max_tokens is 32 against 64"),
        ({"grader": "g/2"}, "grader is 'g/1' against 'g/2'"),
        ({"template_digest": "x"}, "template_digest"),
        ({"seed": 1}, "seed is 0 against 1"),
    ],
)
def test_any_other_condition_is_refused_by_name(change, named):
    a = record([[0], [1]])
    b = record([[1], [1]], "b")
    with pytest.raises(EvidenceError, match=f"cannot compare 'a' with 'b': {named}"):
        compare(a, replace(b, conditions=replace(b.conditions, **change)))


def test_reading_a_sampling_field_does_not_make_conditions_differ():
    a, b = record([[0], [1]]), record([[1], [1]], "b")
    assert a.conditions.sampling.greedy is False
    assert compare(a, b).n == 2


def test_other_item_ids_are_refused():
    a, b = record([[0], [1]]), record([[0], [1]], "b")
    with pytest.raises(EvidenceError, match="2 item ids are in one only, e.g. 'i1'"):
        compare(a, replace(b, items=(b.items[0], replace(b.items[1], id="i9"))))


def test_evidence_grades():
    flat = record([[0]] * 30 + [[1]] * 30)
    assert compare(flat, record([[1]] * 15 + [[0]] * 15 + [[1]] * 30, "b")).evidence_grade == "clear"
    assert compare(flat, record([[1]] * 5 + [[0]] * 26 + [[1]] * 29, "b")).evidence_grade == "none"  # p = 2 * 7/64 = .22 on 5 : 1
    assert compare(flat, record([[1]] * 5 + [[0]] * 25 + [[1]] * 30, "b")).evidence_grade == "suggestive"  # p = 2/32 = .0625
    assert compare(flat, flat).evidence_grade == "none"
