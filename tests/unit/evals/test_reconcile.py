"""Two records of one model: every verdict, and what is never called a cause."""

from dataclasses import replace

import pytest
from eval_records import record, values

from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.evals.reconcile import reconcile

BASE = [[1]] * 30 + [[0]] * 30
WORSE = [[1]] * 15 + [[0]] * 45
"""15 of 60 items lost: exact McNemar 2 / 2**15 = 6e-5."""


def test_equal_conditions_and_outcomes_resolve_the_number():
    a = values(BASE)
    found = reconcile(a, a)
    assert (found.verdict, found.absolute, found.disagree, found.shared) == ("equal", "resolved", 0, 60)


def test_one_differing_condition_explains():
    found = reconcile(values(BASE), values(WORSE, verifier="g/2"))
    assert (found.verdict, found.absolute) == ("explained", "unresolved")
    assert found.reason == "verifier is the one thing that differs and could be why (p = 6.1e-05 of noise alone)"
    assert [str(difference) for difference in found.differing] == ["verifier is 'g/1' against 'g/2'"]
    assert (found.disagree, found.score_a, found.score_b, found.test) == (
        15,
        0.5,
        0.25,
        "cluster-t interval, exact McNemar test",
    )


def test_two_differing_conditions_leave_it_open():
    found = reconcile(values(BASE), values(WORSE, verifier="g/2", sampling=Sampling(temperature=0.0, max_tokens=9)))
    assert found.verdict == "unresolved"
    assert "any of verifier, sampling.temperature may be why: change one at a time" in found.reason


def test_a_small_difference_is_noise():
    # 3 items lost, 1 gained: p = 2 * (1 + 4) / 16 = .625
    other = [[1]] * 27 + [[0]] * 3 + [[1]] + [[0]] * 29
    found = reconcile(values(BASE), values(other, seed=1))
    assert found.verdict == "sampling noise"
    assert found.p_value == pytest.approx(0.625)
    assert found.reason == "p = 0.625, although seed differs"
    assert found.absolute == "unresolved"


def test_another_seed_is_no_cause_of_a_large_difference():
    found = reconcile(values(BASE), values(WORSE, seed=1, suite="other"))
    assert found.verdict == "unresolved"
    assert "nothing that differs could be why: suite, seed" in found.reason


def test_equal_conditions_with_other_outcomes_are_unresolved():
    found = reconcile(values(BASE), values([[0], *BASE[1:]]))
    assert (found.verdict, found.disagree) == ("unresolved", 1)
    assert "equal conditions, yet 1 items differ" in found.reason


def test_other_weights_behind_one_name_are_named():
    a = values(BASE)
    found = reconcile(a, replace(values(WORSE), model_digest="other weights"))
    assert found.verdict == "explained"
    assert found.reason.startswith("model_digest is the one thing")


def test_two_models_are_not_reconciled():
    with pytest.raises(EvidenceError, match="'a' .weights of a. and 'b' .weights of b. are two models"):
        reconcile(values(BASE), values(WORSE, "b"))


def test_items_that_are_not_shared_are_compared_unpaired():
    other = record({f"j{n}": ["right" if value else "wrong"] for n, (value,) in enumerate(WORSE)}, items_digest="others")
    found = reconcile(values(BASE), other)
    assert (found.shared, found.test, found.p_shared) == (0, "unpaired welch-t", None)
    assert found.verdict == "explained"
    assert found.reason.startswith("other items (items_digest) is the one thing")
    both = replace(other, conditions=replace(other.conditions, verifier="g/2"))
    assert "any of verifier, other items (items_digest) may be why" in reconcile(values(BASE), both).reason
    constant = [record({f"{side}{n}": ["right"] for n in range(3)}, items_digest=side) for side in "jk"]
    assert reconcile(*constant).verdict == "unresolved"


def test_a_larger_choice_of_the_same_items_is_no_cause_on_those_they_share():
    larger = [*WORSE, [1], [1]]
    found = reconcile(values(BASE), values(larger, items_digest="more", verifier="g/2"))
    assert found.reason.startswith("verifier is the one thing")
    assert found.shared == 60


def test_scores_that_agree_on_the_shared_items_differ_by_the_others():
    # .5 on 60 items; the same 60 and 140 that are all right: .85
    larger = values([*BASE, *[[1]] * 140], items_digest="more")
    found = reconcile(values(BASE), larger)
    assert (found.score_b, found.shared, found.disagree, found.p_shared) == (0.85, 60, 0, 1.0)
    assert found.p_value < 1e-5
    assert (found.verdict, found.absolute) == ("explained", "unresolved")
    assert found.reason == "other items (items_digest, n_items): on those that both scored they agree (p = 1)"


def test_another_tokenizer_is_one_cause_not_two():
    found = reconcile(values(BASE), values(WORSE, tokenizer_digest="x", template_digest="y"))
    assert (found.verdict, found.reason.split()[0]) == ("explained", "tokenizer_digest")
