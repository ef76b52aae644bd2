"""From logits to log-probabilities of the sampling distribution. Sampler and trainer call the same function.

A ratio between two policies is only meaningful when both sides describe the distribution that the token was drawn from: temperature,
top-k and top-p belong to it (spec/faults.md 30, 31).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
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
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if divisor(sampling) != 1.0:
        logits_NV = logits_NV / divisor(sampling)
    if not cuts(sampling):
        return logits_NV
    last_N = last_kept(logits_NV, sampling)
    edge_N = logits_NV.gather(-1, last_N[:, None]).squeeze(-1)
    return logits_NV.masked_fill(outside(logits_NV, edge_N, last_N, keep_N), -torch.inf)


def divisor(sampling: Sampling) -> float:
    """What the logits are divided by: the temperature, or 1 for greedy."""
    return sampling.temperature or 1.0


def cuts(sampling: Sampling) -> bool:
    """Whether top-k or top-p excludes tokens."""
    return bool(sampling.top_k) or sampling.top_p < 1.0


def last_kept(logits_NV: Float[Tensor, "N V"], sampling: Sampling) -> Int[Tensor, " N"]:
    """The least likely token of each row that top-k, then top-p, keep; of equal logits the lower id is the more likely one.

    One id per row says what the cut excludes, so a backward pass does not have to sort again.
    """
    sorted_NV, order_NV = logits_NV.detach().sort(dim=-1, descending=True, stable=True)
    drop_NV = torch.zeros_like(sorted_NV, dtype=torch.bool)
    if sampling.top_k:
        drop_NV[:, sampling.top_k :] = True
    if sampling.top_p < 1.0:
        mass_NV = sorted_NV.masked_fill(drop_NV, -torch.inf).softmax(-1).double().cumsum(-1)
        drop_NV[:, 1:] |= mass_NV[:, :-1] >= sampling.top_p  # the token that crosses top_p stays
    kept_N = (~drop_NV).sum(-1)
    return order_NV.gather(-1, kept_N[:, None] - 1).squeeze(-1)


def outside(
    logits_NC: Float[Tensor, "N C"],
    edge_N: Float[Tensor, " N"],
    last_N: Int[Tensor, " N"],
    keep_N: Int[Tensor, " N"] | None = None,
    first: int = 0,
) -> Bool[Tensor, "N C"]:
    """Which tokens of a slice of the vocabulary a cut excludes: those less likely than the last one kept.

    Args:
        logits_NC: logits of the ids first, first + 1, ...
        edge_N: logit of `last_N`. It may come from an earlier product: that the last one kept is inside does not hang on its last bit.
        last_N: id of the last token kept.
        keep_N: ids that are inside whatever their logit says.
        first: id of the first column.

    Example: of the logits (2, 1, 1, 0) with last kept id 1, ids 2 and 3 are outside; with last kept id 2 only id 3 is.
    """
    ids_C, edge_N1, last_N1 = torch.arange(first, first + logits_NC.shape[-1], device=logits_NC.device), edge_N[:, None], last_N[:, None]
    out_NC = (logits_NC < edge_N1) | ((logits_NC == edge_N1) & (ids_C > last_N1))
    out_NC &= ids_C != last_N1
    return out_NC if keep_N is None else out_NC & (ids_C != keep_N[:, None])


class TokenScores(NamedTuple):
    """What a distribution says about N tokens, in nats.

    Example: probabilities (0.5, 0.3, 0.2), target 1: logp_N = [log 0.3], entropy_N = [1.03]; the top 2 are ids [[0, 1]] with
    log-probabilities [[log 0.5, log 0.3]]; at ids [[2]] stands [[log 0.2]].
    """

    logp_N: Tensor
    """Log-probability of each target; with gradient."""
    entropy_N: Tensor
    """Entropy of each distribution; with gradient only where asked for."""
    top: tuple[Tensor, Tensor] | None = None
    """Ids and log-probabilities [N, K] of the most likely tokens, most likely first; without gradient."""
    at_NK: Tensor | None = None
    """Log-probabilities of given ids; with gradient. -inf, without gradient, where the cut excludes the id."""


def logit_scores(
    logits_NV: Float[Tensor, "N V"],
    targets_N: Int[Tensor, " N"],
    sampling: Sampling,
    *,
    entropy_gradient: bool = False,
    top_k: int = 0,
    at_NK: Int[Tensor, "N K"] | None = None,
) -> TokenScores:
    """Scores of targets under the distribution that `sampling` draws from, in float32 (float64 for float64 logits).

    The plain path: the logits and several copies of them are alive until the backward pass. `kernel.linear_scores` gives the same
    numbers from hidden states in a fraction of the memory.

    Args:
        logits_NV: raw logits.
        targets_N: ids to score; they stay in the support whatever the cut says.
        entropy_gradient: whether entropy is a term of a loss, or only measured.
        top_k: how many of the most likely tokens to return, at most V; 0 for none.
        at_NK: further ids to score.
    """
    logp_NV = warp(logits_NV, sampling, keep_N=targets_N).log_softmax(-1)
    seen_NV = logp_NV if entropy_gradient else logp_NV.detach()
    entropy_N = -(seen_NV.exp() * seen_NV.masked_fill(seen_NV.isinf(), 0.0)).sum(-1)
    logp_N = logp_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    top = found_NK = None
    if top_k:
        top_NK, ids_NK = logp_NV.detach().topk(top_k)
        top = (ids_NK, top_NK)
    if at_NK is not None:
        found_NK = logp_NV.gather(-1, at_NK)
        found_NK = torch.where(found_NK.isneginf(), -torch.inf, found_NK)  # no gradient from an excluded id
    return TokenScores(logp_N, entropy_N, top, found_NK)


def logps_and_entropy(
    logits_NV: Float[Tensor, "N V"], targets_N: Int[Tensor, " N"], sampling: Sampling
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target (with gradient) and entropy of each distribution (without), as in `logit_scores`."""
    scores = logit_scores(logits_NV, targets_N, sampling)
    return scores.logp_N, scores.entropy_N


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
