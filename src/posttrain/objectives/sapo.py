"""SAPO: a soft gate on the token ratio instead of a clip (Gao et al. 2025).

    surrogate_t = A 4 / tau sigmoid(tau (rho - 1))        tau larger where A < 0

The gate has slope 1 at rho = 1, so on-policy this is the policy gradient; it flattens smoothly on both sides instead of stopping at a
bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.objectives.streams import Streams

TAU_POSITIVE = 1.0
TAU_NEGATIVE = 1.05
"""Tokens with A < 0 raise the logits of every other token and are held tighter; both values from the source."""


def sapo(streams: Streams) -> Tensor:
    """Loss per token, 0 where untrained. Example: rho 1.5, A 1: -4 sigmoid(0.5) = -2.490, gradient by logp -4 * 0.2350 * 1.5 = -1.410."""
    clean = streams.masked()
    ratio_BT = (clean.logp_BT - clean.old_BT).exp()
    # filled in the dtype of the streams: two plain floats in torch.where would make float32 of 1.05
    tau_BT = torch.full_like(ratio_BT, TAU_POSITIVE).masked_fill(clean.advantage_BT < 0, TAU_NEGATIVE).detach()
    return -clean.advantage_BT * 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))


def sapo_coefficient(log_ratio: float, advantage: float) -> float:
    """d surrogate / d logp, as the certificate checks it: 4 s (1 - s) rho A with s = sigmoid(tau (rho - 1))."""
    ratio, tau = math.exp(log_ratio), TAU_NEGATIVE if advantage < 0 else TAU_POSITIVE
    s = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 * s * (1 - s) * ratio * advantage
