"""The clipped policy-gradient loss, per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Clipped(NamedTuple):
    """Per-token loss, the ratio it used, and where the clip stopped the gradient."""

    loss_BT: Tensor
    ratio_BT: Tensor
    clipped_BT: Tensor


def clipped_surrogate(
    logp_BT: Float[Tensor, "B T"],
    old_BT: Float[Tensor, "B T"],
    advantage_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    low: float,
    high: float,
) -> Clipped:
    """PPO's pessimistic surrogate with separate bounds: -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(logp - old).

    Masked slots may hold anything: they are replaced before the exponential, so that neither value nor gradient can leak (0 * inf is NaN).
    `clipped_BT` is True where the gradient is zero because of the bound: rho above 1 + high with A > 0, or below 1 - low with A < 0.
    Source: PPO (Schulman et al. 2017); asymmetric bounds after DAPO; spec/ladder-at-100m.md H-20.
    """
    delta_BT = torch.where(mask_BT, logp_BT - old_BT, 0.0)
    advantage_BT = torch.where(mask_BT, advantage_BT, 0.0)
    ratio_BT = delta_BT.exp()
    free_BT = ratio_BT * advantage_BT
    bounded_BT = ratio_BT.clamp(1.0 - low, 1.0 + high) * advantage_BT
    clipped_BT = mask_BT & (bounded_BT < free_BT)
    return Clipped(-torch.minimum(free_BT, bounded_BT), ratio_BT.detach(), clipped_BT)
