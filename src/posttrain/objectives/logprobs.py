"""From logits to log-probabilities of the sampling distribution. Sampler and trainer call the same function.

A ratio between two policies is only meaningful when both sides describe the distribution that the token was drawn from: temperature,
top-k, top-p and min-p belong to it (spec/faults.md 30, 31). What a cut leaves hangs on the last bit of a logit, so a sampler records it,
and the trainer renormalises over the same ids instead of cutting again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posttrain.core.sampling import Sampling


class Replay(NamedTuple):
    """A sampling distribution, and what the sampler recorded that its cut left.

    Example: Replay(Sampling(top_k=2), tensor([[0, 4], [0, 7]])): row 0 was drawn from ids 4 and 7, any other row is cut anew.
    """

    sampling: Sampling
    candidate_M2: Tensor | None
    """Pairs (row, id) ordered by row; a row that has some keeps exactly those. None when nothing was recorded."""


def parts(how: Sampling | Replay) -> tuple[Sampling, Tensor | None]:
    """Sampling and recorded candidates."""
    return (how.sampling, how.candidate_M2) if isinstance(how, Replay) else (how, None)


def warp(logits_NV: Float[Tensor, "N V"], sampling: Sampling | Replay, keep_N: Int[Tensor, " N"] | None = None) -> Float[Tensor, "N V"]:
    """Logits of the distribution that `sampling` draws from; excluded tokens become -inf.

    Args:
        logits_NV: raw logits.
        sampling: temperature, top-k, top-p, min-p, in that order. Greedy is not a distribution to score under: temperature 1 is used.
        keep_N: ids that stay in the support whatever the cut says. A trainer passes the token that was sampled: it was in the sampler's
            support, and a last-bit difference of two logits at the edge of the cut must not turn its log-probability into -inf.
    """
    sampling, candidate_M2 = parts(sampling)
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if divisor(sampling) != 1.0:
        logits_NV = logits_NV / divisor(sampling)
    if candidate_M2 is None and not sampling.cuts:
        return logits_NV
    return logits_NV.masked_fill(cut_of(logits_NV, sampling, keep_N, candidate_M2).excludes(logits_NV), -torch.inf)


def divisor(sampling: Sampling) -> float:
    """What the logits are divided by: the temperature, or 1 for greedy."""
    return sampling.temperature or 1.0


class Cut(NamedTuple):
    """Which tokens some rows leave out: those less likely than the last one that a cut keeps, or those that no sampler recorded.

    Example: logits (2, 1, 0) under top_k=2 have edge 1 and last id 1. With the candidates (0, 2) recorded for the row, edge and last say
    nothing and id 1 is left out.
    """

    edge_N: Tensor
    """Logit of the last token kept; -inf in rows that are not cut anew."""
    last_N: Tensor
    """Its id; V in rows that are not cut anew."""
    keep_N: Tensor | None
    """Ids that are inside whatever the cut says."""
    candidate_M2: Tensor | None
    """Pairs (row, id) ordered by row."""

    def excludes(self, logits_NC: Tensor, first: int = 0) -> Tensor:
        """[N, C] for logits of the ids first, first + 1, ..."""
        if self.candidate_M2 is None:
            return outside(logits_NC, self.edge_N, self.last_N, self.keep_N, first)
        replayed_N = _has_candidates(self.candidate_M2, len(logits_NC))
        if replayed_N.all():
            return _not_candidates(self.candidate_M2, replayed_N, logits_NC.shape[-1], first)
        out_NC = outside(logits_NC, self.edge_N, self.last_N, self.keep_N, first)
        return out_NC | _not_candidates(self.candidate_M2, replayed_N, logits_NC.shape[-1], first)


def cut_of(logits_NV: Tensor, sampling: Sampling, keep_N: Tensor | None = None, candidate_M2: Tensor | None = None) -> Cut:
    """The cut of `sampling` in rows without candidates, from logits that are divided by the temperature."""
    n, vocab = logits_NV.shape
    edge_N, last_N = torch.full_like(logits_NV[:, 0], -torch.inf), torch.full_like(logits_NV[:, 0], vocab, dtype=torch.long)
    if sampling.cuts:
        anew_N = torch.ones_like(last_N, dtype=torch.bool) if candidate_M2 is None else ~_has_candidates(candidate_M2, n)
        if anew_N.any():
            cut_NV = logits_NV.detach() if anew_N.all() else logits_NV.detach()[anew_N]
            last_N[anew_N] = last_kept(cut_NV, sampling)
            edge_N[anew_N] = cut_NV.gather(-1, last_N[anew_N][:, None]).squeeze(-1)
    return Cut(edge_N, last_N, keep_N, candidate_M2)


def _has_candidates(candidate_M2: Tensor, rows: int) -> Tensor:
    found_N = torch.zeros(rows, dtype=torch.bool, device=candidate_M2.device)
    found_N[candidate_M2[:, 0]] = True
    return found_N


def _not_candidates(candidate_M2: Tensor, replayed_N: Tensor, width: int, first: int) -> Tensor:
    """Which of the ids first, ..., first + width - 1 are not among their row's candidates; none in a row that has no candidates."""
    out_NC = replayed_N[:, None].repeat(1, width)
    row_M, column_M = candidate_M2[:, 0], candidate_M2[:, 1] - first
    here_M = (column_M >= 0) & (column_M < width)
    out_NC[row_M[here_M], column_M[here_M]] = False
    return out_NC


def last_kept(logits_NV: Float[Tensor, "N V"], sampling: Sampling) -> Int[Tensor, " N"]:
    """The least likely token of each row that top-k, top-p and min-p keep; of equal logits the lower id is the more likely one.

    One id per row says what the cut excludes, so a backward pass does not have to sort again.
    """
    sorted_NV, order_NV = logits_NV.detach().sort(dim=-1, descending=True, stable=True)
    drop_NV = torch.zeros_like(sorted_NV, dtype=torch.bool)
    if sampling.top_k:
        drop_NV[:, sampling.top_k :] = True
    if sampling.top_p < 1.0:
        mass_NV = sorted_NV.masked_fill(drop_NV, -torch.inf).softmax(-1).double().cumsum(-1)
        drop_NV[:, 1:] |= mass_NV[:, :-1] >= sampling.top_p  # the token that crosses top_p stays
    if sampling.min_p:
        drop_NV |= sorted_NV < sorted_NV[:, :1] + math.log(sampling.min_p)
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
    sampling: Sampling | Replay,
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

    One uniform per row and token makes a request's result a function of its own stream, whoever shares the batch.
    """
    ids_N, logp_N, _ = draw_kept(logits_NV, sampling, uniforms_N)
    return ids_N, logp_N


def draw_kept(
    logits_NV: Float[Tensor, "N V"], sampling: Sampling, uniforms_N: Float[Tensor, " N"]
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"], Bool[Tensor, "N V"] | None]:
    """As `draw`, and which tokens the cut left; None when nothing is cut. The sampled token is always among them."""
    warped_NV = warp(logits_NV, sampling) if sampling.cuts or not sampling.greedy else logits_NV
    kept_NV = ~warped_NV.isneginf() if sampling.cuts else None
    if sampling.greedy:
        ids_N = logits_NV.argmax(-1)
        if kept_NV is not None:
            kept_NV[torch.arange(len(ids_N), device=ids_N.device), ids_N] = True  # of equal logits argmax may take another
        return ids_N, torch.zeros_like(logits_NV[:, 0], dtype=torch.float32), kept_NV
    logp_NV = warped_NV.log_softmax(-1)
    ids_N = invert(logp_NV.exp(), uniforms_N)
    return ids_N, logp_NV.gather(-1, ids_N[:, None]).squeeze(-1), kept_NV


def invert(prob_NV: Float[Tensor, "N V"], uniforms_N: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """The token at which each row's cumulative probability passes its uniform; never one of probability 0.

    Sums of blocks of about sqrt(V) tokens find the block, a cumulative sum within it the token: both in float64, since in float32 a 50k
    vocabulary loses the tail, but without a float64 copy of the row.

    Example: probabilities (0.5, 0.3, 0.2) give token 0 for uniforms below 0.5, token 1 below 0.8, else token 2.
    """
    rows, size = prob_NV.shape
    block = 1 << ((size - 1).bit_length() // 2)
    if size % block:
        prob_NV = torch.nn.functional.pad(prob_NV, (0, -size % block))
    prob_NKB = prob_NV.view(rows, -1, block)
    cdf_NK = prob_NKB.sum(-1).double().cumsum(-1)
    wanted_N1 = uniforms_N.double()[:, None] * cdf_NK[:, -1:]  # stays below the total: a uniform is at most 1 - 2^-53
    block_N1 = torch.searchsorted(cdf_NK, wanted_N1, right=True).clamp_(max=cdf_NK.shape[1] - 1)
    before_N1 = torch.nn.functional.pad(cdf_NK, (1, 0)).gather(1, block_N1)
    inner_NB = prob_NKB[torch.arange(rows, device=prob_NV.device), block_N1[:, 0]].double().cumsum(-1)
    # The block's float32 sum may exceed the float64 one by a rounding: what is left must stay below the last sum.
    left_N1 = torch.minimum(wanted_N1 - before_N1, inner_NB[:, -1:] * (1 - 2.0**-53))
    return (block_N1 * block + torch.searchsorted(inner_NB, left_N1, right=True)).squeeze(-1)
