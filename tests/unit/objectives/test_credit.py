"""Token-level credit against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posttrain.core.seeds import numpy_rng
from posttrain.objectives.credit import gae, reward_to_go, teacher_advantage, token_rewards

REWARDS, VALUES, ALL = [0.0, 0.0, 1.0], [0.3, 0.5, 0.8], [True, True, True]


@pytest.mark.parametrize(
    ("lam", "expected"),
    # differences .5 - .3 = .2, .8 - .5 = .3, 1 - .8 = .2
    # lambda .95: .2; .3 + .95 x .2 = .49; .2 + .95 x .49 = .6655
    [(1.0, [0.7, 0.5, 0.2]), (0.0, [0.2, 0.3, 0.2]), (0.95, [0.6655, 0.49, 0.2])],
)
def test_worked_advantages(lam, expected):
    advantages, returns = gae(REWARDS, VALUES, ALL, 1.0, lam)
    assert advantages == pytest.approx(expected, abs=1e-12)
    assert returns == pytest.approx(np.add(expected, VALUES), abs=1e-12)
    assert advantages.dtype == returns.dtype == np.float64


def test_discount_and_decay():
    # differences .5 x .5 - .3 = -.05, .5 x .8 - .5 = -.1, .2; decay .5 x .4 = .2: .2; -.1 + .04 = -.06; -.05 - .012 = -.062
    advantages, returns = gae(REWARDS, VALUES, ALL, 0.5, 0.4)
    assert advantages == pytest.approx([-0.062, -0.06, 0.2], abs=1e-12)
    assert returns == pytest.approx([0.238, 0.44, 1.0], abs=1e-12)


def test_a_cut_episode_goes_on_at_the_bootstrap_value():
    # lambda 0: 0 + .5 x .6 - .1 = .2. lambda 1, two tokens: second .2, first 0 + .5 x .1 - .3 + .5 x .2 = -.15
    assert gae([0.0], [0.1], [True], 0.5, 0.0, bootstrap=0.6)[0] == pytest.approx([0.2])
    assert gae([0.0, 0.0], [0.3, 0.1], [True, True], 0.5, 1.0, bootstrap=0.6)[0] == pytest.approx([-0.15, 0.2])


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_the_next_state_is_the_next_decision(lam, junk):
    # prompt, decision, two tool tokens, decision, tool token, decision, padding
    trained = [False, True, False, False, True, False, True, False]
    rewards = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    values = [junk, 0.3, junk, junk, 0.5, junk, 0.8, junk]
    for wide, compact in zip(gae(rewards, values, trained, 0.9, lam), gae(REWARDS, VALUES, ALL, 0.9, lam), strict=True):
        assert wide.tolist() == [0.0, compact[0], 0.0, 0.0, compact[1], 0.0, compact[2], 0.0]


def test_a_reward_at_a_tool_token_belongs_to_the_decision_before_it():
    trained = [False, True, False, False, True, False]
    # before the first decision: to nobody. 2 + 3 at the tool tokens and 1 at the first decision: 6 there; 4 after the second: 4 there
    rewards = [9.0, 1.0, 2.0, 3.0, 0.0, 4.0]
    assert reward_to_go(rewards, trained, 0.5).tolist() == [0.0, 8.0, 0.0, 0.0, 4.0, 0.0]  # 6 + .5 x 4
    advantages, returns = gae(rewards, [math.nan, 5.0, math.nan, math.nan, 3.0, math.nan], trained, 0.5, 0.0)
    assert advantages.tolist() == [0.0, 2.5, 0.0, 0.0, 1.0, 0.0]  # 6 + .5 x 3 - 5, 4 - 3
    assert returns.tolist() == [0.0, 7.5, 0.0, 0.0, 4.0, 0.0]


def test_rewards_that_are_no_numbers_count_nothing_where_untrained():
    assert reward_to_go([math.nan, 1.0, math.inf, 2.0, -math.inf], [False, True, False, True, False]).tolist() == [0.0, 3.0, 0.0, 2.0, 0.0]


def test_an_outcome_reaches_every_decision_of_every_turn():
    # three turns of 2, 1 and 3 decisions behind prompts of different lengths; without critic and discount each gets the outcome
    trained = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1], dtype=bool)
    rewards = np.zeros(12)
    rewards[-1] = 1.0
    advantages, _ = gae(rewards, np.zeros(12), trained, 1.0, 1.0)
    assert advantages.tolist() == trained.astype(float).tolist()


def test_full_decay_returns_do_not_depend_on_the_critic():
    rng = numpy_rng(0, "critic")
    rewards, trained = rng.normal(size=9), rng.random(9) < 0.6
    values = rng.normal(size=9)
    advantages, returns = gae(rewards, values, trained, 0.9, 1.0)
    assert returns == pytest.approx(reward_to_go(rewards, trained, 0.9), abs=1e-12)
    assert advantages == pytest.approx(np.where(trained, returns - values, 0.0), abs=1e-12)


def test_reward_to_go_discounts_per_decision():
    assert reward_to_go([1.0, 0.0, 2.0], ALL, 0.5).tolist() == [1.5, 1.0, 2.0]  # 1 + .25 x 2, .5 x 2, 2
    assert reward_to_go([1.0, 0.0, 2.0], ALL).tolist() == [3.0, 2.0, 2.0]


def test_a_row_without_decisions_is_zero():
    none = [False, False]
    for out in (
        *gae([1.0, math.nan], [math.nan, 1.0], none, 1.0, 1.0, bootstrap=5.0),
        reward_to_go([1.0, 2.0], none),
        token_rewards(1.0, [math.nan, 1.0], none, 0.1),
        teacher_advantage([math.nan, 1.0], [0.0, 1.0], none, 5.0),
    ):
        assert out.tolist() == [0.0, 0.0]


def test_the_score_stands_on_the_last_decision():
    # -.1 x .5 = -.05; 1 - .1 x .25 = .975
    assert token_rewards(1.0, [0.5, 0.25, math.nan], [True, True, False], 0.1) == pytest.approx([-0.05, 0.975, 0.0])
    assert token_rewards(1.0, [math.inf, 0.5, math.nan, 0.25], [False, True, False, True], 0.1) == pytest.approx([0.0, -0.05, 0.0, 0.975])


@pytest.mark.parametrize("length", [1, 3, 8])
def test_token_rewards_add_up_for_short_and_full_rows(length):
    kl = numpy_rng(0, "kl", length).normal(size=8)
    trained = np.arange(8) < length
    got = token_rewards(0.7, kl, trained, 0.2)
    assert got.sum() == pytest.approx(0.7 - 0.2 * kl[:length].sum(), abs=1e-12)
    assert got[length:].tolist() == [0.0] * (8 - length)
    assert got[length - 1] == pytest.approx(0.7 - 0.2 * kl[length - 1])


def test_teacher_log_ratios():
    teacher, student = np.log([0.9, 0.001, 0.4]), np.log([0.9, 0.4, 0.001])
    # ln(.9 / .9) = 0, ln(.001 / .4) = -5.9915
    assert teacher_advantage(teacher, student, ALL, None) == pytest.approx([0.0, -5.9915, 5.9915], abs=1e-4)
    assert teacher_advantage(teacher, student, ALL, 5.0) == pytest.approx([0.0, -5.0, 5.0], abs=1e-12)
    assert teacher_advantage(teacher, student, [True, False, True], 5.0) == pytest.approx([0.0, 0.0, 5.0], abs=1e-12)


def test_a_token_outside_the_teachers_support_needs_a_clip():
    assert teacher_advantage([-math.inf, -1.0], [-1.0, -1.0], [True, True], 3.0).tolist() == [-3.0, 0.0]
    assert teacher_advantage([-math.inf, -1.0], [math.nan, -1.0], [False, True], None).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="teacher_T - student_T is -inf at trained token 0"):
        teacher_advantage([-math.inf, -1.0], [-1.0, -1.0], [True, True], None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_decision_without_a_number_is_refused(bad):
    both = [True, True]
    with pytest.raises(ValueError, match=r"values_T is .* at trained token 1"):
        gae([0.0, 0.0], [0.0, bad], both, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"rewards_T is .* at trained token 0"):
        gae([bad, 0.0], [0.0, 0.0], both, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"kl_T is .* at trained token 1"):
        token_rewards(1.0, [0.0, bad], both, 0.1)
    with pytest.raises(ValueError, match=r"student_T is .* at trained token 1"):
        teacher_advantage([0.0, 0.0], [0.0, bad], both, 1.0)
    with pytest.raises(ValueError, match="nan at trained token 0"):
        teacher_advantage([math.nan, 0.0], [0.0, 0.0], both, 1.0)


def test_streams_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"values_T has shape \(1,\), trained_T \(2,\)"):
        gae([0.0, 0.0], [0.0], [True, True], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"rewards_T has shape \(3,\)"):
        reward_to_go([0.0, 0.0, 0.0], [True, True])
    with pytest.raises(ValueError, match=r"kl_T has shape \(2, 2\)"):
        token_rewards(0.0, [[0.0, 0.0], [0.0, 0.0]], [[True, True], [True, False]], 0.1)
