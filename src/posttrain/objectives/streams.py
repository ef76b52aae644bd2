"""What a policy objective sees of one micro-batch, and what it answers.

    Streams -> ratios -> limit, correction -> KL, entropy -> Terms        (one value per token; aggregate.py makes the number)

Every token of the mask meets exactly one `Fate`: it is trained, or it is left out for a named reason, in which case its surrogate gradient
is exactly zero. Totals reconcile: trained slots = sum over fates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from posttrain.core.metrics import Metric


class Fate(IntEnum):
    """Why the policy term of a token has a gradient, or has none."""

    UNTRAINED = 0
    """Outside the mask."""
    TRAINED = 1
    CLIPPED = 2
    """Beyond the bound of the ratio, on the side where the bound holds."""
    OUT_OF_BAND = 3
    """The ratio is outside a band that masks whatever the sign."""
    MISMATCHED = 4
    """Sampler and trainer disagree on this token by more than the correction allows."""
    REJECTED = 5
    """The whole response was rejected for its mismatch."""
    GATED = 6
    """Selected by the covariance rule."""


LEFT_OUT = tuple(fate for fate in Fate if fate > Fate.TRAINED)


@dataclass(frozen=True, slots=True)
class Streams:
    """Per-token streams of B completions padded to T tokens, in nats; where `mask_BT` is False any value may stand, NaN included.

    Example: two completions of 2 and 1 trained tokens: mask [[1, 1], [1, 0]], logp [[-0.1, -0.3], [-2.0, nan]],
    advantage [[0.5, 0.5], [-0.5, nan]]. On the first update of an on-policy step old equals logp.
    """

    logp_BT: Tensor
    """log pi of the token under the policy being trained, with gradient."""
    old_BT: Tensor
    """The same under the policy before this phase's first update (the proximal policy), in the trainer's arithmetic."""
    behaviour_BT: Tensor
    """What the sampler recorded."""
    advantage_BT: Tensor
    mask_BT: Tensor
    reference_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    """Entropy of the policy's distribution at each token; with gradient when a bonus is paid."""
    sentence_BT: Tensor | None = None
    """Index of the sentence within the completion, from 0."""
    gate_BT: Tensor | None = None
    """True for tokens that the covariance rule selected over the whole optimizer step."""
    divergence_BT: Tensor | None = None
    """Exact or top-K KL to the reference, with gradient, when the scorer computes it."""

    def masked(self) -> Streams:
        """The same with 0 in every untrained slot, so that no later exponential or product can leak what stood there."""

        def clean(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.where(self.mask_BT, values, torch.zeros_like(values))

        return Streams(
            logp_BT=torch.where(self.mask_BT, self.logp_BT, 0.0),
            old_BT=torch.where(self.mask_BT, self.old_BT, 0.0),
            behaviour_BT=torch.where(self.mask_BT, self.behaviour_BT, 0.0),
            advantage_BT=torch.where(self.mask_BT, self.advantage_BT, 0.0),
            mask_BT=self.mask_BT,
            reference_BT=clean(self.reference_BT),
            entropy_BT=clean(self.entropy_BT),
            sentence_BT=clean(self.sentence_BT),
            gate_BT=clean(self.gate_BT),
            divergence_BT=clean(self.divergence_BT),
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """An objective's answer: unreduced per-token loss, the fate of every token, and metrics that carry their own reduction."""

    loss_BT: Tensor
    fate_BT: Tensor
    metrics: dict[str, Metric]
