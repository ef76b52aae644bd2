"""pass@k against counting subsets."""

from itertools import combinations

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.passk import mean_pass_at_k, pass_at_k


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
