"""The trainer's view of a batch: log-probability and entropy of every trained token, logits only where one is predicted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from posttrain.core.sampling import Sampling
from posttrain.engine.batch import Batch
from posttrain.engine.decoder import FAST_FAMILIES, backbone, config_of
from posttrain.objectives.logprobs import logps_and_entropy

CHUNK = 1024
"""Trained tokens whose logits exist at the same time."""


class Scores(NamedTuple):
    """Per-token log-probabilities (with gradient, when enabled) and entropies (without), [B, T], 0 where untrained; nats."""

    logp_BT: Tensor
    entropy_BT: Tensor


def shares_prompts(model: nn.Module) -> bool:
    """Whether the model takes a custom attention mask and exposes hidden states before its head, so that siblings can share a prompt."""
    return config_of(model).model_type in FAST_FAMILIES and not getattr(model.config, "sliding_window", None)


def score(model: nn.Module, batch: Batch, sampling: Sampling) -> Scores:
    """Score the trained tokens of `batch` under the distribution that `sampling` draws from."""
    if not len(batch.target_N):
        empty = torch.zeros(batch.slot_BT.shape)
        return Scores(empty, empty)
    if shares_prompts(model):
        states_NH = _hidden(model, batch)
        head = model.get_output_embeddings()  # type: ignore[operator]
        chunks = [
            logps_and_entropy(head(part_NH), target_N, sampling)
            for part_NH, target_N in zip(states_NH.split(CHUNK), batch.target_N.split(CHUNK), strict=True)
        ]
        logp_N, entropy_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    else:
        padding_RW = (batch.document_RW >= 0).long()
        logits_RWV = model(input_ids=batch.ids_RW, attention_mask=padding_RW, position_ids=batch.position_RW, use_cache=False).logits
        logp_N, entropy_N = logps_and_entropy(logits_RWV.flatten(0, 1)[batch.source_N], batch.target_N, sampling)
    return Scores(batch.unflatten(logp_N), batch.unflatten(entropy_N))


def _hidden(model: nn.Module, batch: Batch) -> Tensor:
    out = backbone(model)(input_ids=batch.ids_RW, attention_mask=batch.attention_R1WW(), position_ids=batch.position_RW, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)[batch.source_N]
