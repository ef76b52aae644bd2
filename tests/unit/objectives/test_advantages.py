"""Group-relative advantages against numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations
from typing import get_args

import pytest

from posttrain.core.seeds import python_rng
from posttrain.objectives.advantages import (
    TARGETS,
    Advantage,
    Moments,
    channel_advantages,
    channel_correlations,
    degenerate,
    effective_channels,
    geometry,
    group_advantages,
    normalise,
    normalise_batch,
    pivot,
    subgroup_advantages,
)

EVERY = get_args(Advantage)
RELATIVE = [how for how in EVERY if how != "none"]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0]  # mean 0.4; squared deviations 0.36 x 2 + 0.16 x 3 = 1.2


def test_population_std_of_the_worked_group():
    # std sqrt(1.2 / 5) = 0.489898; 0.6 / 0.489898 = 1.224745, -0.4 / 0.489898 = -0.816497
    got = group_advantages(REWARDS, "mean_std", eps=0.0)
    assert got == pytest.approx([1.224745, -0.816497, -0.816497, 1.224745, -0.816497], abs=1e-6)
    assert sum(got) == pytest.approx(0.0, abs=1e-12)


def test_sample_std_of_the_worked_group():
    # std sqrt(1.2 / 4) = 0.547723; 0.6 / 0.547723 = 1.095445, -0.4 / 0.547723 = -0.730297
    got = group_advantages(REWARDS, "mean_std", ddof=1, eps=0.0)
    assert got == pytest.approx([1.095445, -0.730297, -0.730297, 1.095445, -0.730297], abs=1e-6)


def test_mean_and_leave_one_out_of_the_worked_group():
    assert group_advantages(REWARDS, "mean") == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    # the others of a winner average 1/4, of a loser 2/4: 0.75 and -0.5, which is 5/4 of the line above
    assert group_advantages(REWARDS, "leave_one_out") == pytest.approx([0.75, -0.5, -0.5, 0.75, -0.5])


@pytest.mark.parametrize(
    ("right", "ddof", "winner", "loser"),
    # n of 8: p = n/8, population std sqrt(p (1 - p)); 7/8 / 0.330719 = 2.645751, 5/8 / 0.484123 = 1.290994
    # sample std is larger by sqrt(8/7) = 1.069045
    [(1, 0, 2.645751, -0.377964), (3, 0, 1.290994, -0.774597), (1, 1, 2.474874, -0.353553), (3, 1, 1.207615, -0.724569)],
)
def test_worked_numbers_for_groups_of_eight(right, ddof, winner, loser):
    got = group_advantages([1.0] * right + [0.0] * (8 - right), "mean_std", ddof=ddof, eps=0.0)
    assert got == pytest.approx([winner] * right + [loser] * (8 - right), abs=1e-6)


def test_winners_weigh_one_and_a_half_losers_whatever_the_scale():
    for how in ("mean", "mean_std", "leave_one_out"):
        got = group_advantages(REWARDS, how, eps=0.0)
        assert got[0] / -got[1] == pytest.approx(1.5)  # (1 - p) / p at p = 0.4


def test_eps_is_added_to_the_std():
    # std 0.5, eps 0.5: 0.5 / 1.0
    assert group_advantages([1.0, 0.0], "mean_std", eps=0.5) == [0.5, -0.5]


@pytest.mark.parametrize("how", RELATIVE)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("siblings", [2, 3, 8, 16])
def test_equal_rewards_give_exactly_zero(how, ddof, value, siblings):
    assert group_advantages([value] * siblings, how, ddof=ddof) == [0.0] * siblings
    assert group_advantages([value] * siblings, how, ddof=ddof, eps=0.0) == [0.0] * siblings
    assert degenerate([value] * siblings)


@pytest.mark.parametrize("ddof", [0, 1])
def test_one_sibling_has_nobody_to_compare_with(ddof):
    for how in RELATIVE:
        assert group_advantages([1.0], how, ddof=ddof, k=3) == [0.0]  # and not NaN, which the sample std of one number is
    assert group_advantages([0.7], "none") == [0.7]
    assert [group_advantages([], how) for how in EVERY] == [[]] * len(EVERY)


def test_without_a_baseline_the_reward_is_the_advantage():
    assert group_advantages([1.0, None, -0.5], "none") == [1.0, 0.0, -0.5]
    assert group_advantages([0.1] * 3, "none") == [0.1] * 3


def test_median_and_mad_of_a_worked_group():
    # median 2; distances 2 1 0 3 7, their median is 2: (-2, -1, 0, 3, 7) / 2
    assert group_advantages([0.0, 1.0, 2.0, 5.0, 9.0], "median_mad", eps=0.0) == [-1.0, -0.5, 0.0, 1.5, 3.5]
    assert group_advantages([0.0, 1.0, 2.0, 5.0, 9.0], "median_mad", eps=2.0) == [-0.5, -0.25, 0.0, 0.75, 1.75]
    # an even number: median (0 + 1) / 2, all distances 0.5
    assert group_advantages([0.0, 1.0, None], "median_mad", eps=0.0) == [-1.0, 1.0, 0.0]


def test_a_median_that_most_siblings_share_falls_back_to_the_mean_distance():
    # 1 of 8: median 0, distances 0 x 7 and 1, MAD 0; mean distance 1/8: 1 / 0.125 = 8. Dividing by eps would give 1e6
    assert group_advantages([1.0] + [0.0] * 7, "median_mad", eps=0.0) == [8.0] + [0.0] * 7
    # 3 of 4: median 1, mean distance 1/4: -1 / 0.25
    assert group_advantages([1.0, 0.0, 1.0, 1.0], "median_mad", eps=0.0) == [0.0, -4.0, 0.0, 0.0]


def test_pivot_is_the_first_sibling_at_the_median():
    assert pivot([0.0, 1.0, 5.0, 2.0, 9.0]) == 3  # the median is 2
    assert pivot([0.0, None, 1.0, 1.0]) == 2  # of 0, 1, 1
    assert pivot([1.0, 0.0, 0.0]) == 1
    assert pivot([0.0, 1.0]) is None
    assert pivot([0.0, 1.0, 2.0, None]) == 1
    assert pivot([0.0, None, 2.0]) is None
    assert pivot([None]) is None
    for rewards in ([3.0, 1.0, 2.0], [0.0, 0.0, 1.0], [4.0, 4.0, 4.0]):
        place = pivot(rewards)
        assert place is not None
        assert group_advantages(rewards, "median_mad")[place] == 0.0


def test_max_rl_divides_by_the_mean():
    # mean 0.4: 0.6 / 0.4 and -0.4 / 0.4
    assert group_advantages(REWARDS, "max_rl") == pytest.approx([1.5, -1.0, -1.0, 1.5, -1.0])
    # mean 2: (3 - 2) / 2 and (1 - 2) / 2; the scale of the reward drops out
    assert group_advantages([3.0, None, 1.0], "max_rl") == group_advantages([6.0, None, 2.0], "max_rl") == [0.5, 0.0, -0.5]
    assert group_advantages([0.0, 0.0], "max_rl") == [0.0, 0.0]


@pytest.mark.parametrize("rewards", [[1.0, -0.5], [-0.5, -0.5], [3.0, -0.5, None]])
def test_max_rl_refuses_negative_rewards(rewards):
    with pytest.raises(ValueError, match=r"rewards >= 0, got -0\.5"):
        group_advantages(rewards, "max_rl")


def test_pass_at_2_of_three_worked_siblings():
    # 3: best of (3, one other) is 3, best of the others (1, 0) is 1: 2 (3 - 1) = 4
    # 1: best of (1, 3) and (1, 0) averages 2, best of (3, 0) is 3: 2 (2 - 3) = -2
    # 0: best of (0, 3) and (0, 1) averages 2, best of (3, 1) is 3: 2 (2 - 3) = -2
    assert group_advantages([1.0, 3.0, None, 0.0], "pass_at_k", k=2) == pytest.approx([-2.0, 4.0, 0.0, -2.0], abs=1e-12)


@pytest.mark.parametrize(("size", "right", "k"), [(5, 2, 2), (8, 1, 4), (8, 3, 7), (16, 4, 8)])
def test_pass_at_k_of_right_and_wrong(size, right, k):
    # A right one counts when k others are all wrong; a wrong one loses what a k-th draw from the others would have added.
    draws = math.comb(size - 1, k)
    winner = k * math.comb(size - right, k) / draws
    loser = k * (math.comb(size - 1 - right, k) / draws - math.comb(size - 1 - right, k - 1) / math.comb(size - 1, k - 1))
    got = group_advantages([1.0] * right + [0.0] * (size - right), "pass_at_k", k=k)
    assert got == pytest.approx([winner] * right + [loser] * (size - right), abs=1e-12)


@pytest.mark.parametrize(("size", "k"), [(2, 1), (5, 1), (5, 2), (5, 4), (7, 3)])
def test_pass_at_k_equals_the_average_over_all_subsets(size, k):
    rng = python_rng(0, "pass_at_k", size, k)
    rewards = [round(rng.uniform(-2, 2), 1) for _ in range(size)]  # one decimal: ties happen
    got = group_advantages(rewards, "pass_at_k", k=k)
    for i, own in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        beside = [max(own, *chosen) if chosen else own for chosen in combinations(others, k - 1)]
        without = [max(chosen) for chosen in combinations(others, k)]
        assert got[i] == pytest.approx(k * (sum(beside) / len(beside) - sum(without) / len(without)), abs=1e-12)
    assert sum(got) == pytest.approx(0.0, abs=1e-12)


def test_pass_at_1_is_leave_one_out():
    for rewards in (REWARDS, [0.3, None, -1.7, 2.0, 0.3]):
        assert group_advantages(rewards, "pass_at_k", k=1) == pytest.approx(group_advantages(rewards, "leave_one_out"), abs=1e-12)


def test_pass_at_k_needs_k_others():
    with pytest.raises(ValueError, match="k = 4 needs .* n = 4 scored"):
        group_advantages([1.0, 0.0, None, 0.0, 1.0], "pass_at_k", k=4)
    with pytest.raises(ValueError, match="k = 2 needs .* n = 2 scored"):
        group_advantages([1.0, 1.0], "pass_at_k", k=2)  # whatever the rewards are
    with pytest.raises(ValueError, match="k = 0"):
        group_advantages([1.0, 0.0], "pass_at_k", k=0)


@pytest.mark.parametrize("how", EVERY)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_refused(how, bad):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, bad], how)


def test_unscored_sibling_leaves_the_baseline():
    # baseline of [1, 0] is 0.5; the unscored one gets 0, not -0.33
    assert group_advantages([1.0, None, 0.0], "mean") == [0.5, 0.0, -0.5]
    # the other scored sibling alone is the baseline: 1 - 0 and 0 - 1
    assert group_advantages([1.0, None, 0.0], "leave_one_out") == [1.0, 0.0, -1.0]


def test_one_scored_sibling_has_no_baseline():
    assert group_advantages([1.0, None, None], "mean") == [0.0, 0.0, 0.0]
    assert degenerate([1.0, None, None])
    assert degenerate([None, None])
    assert not degenerate([1.0, None, 0.0])


def test_zero_is_a_score():
    assert not degenerate([0.0, 1.0])
    assert group_advantages([0.0, 1.0], "mean") == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("p", "siblings", "share"),
    # p^G + (1 - p)^G
    [(0.3, 8, 0.0577), (0.05, 8, 0.6634), (0.02, 4, 0.922), (0.5, 4, 0.125), (0.1, 16, 0.185)],
)
def test_share_of_groups_without_signal(p, siblings, share):
    total = 0.0
    for right in range(siblings + 1):
        chance = math.comb(siblings, right) * p**right * (1 - p) ** (siblings - right)
        total += chance * degenerate([1.0] * right + [0.0] * (siblings - right))
    assert total == pytest.approx(share, abs=5e-4)


def test_oversampling_needed_at_a_degenerate_share():
    # N / (1 - d) groups fill N on average: 16 / (1 - 0.0577) = 16.98, 16 / (1 - 0.6634) = 47.5
    for p, expected in ((0.3, 16.98), (0.05, 47.54)):
        kept = sum(math.comb(8, k) * p**k * (1 - p) ** (8 - k) for k in range(9) if not degenerate([1.0] * k + [0.0] * (8 - k)))
        assert 16 / kept == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("p", "seen"), [(0.05, 0.149), (0.3, 0.318), (0.5, 0.5), (0.8, 0.760), (0.95, 0.851)])
def test_dropping_unanimous_groups_pulls_the_training_score_towards_a_half(p, seen):
    chances = {c: math.comb(8, c) * p**c * (1 - p) ** (8 - c) for c in range(9) if not degenerate([1.0] * c + [0.0] * (8 - c))}
    assert sum(c / 8 * chance for c, chance in chances.items()) / sum(chances.values()) == pytest.approx(seen, abs=5e-4)


def test_a_format_bonus_makes_signal_where_the_task_has_none():
    # Nobody is right; seven are neat (+0.1), one is not (-0.1). Mean 0.075, sample variance (7 x 0.025^2 + 0.175^2) / 7 = 0.005:
    # 0.025 / 0.0707 = 0.354 and -0.175 / 0.0707 = -2.475, as large as a right answer. Only the primary reward shows it.
    got = group_advantages([0.1] * 7 + [-0.1], "mean_std", ddof=1, eps=0.0)
    assert got == pytest.approx([0.353553] * 7 + [-2.474874], abs=1e-6)
    assert not degenerate([0.1] * 7 + [-0.1])
    assert degenerate([0.0] * 8)


def test_subgroups_are_compared_among_themselves():
    # a: 1, 0 (mean 0.5); b: 5, 3 (mean 4); c is alone; None belongs nowhere
    rewards, keys = [1.0, 5.0, 0.0, 3.0, 9.0, 7.0], ["a", "b", "a", "b", None, "c"]
    assert subgroup_advantages(rewards, keys, "mean") == [0.5, 1.0, -0.5, -1.0, 0.0, 0.0]
    assert subgroup_advantages(rewards, keys, "none") == [1.0, 5.0, 0.0, 3.0, 0.0, 7.0]
    # sample std of (1, 0) is 0.7071, of (5, 3) 1.4142: both give 0.7071; eps 0.5 is read too
    assert subgroup_advantages(rewards, keys, "mean_std", ddof=1, eps=0.0)[:2] == pytest.approx([0.707107] * 2, abs=1e-6)
    assert subgroup_advantages(rewards, keys, "mean_std", eps=0.5)[0] == 0.5
    # an unscored member leaves its subgroup's baseline; 0 is a key like any other
    assert subgroup_advantages([1.0, None, 0.0, 4.0], [0, 0, 0, None], "mean") == [0.5, 0.0, -0.5, 0.0]
    assert subgroup_advantages([3.0, 1.0, 0.0], ["a"] * 3, "pass_at_k", k=2) == pytest.approx([4.0, -2.0, -2.0])
    with pytest.raises(ValueError, match="2 rewards, 1 keys"):
        subgroup_advantages([1.0, 0.0], ["a"], "mean")


def test_batch_normalisation_counts_tokens():
    # values 1, 3 with 3, 1 tokens: mean (3 + 3) / 4 = 1.5; variance (3 x 0.25 + 1 x 2.25) / 4 = 0.75, std 0.866025
    assert normalise_batch([1.0, 3.0], [3, 1], eps=0.0) == pytest.approx([-0.577350, 1.732051], abs=1e-6)
    # std 1, eps 1
    assert normalise_batch([1.0, -1.0], [5, 5], eps=1.0) == [0.5, -0.5]


def test_normalised_tokens_have_mean_zero_and_variance_one():
    rng = python_rng(0, "normalise")
    values, counts = [rng.uniform(-1, 3) for _ in range(9)], [rng.randrange(0, 30) for _ in range(9)]
    tokens = [a for a, count in zip(normalise_batch(values, counts, eps=0.0), counts, strict=True) for _ in range(count)]
    assert sum(tokens) / len(tokens) == pytest.approx(0.0, abs=1e-12)
    assert sum(a * a for a in tokens) / len(tokens) == pytest.approx(1.0, abs=1e-12)


def test_ranks_add_up_their_moments():
    values, counts = [0.2, 1.0, -0.7, 0.4, 3.0], [7, 2, 9, 4, 1]
    whole = normalise_batch(values, counts)
    merged = Moments.of(values[:2], counts[:2]) + Moments.of(values[2:], counts[2:])
    assert merged.n == 23
    parts = normalise(values[:2], merged) + normalise(values[2:], merged)
    assert parts == pytest.approx(whole, abs=1e-12)
    own = normalise_batch(values[:2], counts[:2]) + normalise_batch(values[2:], counts[2:])
    assert own != pytest.approx(whole, abs=0.1)  # each rank by itself is another estimator
    assert sum([Moments.of([v], [c]) for v, c in zip(values, counts, strict=True)], Moments()).mean == pytest.approx(merged.mean)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, -0.7, 0.9, 1e6 / 3])
@pytest.mark.parametrize("counts", [[1], [3, 7, 11], list(range(1, 200))])
def test_equal_values_normalise_to_exactly_zero(value, counts):
    zeros = [0.0] * len(counts)
    assert normalise_batch([value] * len(counts), counts) == zeros
    ranks = sum((Moments.of([value], [count]) for count in counts), Moments())
    assert normalise([value] * len(counts), ranks, eps=0.0) == zeros
    assert ranks.variance == Moments.of([value] * len(counts), counts).variance == 0.0  # 0.9 with 21 tokens rounds to 2e-16


def test_a_small_but_real_spread_is_not_rounding():
    # 1 +- 1e-5: variance 1e-10 of the mean square
    assert normalise_batch([1.00001, 0.99999], [1, 1], eps=0.0) == pytest.approx([1.0, -1.0], abs=1e-4)


def test_a_step_without_tokens_is_zero():
    assert normalise_batch([1.0, 2.0], [0, 0]) == [0.0, 0.0]
    assert normalise_batch([], []) == []


def test_channels_normalised_one_by_one_cancel_the_task():
    channels = {"f1": [1.0, 0.0], "cost": [-0.05, 0.0]}
    assert channel_advantages(channels, {"f1": 1.0, "cost": 1.0}, eps=0.0) == pytest.approx([0.0, 0.0], abs=1e-12)
    # with eps 1e-6: 0.5 / 0.500001 - 0.025 / 0.025001 = 3.8e-5
    assert channel_advantages(channels, {"f1": 1.0, "cost": 1.0}) == pytest.approx([3.8e-5, -3.8e-5], abs=1e-6)
    assert group_advantages([0.95, 0.0], "mean_std", eps=0.0) == pytest.approx([1.0, -1.0])  # the sum keeps the direction


def test_channel_weights_and_unscored_channels():
    # f1: +-1 times 2; cost, scored for the first and third sibling: +1 and -1 times 0.5
    got = channel_advantages({"f1": [1.0, 0.0, None], "cost": [0.0, None, -4.0]}, {"f1": 2.0, "cost": 0.5}, eps=0.0)
    assert got == [2.5, -2.0, -0.5]
    # sample std of (1, 0) is 0.7071
    assert channel_advantages({"f1": [1.0, 0.0]}, {"f1": 1.0}, ddof=1, eps=0.0) == pytest.approx([0.707107, -0.707107], abs=1e-6)


@pytest.mark.parametrize(
    ("channels", "weights"),
    [
        ({}, {}),
        ({"a": [1.0, 0.0]}, {"b": 1.0}),
        ({"a": [1.0, 0.0]}, {"a": 1.0, "b": 1.0}),
        ({"a": [1.0], "b": [1.0, 0.0]}, {"a": 1.0, "b": 1.0}),
    ],
)
def test_channels_and_weights_have_to_match(channels, weights):
    with pytest.raises(ValueError, match="every channel needs one weight"):
        channel_advantages(channels, weights)


def test_channel_correlations_within_a_group():
    channels = {"f1": [1.0, 0.0, 1.0, None], "cost": [-3.0, -1.0, -3.0, -9.0], "form": [0.1] * 4, "depth": [1.0, 2.0, 4.0, 0.0]}
    got = channel_correlations(channels)
    # depth on the first three: centred (-4/3, -1/3, 5/3), squares 14/3; f1 centred (1/3, -2/3, 1/3), squares 2/3; product 1/3
    # (1/3) / sqrt(2/3 x 14/3) = 0.188982. All four: cost centred (1, 3, 1, -5), squares 36; depth (-.75, .25, 2.25, -1.75), squares 8.75
    # product -0.75 + 0.75 + 2.25 + 8.75 = 11; 11 / sqrt(36 x 8.75) = 0.619780
    assert set(got) == {("f1", "cost"), ("f1", "depth"), ("cost", "depth")}
    assert got["f1", "cost"] == pytest.approx(-1.0)
    assert got["f1", "depth"] == pytest.approx(0.188982, abs=1e-6)
    assert got["cost", "depth"] == pytest.approx(0.619780, abs=1e-6)


def test_correlations_need_two_siblings_that_both_channels_scored():
    assert channel_correlations({"a": [1.0, None, 0.0], "b": [None, 1.0, 0.0]}) == {}
    assert channel_correlations({"a": [1.0, 0.0, 5.0], "b": [1.0, 0.0, None]}) == {("a", "b"): pytest.approx(1.0)}
    assert channel_correlations({"a": [1.0, 0.0, None], "b": [2.0, 2.0, 5.0]}) == {}  # b is constant where a is scored


def test_effective_number_of_channels():
    base, cross = [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]
    assert effective_channels({f"copy{i}": [i + value for value in base] for i in range(5)}) == pytest.approx(1.0)
    assert effective_channels({"a": base, "minus a": [-value for value in base]}) == pytest.approx(1.0)
    assert effective_channels({"a": base, "b": cross, "constant": [0.1] * 4}) == pytest.approx(2.0)
    # centred (.5, -.5, .5, -.5) and (.75, -.25, -.25, -.25): product .5, squares 1 and .75, so r^2 = .25 / .75 = 1/3
    # eigenvalues 1 + r and 1 - r: 2^2 / (2 + 2 r^2) = 4 / (8/3) = 1.5
    assert effective_channels({"a": [1.0, 0.0, 1.0, 0.0], "b": [1.0, 0.0, 0.0, 0.0]}) == pytest.approx(1.5)
    assert effective_channels({"a": [0.3] * 4}) == 0.0
    assert effective_channels({}) == 0.0


def test_geometry_of_groups_of_eight():
    table = geometry(8, "mean_std", ddof=1)
    assert [row.successes for row in table] == list(range(9))
    # 7 of 8: p = 7/8, sample std sqrt(8 x 7/64 / 7) = 0.353553; 0.875 / 0.353553 = 2.475; (7 x 0.353553 + 2.474874) / 8 = 0.619
    assert table[7][1:] == pytest.approx((2.475, 0.619, 7.0), abs=1e-3)
    assert table[4][1:] == pytest.approx((0.935, 0.935, 7.0), abs=1e-3)
    assert [row.sum_squares for row in table] == pytest.approx([0.0] + [7.0] * 7 + [0.0], abs=1e-4)
    raw = geometry(8, "mean")
    # 7 of 8: (7 x 1/8 + 7/8) / 8 = 0.21875; 7 x 1/64 + 49/64 = 0.875. 4 of 8: all 0.5
    assert raw[7][1:] == pytest.approx((0.875, 0.21875, 0.875))
    assert raw[4][1:] == pytest.approx((0.5, 0.5, 2.0))
    assert geometry(8, "mean_std", ddof=0)[7].sum_squares == pytest.approx(8.0, abs=1e-4)
    assert geometry(2, "mean_std", eps=0.5)[1].max_abs == 0.5
    assert geometry(3, "pass_at_k", k=2)[1].max_abs == pytest.approx(2.0)  # 2 (1 - 0)


def test_every_estimator_says_what_it_climbs():
    assert set(TARGETS) == set(EVERY)


def test_advantages_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import posttrain.objectives.advantages, posttrain.objectives.credit"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_sequence_without_tokens_leaves_the_moments_alone():
    assert Moments.of([1.0, math.nan, 3.0, math.inf], [3, 0, 1, 0]) == Moments.of([1.0, 3.0], [3, 1])
