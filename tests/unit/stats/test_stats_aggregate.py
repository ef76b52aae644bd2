"""Aggregates over tasks and runs against arithmetic and counted pairs."""

import numpy as np
import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.aggregate import aggregate, improvement, iqm, optimality_gap, probability_of_improvement
from posttrain.stats.bootstrap import mean

SCORES = [[0.50, 0.60, 0.55, 0.52], [0.20, 0.30, 0.10, 0.25], [0.90, 0.95, 0.85, 0.99]]


def test_iqm_cuts_a_quarter_at_each_end():
    assert float(iqm([9.0, 1.0, 2.0, 3.0])) == 2.5  # 1 and 9 go
    assert float(iqm([1.0, 2.0, 6.0])) == 3.0  # a quarter of 3 is rounded down to nothing
    assert float(iqm(list(range(8)))) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert iqm(np.arange(8.0).reshape(2, 4)).tolist() == [1.5, 5.5]
    with pytest.raises(EvidenceError, match="no values"):
        iqm([])


def test_optimality_gap_does_not_let_excess_pay():
    assert float(optimality_gap([0.5, 1.5])) == 0.25
    assert float(optimality_gap([0.5, 1.5], target=2.0)) == 1.0


def test_improvement_counts_pairs():
    # task 1: of (1,3) (1,2) (2,3) (2,2) three are won and one tied: 3.5/4; task 2: two ties and two losses: 1/4
    assert probability_of_improvement([[1, 2], [5, 5]], [[3, 2], [5, 4]]) == pytest.approx((3.5 / 4 + 1 / 4) / 2)
    assert probability_of_improvement(SCORES, SCORES) == pytest.approx(0.5)
    assert probability_of_improvement([[0, 0, 0]], [[1]]) == 1.0


def test_aggregate_of_the_mean():
    result = aggregate(SCORES, mean, seed=0)
    assert result.value == pytest.approx(np.mean(SCORES))
    # 12 runs less 3 tasks: t(9) 2.262157
    # per task variance / 4: .00189 .00729 .00369 (ddof 1) / 4, over 9: se = sqrt(.01287 / 4 / 9) = .0189
    spread = np.sqrt(sum(np.var(row, ddof=1) / 4 for row in SCORES) / 9)
    assert (result.interval.high - result.interval.low) / 2 == pytest.approx(2.262157 * spread, rel=0.05)
    assert (result.tasks, result.runs, result.interval.method) == (3, 12, "stratified bootstrap")


def test_tasks_are_strata():
    # the spread between tasks is .7, the interval knows only that within them
    assert aggregate(SCORES, iqm, seed=0).interval.high - aggregate(SCORES, iqm, seed=0).interval.low < 0.2


def test_improvement_with_interval():
    better = [[value + 0.5 for value in row] for row in SCORES]
    shifted = [[value + 0.02 for value in row] for row in SCORES]
    assert improvement(SCORES, shifted, seed=0).value == pytest.approx(probability_of_improvement(SCORES, shifted))
    result = improvement(SCORES, shifted, seed=0)
    assert result.interval.low < result.value < result.interval.high
    assert result.runs == 24
    with pytest.raises(EvidenceError, match="no width"):
        improvement(SCORES, better, seed=0)  # every run wins every pair: no resample can differ


def test_order_of_runs_does_not_matter_and_ragged_tasks_work():
    turned = [row[::-1] for row in SCORES]
    assert aggregate(SCORES, iqm, seed=3) == aggregate(turned, iqm, seed=3)
    assert aggregate([[0.1, 0.2], [0.3, 0.5, 0.4, 0.1, 0.2, 0.3]], iqm, seed=0).runs == 8


def test_refusals():
    with pytest.raises(EvidenceError, match=r"task 1 has 1 run"):
        aggregate([[0.1, 0.2], [0.3]], mean, seed=0)
    with pytest.raises(EvidenceError, match="6 runs over 2 task"):
        aggregate([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], mean, seed=0)
    with pytest.raises(EvidenceError, match="no task"):
        aggregate([], mean, seed=0)
    with pytest.raises(EvidenceError, match="1 tasks against 2"):
        probability_of_improvement([[1]], [[1], [2]])
    with pytest.raises(EvidenceError, match="no width"):
        aggregate([[0.5] * 8], mean, seed=0)
