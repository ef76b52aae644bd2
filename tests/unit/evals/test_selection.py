"""Picking a checkpoint: what is refused, what is tied, and what the choice added to the score."""

import pytest
from eval_records import record, values

from posttrain.core.errors import EvidenceError
from posttrain.evals.selection import select


def scored(right: int, label: str, n: int = 500, **changed):
    return values([[1]] * right + [[0]] * (n - right), label, **changed)


def elsewhere(right: int, label: str, n: int = 500, **changed):
    """The same model on items that took no part."""
    rows = {f"r{i}": ["right" if i < right else "wrong"] for i in range(n)}
    return record(rows, label, items_digest="others", split_digest="other split", split="report", **changed)


def test_the_winner_is_reported_elsewhere():
    found = select([scored(250, "one"), scored(300, "two")], [elsewhere(240, "one"), elsewhere(285, "two")])
    assert (found.winner, found.tied, found.gap) == ("two", (), pytest.approx(0.1))
    assert found.scores == {"two": 0.6, "one": 0.5}
    assert found.report.label == "two"
    assert found.optimism == pytest.approx(0.6 - 0.57)


def test_a_gap_inside_the_noise_picks_nothing():
    # two against three: 3 gained, 0 lost, p = .25; one is 50 behind
    found = select([scored(250, "one"), scored(300, "two"), scored(303, "three")], [elsewhere(1, "three")])
    assert (found.winner, found.best, found.tied, found.report, found.optimism) == (None, "three", ("two",), None, None)
    assert found.gap == pytest.approx(0.006)


def test_many_candidates_need_a_larger_gap():
    # best against each of 10 others: 7 gained, p = 2 / 2**7 = .0156, times 10 = .156
    ten = [scored(293, f"c{i}") for i in range(10)]
    assert select([ten[0], scored(300, "best")]).winner == "best"
    assert select([*ten, scored(300, "best")]).winner is None


def test_a_pulse_picks_nothing():
    with pytest.raises(EvidenceError, match="'one' was scored on 499 items, a pulse; picking a checkpoint takes 500 or more"):
        select([scored(100, "one", 499), scored(300, "two", 499)])
    with pytest.raises(EvidenceError, match="scored on 499 items"):
        select([values([[1]] * 499 + [[None]], "one"), scored(100, "two")])


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (scored(300, "two"), "500 of the 500 items that report 'two' also picked it"),
        (scored(300, "two", 600, items_digest="more"), "500 of the 600 items that report 'two' also picked it"),
        (elsewhere(300, "two", verifier="g/2"), "picked and reported in other conditions: verifier is 'g/1' against 'g/2'"),
        (elsewhere(300, "one"), "the winner 'two' .weights of two. is not among the reported 'one'"),
    ],
)
def test_a_report_that_flatters_is_refused(report, said):
    with pytest.raises(EvidenceError, match=said):
        select([scored(250, "one"), scored(300, "two")], [report])


def test_candidates_have_to_be_comparable():
    with pytest.raises(EvidenceError, match="verifier is"):
        select([scored(250, "one"), scored(300, "two", verifier="g/2")])
    with pytest.raises(EvidenceError, match="1 checkpoint to choose from"):
        select([scored(250, "one")])
    with pytest.raises(EvidenceError, match="two records of 'one'"):
        select([scored(250, "one"), scored(251, "one"), scored(300, "two")])
