"""Group-relative advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from posttrain.objectives.advantages import degenerate, group_advantages

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


@pytest.mark.parametrize("how", ["mean", "mean_std", "leave_one_out"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("siblings", [2, 3, 8, 16])
def test_equal_rewards_give_exactly_zero(how, ddof, value, siblings):
    assert group_advantages([value] * siblings, how, ddof=ddof) == [0.0] * siblings
    assert group_advantages([value] * siblings, how, ddof=ddof, eps=0.0) == [0.0] * siblings
    assert degenerate([value] * siblings)


def test_one_sibling_is_refused():
    with pytest.raises(ValueError, match="at least 2 completions per prompt"):
        group_advantages([1.0], "mean_std")


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
