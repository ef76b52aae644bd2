"""DPO on worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.objectives.preference import dpo, sequence_logps


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_step_zero_is_ln_2_with_rewards_zero():
    out = dpo(one(-12.0), one(-30.0), one(-12.0), one(-30.0), 0.1)
    assert out.loss_P.item() == pytest.approx(math.log(2.0), abs=1e-12)
    assert (out.chosen_reward_P.item(), out.rejected_reward_P.item()) == (0.0, 0.0)


def test_worked_pair():
    # log-ratios -10 + 12 = +2 and -25 + 20 = -5: margin 0.1 x 7 = 0.7, -log sigmoid(0.7) = log(1 + e^-0.7) = 0.403186
    out = dpo(one(-10.0), one(-25.0), one(-12.0), one(-20.0), 0.1)
    assert out.loss_P.item() == pytest.approx(0.403186, abs=1e-6)
    assert out.chosen_reward_P.item() == pytest.approx(0.2)
    assert out.rejected_reward_P.item() == pytest.approx(-0.5)


def test_likelihood_displacement_lowers_the_loss_while_both_rewards_fall():
    # log-ratios -9 and -14: margin 0.5, log(1 + e^-0.5) = 0.474077, still below ln 2
    out = dpo(one(-21.0), one(-34.0), one(-12.0), one(-20.0), 0.1)
    assert out.loss_P.item() == pytest.approx(0.474077, abs=1e-6)
    assert out.chosen_reward_P.item() == pytest.approx(-0.9)
    assert out.rejected_reward_P.item() == pytest.approx(-1.4)


def test_gradient_raises_chosen_and_lowers_rejected():
    # d loss / d chosen = -beta sigmoid(-margin) = -0.1 x 0.331812 at margin 0.7
    chosen, rejected = one(-10.0).requires_grad_(), one(-25.0).requires_grad_()
    dpo(chosen, rejected, one(-12.0), one(-20.0), 0.1).loss_P.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.0331812, abs=1e-7)
    assert rejected.grad.item() == pytest.approx(0.0331812, abs=1e-7)


def test_a_hopeless_margin_stays_finite():
    # softplus(1000) = 1000; log(sigmoid(-1000)) computed naively would be -inf
    assert dpo(one(-10000.0), one(0.0), one(0.0), one(0.0), 0.1).loss_P.item() == pytest.approx(1000.0)


def test_sequence_logps_sum_trained_tokens_per_row():
    logp = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0]])
    mask = torch.tensor([[True, True, False], [False, True, True]])
    assert sequence_logps(logp, mask).tolist() == [-3.0, -48.0]
