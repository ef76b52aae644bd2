"""pass@k against counting subsets."""

import math
from itertools import combinations, product

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.passk import mean_pass_at_k, mean_pass_hat_k, pass_at_k, pass_at_k_se, pass_hat_k, pass_hat_k_se


def test_equals_counting_every_subset():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_is_unbiased_where_the_plug_in_is_not():
    # c = 1 of n = 4, k = 2: 1 - 3/6 = .5; the plug-in 1 - (1 - 1/4)^2 = .4375 is biased low
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)


def test_is_stable_for_large_counts():
    # 1 - C(1999, 1000)/C(2000, 1000) = 1000/2000
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


def test_mean_over_items():
    assert mean_pass_at_k([(4, 1), (4, 4), (4, 0)], 2) == pytest.approx((0.5 + 1 + 0) / 3)


def test_refusals_name_the_numbers():
    with pytest.raises(EvidenceError, match="pass@8 needs at least 8 samples per item, got 4"):
        pass_at_k(4, 1, 8)
    with pytest.raises(EvidenceError, match="5 correct of 4"):
        pass_at_k(4, 5, 1)
    with pytest.raises(EvidenceError, match="k starts at 1"):
        pass_at_k(4, 1, 0)
    with pytest.raises(EvidenceError, match="no items"):
        mean_pass_at_k([], 1)


def test_pass_hat_equals_counting_every_subset():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([1] * c + [0] * (n - c), k))
                assert pass_hat_k(n, c, k) == pytest.approx(sum(all(s) for s in subsets) / len(subsets))


def test_both_are_the_success_rate_at_one_and_mirror_each_other():
    assert pass_hat_k(8, 3, 1) == pytest.approx(3 / 8)
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
    assert pass_hat_k(8, 3, 2) == pytest.approx(1 - pass_at_k(8, 5, 2))  # all right = not (one wrong at least)
    assert pass_hat_k(2000, 1999, 1000) == pytest.approx(0.5)
    assert mean_pass_hat_k([(4, 3), (4, 4), (4, 1)], 2) == pytest.approx((0.5 + 1 + 0) / 3)


def test_error_over_sampled_items_by_hand():
    # k = 2: pass@2 of 0, 1, 4 of 4 is 0, .5, 1: sd .5, over sqrt(3); pass^2 of 1, 3, 4 of 4 is 0, .5, 1 likewise
    assert pass_at_k_se([(4, 0), (4, 1), (4, 4)], 2) == pytest.approx(0.5 / math.sqrt(3))
    assert pass_hat_k_se([(4, 1), (4, 3), (4, 4)], 2) == pytest.approx(0.5 / math.sqrt(3))


def test_error_for_fixed_items_by_hand():
    # k = 1 is the mean of n samples, whose jackknife variance is s^2 / n: 2 of 4 -> s^2 = 1/3, /4 = 1/12; two items: sqrt(2/12) / 2
    assert pass_at_k_se([(4, 2), (4, 2)], 1, items="fixed") == pytest.approx(math.sqrt(2 / 12) / 2)
    assert pass_hat_k_se([(4, 2), (4, 2)], 1, items="fixed") == pytest.approx(math.sqrt(2 / 12) / 2)
    assert pass_at_k_se([(4, 0), (4, 4)], 2, items="fixed") == 0.0  # these items came out the same way every time
    # 1 of 3 at k = 2: without the right one pass@2(2, 0) = 0, without a wrong one pass@2(2, 1) = 1 twice; centre 2/3,
    # (2/3) * (4/9 + 2 * 1/9) = 4/9, two items: sqrt(8/9) / 2
    assert pass_at_k_se([(3, 1), (3, 1)], 2, items="fixed") == pytest.approx(math.sqrt(8 / 9) / 2)


def test_jackknife_for_fixed_items_is_close_to_the_true_variance_and_not_below():
    # every outcome of 6 samples at p = .3 weighted by its probability: the jackknife is biased upwards (Efron and Stein 1981)
    n, k, p = 6, 2, 0.3
    outcomes = [(sum(bits), p ** sum(bits) * (1 - p) ** (n - sum(bits))) for bits in product((0, 1), repeat=n)]
    mean = sum(weight * pass_at_k(n, c, k) for c, weight in outcomes)
    assert mean == pytest.approx(1 - 0.7**2)  # unbiased
    true = sum(weight * (pass_at_k(n, c, k) - mean) ** 2 for c, weight in outcomes)
    estimated = sum(weight * 2 * pass_at_k_se([(n, c), (n, c)], k, items="fixed") ** 2 for c, weight in outcomes)
    assert true < estimated < 1.35 * true


def test_refusals_of_pass_hat_and_errors():
    with pytest.raises(EvidenceError, match="pass\\^8 needs at least 8"):
        pass_hat_k(4, 1, 8)
    with pytest.raises(EvidenceError, match="at least 2 items"):
        pass_at_k_se([(4, 1)], 1)
    with pytest.raises(EvidenceError, match="at least 5 samples per item, got 4"):
        pass_hat_k_se([(4, 1), (4, 1)], 4, items="fixed")
    with pytest.raises(EvidenceError, match="no items"):
        mean_pass_hat_k([], 1)
