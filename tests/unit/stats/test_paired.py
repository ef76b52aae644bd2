"""Paired tests against arithmetic written out by hand."""

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import wilson
from posttrain.stats.paired import mcnemar_exact, paired_bootstrap, paired_difference, sign_flip_test


def test_difference_by_hand():
    # differences b - a: .5 0 .5 0: mean .25, sd .288675, se .144338, t = 1.732051 on 3 df, two-sided p = .18169
    result = paired_difference([0.0, 0.5, 0.25, 1.0], [0.5, 0.5, 0.75, 1.0])
    assert result.delta == pytest.approx(0.25)
    assert result.n == 4
    assert result.p_value == pytest.approx(0.18169, abs=1e-5)
    assert result.interval.low == pytest.approx(0.25 - 3.182446 * 0.144338, abs=1e-5)
    assert result.method == "paired cluster-t"


def test_pairing_removes_the_spread_between_items():
    before = [i / 100 for i in range(100)]
    after = [min(1.0, value + (0.02 if i % 2 else 0.04)) for i, value in enumerate(before)]
    assert paired_difference(before, after).p_value < 1e-10  # unpaired, the sd of .29 would hide a change of .03


def test_no_difference_anywhere_is_not_certainty():
    result = paired_difference([1.0, 0.0] * 10, [1.0, 0.0] * 10)
    unseen = wilson(0, 20).high
    assert (result.delta, result.p_value) == (0.0, 1.0)
    assert (result.interval.low, result.interval.high) == (pytest.approx(-unseen), pytest.approx(unseen))


def test_the_same_difference_everywhere():
    result = paired_difference([0.0] * 5, [1.0] * 5)
    assert result.p_value == pytest.approx(2 / 2**5)
    assert result.interval.high == 1.0
    assert result.interval.low < 0.5


def test_differences_that_are_equal_up_to_rounding_are_equal():
    result = paired_difference([0.1, 0.3, 0.5], [0.3, 0.5, 0.7])  # .2, .2 and .19999999999999996 in binary
    assert result.interval.high - result.interval.low > 0.5
    assert result.p_value == 2 / 2**3


def test_swapping_the_sides_mirrors_the_result():
    a, b = [0.1, 0.4, 0.9, 0.3], [0.2, 0.2, 1.0, 0.9]
    forward, back = paired_difference(a, b), paired_difference(b, a)
    assert forward.delta == pytest.approx(-back.delta)
    assert forward.p_value == pytest.approx(back.p_value)
    assert forward.interval.low == pytest.approx(-back.interval.high)


def test_unequal_lengths_are_refused():
    with pytest.raises(EvidenceError, match="2 items against 3"):
        paired_difference([0, 1], [0, 1, 1])


def test_mcnemar_by_hand():
    assert mcnemar_exact(0, 5) == pytest.approx(2 / 32)
    assert mcnemar_exact(1, 5) == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar_exact(5, 1) == mcnemar_exact(1, 5)
    assert mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(0, 0) == 1.0
    with pytest.raises(EvidenceError, match="negative"):
        mcnemar_exact(-1, 2)


def test_sign_flips_are_exact_for_few_items():
    # of 2^4 patterns of (1, 1, 1, 2) the |sum| 5 is reached by 2
    assert sign_flip_test([1, 1, 1, 2], seed=0) == pytest.approx(2 / 16)
    # |sum| of (1, -1, 2, 0) is 2; |+-1 +-1 +-2| >= 2 in 6 of 8 patterns, the 0 doubles both counts
    assert sign_flip_test([1, -1, 2, 0], seed=0) == pytest.approx(6 / 8)


def test_random_flips_are_seeded_and_never_zero():
    differences = [0.1 + 0.01 * i for i in range(40)]
    first = sign_flip_test(differences, seed=3, flips=500)
    assert first == sign_flip_test(differences, seed=3, flips=500) == pytest.approx(1 / 501)
    noise = [(-1) ** i * 0.1 for i in range(40)]
    assert sign_flip_test(noise, seed=3, flips=500) == 1.0


def test_random_flips_agree_with_the_exact_count():
    differences = [0.3, -0.1, 0.4, 0.2, -0.2, 0.5, 0.1, 0.0, 0.3, -0.4]
    exact = sign_flip_test(differences, seed=0, flips=2**10)
    assert sign_flip_test(differences, seed=0, flips=2**10 - 1) == pytest.approx(exact, abs=0.06)


def test_sign_flip_refusals():
    with pytest.raises(EvidenceError, match="at least 2 items"):
        sign_flip_test([1.0], seed=0)
    with pytest.raises(EvidenceError, match="flips"):
        sign_flip_test([1.0, 2.0], seed=0, flips=0)


def test_bootstrap_by_enumeration():
    # differences: one 1 and nine 0; the mean of a resample is Binomial(10, .1) / 10, of which 35% is 0 and one draw in 7000
    # above 5/10; with one item that differs, flipping its sign changes nothing: p = 1
    result = paired_bootstrap([0.0] * 10, [1.0] + [0.0] * 9, seed=0)
    assert (result.delta, result.n, result.method) == (pytest.approx(0.1), 10, "paired bca bootstrap, sign-flip test")
    assert (result.interval.low, result.p_value) == (0.0, 1.0)
    assert 0.4 <= result.interval.high <= 0.6


def test_bootstrap_p_value_is_as_careful_as_mcnemar():
    # 4 gains, no loss: 2 of 2^4 sign patterns reach it, whatever the 6 ties do
    result = paired_bootstrap([0.0] * 10, [1.0] * 4 + [0.0] * 6, seed=0)
    assert result.p_value == pytest.approx(2 / 2**4) == mcnemar_exact(0, 4)


def test_bootstrap_mirrors_when_the_sides_are_swapped():
    a, b = [0.1 * (i % 5) for i in range(30)], [0.1 * (i % 7) for i in range(30)]
    forward, back = paired_bootstrap(a, b, seed=1), paired_bootstrap(b, a, seed=1)
    assert forward.delta == pytest.approx(-back.delta)
    assert forward.interval.low == pytest.approx(-back.interval.high, abs=0.01)


def test_bootstrap_of_equal_differences_is_not_certainty():
    assert paired_bootstrap([0.0] * 10, [0.0] * 10, seed=0) == paired_difference([0.0] * 10, [0.0] * 10)
    with pytest.raises(EvidenceError, match="bootstrap of 3"):
        paired_bootstrap([0.0, 0.0, 0.0], [1.0, 0.0, 0.5], seed=0)
    with pytest.raises(EvidenceError, match="same items"):
        paired_bootstrap([0.0], [1.0, 0.0], seed=0)
