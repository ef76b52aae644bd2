"""What happens to a token whose probability has changed too far. One function per member of the axis.

Each takes the log-ratio (with gradient), the advantage and the mask, and returns the surrogate to be *maximised* per token together with
the fate of each token. `rho` is the ratio; "no gradient" means exactly zero. What a token contributes, as d surrogate / d logp:

    none              rho A
    clip              rho A, 0 above 1 + high when A > 0 and below 1 - low when A < 0; 0 beyond `dual` (A < 0) and beyond `cap` (any A)
    cispo             sg(clip(rho)) A
    band              rho A inside the band, 0 outside
    squared           rho A - 2 omega log rho inside the band, 0 outside
    squared_sequence  A - tau log(pi(y) / pi_old(y))
    divergence        rho A, 0 when moving away and beyond the threshold

Clip-Cov and KL-Cov look at the whole optimizer step: covariance.py selects, this file applies. Golden numbers:
spec/recipes-of-the-labs.md T46.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posttrain.objectives.axes import CISPO, Band, Clip, ClipCov, Divergence, KLCov, Limit, NoLimit, Squared, SquaredSequence
from posttrain.objectives.streams import Fate


class Limited(NamedTuple):
    """Surrogate per token (to be maximised) and the fate of each token."""

    surrogate_BT: Tensor
    fate_BT: Tensor


def limited(
    log_ratio_BT: Float[Tensor, "B T"],
    advantage_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    limit: Limit,
    old_BT: Float[Tensor, "B T"],
    gate_BT: Bool[Tensor, "B T"] | None = None,
) -> Limited:
    """Apply one member of the axis.

    Args:
        log_ratio_BT: 0 where untrained (ratios.py).
        advantage_BT: 0 where untrained.
        old_BT: log-probability of the token under the policy that the ratio is measured against; only `divergence` reads it.
        gate_BT: tokens that the covariance rule selected.
    """
    match limit:
        case NoLimit():
            return _all(_ratio(log_ratio_BT) * advantage_BT, mask_BT)
        case Clip():
            return clip(log_ratio_BT, advantage_BT, mask_BT, limit)
        case CISPO():
            return cispo(log_ratio_BT, advantage_BT, mask_BT, limit)
        case Band():
            return band(log_ratio_BT, advantage_BT, mask_BT, limit)
        case Squared():
            return squared(log_ratio_BT, advantage_BT, mask_BT, limit)
        case SquaredSequence():
            return squared_sequence(log_ratio_BT, advantage_BT, mask_BT, limit)
        case Divergence():
            return divergence(log_ratio_BT, advantage_BT, mask_BT, limit, old_BT)
        case ClipCov():
            inner = clip(log_ratio_BT, advantage_BT, mask_BT, Clip(low=limit.low, high=limit.high))
            return gated(inner, mask_BT, gate_BT)
        case KLCov():
            chosen_BT = torch.zeros_like(mask_BT) if gate_BT is None else gate_BT & mask_BT
            penalty_BT = torch.where(chosen_BT, limit.coef * (log_ratio_BT.square() / 2), 0.0)
            return _all(_ratio(log_ratio_BT) * advantage_BT - penalty_BT, mask_BT)


def clip(log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, limit: Clip) -> Limited:
    """min(rho A, clip(rho, 1 - low, 1 + high) A), optionally with a floor for A < 0 (dual clip, Ye et al. 2020) and an outer cap (MAI).

    Example, low = high = 0.2: rho 1.3 with A = 1 gives 1.2 without gradient; rho 1.3 with A = -1 gives -1.3 with gradient 1.3, the branch
    that the clip leaves open; cap = 2 closes it for rho > 2.
    """
    ratio_BT = _ratio(log_ratio_BT)
    if limit.cap is not None:
        beyond_BT = ratio_BT > limit.cap
        held_BT = log_ratio_BT - log_ratio_BT.detach() + 1.0  # value 1, the gradient of the log-ratio
        ratio_BT = torch.where(beyond_BT, limit.cap * (held_BT if limit.outer == "weight" else 1.0), ratio_BT)
    free_BT = ratio_BT * advantage_BT
    bounded_BT = ratio_BT.clamp(1.0 - limit.low, 1.0 + limit.high) * advantage_BT
    surrogate_BT = torch.minimum(free_BT, bounded_BT)
    stopped_BT = bounded_BT < free_BT
    if limit.cap is not None and limit.outer == "clamp":
        stopped_BT = stopped_BT | (beyond_BT & (advantage_BT != 0))
    if limit.dual is not None:
        floor_BT = limit.dual * advantage_BT
        stopped_BT = stopped_BT | ((advantage_BT < 0) & (surrogate_BT < floor_BT))
        surrogate_BT = torch.where(advantage_BT < 0, torch.maximum(surrogate_BT, floor_BT), surrogate_BT)
    return _left_out(surrogate_BT, mask_BT, stopped_BT, Fate.CLIPPED)


def cispo(log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, limit: CISPO) -> Limited:
    """sg(min(rho, 1 + high)) A log pi: a bounded weight, and no token is silenced (MiniMax-M1 2025).

    The surrogate carries log pi up to a constant: its value is that of weight * A * (1 + log pi - sg(log pi)).
    """
    lowest = None if limit.low is None else 1.0 - limit.low
    weight_BT = log_ratio_BT.detach().exp().clamp(lowest, 1.0 + limit.high)
    return _all(weight_BT * advantage_BT * (1.0 + log_ratio_BT - log_ratio_BT.detach()), mask_BT)


def band(log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, limit: Band) -> Limited:
    """rho A where lower <= rho <= upper, zero outside; the bounds may differ where A < 0 (GLM-5, MiMo-V2.6)."""
    ratio_BT = _ratio(log_ratio_BT)
    negative_BT = advantage_BT < 0
    lower_BT = torch.full_like(advantage_BT, limit.lower)
    upper_BT = torch.full_like(advantage_BT, limit.upper)
    if limit.lower_negative is not None:
        lower_BT = lower_BT.masked_fill(negative_BT, limit.lower_negative)
    if limit.upper_negative is not None:
        upper_BT = upper_BT.masked_fill(negative_BT, limit.upper_negative)
    outside_BT = (ratio_BT.detach() < lower_BT) | (ratio_BT.detach() > upper_BT)
    return _left_out(torch.where(outside_BT, 0.0, ratio_BT * advantage_BT), mask_BT, outside_BT, Fate.OUT_OF_BAND)


def squared(log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, limit: Squared) -> Limited:
    """rho A - omega (log rho)^2 inside the band, zero outside whatever the sign of A (Kimi K2.5)."""
    ratio_BT = _ratio(log_ratio_BT)
    outside_BT = (ratio_BT.detach() < limit.lower) | (ratio_BT.detach() > limit.upper)
    value_BT = ratio_BT * advantage_BT - limit.omega * log_ratio_BT.square()
    return _left_out(torch.where(outside_BT, 0.0, value_BT), mask_BT, outside_BT, Fate.OUT_OF_BAND)


def squared_sequence(log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, limit: SquaredSequence) -> Limited:
    """A log pi(y) - tau / 2 (log pi(y) / pi_old(y))^2, each token carrying its share of the square (Kimi k1.5).

    With x_t the token log-ratios and S their sum over the response, the shares S x_t add up to S^2. Needs token log-ratios.
    """
    total_B1 = log_ratio_BT.sum(-1, keepdim=True)
    score_BT = advantage_BT * (1.0 + log_ratio_BT - log_ratio_BT.detach())
    return _all(score_BT - limit.tau / 2 * total_B1 * log_ratio_BT, mask_BT)


def divergence(log_ratio_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, limit: Divergence, old_BT: Tensor) -> Limited:
    """DPPO (Qi et al. 2026): the trust region is measured in probability, on the two outcomes {this token, any other}.

    A rare token may multiply its probability without leaving it; a common one may not move far. Masked only when moving further away:
    rho > 1 with A > 0, rho < 1 with A < 0. Example: old 0.5, new 0.7: total variation 0.2.
    """
    ratio_BT = _ratio(log_ratio_BT)
    old_p_BT = old_BT.exp()
    new_p_BT = (old_BT + log_ratio_BT.detach()).exp().clamp(max=1.0)
    if limit.measure == "tv":
        distance_BT = (new_p_BT - old_p_BT).abs()
    else:
        distance_BT = binary_kl(old_p_BT, new_p_BT)
    away_BT = torch.where(advantage_BT > 0, ratio_BT > 1, ratio_BT < 1) & (advantage_BT != 0)
    outside_BT = away_BT & (distance_BT > limit.threshold)
    return _left_out(torch.where(outside_BT, 0.0, ratio_BT * advantage_BT), mask_BT, outside_BT, Fate.OUT_OF_BAND)


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL between two coins with heads p and q, in nats; 0 log 0 is 0."""
    tiny = torch.finfo(p.dtype).tiny
    rest = torch.xlogy(1 - p, (1 - p).clamp(min=tiny) / (1 - q).clamp(min=tiny))
    return torch.xlogy(p, p.clamp(min=tiny) / q.clamp(min=tiny)) + rest


def gated(inner: Limited, mask_BT: Tensor, gate_BT: Tensor | None) -> Limited:
    """Take the gradient, not the value, from the tokens that the covariance rule selected; clipped tokens keep their own fate."""
    if gate_BT is None:
        return inner
    chosen_BT = gate_BT & mask_BT & (inner.fate_BT == Fate.TRAINED)
    surrogate_BT = torch.where(chosen_BT, inner.surrogate_BT.detach(), inner.surrogate_BT)
    return Limited(surrogate_BT, torch.where(chosen_BT, int(Fate.GATED), inner.fate_BT))


def _ratio(log_ratio_BT: Tensor) -> Tensor:
    """exp, held at e^80: float32 overflows at e^88, and 0 * inf would be a NaN in the gradient of a token that is left out."""
    return log_ratio_BT.clamp(max=80.0).exp()


def _all(surrogate_BT: Tensor, mask_BT: Tensor) -> Limited:
    return Limited(surrogate_BT, torch.where(mask_BT, int(Fate.TRAINED), int(Fate.UNTRAINED)))


def _left_out(surrogate_BT: Tensor, mask_BT: Tensor, out_BT: Tensor, reason: Fate) -> Limited:
    fate_BT = torch.where(out_BT, int(reason), int(Fate.TRAINED))
    return Limited(surrogate_BT, torch.where(mask_BT, fate_BT, int(Fate.UNTRAINED)))
