"""Sampler and trainer may compute different probabilities for one token under the same weights. What to do about it.

    pi / behaviour = (pi / old) * (old / behaviour) = staleness * mismatch

The two factors have different causes and different remedies, so they stay two (spec/recipes-of-the-labs.md G-51): `limits.py` acts on
the first, this file on the second. kappa = old / behaviour, both at the sampling temperature; it never carries a gradient. The weight it
gives multiplies the token's surrogate; a weight of zero is a named fate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posttrain.objectives.axes import BinaryKL, Correction, Decoupled, Mask, NoCorrection, Truncate
from posttrain.objectives.limits import binary_kl
from posttrain.objectives.ratios import sequence_mean
from posttrain.objectives.streams import Fate


class Corrected(NamedTuple):
    """Weight per token without gradient, and the fate of tokens that lose theirs (TRAINED elsewhere, UNTRAINED outside the mask)."""

    weight_BT: Tensor
    fate_BT: Tensor


def correction(
    old_BT: Float[Tensor, "B T"], behaviour_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], how: Correction
) -> Corrected:
    """Weight of each token for the disagreement between trainer and sampler.

    Example, the same token at 0.30 in the trainer and 0.25 in the sampler: kappa 1.2. Truncate(cap=2) and Decoupled() weigh it 1.2;
    Mask(0.5, 5) weighs it 1.2, or 1 with weight="one"; at kappa 6 Truncate weighs it 2 and Mask leaves it out.
    Source: spec/recipes-of-the-labs.md G-31, G-54, G-55, T16.
    """
    log_kappa_BT = torch.where(mask_BT, old_BT - behaviour_BT, 0.0).detach()
    kappa_BT = log_kappa_BT.exp()
    one_BT = torch.ones_like(kappa_BT)
    fate_BT = torch.where(mask_BT, int(Fate.TRAINED), int(Fate.UNTRAINED))
    match how:
        case NoCorrection():
            return Corrected(one_BT, fate_BT)
        case Truncate():
            if how.level == "sequence":
                kappa_BT = log_kappa_BT.sum(-1, keepdim=True).exp().expand_as(kappa_BT)
            return Corrected(kappa_BT.clamp(max=how.cap), fate_BT)
        case Decoupled():
            return Corrected(kappa_BT if how.cap is None else kappa_BT.clamp(max=how.cap), fate_BT)
        case BinaryKL():
            p_BT = torch.where(mask_BT, old_BT.detach(), 0.0).exp().clamp(max=1.0)
            q_BT = torch.where(mask_BT, behaviour_BT, 0.0).exp().clamp(max=1.0)
            outside_BT = mask_BT & (binary_kl(p_BT, q_BT) > how.threshold)
            return Corrected(torch.where(outside_BT, 0.0, one_BT), torch.where(outside_BT, int(Fate.MISMATCHED), fate_BT))
        case Mask():
            return _mask(log_kappa_BT, kappa_BT, mask_BT, how, fate_BT)


def _mask(log_kappa_BT: Tensor, kappa_BT: Tensor, mask_BT: Tensor, how: Mask, fate_BT: Tensor) -> Corrected:
    outside_BT = mask_BT & ((kappa_BT < how.lower) | (kappa_BT > how.upper))
    mean_B1 = sequence_mean(log_kappa_BT, mask_BT).exp()
    rejected_B1 = torch.zeros_like(mean_B1, dtype=torch.bool)
    if how.sequence_lower is not None:
        rejected_B1 = rejected_B1 | (mean_B1 < how.sequence_lower)
    if how.sequence_upper is not None:
        rejected_B1 = rejected_B1 | (mean_B1 > how.sequence_upper)
    fate_BT = torch.where(outside_BT, int(Fate.MISMATCHED), fate_BT)
    fate_BT = torch.where(rejected_B1 & mask_BT, int(Fate.REJECTED), fate_BT)
    kept_BT = kappa_BT if how.weight == "ratio" else torch.ones_like(kappa_BT)
    return Corrected(torch.where(fate_BT == Fate.TRAINED, kept_BT, 0.0), fate_BT)
