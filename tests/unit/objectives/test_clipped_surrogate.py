"""The clipped surrogate: value, gradient and clip flag in all six regions."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.objectives.policy import clipped_surrogate

ONE = torch.ones(1, 1, dtype=torch.bool)


def surrogate(ratio: float, advantage: float):
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    none = torch.zeros(1, 1, dtype=torch.float64)
    out = clipped_surrogate(logp, none, torch.full((1, 1), advantage, dtype=torch.float64), ONE, 0.2, 0.28)
    (gradient,) = torch.autograd.grad(out.loss_BT.sum(), logp)
    return out, gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # inside the band [0.8, 1.28]: loss -rho A, gradient -rho A
        (1.1, 2.0, -2.2, -2.2, False),
        (1.1, -2.0, 2.2, 2.2, False),
        # above the band: a good token stops at 1.28 A, a bad one is still pushed down
        (1.5, 2.0, -2.56, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),
        # below the band: a bad token stops at 0.8 A, a good one is still pulled up
        (0.5, 2.0, -1.0, -1.0, False),
        (0.5, -2.0, 1.6, 0.0, True),
    ],
)
def test_every_region(ratio, advantage, loss, gradient, clipped):
    out, slope = surrogate(ratio, advantage)
    assert out.loss_BT.item() == pytest.approx(loss)
    assert slope == pytest.approx(gradient)
    assert out.ratio_BT.item() == pytest.approx(ratio)
    assert out.clipped_BT.item() is clipped


def test_bounds_are_asymmetric():
    # 1.25 lies within 1 + 0.28 but not within 1 + 0.2
    assert surrogate(1.25, 1.0)[0].clipped_BT.item() is False
    assert surrogate(0.79, -1.0)[0].clipped_BT.item() is True
    assert surrogate(0.81, -1.0)[0].clipped_BT.item() is False


def test_unmoved_policy_has_ratio_exactly_one():
    logp = torch.tensor([[-0.3, -17.3, -1e-9]])
    out = clipped_surrogate(logp, logp.clone(), torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), 0.2, 0.28)
    assert out.ratio_BT.tolist() == [[1.0, 1.0, 1.0]]
    assert out.loss_BT.tolist() == [[-1.0, -1.0, -1.0]]
    assert not out.clipped_BT.any()


def test_overflowing_masked_ratio_is_harmless():
    logp = torch.tensor([[0.0, 500.0]], requires_grad=True)
    out = clipped_surrogate(logp, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[True, False]]), 0.2, 0.28)
    out.loss_BT.sum().backward()
    assert out.loss_BT.tolist() == [[-1.0, 0.0]]
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-1.0, 0.0]]
