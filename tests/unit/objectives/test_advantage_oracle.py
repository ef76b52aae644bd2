"""The expected gradient of every estimator by full enumeration: a softmax over a few answers, every possible group of G draws.

With scores grad log pi(y) = onehot(y) - pi no sampling and no tolerance beyond rounding is needed.
"""

from __future__ import annotations

import math
from itertools import product
from typing import get_args

import numpy as np
import pytest

from posttrain.objectives.advantages import TARGETS, Advantage, group_advantages, success_weight

EVERY = get_args(Advantage)
LOGITS = {3: np.array([0.2, -0.3, 0.0]), 4: np.array([0.7, -0.4, 0.1, -1.1])}


def softmax(logits_V: np.ndarray) -> np.ndarray:
    return np.exp(logits_V) / np.exp(logits_V).sum()


def expected_gradient(pi_V: np.ndarray, rewards_V: np.ndarray, size: int, how: Advantage, **options) -> np.ndarray:
    """E[(1/G) sum_i A_i grad log pi(y_i)] over all V^G groups."""
    scores_VV = np.eye(len(pi_V)) - pi_V
    total_V = np.zeros(len(pi_V))
    for group in product(range(len(pi_V)), repeat=size):
        advantages = group_advantages([float(rewards_V[y]) for y in group], how, **options)
        total_V += math.prod(pi_V[y] for y in group) * sum(a * scores_VV[y] for a, y in zip(advantages, group, strict=True)) / size
    return total_V


def gradient_of_the_best(pi_V: np.ndarray, rewards_V: np.ndarray, k: int) -> np.ndarray:
    """grad E[max of k draws], from E = sum over answers of R (P(all draws <= R) - P(all < R)). k = 1 is grad E[R]."""
    total_V = np.zeros(len(pi_V))
    for reward in set(rewards_V.tolist()):
        for upto_V, sign in ((rewards_V <= reward, 1), (rewards_V < reward, -1)):
            below = pi_V[upto_V].sum()
            total_V += sign * reward * k * below ** (k - 1) * pi_V * (upto_V - below)
    return total_V


@pytest.mark.parametrize("how", EVERY)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("answers", "right"), [(3, [1]), (3, [0, 2]), (4, [3]), (4, [0, 3])])
def test_right_or_wrong_gives_the_weight_times_the_gradient_of_the_success_rate(how, size, answers, right):
    pi_V = softmax(LOGITS[answers])
    rewards_V = np.isin(np.arange(answers), right).astype(float)
    p = float(pi_V @ rewards_V)
    grad_p = pi_V * (rewards_V - p)
    for k in range(1, size if how == "pass_at_k" else 2):
        for ddof in (0, 1) if how == "mean_std" else (0,):
            got = expected_gradient(pi_V, rewards_V, size, how, ddof=ddof, k=k)
            assert got == pytest.approx(success_weight(how, size, p, ddof=ddof, k=k) * grad_p, abs=1e-12)


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("p", [0.0, 0.05, 0.3, 0.5, 0.9, 1.0])
def test_weights_in_closed_form(size, p):
    q = 1 - p
    assert success_weight("none", size, p) == pytest.approx(1.0, abs=1e-12)
    assert success_weight("mean", size, p) == pytest.approx((size - 1) / size, abs=1e-12)
    assert success_weight("leave_one_out", size, p) == pytest.approx(1.0, abs=1e-12)
    assert success_weight("max_rl", size, p) == pytest.approx(sum(q**j for j in range(size - 1)), abs=1e-12)
    if p > 0:
        assert success_weight("max_rl", size, p) == pytest.approx((1 - q ** (size - 1)) / p, abs=1e-12)
    for k in range(1, size):
        assert success_weight("pass_at_k", size, p, k=k) == pytest.approx(k * q ** (k - 1), abs=1e-12)


def test_weight_of_two_siblings_with_a_deviation():
    # One right, one wrong: +-1. Beside a wrong sibling success moves the advantage from 0 to 1, beside a right one from -1 to 0:
    # 1 for every p. With the sample std +-1 / sqrt(2).
    assert success_weight("mean_std", 2, 0.3, eps=0.0) == pytest.approx(1.0)
    assert success_weight("mean_std", 2, 0.3, ddof=1, eps=0.0) == pytest.approx(math.sqrt(0.5))
    assert success_weight("mean_std", 2, 0.3, eps=0.5) == pytest.approx(0.5)
    assert success_weight("median_mad", 2, 0.3, eps=0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.8])
def test_weights_of_large_groups(p):
    # d/dp of 2 arcsin(sqrt(p)) is 1 / sqrt(p (1 - p))
    assert success_weight("mean_std", 256, p) == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=0.03)
    assert success_weight("max_rl", 256, p) == pytest.approx(1 / p, rel=1e-9)
    assert success_weight("median_mad", 256, p) == pytest.approx(1 / min(p, 1 - p), rel=0.06)


def test_one_sibling_moves_nothing_unless_rewards_are_taken_as_they_are():
    for how in EVERY:
        assert success_weight(how, 1, 0.3) == (1.0 if how == "none" else 0.0)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_a_weight_needs_a_probability(p):
    with pytest.raises(ValueError, match="no probability"):
        success_weight("mean", 4, p)


def test_scale_and_direction_with_graded_rewards():
    pi_V, rewards_V = softmax(LOGITS[3]), np.array([0.0, 1.0, 0.5])
    true_V = gradient_of_the_best(pi_V, rewards_V, 1)
    assert true_V == pytest.approx(pi_V * (rewards_V - pi_V @ rewards_V), abs=1e-15)
    # (G - 1) / G = 2 / 3: a sibling is a third of its own baseline
    assert expected_gradient(pi_V, rewards_V, 3, "mean") / true_V == pytest.approx([2 / 3] * 3, abs=1e-12)
    assert expected_gradient(pi_V, rewards_V, 3, "leave_one_out") / true_V == pytest.approx([1.0] * 3, abs=1e-12)
    assert expected_gradient(pi_V, rewards_V, 3, "none") / true_V == pytest.approx([1.0] * 3, abs=1e-12)
    # three different factors: not a rescaled gradient of the mean reward but another direction
    assert expected_gradient(pi_V, rewards_V, 3, "mean_std", eps=0.0) / true_V == pytest.approx([1.91, 1.73, 2.83], abs=5e-3)


@pytest.mark.parametrize(("answers", "size"), [(3, 2), (3, 3), (3, 4), (4, 4)])
def test_pass_at_k_climbs_the_best_of_k(answers, size):
    pi_V = softmax(LOGITS[answers])
    for rewards_V in (np.array([0.0, 1.0, 0.5, -0.3])[:answers], np.array([2.0, -1.0, -1.0, 0.0])[:answers]):
        for k in range(1, size):
            got = expected_gradient(pi_V, rewards_V, size, "pass_at_k", k=k)
            assert got == pytest.approx(gradient_of_the_best(pi_V, rewards_V, k), abs=1e-12)


def test_the_gradient_of_the_best_is_the_slope_of_the_expectation():
    logits_V, rewards_V, k, step = LOGITS[3], np.array([0.0, 1.0, 0.5]), 3, 1e-5

    def best(shifted_V: np.ndarray) -> float:
        pi_V = softmax(shifted_V)
        return sum(math.prod(pi_V[y] for y in draws) * max(rewards_V[y] for y in draws) for draws in product(range(3), repeat=k))

    slopes = [(best(logits_V + step * side) - best(logits_V - step * side)) / (2 * step) for side in np.eye(3)]
    assert gradient_of_the_best(softmax(logits_V), rewards_V, k) == pytest.approx(slopes, abs=1e-9)


def test_estimators_whose_target_is_called_exact_are_exact():
    pi_V, rewards_V = softmax(LOGITS[3]), np.array([0.0, 1.0, 0.5])
    for how, target in TARGETS.items():
        k = 2 if how == "pass_at_k" else 1
        hit = np.allclose(expected_gradient(pi_V, rewards_V, 3, how, k=k), gradient_of_the_best(pi_V, rewards_V, k), atol=1e-12)
        assert hit == ("exactly" in target)
