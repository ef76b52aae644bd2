"""From logits to log-probabilities of the sampling distribution. Sampler and trainer call the same function.

A ratio between two policies is only meaningful when both sides describe the distribution that the token was drawn from: temperature,
top-k and top-p belong to it (spec/faults.md 30, 31).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posttrain.core.sampling import Sampling


def warp(logits_NV: Float[Tensor, "N V"], sampling: Sampling, keep_N: Int[Tensor, " N"] | None = None) -> Float[Tensor, "N V"]:
    """Logits of the distribution that `sampling` draws from; excluded tokens become -inf.

    Args:
        logits_NV: raw logits.
        sampling: temperature, then top-k, then top-p, in that order. Greedy is not a distribution to score under: temperature 1 is used.
        keep_N: ids that stay in the support whatever the cut says. A trainer passes the token that was sampled: it was in the sampler's
            support, and a last-bit difference of two logits at the edge of the cut must not turn its log-probability into -inf.
    """
    logits_NV = logits_NV.float()
    if sampling.temperature not in (0.0, 1.0):
        logits_NV = logits_NV / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1.0:
        return logits_NV
    sorted_NV, order_NV = logits_NV.detach().sort(dim=-1, descending=True, stable=True)
    drop_NV = torch.zeros_like(sorted_NV, dtype=torch.bool)
    if sampling.top_k:
        drop_NV[:, sampling.top_k :] = True
    if sampling.top_p < 1.0:
        mass_NV = sorted_NV.masked_fill(drop_NV, -torch.inf).softmax(-1).double().cumsum(-1)
        drop_NV[:, 1:] |= mass_NV[:, :-1] >= sampling.top_p  # the token that crosses top_p stays
    drop_NV = torch.zeros_like(drop_NV).scatter(-1, order_NV, drop_NV)
    if keep_N is not None:
        drop_NV = drop_NV.scatter(-1, keep_N[:, None], False)
    return logits_NV.masked_fill(drop_NV, -torch.inf)


def logps_and_entropy(
    logits_NV: Float[Tensor, "N V"], targets_N: Int[Tensor, " N"], sampling: Sampling
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of each distribution, in nats, under the sampling distribution, in float32.

    Entropy carries no gradient: it is a measurement here.
    """
    logp_NV = warp(logits_NV, sampling, keep_N=targets_N).log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logp_NV.exp() * logp_NV.masked_fill(logp_NV.isinf(), 0.0)).sum(-1)
    return logp_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


def draw(
    logits_NV: Float[Tensor, "N V"], sampling: Sampling, uniforms_N: Float[Tensor, " N"]
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """One token per row by inverse CDF, with its log-probability under the sampling distribution.

    One uniform per row and token makes a request's result a function of its own stream, whoever shares the batch. The cumulative sum is
    taken in float64: in float32 a 50k vocabulary loses the tail.
    """
    if sampling.greedy:
        ids_N = logits_NV.argmax(-1)
        return ids_N, torch.zeros_like(logits_NV[:, 0], dtype=torch.float32)
    logp_NV = warp(logits_NV, sampling).log_softmax(-1)
    cdf_NV = logp_NV.double().exp().cumsum(-1)
    wanted_N1 = (uniforms_N.double() * cdf_NV[:, -1])[:, None]
    ids_N = torch.searchsorted(cdf_NV, wanted_N1, right=True).squeeze(-1).clamp(max=logits_NV.shape[-1] - 1)
    return ids_N, logp_NV.gather(-1, ids_N[:, None]).squeeze(-1)
