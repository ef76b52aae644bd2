"""How far the policy is from a reference policy, and which divergence each way of penalising it really descends.

With x = log pi(token) - log ref(token) in nats, and tokens drawn from pi:

    estimator   term            mean over pi              gradient as a loss     as a negative reward
    k1          x               KL(pi||ref)               zero: refused          grad KL(pi||ref)
    k2          x^2 / 2         near KL(pi||ref), biased  grad KL(pi||ref)       no divergence: refused
    k3          e^-x - 1 + x    KL(pi||ref)               grad KL(ref||pi)       no divergence: refused
    rho_k3      rho * k3        KL(pi||ref)               grad KL(pi||ref)       equals k3 there: refused

A loss is differentiated token by token; a reward multiplies grad log pi of its token. Hence the same formula has two gradients
(`placements.py` lists which combination descends what, and which are refused):

    loss:    E[grad k]       k3' = 1 - e^-x, so E[k3' grad log pi] = -sum ref grad log pi = grad KL(ref||pi)
    reward:  E[k grad log pi], for k3 grad KL(pi||ref) - grad KL(ref||pi): nothing to first order at the reference, and it can lead away

Per token both k2 and rho_k3 have the gradient x grad log pi. Nothing is clamped: a clamp removes the gradient where the gap is largest.
Sources: spec/faults.md 25, 28; spec/recipes-of-the-labs.md T47; spec/book-5 P29; Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posttrain.objectives.placements import DESCENDS as DESCENDS
from posttrain.objectives.placements import REFUSED, KLEstimator


def kl_value(
    logp_BT: Float[Tensor, "B T"],
    reference_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    estimator: KLEstimator,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B T"]:
    """Per-token estimate in nats, without gradient: to be logged, or (k1) subtracted from a reward.

    Args:
        logp_BT, reference_BT: log-probabilities of the sampled tokens under policy and reference; anything may stand where masked.
        estimator: rho_k3 has the value of k3.
        dtype: float32 or float64. The difference is formed in it and the result has it, so that sums are taken in it too.

    Returns:
        Exactly 0 where masked and where both log-probabilities are equal.

    Example: log .4 and log .001: k1 = ln 400 = 5.99. On-policy distillation has the advantage -k1 against its teacher (G-59).
    """
    return _estimate(_gap(logp_BT.detach(), reference_BT.detach(), mask_BT, dtype), estimator)


def kl_loss(
    logp_BT: Float[Tensor, "B T"],
    reference_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    estimator: KLEstimator,
    ratio_BT: Float[Tensor, "B T"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B T"]:
    """Per-token KL term with gradient; arguments and zeros as in `kl_value`.

    Args:
        ratio_BT: the weight of rho_k3 with its gradient, pi / (the policy that sampled). None: exp(logp - sg(logp)), whose value is 1 and
            whose gradient adds the score function. The other estimators have no weight.

    Without a given ratio the gradient of rho_k3 is x grad log pi as it stands. As a product it would be a difference of two numbers near
    e^-x, which in a float32 `logp` is off by 1 at x = -17 and gone at x = -30; with a given ratio it is that product.

    Raises:
        ValueError: estimator k1.
    """
    if estimator == "k1":
        raise ValueError(f"k1 as a loss: {REFUSED['loss', 'k1']}")
    x_BT = _gap(logp_BT, reference_BT, mask_BT, dtype)
    term_BT = _estimate(x_BT, estimator)
    if estimator != "rho_k3":
        return term_BT
    if ratio_BT is None:  # the value of k3 with the gradient of k2
        slope_BT = _estimate(x_BT, "k2")
        return term_BT.detach() + (slope_BT - slope_BT.detach())
    return torch.where(mask_BT, ratio_BT.to(dtype), 0.0) * term_BT


def full_kl(
    logp_NV: Float[Tensor, "N V"], reference_NV: Float[Tensor, "N V"], direction: Literal["reverse", "forward"] = "reverse"
) -> Float[Tensor, " N"]:
    """Exact divergence of each row in nats, with gradient, from normalised log-probabilities of the whole vocabulary.

    "reverse" is KL(policy || reference), "forward" KL(reference || policy). Entries of -inf are probability 0 and contribute what the limit
    says: nothing, or infinity where the first distribution has mass and the second has none. Cut both to the same support before.

    Example: reference (.49, .02, .49). The peaked policy (.96, .02, .02) has reverse 0.582 and forward 1.238; the flat policy
    (1/3, 1/3, 1/3) has 0.681 and 0.321: reverse prefers the peaked one, forward the flat one (spec/recipes-of-the-labs.md T45).
    """
    if direction == "reverse":
        return _divergence(logp_NV, reference_NV)
    return _divergence(reference_NV, logp_NV)


def top_k_kl(policy_NK: Float[Tensor, "N K"], reference_NK: Float[Tensor, "N K"]) -> Float[Tensor, " N"]:
    """KL(policy || reference) of K tokens and one bucket that holds all others, in nats, with gradient.

    Both arguments are log-probabilities under the whole vocabulary, not renormalised, at the SAME K ids. Merging tokens can only lose
    divergence, so the result is a lower bound of the full one; with K = V they are equal. It is never negative. The sum over the K tokens
    without the bucket is no divergence: it is negative when the reference has more mass on them (spec/book-3 C62).

    Example: p = (.5, .3, .2), q = (.5, .4, .1), K = 2: .3 ln(.3 / .4) = -0.086 alone, + .2 ln(.2 / .1) for the bucket = 0.052.

    A bucket is what the K probabilities leave of 1, known to about 1e-7 when the arguments are float32. One below that counts as 1.2e-7, in
    both distributions alike: it cannot be told from 0, and 0 in the reference alone would make the result infinite.
    """
    smallest = torch.finfo(policy_NK.dtype).eps
    buckets = []
    for logp_NK in (policy_NK, reference_NK):
        rest_N1 = (1.0 - logp_NK.exp().sum(-1, keepdim=True)).clamp(min=smallest).log()
        buckets.append(torch.cat([logp_NK, rest_N1], dim=-1))
    return _divergence(*buckets)


def _gap(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, 0 where masked."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"KL arithmetic in {dtype}: a difference of log-probabilities needs float32 or float64")
    return torch.where(mask_BT, logp_BT.to(dtype) - reference_BT.to(dtype), 0.0)


def _estimate(x_BT: Tensor, estimator: KLEstimator) -> Tensor:
    """The unweighted term of each estimator."""
    match estimator:
        case "k1":
            return x_BT
        case "k2":
            return x_BT.square() / 2
        case "k3" | "rho_k3":
            return torch.expm1(-x_BT) + x_BT


def _divergence(logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """Sum over V of p log(p/q) - p + q; the added terms sum to zero over a distribution.

    With them no entry is negative, so rounding can make neither an entry nor the sum negative, and the error of a small divergence is small
    against it. With d = log(p/q) an entry is p (e^-d - 1 + d), written with q where p < q so that no exponential overflows.
    """
    empty_NV = logp_NV == -torch.inf  # replaced before the difference: -inf minus anything would leak NaN into the gradient
    d_NV = torch.where(empty_NV, 0.0, logp_NV) - torch.where(empty_NV, 0.0, logq_NV)
    above_NV, below_NV = d_NV.clamp(min=0.0), d_NV.clamp(max=0.0)
    where_above_NV = logp_NV.exp() * (torch.expm1(-above_NV) + above_NV)
    where_below_NV = logq_NV.exp() * (below_NV * below_NV.exp() - torch.expm1(below_NV))
    return torch.where(empty_NV, logq_NV.exp(), where_above_NV + where_below_NV).sum(-1)
