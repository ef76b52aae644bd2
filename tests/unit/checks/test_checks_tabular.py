"""The exact world against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posttrain.checks.tabular import (
    derivative,
    divergence_gradient,
    expectation,
    probabilities,
    score_sum,
    softmax,
    tree,
    world,
)

EVEN = np.zeros((3, 2))


def test_fixed_length_has_every_sequence_once():
    where = tree(2, 2)
    assert where.tokens_BT.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert where.states_BT.tolist() == [[0, 1], [0, 1], [0, 2], [0, 2]]  # prefixes "", "0", "1"
    assert where.mask_BT.all()
    assert where.states == 3


def test_an_end_token_makes_lengths_vary():
    where = tree(2, 3, ends=True)  # 0, 10, 110, 111
    assert [row[mask].tolist() for row, mask in zip(where.tokens_BT, where.mask_BT, strict=True)] == [[0], [1, 0], [1, 1, 0], [1, 1, 1]]
    assert where.lengths_B.tolist() == [1, 2, 3, 3]
    assert where.states == 3
    assert probabilities(where, EVEN).tolist() == [0.5, 0.25, 0.125, 0.125]


@pytest.mark.parametrize(
    ("vocabulary", "length", "ends", "count"), [(3, 2, False, 9), (3, 3, True, 15), (5, 1, False, 5), (4, 3, True, 40)]
)
def test_probabilities_sum_to_one(vocabulary, length, ends, count):
    on = world(vocabulary, length, ends=ends)
    assert len(on.where.tokens_BT) == count  # with an end token: 1 + (V - 1) + (V - 1)^2 V for length 3
    assert probabilities(on.where, on.logits_SV).sum() == pytest.approx(1.0, abs=1e-14)


def test_scores_are_onehot_minus_p():
    # one prefix, p = (3/4, 1/4); weights 1 on token 0 and 2 on token 1:
    # (1 - 3/4) - 2 * 3/4 = -5/4 and -1/4 + 2 * (1 - 1/4) = 5/4
    where = tree(2, 1)
    logits = np.log([[3.0, 1.0]])
    assert score_sum(where, logits, np.array([[1.0], [2.0]])) == pytest.approx(np.array([[-1.25, 1.25]]))


def test_complex_step_is_exact():
    # d/dx x^3 = 12 at 2
    assert derivative(lambda x: (x**3).sum(), np.array([2.0]))[0] == 12.0
    # softmax p = (3/4, 1/4): d p0 / d logit0 = p0 (1 - p0) = 3/16, d p0 / d logit1 = -3/16
    gradient = derivative(lambda x: softmax(x)[0], np.log([3.0, 1.0]))
    assert gradient == pytest.approx([3 / 16, -3 / 16], abs=1e-16)


def test_the_score_identity_holds_between_the_two_methods():
    # sum_y p(y) R(y) grad log p(y) is the gradient of E[R]; one side by scores, the other by complex step
    on = world(3, 3, ends=True)
    reward = np.arange(15.0)
    weights = np.where(on.where.mask_BT, (probabilities(on.where, on.logits_SV) * reward)[:, None], 0.0)
    scores = score_sum(on.where, on.logits_SV, weights)
    assert scores == pytest.approx(derivative(expectation(on.where, reward), on.logits_SV), abs=1e-13)
    assert np.abs(scores).max() > 0.1


def test_divergence_gradients_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2). KL(q||p): gradient p - q = (1/4, -1/4).
    # KL(p||q): p_v (log(p_v / q_v) - KL) with KL = 3/4 ln(3/2) + 1/4 ln(1/2)
    logits, reference, one = np.log([[3.0, 1.0]]), np.zeros((1, 2)), np.ones(1)
    forward = divergence_gradient(logits, reference, one, "KL(reference || policy)")
    assert forward == pytest.approx(np.array([[0.25, -0.25]]))
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = divergence_gradient(logits, reference, one, "KL(policy || reference)")
    assert reverse == pytest.approx(np.array([[0.75 * (math.log(1.5) - kl), 0.25 * (math.log(0.5) - kl)]]))
    with pytest.raises(ValueError, match="no divergence is called 'KL'"):
        divergence_gradient(logits, reference, one, "KL")


def test_a_narrow_world_is_near_its_old_policy():
    assert np.abs(world(3, 1, spread=3e-4).old_SV - world(3, 1, spread=3e-4).logits_SV).max() < 2e-3
    on = world(3, 1).on_policy()
    assert on.old_SV is on.behaviour_SV is on.logits_SV
