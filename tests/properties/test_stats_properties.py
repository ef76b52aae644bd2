"""Laws of the statistics for arbitrary inputs: what an interval must contain, in which direction it moves, and what must not matter."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.core.errors import EvidenceError
from posttrain.stats.aggregate import iqm, probability_of_improvement
from posttrain.stats.bootstrap import bca, cluster_bootstrap, mean, percentile
from posttrain.stats.grade import grade_of_runs
from posttrain.stats.intervals import clopper_pearson, cluster_t, half_width, student_t, wilson
from posttrain.stats.lag import change_point, lag
from posttrain.stats.multiple import holm
from posttrain.stats.paired import mcnemar_exact, paired_bootstrap, paired_difference, sign_flip_test
from posttrain.stats.passk import pass_at_k, pass_at_k_se, pass_hat_k, pass_hat_k_se
from posttrain.stats.power import SigmaEstimate, items_needed, min_detectable_effect, p_mixed, seeds_needed
from posttrain.stats.ranks import rank_flip_probability
from posttrain.stats.two_sample import fisher_exact, unpaired_proportions, welch

LEVELS = st.floats(0.5, 0.99)
COUNTS = st.integers(2, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
GRID = st.integers(0, 64).map(lambda value: value / 64)
"""Scores with exact sums, as averages over samples are."""
SCORES = st.lists(GRID, min_size=8, max_size=40)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
FEWER = settings(max_examples=40)


def spread(values: list[float]) -> bool:
    return max(values) - min(values) > 1e-3


@given(COUNTS, LEVELS)
def test_rate_intervals_hold_the_rate_and_stay_in_bounds(counts, level):
    successes, n = counts
    for make in (wilson, clopper_pearson):
        interval = make(successes, n, level)
        assert 0.0 <= interval.low < interval.high <= 1.0
        assert interval.low - 1e-12 <= successes / n <= interval.high + 1e-12


@given(COUNTS, LEVELS, st.floats(0.001, 0.009))
def test_more_confidence_is_a_wider_interval(counts, level, more):
    successes, n = counts
    values = [1.0] * successes + [0.0] * (n - successes)
    for make in (lambda x: wilson(successes, n, x), lambda x: clopper_pearson(successes, n, x), lambda x: cluster_t(values, x)):
        narrow, wide = make(level), make(level + more)
        assert wide.low <= narrow.low + 1e-12
        assert narrow.high <= wide.high + 1e-12
    assert half_width(n, level=level) < half_width(n, level=level + more)


@given(SCORES, LEVELS, st.randoms(use_true_random=False))
def test_t_intervals_hold_the_mean_whatever_the_order(values, level, random):
    assume(spread(values))
    mixed = random.sample(values, len(values))
    for make in (student_t, cluster_t):
        interval, again = make(values, level), make(mixed, level)
        assert interval.low < sum(values) / len(values) < interval.high
        assert (interval.low, interval.high) == (pytest.approx(again.low), pytest.approx(again.high))


@FEWER
@given(SCORES, st.integers(0, 5), st.randoms(use_true_random=False))
def test_bootstrap_intervals_stay_within_the_data_and_forget_the_order(values, seed, random):
    assume(spread(values))
    mixed = random.sample(values, len(values))
    for make in (percentile, bca):
        try:
            interval = make(values, mean, seed, resamples=400)
        except EvidenceError:  # all resamples of a lone outlier on one side
            continue
        assert min(values) <= interval.low < interval.high <= max(values)
        assert interval == make(mixed, mean, seed, resamples=400)


@FEWER
@given(SCORES, st.integers(0, 5))
def test_a_higher_level_widens_the_bootstrap(values, seed):
    assume(spread(values))
    narrow, wide = percentile(values, mean, seed, 0.8, 2000), percentile(values, mean, seed, 0.95, 2000)
    assert wide.low <= narrow.low <= narrow.high <= wide.high


@FEWER
@given(st.lists(st.lists(GRID, min_size=1, max_size=4), min_size=8, max_size=15), st.randoms(use_true_random=False))
def test_the_order_of_clusters_and_samples_does_not_matter(clusters, random):
    assume(len({sum(cluster) / len(cluster) for cluster in clusters}) > 3)
    mixed = [random.sample(cluster, len(cluster)) for cluster in random.sample(clusters, len(clusters))]
    assert cluster_bootstrap(clusters, 0, resamples=400) == cluster_bootstrap(mixed, 0, resamples=400)


@FEWER
@given(st.lists(st.tuples(GRID, GRID), min_size=8, max_size=30), st.integers(0, 3))
def test_paired_results_agree_on_the_change(pairs, seed):
    a, b = [first for first, _ in pairs], [second for _, second in pairs]
    differences = [second - first for first, second in pairs]
    assume(len(set(differences)) > 2)
    plain, boot = paired_difference(a, b), paired_bootstrap(a, b, seed, resamples=400)
    assert plain.delta == boot.delta == pytest.approx(sum(differences) / len(pairs))
    assert -1.0 <= boot.interval.low < boot.interval.high <= 1.0
    assert 0 < boot.p_value <= 1
    assert sign_flip_test(differences, seed, 400) == sign_flip_test([-d for d in differences], seed, 400)


@given(COUNTS, COUNTS)
def test_unpaired_proportions_mirror(a, b):
    forward, back = unpaired_proportions(*a, *b), unpaired_proportions(*b, *a)
    assert -1.0 <= forward.interval.low <= forward.delta <= forward.interval.high <= 1.0
    assert forward.interval.low == pytest.approx(-back.interval.high)
    assert forward.p_value == pytest.approx(back.p_value)
    assert 0 < fisher_exact(*a, *b) <= 1


@given(st.lists(GRID, min_size=2, max_size=20), st.lists(GRID, min_size=2, max_size=20), st.floats(-5, 5))
def test_welch_mirrors_and_moves_with_a_shift(a, b, shift):
    assume(spread(a) or spread(b))
    result, back, moved = welch(a, b), welch(b, a), welch(a, [value + shift for value in b])
    assert result.delta in result.interval
    assert result.interval.low == pytest.approx(-back.interval.high)
    assert moved.delta == pytest.approx(result.delta + shift)
    assert (result.p_value < 0.05) == (0.0 not in result.interval) or result.p_value == pytest.approx(0.05)


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=12))
def test_holm_never_lowers_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    assert list(adjusted) == list(p_values)
    for name, value in p_values.items():
        assert value <= adjusted[name] <= min(1.0, value * len(p_values))
        for other, rival in p_values.items():
            if value < rival:
                assert adjusted[name] <= adjusted[other]


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_rises_and_pass_hat_k_falls_with_k(case):
    n, c, k = case
    reach, rely = pass_at_k(n, c, k), pass_hat_k(n, c, k)
    assert -1e-12 <= rely <= c / n + 1e-12
    assert c / n - 1e-12 <= reach <= 1.0
    assert rely == pytest.approx(1 - pass_at_k(n, n - c, k), abs=1e-9)
    if k < n:
        assert pass_at_k(n, c, k + 1) >= reach - 1e-12
        assert pass_hat_k(n, c, k + 1) <= rely + 1e-12
        for se in (pass_at_k_se, pass_hat_k_se):
            assert se([(n, c), (n, n - c)], k) >= 0.0
            assert math.isfinite(se([(n, c), (n, n - c)], k, items="fixed"))


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_symmetric_and_a_probability(b, c):
    assert 0 < mcnemar_exact(b, c) == mcnemar_exact(c, b) <= 1


@given(st.floats(0.001, 1), st.floats(0.001, 0.5), st.floats(0.8, 0.99), st.floats(0.5, 0.95))
def test_budgets_hold_what_they_promise(delta, value, level, power):
    sigma = SigmaEstimate("seed_to_seed", value, 4)
    seeds = seeds_needed(delta, sigma, level, power)
    assert min_detectable_effect(seeds, sigma, level, power) <= delta * (1 + 1e-9)
    assert seeds == 2 or min_detectable_effect(seeds - 1, sigma, level, power) > delta * (1 - 1e-9)
    assert seeds_needed(delta * 1.1, sigma, level, power) <= seeds
    if delta <= 0.5:
        assert items_needed(delta, discordance=0.5) <= items_needed(delta, discordance=1.0)


@given(st.floats(0.001, 1), st.integers(1, 300), st.floats(0.001, 0.5))
def test_more_seeds_never_take_a_claim_away(delta, seeds, value):
    sigma = SigmaEstimate("seed_to_seed", value, 4)
    assert grade_of_runs(delta, seeds, sigma).claimable == (seeds >= seeds_needed(delta, sigma))
    assert not grade_of_runs(delta, seeds, sigma).claimable or grade_of_runs(delta, seeds + 1, sigma).claimable


@given(st.floats(0, 1), st.integers(1, 64))
def test_mixed_groups_are_likeliest_at_one_half(p, group):
    assert 0.0 <= p_mixed(p, group) <= p_mixed(0.5, group) + 1e-12
    assert p_mixed(p, group) == pytest.approx(p_mixed(1 - p, group), abs=1e-9)


@given(st.lists(GRID, min_size=1, max_size=30), st.lists(GRID, min_size=1, max_size=30))
def test_iqm_and_improvement_in_bounds(a, b):
    assert min(a) <= float(iqm(a)) <= max(a)
    assert probability_of_improvement([a], [b]) == pytest.approx(1 - probability_of_improvement([b], [a]))


@FEWER
@given(st.lists(st.tuples(GRID, GRID), min_size=3, max_size=20), st.data())
def test_rank_flips_are_probabilities_and_vanish_with_all_items(pairs, data):
    scores = {"a": [first for first, _ in pairs], "b": [second for _, second in pairs]}
    assume(abs(sum(scores["a"]) - sum(scores["b"])) > 1e-6)
    n = data.draw(st.integers(1, len(pairs)))
    assert 0.0 <= rank_flip_probability(scores, n, seed=0, draws=50) <= (1.0 if n < len(pairs) else 0.0)


@given(st.lists(ANY_FLOAT, min_size=40, max_size=60), st.lists(ANY_FLOAT, min_size=40, max_size=60))
def test_lags_of_anything_are_numbers_or_one_clear_refusal(a, b):
    size = min(len(a), len(b))
    try:
        found = lag(a[:size], b[:size], 5)
        change_point(a)
    except EvidenceError:  # half of the values are missing
        assert min(np.isfinite(a).sum(), np.isfinite(b[:size]).sum(), np.isfinite(a[:size]).sum()) <= len(a) / 2
        return
    assert 0.0 <= found.p_value <= 1.0
    assert -1.0 - 1e-9 <= found.correlation <= 1.0 + 1e-9


@FEWER
@given(st.lists(st.tuples(GRID, GRID), min_size=60, max_size=90))
def test_swapping_the_series_turns_the_lag_round(pairs):
    a, b = [first for first, _ in pairs], [second for _, second in pairs]
    forward, back = lag(a, b, 10), lag(b, a, 10)
    assert forward.p_value == pytest.approx(back.p_value, abs=1e-9)
    assert abs(forward.steps or 0) == abs(back.steps or 0)
    found = change_point(a)
    assert found is None or 0 < found < len(a)
