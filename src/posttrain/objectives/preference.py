"""Direct preference optimisation: raise the margin between a chosen and a rejected response, relative to a reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


class DPO(NamedTuple):
    """Per-pair loss and the two implicit rewards. Both falling while the margin grows is likelihood displacement, so both are kept."""

    loss_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def sequence_logps(logp_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum of trained-token log-probabilities per row, in nats."""
    return torch.where(mask_BT, logp_BT, 0.0).sum(-1)


def dpo(
    chosen_P: Float[Tensor, " P"],
    rejected_P: Float[Tensor, " P"],
    ref_chosen_P: Float[Tensor, " P"],
    ref_rejected_P: Float[Tensor, " P"],
    beta: float,
) -> DPO:
    """-log sigmoid(beta [(chosen - ref_chosen) - (rejected - ref_rejected)]), one value per pair.

    Arguments are summed response log-probabilities. At policy == reference the loss is ln 2 and both rewards are 0.
    Example: log-ratios +2 and -5 at beta 0.1: margin 0.7, loss 0.4032, rewards +0.2 and -0.5.
    Source: Rafailov et al. 2023; spec/ladder-at-100m.md H-10.
    """
    chosen_reward_P = beta * (chosen_P - ref_chosen_P)
    rejected_reward_P = beta * (rejected_P - ref_rejected_P)
    return DPO(-F.logsigmoid(chosen_reward_P - rejected_reward_P), chosen_reward_P.detach(), rejected_reward_P.detach())
