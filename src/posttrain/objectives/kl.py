"""Per-token estimators of the divergence from a reference policy, with what each one really descends when used as a loss.

With x = log pi(token) - log ref(token), tokens drawn from pi (spec/faults.md 25):

    k1 = x              value: KL(pi||ref), unbiased.  As a loss its expected gradient is zero: refused.
    k2 = x^2 / 2        value: biased, small.          As a loss it descends KL(pi||ref).
    k3 = e^-x - 1 + x   value: KL(pi||ref), unbiased.  As a loss it descends KL(ref||pi), the other direction.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KLEstimator = Literal["k2", "k3"]
DESCENDS = {"k2": "KL(policy || reference)", "k3": "KL(reference || policy)"}


def kl_loss(
    logp_BT: Float[Tensor, "B T"], reference_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], estimator: KLEstimator
) -> Float[Tensor, "B T"]:
    """Per-token KL term with gradient, exactly 0 where masked or where both policies agree."""
    x_BT = torch.where(mask_BT, logp_BT - reference_BT, 0.0)
    if estimator == "k2":
        return x_BT.square() / 2
    return torch.expm1(-x_BT) + x_BT
