"""KL estimators against exact enumeration over a vocabulary of three tokens: values and the direction each one descends."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.objectives.kl import DESCENDS, kl_loss

LOGITS = torch.tensor([0.2, -0.5, 1.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.3, 0.4, 0.1], dtype=torch.float64).log_softmax(-1)
ALL = torch.ones(1, 3, dtype=torch.bool)


def expected_gradient(estimator: str) -> torch.Tensor:
    """E over tokens drawn from the policy of the gradient of the loss at that token; the draw itself carries no gradient."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    per_token = kl_loss(logp[None], REFERENCE[None], ALL, estimator)
    (gradient,) = torch.autograd.grad((logp.detach().exp() * per_token[0]).sum(), logits)
    return gradient


def gradient_of(divergence) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(logits.log_softmax(-1)), logits)
    return gradient


def policy_to_reference(logp: torch.Tensor) -> torch.Tensor:
    return (logp.exp() * (logp - REFERENCE)).sum()


def reference_to_policy(logp: torch.Tensor) -> torch.Tensor:
    return (REFERENCE.exp() * (REFERENCE - logp)).sum()


def test_k2_descends_policy_to_reference():
    torch.testing.assert_close(expected_gradient("k2"), gradient_of(policy_to_reference))
    assert DESCENDS["k2"] == "KL(policy || reference)"


def test_k3_descends_reference_to_policy():
    torch.testing.assert_close(expected_gradient("k3"), gradient_of(reference_to_policy))
    assert DESCENDS["k3"] == "KL(reference || policy)"


def test_the_two_directions_differ_in_sign_somewhere():
    other = torch.tensor([-0.2, 0.6, 0.5], dtype=torch.float64).log_softmax(-1)
    logits = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    gradients = []
    for estimator in ("k2", "k3"):
        logp = logits.log_softmax(-1)
        loss = (logp.detach().exp() * kl_loss(logp[None], other[None], ALL, estimator)[0]).sum()
        gradients.append(torch.autograd.grad(loss, logits)[0])
    assert not torch.allclose(gradients[0], gradients[1], atol=1e-3)


def test_k3_value_is_unbiased():
    logp = LOGITS.log_softmax(-1)
    value = (logp.exp() * kl_loss(logp[None], REFERENCE[None], ALL, "k3")[0]).sum()
    torch.testing.assert_close(value, policy_to_reference(logp))


def test_values_by_hand():
    # x = log 2: k2 = 0.6931^2 / 2 = 0.240227; k3 = 1/2 - 1 + 0.693147 = 0.193147.  x = -log 2: k3 = 2 - 1 - 0.693147 = 0.306853
    logp = torch.tensor([[math.log(2.0), -math.log(2.0)]])
    none, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    assert kl_loss(logp, none, mask, "k2")[0].tolist() == pytest.approx([0.240227, 0.240227], abs=1e-6)
    assert kl_loss(logp, none, mask, "k3")[0].tolist() == pytest.approx([0.193147, 0.306853], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_exactly_zero_where_policies_agree(estimator):
    logp = torch.tensor([[-0.1, -3.7, -20.0]], requires_grad=True)
    out = kl_loss(logp, logp.detach(), ALL, estimator)
    assert out.tolist() == [[0.0, 0.0, 0.0]]
    assert torch.autograd.grad(out.sum(), logp)[0].tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_large_gap_keeps_its_gradient(estimator):
    # 5 nats below the reference: nothing clamps; k2' = x = -5, k3' = 1 - e^5 = -147.4
    logp = torch.tensor([[-6.0]], requires_grad=True)
    out = kl_loss(logp, torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool), estimator)
    expected = {"k2": -5.0, "k3": 1 - math.exp(5)}[estimator]
    assert torch.autograd.grad(out.sum(), logp)[0].item() == pytest.approx(expected, rel=1e-6)
