"""Unpaired comparisons against arithmetic and counted tables."""

import math

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import wilson
from posttrain.stats.paired import mcnemar_exact
from posttrain.stats.two_sample import fisher_exact, unpaired_proportions, welch


def test_welch_by_hand():
    # variances 1 and 4 over 3 each: se sqrt(1/3 + 4/3) = 1.290994; df (5/3)^2 / ((1/9)/2 + (16/9)/2) = 2.941176; t = 3 / 1.290994
    result = welch([1, 2, 3], [3, 5, 7])
    assert (result.delta, result.n_a, result.n_b, result.method) == (3.0, 3, 3, "unpaired welch-t")
    assert result.interval.high - 3 == pytest.approx(3 - result.interval.low)
    # with 2.941 degrees of freedom the quantile lies between t(3) = 3.1824 and t(2) = 4.3027
    assert 3.1824 < (result.interval.high - 3) / 1.290994 < 3.25
    assert 0.1022 < result.p_value < 0.1453  # 2 P(t > 2.3238) is .1027 with 3 df and .1458 with 2


def test_welch_with_equal_spreads_is_the_pooled_test():
    # equal n and variance: df = 2 (n - 1) = 4, t = 2 / sqrt(2/3) = 2.44949, p = .0705
    result = welch([1, 2, 3], [3, 4, 5])
    assert result.p_value == pytest.approx(0.07048, abs=1e-5)
    assert result.interval.low == pytest.approx(2 - 2.776445 * math.sqrt(2 / 3), abs=1e-5)


def test_welch_mirrors_and_handles_one_constant_side():
    a, b = [0.1, 0.2, 0.4], [0.5, 0.3, 0.9, 0.6]
    assert welch(a, b).interval.low == pytest.approx(-welch(b, a).interval.high)
    # one side constant: df = n - 1 of the other, se = its own: 1 +- 4.302653 / sqrt(3)
    assert welch([1, 1, 1], [1, 2, 3]).interval.high == pytest.approx(1 + 4.302653 / math.sqrt(3), abs=1e-5)


def test_fisher_counts_tables():
    # margins 3, 3 and 3 solved of 6: C(6,3) = 20 tables; 0 against 3 and 3 against 0 are the only ones as rare: 2/20
    assert fisher_exact(0, 3, 3, 3) == pytest.approx(0.1)
    assert fisher_exact(1, 3, 2, 3) == pytest.approx(1.0)
    # one-sided tail of 5 with 9 against 1: sums over the equally rare tables of C(10,k) C(10,10-k) / C(20,10)
    weights = [math.comb(10, k) * math.comb(10, 10 - k) for k in range(11)]
    assert fisher_exact(9, 10, 1, 10) == pytest.approx(2 * (weights[0] + weights[1]) / math.comb(20, 10))
    assert fisher_exact(0, 5, 0, 5) == 1.0


def test_published_gains_that_were_noise():
    assert fisher_exact(3, 30, 8, 30) == pytest.approx(0.18, abs=0.005)  # 10.0% to 26.7% on 30 items
    assert fisher_exact(179, 200, 181, 200) == pytest.approx(0.87, abs=0.005)  # 89.5% to 90.5% on 200 items


def test_newcombe_by_hand():
    # 3/30 and 8/30: Wilson [.0346, .2562] and [.1418, .4445]; low .1667 - sqrt((.2667 - .1418)^2 + (.2562 - .1)^2)
    a, b = wilson(3, 30), wilson(8, 30)
    result = unpaired_proportions(3, 30, 8, 30)
    assert result.interval.low == pytest.approx(8 / 30 - 0.1 - math.sqrt((8 / 30 - b.low) ** 2 + (a.high - 0.1) ** 2))
    assert result.interval.low == pytest.approx(0.1667 - 0.2000, abs=2e-3)
    assert result.method.startswith("unpaired")
    none = unpaired_proportions(0, 20, 0, 20)
    assert none.interval.low < 0 < none.interval.high
    assert unpaired_proportions(0, 20, 20, 20).interval.high == 1.0


def test_the_unpaired_test_misses_what_the_paired_one_sees():
    # 500 items, 40 solved only by b and 18 only by a: 260 against 282 solved
    assert fisher_exact(260, 500, 282, 500) > 0.15
    assert mcnemar_exact(18, 40) < 0.01


def test_refusals():
    with pytest.raises(EvidenceError, match="second set has 1"):
        welch([1, 2], [1])
    with pytest.raises(EvidenceError, match="neither set varies"):
        welch([1, 1], [2, 2])
    with pytest.raises(EvidenceError, match="level"):
        welch([1, 2], [2, 3], level=2)
    with pytest.raises(EvidenceError, match="7 successes in 6"):
        fisher_exact(7, 6, 0, 1)
    with pytest.raises(EvidenceError, match="at least 2 items"):
        unpaired_proportions(1, 1, 1, 2)
