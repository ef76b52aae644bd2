"""By how much has the policy changed its mind about a token, measured at the grain of a token, a sentence or a whole response.

Every grain is written per token: the value is that of the token's sentence or sequence, the gradient is the token's own,

    log ratio_t = sg(mean over the segment of (logp - base)) + (logp_t - sg(logp_t)),

so that the gradient of ratio_t * A_t is ratio * A_t * grad logp_t. With one advantage per response this is GSPO's gradient exactly, and it
stays right when advantages differ within a response (GSPO's token variant; Zheng et al. 2025). Source: spec/recipes-of-the-labs.md G-28,
G-29; spec/book-3 C2.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posttrain.objectives.axes import RatioLevel


def log_ratio(
    logp_BT: Float[Tensor, "B T"],
    base_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    level: RatioLevel,
    sentence_BT: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """log(pi / pi_base) per token, 0 where untrained.

    Args:
        base_BT: log-probabilities of the policy to compare with; no gradient flows into them.
        level: "token" (logp - base), "sentence" and "sequence" (mean over the trained tokens of the segment: log of the geometric mean of
            the token ratios), "none" (value 0, gradient of logp: plain REINFORCE when multiplied by an advantage).
        sentence_BT: needed by "sentence".

    Example: a response with token log-ratios 0.2 and 0.0 has sequence log-ratio 0.1 at both tokens, a ratio of 1.105.
    """
    delta_BT = torch.where(mask_BT, logp_BT - base_BT.detach(), 0.0)
    if level == "token":
        return delta_BT
    own_BT = delta_BT - delta_BT.detach()
    if level == "none":
        return own_BT
    if level == "sequence":
        return torch.where(mask_BT, sequence_mean(delta_BT.detach(), mask_BT), 0.0) + own_BT
    if sentence_BT is None:
        raise ValueError("a ratio per sentence needs sentence_BT, the sentence that each token belongs to")
    index_BT = torch.where(mask_BT, sentence_BT, 0)
    sums_BS, counts_BS = (delta_BT.new_zeros(len(delta_BT), int(index_BT.max()) + 1 if index_BT.numel() else 1) for _ in range(2))
    sums_BS.scatter_add_(-1, index_BT, delta_BT.detach())
    counts_BS.scatter_add_(-1, index_BT, mask_BT.to(delta_BT.dtype))
    return torch.where(mask_BT, (sums_BS / counts_BS.clamp(min=1)).gather(-1, index_BT), 0.0) + own_BT


def sequence_mean(values_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
    """Mean over each row's trained tokens; 0 for a row without any."""
    total_B1 = torch.where(mask_BT, values_BT, 0.0).sum(-1, keepdim=True)
    return total_B1 / mask_BT.sum(-1, keepdim=True).clamp(min=1)
