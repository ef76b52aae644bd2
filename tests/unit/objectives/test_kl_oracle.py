"""What every KL estimator does in expectation, against exact enumeration over small vocabularies in float64.

The truth is analytic: no autograd, no function of the package. With p = softmax(z):

    d log p_v / d z_j = [v = j] - p_j
    d KL(p||q) / d z_j = p_j (log p_j - log q_j - KL(p||q))
    d KL(q||p) / d z_j = p_j - q_j
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from torch import Tensor

from posttrain.core.errors import ConfigError
from posttrain.objectives.kl import full_kl, kl_loss, kl_value, top_k_kl
from posttrain.objectives.placements import DESCENDS, REFUSED, ExactKL, KLEstimator, KLPlacement, check_placement

REVERSE, FORWARD = "KL(policy || reference)", "KL(reference || policy)"


@dataclass(frozen=True)
class Pair:
    """Logits of a policy and of a reference, and everything that follows from them by hand."""

    z: tuple[float, ...]
    r: tuple[float, ...]

    @property
    def p(self) -> list[float]:
        return softmax(self.z)

    @property
    def q(self) -> list[float]:
        return softmax(self.r)

    @property
    def x(self) -> list[float]:
        return [math.log(a / b) for a, b in zip(self.p, self.q, strict=True)]

    @property
    def reverse(self) -> float:
        return sum(p * x for p, x in zip(self.p, self.x, strict=True))

    @property
    def forward(self) -> float:
        return sum(-q * x for q, x in zip(self.q, self.x, strict=True))

    @property
    def grad_reverse(self) -> list[float]:
        return [p * (x - self.reverse) for p, x in zip(self.p, self.x, strict=True)]

    @property
    def grad_forward(self) -> list[float]:
        return [p - q for p, q in zip(self.p, self.q, strict=True)]

    @property
    def grad_mean_k2(self) -> list[float]:
        """d E_p[x^2 / 2] / d z_j = p_j (x_j^2 / 2 + x_j - E[x^2 / 2 + x]): the score term, and the slope x."""
        f = [x * x / 2 + x for x in self.x]
        mean = sum(p * value for p, value in zip(self.p, f, strict=True))
        return [p * (value - mean) for p, value in zip(self.p, f, strict=True)]

    def score(self, weight: list[float]) -> list[float]:
        """E[weight grad log p], grad log p_v = (one-hot of v) - p: what a reward of -weight descends."""
        p = self.p
        return [sum(p[v] * weight[v] * ((v == j) - p[j]) for v in range(len(p))) for j in range(len(p))]


def softmax(z: tuple[float, ...]) -> list[float]:
    total = sum(math.exp(value) for value in z)
    return [math.exp(value) / total for value in z]


PAIRS = [
    Pair((math.log(0.80), math.log(0.09), math.log(0.11)), (math.log(0.3), math.log(0.6), math.log(0.1))),
    Pair((0.2, -0.5, 1.1), (-0.3, 0.4, 0.1)),
    Pair((0.7, -1.3, 2.1, 0.0, -0.4), (-0.6, 0.9, 1.2, -2.0, 0.3)),
    Pair((3.0, -2.0, 0.5, -4.0, 1.0), (-3.0, 2.0, 0.0, 1.5, 1.0)),
]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{len(pair.z)} tokens")


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def leaf(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with gradient, log-probabilities of policy and reference: one row whose token v is the v-th of the vocabulary."""
    logits = tensor(pair.z).requires_grad_()
    return logits, logits.log_softmax(-1)[None], tensor(pair.q).log()[None]


def everything(pair: Pair) -> Tensor:
    return torch.ones(1, len(pair.z), dtype=torch.bool)


def in_the_loss(pair: Pair, estimator: KLEstimator) -> list[float]:
    """E over tokens of the gradient of the loss at that token; the draw itself carries no gradient."""
    logits, logp, reference = leaf(pair)
    per_token = kl_loss(logp, reference, everything(pair), estimator, dtype=torch.float64)
    return torch.autograd.grad((tensor(pair.p) * per_token[0]).sum(), logits)[0].tolist()


def in_the_reward(pair: Pair, estimator: KLEstimator) -> list[float]:
    """What subtracting the estimate from the reward of each token descends."""
    _, logp, reference = leaf(pair)
    return pair.score(kl_value(logp, reference, everything(pair), estimator, dtype=torch.float64)[0].tolist())


def close(got, expected) -> None:
    torch.testing.assert_close(tensor(got), tensor(expected), rtol=0.0, atol=1e-12)


def apart(got: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(got, other, strict=True))


@every_pair
@pytest.mark.parametrize("estimator", ["k1", "k3", "rho_k3"])
def test_the_mean_value_is_the_divergence(pair, estimator):
    _, logp, reference = leaf(pair)
    value = kl_value(logp, reference, everything(pair), estimator, dtype=torch.float64)[0]
    close((tensor(pair.p) * value).sum().item(), pair.reverse)


@every_pair
def test_the_mean_value_of_k2_is_biased(pair):
    _, logp, reference = leaf(pair)
    value = kl_value(logp, reference, everything(pair), "k2", dtype=torch.float64)[0]
    mean = (tensor(pair.p) * value).sum().item()
    close(mean, sum(p * x * x / 2 for p, x in zip(pair.p, pair.x, strict=True)))
    assert abs(mean - pair.reverse) > 1e-3


@every_pair
def test_k1_in_the_loss_has_no_expected_gradient_and_is_refused(pair):
    logits, logp, reference = leaf(pair)
    (gradient,) = torch.autograd.grad((tensor(pair.p) * (logp - reference)[0]).sum(), logits)
    close(gradient.tolist(), [0.0] * len(pair.z))
    with pytest.raises(ValueError, match="expected gradient is zero.*use k2 or rho_k3 in the loss, or k1 in the reward"):
        kl_loss(logp, reference, everything(pair), "k1")


@every_pair
@pytest.mark.parametrize("estimator", ["k2", "rho_k3"])
def test_k2_and_rho_k3_in_the_loss_descend_policy_to_reference(pair, estimator):
    close(in_the_loss(pair, estimator), pair.grad_reverse)


@every_pair
def test_k3_in_the_loss_descends_reference_to_policy(pair):
    close(in_the_loss(pair, "k3"), pair.grad_forward)
    assert apart(in_the_loss(pair, "k3"), pair.grad_reverse) > 1e-2


@every_pair
def test_k1_in_the_reward_descends_policy_to_reference(pair):
    close(in_the_reward(pair, "k1"), pair.grad_reverse)


@every_pair
@pytest.mark.parametrize("estimator", ["k3", "rho_k3"])
def test_k3_in_the_reward_descends_one_divergence_and_climbs_the_other(pair, estimator):
    close(in_the_reward(pair, estimator), [a - b for a, b in zip(pair.grad_reverse, pair.grad_forward, strict=True)])


@every_pair
def test_k2_in_the_reward_loses_the_gradient_of_the_divergence(pair):
    close(in_the_reward(pair, "k2"), [a - b for a, b in zip(pair.grad_mean_k2, pair.grad_reverse, strict=True)])


def test_the_directions_disagree_on_the_sign_of_a_token():
    # p = (.80, .09, .11), q = (.3, .6, .1): KL(p||q) = .8 (0.9808) + .09 (-1.8971) + .11 (0.0953) = 0.6244
    # third token: .11 (0.0953 - 0.6244) = -0.0582 in one direction, .11 - .10 = +0.01 in the other
    assert in_the_loss(PAIRS[0], "k2")[2] == pytest.approx(-0.0582, abs=1e-4)
    assert in_the_loss(PAIRS[0], "k3")[2] == pytest.approx(0.01, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_in_the_reward_k2_and_k3_do_not_hold_a_policy_near_its_reference(estimator):
    # Half the distance to the reference: a divergence has half the gradient, these have a quarter and less.
    far, near = (Pair((0.0, h, -h), (0.0, 0.0, 0.0)) for h in (0.02, 0.01))
    assert apart(in_the_loss(near, estimator), [0.0] * 3) / apart(in_the_loss(far, estimator), [0.0] * 3) == pytest.approx(0.5, abs=0.01)
    assert apart(in_the_reward(near, estimator), [0.0] * 3) / apart(in_the_reward(far, estimator), [0.0] * 3) < 0.26


def test_what_k3_in_the_reward_descends_goes_below_its_value_at_the_reference():
    # A divergence is smallest, 0, at the reference. Here p = (.8, .1, .1) and q is uniform.
    # KL(p||q) = .8 ln 2.4 + .2 ln .3 = 0.7004 - 0.2408 = 0.4596
    # KL(q||p) = (ln(1 / 2.4) + 2 ln(1 / .3)) / 3 = (-0.8755 + 2.4079) / 3 = 0.5108: the difference is -0.0512
    pair = Pair((math.log(8.0), 0.0, 0.0), (0.0, 0.0, 0.0))
    assert (pair.reverse, pair.forward) == pytest.approx((0.4596, 0.5108), abs=1e-4)
    # and the way leads further out: to make the penalty smaller, the first token, above its reference already, has to grow
    assert in_the_reward(pair, "k3")[0] < 0 < pair.grad_reverse[0]


@every_pair
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_exact_divergences_and_their_gradients(pair, direction):
    logits, logp, reference = leaf(pair)
    out = full_kl(logp, reference, direction)
    close(out.tolist(), [pair.reverse if direction == "reverse" else pair.forward])
    expected = pair.grad_reverse if direction == "reverse" else pair.grad_forward
    close(torch.autograd.grad(out.sum(), logits)[0].tolist(), expected)


@every_pair
@pytest.mark.parametrize("k", [1, 2])
def test_top_k_is_the_divergence_of_merged_tokens(pair, k):
    # Buckets b: the first k tokens alone, all others together. d KL / d z_j = p_j (X_b(j) - KL), X_b = log P_b / Q_b.
    p, q = (values[:k] + [sum(values[k:])] for values in (pair.p, pair.q))
    x = [math.log(a / b) for a, b in zip(p, q, strict=True)]
    merged = sum(a * b for a, b in zip(p, x, strict=True))
    logits, logp, reference = leaf(pair)
    out = top_k_kl(logp[:, :k], reference[:, :k])
    close(out.tolist(), [merged])
    close(torch.autograd.grad(out.sum(), logits)[0].tolist(), [pair.p[j] * (x[min(j, k)] - merged) for j in range(len(pair.p))])
    assert merged < pair.reverse or k == len(pair.p) - 1


@every_pair
@pytest.mark.parametrize(("placement", "estimator"), DESCENDS)
def test_the_table_names_what_the_gradient_descends(pair, placement, estimator):
    if estimator in get_args(ExactKL):
        logits, logp, reference = leaf(pair)
        out = full_kl(logp, reference) if estimator == "full" else top_k_kl(logp, reference)
        got = torch.autograd.grad(out.sum(), logits)[0].tolist()
    else:
        got = in_the_loss(pair, estimator) if placement == "loss" else in_the_reward(pair, estimator)
    named = DESCENDS[placement, estimator]
    assert named.startswith((REVERSE, FORWARD))
    # 1e-11: a bucket of nothing counts as 2.2e-16 in float64
    assert apart(got, pair.grad_reverse if named.startswith(REVERSE) else pair.grad_forward) < 1e-11


def test_every_combination_is_either_named_or_refused():
    combinations = {(placement, e) for placement in get_args(KLPlacement) for e in (*get_args(KLEstimator), *get_args(ExactKL))}
    assert set(DESCENDS) | set(REFUSED) == combinations
    assert not set(DESCENDS) & set(REFUSED)


@pytest.mark.parametrize(("placement", "estimator"), DESCENDS)
def test_what_is_named_passes(placement, estimator):
    check_placement(placement, estimator)


@pytest.mark.parametrize(("placement", "estimator"), REFUSED)
def test_what_is_refused_says_why_and_what_instead(placement, estimator):
    with pytest.raises(ConfigError) as raised:
        check_placement(placement, estimator)
    message = str(raised.value)
    assert message.startswith(f"KL estimator {estimator} in the {placement}: ")
    assert REFUSED[placement, estimator] in message
    assert "use " in message
    assert "\n" not in message


def test_the_full_divergence_in_the_reward_says_nothing_about_its_own_token():
    pair = PAIRS[2]
    close(pair.score([pair.reverse] * len(pair.z)), [0.0] * len(pair.z))


def test_a_given_ratio_corrects_for_tokens_of_another_policy():
    # Tokens drawn from b, ratio p / b with its gradient: E_b[grad (ratio k3)] = grad KL(p||q), whatever b is.
    pair, drawn = PAIRS[2], tensor(softmax((0.0, 0.5, 1.0, -0.5, 0.2)))
    logits, logp, reference = leaf(pair)
    per_token = kl_loss(logp, reference, everything(pair), "rho_k3", (logp - drawn.log()).exp(), torch.float64)
    close((drawn * per_token[0]).sum().item(), pair.reverse)
    close(torch.autograd.grad((drawn * per_token[0]).sum(), logits)[0].tolist(), pair.grad_reverse)
