"""pass@1 and pass@k together: each verdict from data made for it, the crossing point, and what became of the solved items."""

import pytest
from eval_records import record, values

from posttrain.evals.coverage import Transitions, coverage, transitions


def items(*groups: tuple[int, int], samples: int = 4) -> list[list[int]]:
    """(how many items, how many of their samples are right)."""
    return [[1] * right + [0] * (samples - right) for count, right in groups for _ in range(count)]


def test_sharpened():
    # 60 items right in 1 of 4 become 40 right in all 4 and 20 lost. pass@1 .25 -> .667; pass@4 1 -> .667
    found = coverage(values(items((60, 1))), values(items((40, 4), (20, 0)), "b"))
    assert (found.verdict, found.why) == ("sharpened", "pass@1 rose, pass@4 fell")
    assert (found.at_1.a, found.at_1.b) == (0.25, pytest.approx(2 / 3))
    assert (found.at_k.k, found.at_k.a, found.at_k.b) == (4, 1.0, pytest.approx(2 / 3))
    assert (found.hat_k.a, found.hat_k.b) == (0.0, pytest.approx(2 / 3))
    # pass@2 of 1 in 4 is 1 - C(3,2)/C(4,2) = .5, below .667; pass@3 is 1 - 1/4 = .75, above it
    assert found.crossover == 3


def test_expanded():
    found = coverage(values(items((30, 1), (30, 0))), values(items((60, 2)), "b"))
    assert (found.verdict, found.why, found.crossover) == ("expanded", "pass@1 rose, pass@4 rose", None)


def test_neither():
    found = coverage(values(items((60, 1))), values(items((60, 3)), "b"))
    assert (found.verdict, found.why) == ("neither", "pass@1 rose, pass@4 did not move beyond noise")
    fallen = coverage(values(items((60, 3))), values(items((60, 1)), "b"))
    assert (fallen.verdict, fallen.why) == ("neither", "pass@1 fell, pass@4 did not move beyond noise")


def test_k_is_what_every_item_has():
    a, b = values([[1, 0, None], [0, 1, 1], [0, 0, 0]]), values([[1, 1, 0], [0, 1, 1], [0, None, 0]], "b")
    assert coverage(a, b).at_k.k == 2


@pytest.mark.parametrize(
    "rows", [[["right"], ["wrong"]], [["half", "right"], ["wrong", "wrong"]], [["right", "error"], ["wrong", "wrong"]]]
)
def test_no_verdict_without_two_scored_samples_of_everything(rows):
    assert coverage(record(rows), record(rows, "b")) is None


def test_transitions_count_items_by_whether_any_sample_was_right():
    a = values([[1, 0], [1, 1], [0, 0], [0, 0], [0, 1], [0, 0], [None, None]])
    b = values([[0, 1], [0, 0], [1, 0], [0, 0], [1, 1], [1, 1], [1, 1]], "b")
    assert transitions(a, b) == Transitions(kept=2, gained=2, lost=1, unsolved=1)  # the last item was never scored before
    assert transitions(b, a) == Transitions(kept=2, gained=1, lost=2, unsolved=1)
    assert transitions(record([["half"], ["right"]]), record([["half"], ["right"]], "b")) is None
