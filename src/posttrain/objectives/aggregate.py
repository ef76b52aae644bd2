"""The one place where per-token values become a number. The denominator is an argument.

With the denominator of the whole optimizer step given from outside, any split into micro-batches, packs or ranks adds up to exactly the
gradient of one batch (spec/faults.md 2-8).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


def weights(mask_BT: Bool[Tensor, "B T"], how: Aggregation) -> Float[Tensor, "B T"]:
    """Weight of each trained token before division by the denominator; 0 where untrained."""
    weight_BT = mask_BT.float()
    if how == "seq_mean_token_mean":
        weight_BT = weight_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return weight_BT


def aggregate(values_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], how: Aggregation, denominator: float) -> Float[Tensor, ""]:
    """Sum of weighted per-token values divided by `denominator`.

    Args:
        values_BT: per-token values; anything, NaN included, may stand where the mask is False.
        how: token_mean (denominator: trained tokens of the step), seq_mean_token_mean and seq_mean_token_sum (denominator: sequences of
            the step), constant (denominator: any fixed number, e.g. sequences x token budget as in Dr. GRPO).
        denominator: of the whole optimizer step, over all ranks and micro-batches; must be positive.
    """
    if not denominator > 0:
        raise ValueError(f"denominator = {denominator}: an optimizer step needs at least one trained token")
    return (torch.where(mask_BT, values_BT, 0.0) * weights(mask_BT, how)).sum() / denominator


def denominator_of(lengths: list[int], how: Aggregation, constant: float = 0.0) -> float:
    """The denominator of a step whose sequences have these numbers of trained tokens; empty sequences do not count."""
    match how:
        case "token_mean":
            return float(sum(lengths))
        case "seq_mean_token_mean" | "seq_mean_token_sum":
            return float(sum(length > 0 for length in lengths))
        case "constant":
            return constant
