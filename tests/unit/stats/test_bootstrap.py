"""Bootstrap intervals against enumeration, against formulas where one exists, and on data where they must refuse."""

import math
from itertools import product

import numpy as np
import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.bootstrap import Resampled, bca, cluster_bootstrap, corrected, expanded_quantile, mean, median, percentile
from posttrain.stats.intervals import student_t

SKEWED = [0.0, 0.0, 0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.9, 2.5]


def test_percentile_places_the_ends_of_the_resampling_distribution():
    # Eight values, one of them 1: the mean of a resample is Binomial(8, 1/8) / 8. t(7) = 2.364624, times sqrt(8/7) = 2.527890, beyond
    # which lie .00574. P(X = 0) = .3436 > .00574, P(X <= 3) = .98880 < .99426, P(X <= 4) = .99878, so the ends are 0 and 4/8.
    interval = percentile([0, 0, 0, 0, 0, 0, 0, 1], mean, seed=0)
    assert (interval.low, interval.high, interval.method) == (0.0, 0.5, "percentile bootstrap")
    assert expanded_quantile(0.95, 8) == pytest.approx(2.527890, abs=1e-5)
    # at 80%: t(7) = 1.414924, times 1.069045 = 1.512617, beyond which lie .0652; P(X <= 1) = .73633, P(X <= 2) = .93275, so 3/8
    assert percentile([0, 0, 0, 0, 0, 0, 0, 1], mean, seed=0, level=0.8).high == 0.375


def test_bca_by_hand():
    # The same data: P(X < 1) + P(X = 1)/2 = .3436 + .3927/2 = .5400, z0 = .1004. Leaving out a 0 gives 1/7, the 1 gives 0: influences
    # are 7 times 1/8 - 1/7 = -1/56 and 1/8; sum of cubes 1/512 - 7/56^3 = .0019133, of squares 1/64 + 7/3136 = .0178571;
    # a = .0019133 / (6 * .0178571^1.5) = .13363. At 80% z = 1.512617, ends at Phi(z0 + u / (1 - a u)), u = z0 -+ z:
    # -1.4122/1.18871 = -1.18801 -> Phi(-1.0876) = .1384 and 1.6130/.78446 = 2.0562 -> Phi(2.1566) = .98448;
    # P(X = 0) = .3436 > .1384 -> 0; P(X <= 2) = .93275 < .98448 < P(X <= 3) = .98880 -> 3/8.
    interval = bca([0, 0, 0, 0, 0, 0, 0, 1], mean, seed=0, level=0.8, resamples=100_000)
    assert (interval.low, interval.high, interval.method) == (0.0, 0.375, "bca bootstrap")
    draws = np.array([0.0] * 34 + [0.125] * 40 + [0.25] * 26)
    parts = corrected(0.125, draws, np.array([1 / 7] * 7 + [0.0]))
    assert parts.acceleration == pytest.approx(0.13363, abs=1e-4)
    assert parts.bias == pytest.approx(0.1004, abs=1e-3)  # share .34 + .20


def test_without_bias_and_acceleration_it_is_the_percentile_interval():
    draws = np.linspace(0, 1, 1001)
    interval = Resampled(0.5, draws, bias=0.0, acceleration=0.0).interval(0.95, 10**9, "x")
    assert (interval.low, interval.high) == (pytest.approx(0.025), pytest.approx(0.975))


def test_bias_moves_both_ends_twice():
    # Phi(.2 + (.2 -+ 1.959964)) = Phi(-1.559964) = .05938 and Phi(2.359964) = .99086
    interval = Resampled(0.5, np.linspace(0, 1, 10_001), bias=0.2, acceleration=0.0).interval(0.95, 10**9, "x")
    assert (interval.low, interval.high) == (pytest.approx(0.05938, abs=1e-4), pytest.approx(0.99086, abs=1e-4))


def test_the_jackknife_of_any_statistic_leaves_out_each_value_once():
    own = bca(SKEWED, lambda values: values.sum(axis=-1) / values.shape[-1], seed=0)
    known = bca(SKEWED, mean, seed=0)
    assert (own.low, own.high) == (pytest.approx(known.low), pytest.approx(known.high))


def test_close_to_student_t_for_many_symmetric_values():
    values = [math.sin(i) for i in range(200)]
    t, boot = student_t(values), bca(values, mean, seed=2)
    assert boot.low == pytest.approx(t.low, abs=0.01)
    assert boot.high == pytest.approx(t.high, abs=0.01)


def test_acceleration_moves_the_interval_towards_the_long_tail():
    plain, accelerated = percentile(SKEWED, mean, seed=0), bca(SKEWED, mean, seed=0)
    assert accelerated.low > plain.low
    assert accelerated.high > plain.high


def test_a_statistic_other_than_the_mean_uses_its_own_jackknife():
    spread = bca(SKEWED, lambda values: values.std(axis=-1), seed=0)
    assert spread.low < float(np.std(SKEWED)) < spread.high
    middle = bca(list(range(31)), median, seed=0)
    assert 8 < middle.low < 15 < middle.high < 22


def test_cluster_bootstrap_equals_bca_for_clusters_of_one():
    single = cluster_bootstrap([[value] for value in SKEWED], seed=0, resamples=20_000)
    plain = bca(SKEWED, mean, seed=0, resamples=20_000)
    assert single.low == pytest.approx(plain.low, abs=0.03)
    assert single.high == pytest.approx(plain.high, abs=0.06)


def test_copies_within_a_cluster_add_no_certainty():
    base = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    once = cluster_bootstrap([[value] for value in base], seed=4)
    copied = cluster_bootstrap([[value] * 50 for value in base], seed=4)
    assert (copied.low, copied.high) == (pytest.approx(once.low), pytest.approx(once.high))
    treated_as_independent = bca([value for value in base for _ in range(50)], mean, seed=4)
    assert treated_as_independent.high - treated_as_independent.low < (copied.high - copied.low) / 5


def test_bias_counts_ties_half():
    # of 2^3 = 8 resampled pair sums, 2 lie below the estimate 1.5, 4 equal it and 2 lie above: share .5, bias 0
    draws = np.array([sum(pair) / 2 + extra for pair in product((1, 2), repeat=2) for extra in (0.0, 0.0)])
    assert corrected(1.5, draws, np.array([1.0, 2.0])).bias == 0.0


@pytest.mark.parametrize(
    "make", [lambda v: percentile(v, mean, 0), lambda v: bca(v, mean, 0), lambda v: cluster_bootstrap([[x] for x in v], 0)]
)
def test_data_without_spread_is_refused(make):
    with pytest.raises(EvidenceError, match="no width can be stated"):
        make([0.1 + 0.2] * 5 + [0.3] * 5)


@pytest.mark.parametrize(
    "make", [lambda v: percentile(v, mean, 0), lambda v: bca(v, mean, 0), lambda v: cluster_bootstrap([[x] for x in v], 0)]
)
def test_few_values_are_refused(make):
    with pytest.raises(EvidenceError, match="bootstrap of 7"):
        make([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])


def test_other_refusals():
    with pytest.raises(EvidenceError, match="100 resamples"):
        bca(SKEWED, mean, 0, resamples=100)
    with pytest.raises(EvidenceError, match="one side"):
        corrected(5.0, np.linspace(0, 1, 50), np.array([1.0, 2.0]))
    with pytest.raises(EvidenceError, match="finite"):
        bca([*SKEWED, math.nan], mean, 0)
    with pytest.raises(EvidenceError, match="level 95"):
        percentile(SKEWED, mean, 0, level=95)
    with pytest.raises(ValueError, match="last axis only"):
        percentile(SKEWED, lambda values: values.mean(axis=0), 0)


def test_seeded():
    assert bca(SKEWED, mean, seed=1) == bca(SKEWED, mean, seed=1)
    assert bca(SKEWED, mean, seed=1) != bca(SKEWED, mean, seed=2)
