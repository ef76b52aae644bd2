"""Comparisons: the paired figures, every refusal, and several suites side by side."""

from dataclasses import replace

import pytest
from eval_records import record, values

from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.evals.compare import Row, Table, compare, compare_all
from posttrain.evals.record import Role
from posttrain.stats.grade import Grade
from posttrain.stats.intervals import Interval
from posttrain.stats.paired import mcnemar_exact, paired_difference


def test_single_samples_use_mcnemar():
    # 10 items: 6 gained, 1 lost, 3 unchanged
    a = values([[0]] * 6 + [[1]] + [[1]] * 3)
    b = values([[1]] * 6 + [[0]] + [[1]] * 3, "b")
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
    a, b = values([[0, 0], [1, 0], [1, 1], [0, 0]]), values([[1, 0], [1, 1], [1, 1], [0, 0]], "b")
    result, expected = compare(a, b), paired_difference([0, 0.5, 1, 0], [0.5, 1, 1, 0])
    assert (result.delta, result.p_value, result.interval, result.mcnemar) == (0.25, expected.p_value, expected.interval, None)


def test_items_are_matched_by_id_not_position():
    a, b = values([[0], [1], [1]]), values([[0], [1], [1]], "b")
    shuffled = replace(b, items=b.items[::-1])
    assert compare(a, shuffled) == compare(a, b)
    assert compare(a, shuffled).mcnemar.gained == 0


def test_items_that_one_side_could_not_score_are_left_out():
    result = compare(values([[0], [1], [1]]), values([[1], [None], [1]], "b"))
    assert (result.n, result.delta) == (2, 0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"suite": "other"}, "suite is 's' against 'other'"),
        ({"dataset": "other"}, "dataset is 'sums' against 'other'"),
        ({"split": "train"}, "split is 'held_out' against 'train'"),
        ({"split_digest": "x"}, "split_digest is 'split' against 'x'"),
        ({"items_digest": "x"}, "items_digest is 'items' against 'x'"),
        ({"sampling": Sampling(temperature=0.5, max_tokens=9)}, r"sampling.temperature is 1.0 against 0.5"),
        ({"sampling": Sampling(max_tokens=64)}, "sampling.max_tokens is 9 against 64"),
        ({"thinking": "off"}, "thinking is 'none' against 'off'"),
        ({"extractor": "x/2"}, "extractor is 'x/1' against 'x/2'"),
        ({"verifier": "g/2"}, "verifier is 'g/1' against 'g/2'"),
        ({"template_digest": "x"}, "template_digest"),
        ({"tokenizer_digest": "x"}, "tokenizer_digest"),
        ({"seed": 1}, "seed is 0 against 1"),
        ({"turns": 2}, "turns is 1 against 2"),
    ],
)
def test_any_other_condition_is_refused_by_name(change, named):
    a, b = values([[0], [1]]), values([[1], [1]], "b")
    with pytest.raises(EvidenceError, match=f"cannot compare 'a' with 'b' on 's': {named}"):
        compare(a, replace(b, conditions=replace(b.conditions, **change)))


def test_all_conditions_that_differ_are_named_at_once():
    a, b = values([[0], [1]]), values([[1], [1]], "b", seed=4, verifier="g/2", sampling=Sampling(temperature=0.0, max_tokens=9))
    with pytest.raises(EvidenceError) as raised:
        compare(a, b)
    assert str(raised.value) == (
        "cannot compare 'a' with 'b' on 's': verifier is 'g/1' against 'g/2'; seed is 0 against 4; "
        "sampling.temperature is 1.0 against 0.0; measure both in the same conditions"
    )


def test_other_item_ids_are_refused():
    a, b = values([[0], [1]]), values([[0], [1]], "b")
    with pytest.raises(EvidenceError, match="2 item ids are in one only, e.g. 'i1'"):
        compare(a, replace(b, items=(b.items[0], replace(b.items[1], id="i9"))))


def test_a_model_compared_with_itself_says_so():
    a = values([[0], [1]])
    assert compare(a, a).same_model
    assert not compare(a, values([[0], [1]], "b")).same_model


@pytest.mark.parametrize(
    ("items", "gained", "lost", "grade", "picks"),
    [
        (60, 15, 0, Grade.WEAK, False),  # resolved, but 60 items are a pulse
        (60, 5, 1, Grade.ANECDOTE, False),  # p = 2 * 7/64 = .22
        (499, 40, 5, Grade.SUGGESTIVE, False),
        (500, 40, 5, Grade.DEFENSIBLE, True),
        (500, 12, 8, Grade.UNDERPOWERED, False),  # a gap of .008: enough items, inside the noise
        (1000, 90, 10, Grade.STRONG, True),
    ],
)
def test_grades_and_what_may_pick_a_checkpoint(items, gained, lost, grade, picks):
    a = values([[0]] * gained + [[1]] * (items - gained))
    b = values([[1]] * gained + [[0]] * lost + [[1]] * (items - gained - lost), "b")
    found = compare(a, b)
    assert (found.grade, found.picks) == (grade, picks)


def test_roles_follow_from_the_paired_items():
    assert compare(values([[1]] * 500), values([[1]] * 499 + [[None]], "b")).role is Role.PULSE


def test_the_detectable_effect():
    # 500 items, 60 gained and 40 lost: sd of the differences sqrt((100/500 - .04^2) * 500/499) = .4459, se .01994, t(499) 1.9647
    a = values([[0]] * 60 + [[1]] * 440)
    b = values([[1]] * 60 + [[0]] * 40 + [[1]] * 400, "b")
    assert compare(a, b).detectable == pytest.approx(0.01994 * 1.9647 * (1.95996 + 0.84162) / 1.95996, rel=1e-3)


def test_several_suites_are_adjusted_together():
    # p-values 2 * (1/2)^5 = .0625, 2 * (1/2)^8 = .0078125 and 1: Holm's .0078125 * 3 and .0625 * 2
    def pair(suite: str, gained: int):
        return values([[0]] * 20, suite=suite), values([[1]] * gained + [[0]] * (20 - gained), "b", suite=suite)

    same = values([[1]] * 10 + [[0]] * 10, suite="same")
    table = compare_all([pair("one", 5), pair("two", 8), pair("none", 0), (same, same)])
    assert [row.adjusted for row in table.rows] == [0.125, 0.0234375, 1.0, None]
    assert [row.grade for row in table.rows] == [Grade.ANECDOTE, Grade.WEAK, Grade.ANECDOTE, None]
    assert table.rows[0].comparison.p_value == 0.0625
    assert table.method == "cluster-t 95%"  # the suite on which nothing moved is no obstacle


def test_intervals_of_two_methods_cannot_stand_in_one_table():
    found = compare(values([[0], [1], [0]]), values([[1], [1], [0]], "b"))
    other = replace(found, interval=Interval(0.1, 0.2, 0.95, "bca bootstrap"))
    with pytest.raises(EvidenceError, match="one table would mix intervals of bca bootstrap 0.95, cluster-t 0.95"):
        Table((Row(found, 0.1), Row(other, 0.1)))


def test_fractions_are_compared_but_have_no_transitions():
    found = compare(record([["half"], ["right"], ["wrong"]]), record([["right"], ["right"], ["wrong"]], "b"))
    assert (found.mcnemar, found.transitions, found.coverage) == (None, None, None)
    assert found.delta == pytest.approx(0.5 / 3)
