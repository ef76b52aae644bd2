"""The one place where per-token values become a number. The denominator is an argument.

With the denominator of the whole optimizer step given from outside, any split into micro-batches, packs or ranks adds up to exactly the
gradient of one batch (spec/faults.md 2-8). Which weight each mode gives to a token of a response with L trained tokens, in a step of N
tokens, B responses and P prompts, whose prompt has M trained tokens over all its responses:

    token_mean            1 / N          a long response counts more
    seq_mean_token_mean   1 / (B L)      every response counts once; a token of a long one counts less
    seq_mean_token_sum    1 / B          every token counts the same, a response by its length
    constant              1 / c          the same, with a scale that does not depend on the step
    prompt_mean           1 / (P M)      every prompt counts once, every token within it the same
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posttrain.objectives.axes import Aggregation


def weights(mask_BT: Bool[Tensor, "B T"], how: Aggregation, prompt_tokens_B: Float[Tensor, " B"] | None = None) -> Float[Tensor, "B T"]:
    """Weight of each trained token before division by the denominator, in float64; 0 where untrained."""
    weight_BT = mask_BT.double()
    if how == "seq_mean_token_mean":
        return weight_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    if how == "prompt_mean":
        if prompt_tokens_B is None:
            raise ValueError("prompt_mean needs prompt_tokens_B: the trained tokens of each row's whole prompt, siblings included")
        return weight_BT / prompt_tokens_B.clamp(min=1)[:, None]
    return weight_BT


def aggregate(
    values_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    how: Aggregation,
    denominator: float,
    prompt_tokens_B: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Sum of weighted per-token values divided by `denominator`.

    Args:
        values_BT: per-token values; anything, NaN included, may stand where the mask is False.
        how: token_mean (denominator: trained tokens of the step), seq_mean_token_mean and seq_mean_token_sum (denominator: sequences of
            the step), constant (denominator: any fixed number, e.g. sequences x token budget as in Dr. GRPO), prompt_mean (denominator:
            prompts of the step).
        denominator: of the whole optimizer step, over all ranks and micro-batches; must be positive.
        prompt_tokens_B: trained tokens of each row's whole prompt; a group may be split over micro-batches, so it comes from outside.
    """
    if not denominator > 0:
        raise ValueError(f"denominator = {denominator}: an optimizer step needs at least one trained token")
    weight_BT = weights(mask_BT, how, prompt_tokens_B).to(values_BT.dtype)
    return (torch.where(mask_BT, values_BT, 0.0) * weight_BT).sum() / denominator


def denominator_of(lengths: Sequence[int], how: Aggregation, constant: float = 0.0, prompts: Sequence[str] = ()) -> float:
    """The denominator of a step whose sequences have these numbers of trained tokens; empty sequences and prompts do not count.

    Args:
        prompts: the prompt of each sequence; needed by prompt_mean.
    """
    match how:
        case "token_mean":
            return float(sum(lengths))
        case "seq_mean_token_mean" | "seq_mean_token_sum":
            return float(sum(length > 0 for length in lengths))
        case "constant":
            return constant
        case "prompt_mean":
            return float(len({prompt for prompt, length in zip(prompts, lengths, strict=True) if length > 0}))
