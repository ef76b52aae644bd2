"""Samples as tensors: packed rows for the model, padded streams for the objective.

A packed row holds several documents; a document is one prompt and the continuations that share it. A token sees its own document's prompt
and its own continuation, nothing else, so a prompt is computed once however many siblings it has, and what was packed together cannot leak:

    document   0 0 0 0 0 0 0 1 1 1 .        two documents and one padding slot
    branch     0 0 0 1 1 2 2 0 0 1 .        0 is the prompt; 1, 2 are siblings
    position   0 1 2 3 4 3 4 0 1 2 .        each sibling continues where the prompt ended

The last token of a continuation is predicted but never read, so it takes no slot.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch. R packed rows of width W, N trained tokens, B samples of at most T tokens.

    Example: a prompt of 3 tokens with continuations (7, 2) and (8, 2) packs into R=1, W=5: ids [p p p 7 8]; N=4 targets [7, 2, 8, 2]
    read from slots [2, 3, 2, 4]; slot_BT = [[0, 1], [2, 3]].
    """

    ids_RW: Tensor
    position_RW: Tensor
    document_RW: Tensor
    """-1 marks padding."""
    branch_RW: Tensor
    source_N: Tensor
    """Flat index into R*W of the hidden state that predicts each trained token."""
    target_N: Tensor
    slot_BT: Tensor
    """Index into N of each token of each sample; -1 where the token is not trained."""
    advantage_BT: Tensor
    behaviour_BT: Tensor
    """Log-probabilities recorded by the sampler; 0 where there are none."""
    sample_B: tuple[int, ...]
    """Position of each row in the list that was packed."""
    prompt_tokens_B: Tensor
    """Trained tokens of each sample's whole group, wherever its siblings are packed."""
    row_B: tuple[int, ...] = ()
    """Identity of each sample within the optimizer step, the same however the step is sharded and packed."""
    candidate_M2: Tensor | None = None
    """Ids that the sampler's cut left at the trained tokens, as pairs (place in target_N, id) ordered by place; a token without any is cut
    anew. None when none were recorded. Example: [[0, 7], [0, 9], [2, 8]]: tokens 0 and 2 of target_N were drawn from {7, 9} and {8}."""
    sentence_BT: Tensor | None = None
    """Sentence index of each token."""
    old_BT: Tensor | None = None
    """Log-probabilities of the policy before this step's first update; None while it is the current policy itself."""
    reference_BT: Tensor | None = None
    """Log-probabilities of the frozen reference; None when no divergence is measured."""
    reference_top: tuple[Tensor, Tensor] | None = None
    """The reference's most likely ids at each trained token and their log-probabilities, [N, K] each."""
    teacher_BT: Tensor | None = None
    """Log-probabilities of a teacher."""
    values_BT: Tensor | None = None
    """The critic's values before this step's first update."""
    returns_BT: Tensor | None = None
    """What the critic is trained towards."""
    gate_BT: Tensor | None = None
    """Tokens that the covariance rule selected over the whole optimizer step."""

    @property
    def mask_BT(self) -> Tensor:
        """Which slots are trained: derived from the streams, never carried."""
        return self.slot_BT >= 0

    def to(self, device: torch.device) -> Batch:
        """The same with every tensor on `device`; the batch itself when they are there."""
        if self.ids_RW.device == device:
            return self
        return replace(self, **{field.name: _moved(getattr(self, field.name), device) for field in fields(self)})

    def unflatten(self, values_N: Tensor) -> Tensor:
        """[N] values as [B, T], 0 where untrained."""
        if not len(values_N):
            return torch.zeros(self.slot_BT.shape, device=self.slot_BT.device)
        return torch.where(self.mask_BT, values_N[self.slot_BT.clamp(min=0)], 0.0)

    def attention_R1WW(self) -> Tensor:
        """True where a query may look at a key. Padding looks at itself, since a row of nothing would turn softmax into NaN."""
        document, branch = self.document_RW, self.branch_RW
        same = (document[:, :, None] == document[:, None, :]) & (document[:, :, None] >= 0)
        visible = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
        square = torch.ones(document.shape[1], document.shape[1], dtype=torch.bool, device=document.device)
        return ((same & visible & square.tril()) | square.tril().triu())[:, None]


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, and tensors in a tuple."""
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_moved(part, device) for part in value) if isinstance(value, tuple) else value
