"""The critic's side of PPO: the clipped regression of values on returns, and how much of the returns the values explain."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posttrain.core.metrics import ExplainedVariance


class ValueTerms(NamedTuple):
    """Per-token loss, and where the clip stopped the gradient."""

    loss_BT: Tensor
    clipped_BT: Tensor


def value_loss(
    values_BT: Float[Tensor, "B T"],
    returns_BT: Float[Tensor, "B T"],
    old_values_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    clip: float | None,
) -> ValueTerms:
    """0.5 * max((v - R)^2, (clip(v, old - c, old + c) - R)^2), in squared units of the return; 0 where masked.

    The larger error counts, so a value that left the band around its old one gets no gradient for going further towards the return, and the
    full one for going back. `clipped_BT` is True where the gradient is zero because of the bound.

    Args:
        values_BT: V now, with gradient.
        returns_BT: the targets R; a constant here, whatever gradient they carry.
        old_values_BT: V before the first update of the step, the one that the advantages used; a constant.
        mask_BT: trained tokens. Masked slots of the other arguments may hold anything.
        clip: half-width c of the band, in units of the return; None for the plain squared error.

    Example: R 1, old 0, v 0.5, c 0.2. The clipped value 0.2 has the larger error: loss 0.5 * 0.8^2 = 0.32, gradient 0. With R -1 the free
    error is larger: loss 0.5 * 1.5^2 = 1.125, gradient v - R = 1.5.
    Source: PPO (Schulman et al. 2017), value clipping as in its reference code; spec/recipes-of-the-labs.md G-22, G-23.
    """
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    returns_BT = torch.where(mask_BT, returns_BT.detach(), 0.0)
    free_BT = (values_BT - returns_BT).square()
    if clip is None:
        return ValueTerms(0.5 * free_BT, torch.zeros_like(mask_BT))
    old_BT = torch.where(mask_BT, old_values_BT.detach(), 0.0)
    # bounds on v itself: old + (v - old) would differ from v in the last bit and report clips that did not happen
    bounded_BT = (values_BT.clamp(old_BT - clip, old_BT + clip) - returns_BT).square()
    return ValueTerms(0.5 * torch.maximum(free_BT, bounded_BT), bounded_BT > free_BT)


def explained_variance(
    values_BT: Float[Tensor, "B T"], returns_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> ExplainedVariance:
    """How much of the spread of the returns over the trained tokens the values account for; sums in float64, no gradient.

    Measure it with the values that the advantages used: after an update they have seen the answer.
    Source: OpenAI baselines, `explained_variance`.
    """
    returns_N = returns_BT[mask_BT].detach().double()
    residuals_N = returns_N - values_BT[mask_BT].detach().double()
    return ExplainedVariance(
        float(len(returns_N)),
        returns_N.sum().item(),
        returns_N.square().sum().item(),
        residuals_N.sum().item(),
        residuals_N.square().sum().item(),
    )
