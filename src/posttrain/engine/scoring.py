"""The trainer's view of a batch: log-probability and entropy of every trained token, logits only where one is predicted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from posttrain.core.sampling import Sampling
from posttrain.engine.batch import Batch
from posttrain.engine.decoder import FAST_FAMILIES, backbone, config_of
from posttrain.engine.trunk import states, supports
from posttrain.objectives.kernel import linear_scores
from posttrain.objectives.logprobs import Replay, logit_scores


class Scores(NamedTuple):
    """What a model says about the trained tokens of a batch; nats. [B, T] streams are 0 where untrained."""

    logp_BT: Tensor
    """Log-probabilities; with gradient, when enabled."""
    entropy_BT: Tensor
    """Entropies; with gradient only where asked for."""
    top: tuple[Tensor, Tensor] | None = None
    """Ids and log-probabilities [N, K] of the most likely tokens, per trained token in the order of `batch.target_N`."""
    at: Tensor | None = None
    """Log-probabilities [N, K] of given ids, in the same order; with gradient, when enabled."""

    def to(self, device: torch.device) -> Scores:
        """The same with every tensor on `device`."""
        top = None if self.top is None else (self.top[0].to(device), self.top[1].to(device))
        return Scores(self.logp_BT.to(device), self.entropy_BT.to(device), top, None if self.at is None else self.at.to(device))


def shares_prompts(model: nn.Module) -> bool:
    """Whether the model takes a custom attention mask and exposes hidden states before its head, so that siblings can share a prompt."""
    return config_of(model).model_type in FAST_FAMILIES and not getattr(model.config, "sliding_window", None)


def score(
    model: nn.Module, batch: Batch, sampling: Sampling, *, entropy_gradient: bool = False, top_k: int = 0, at_NK: Tensor | None = None
) -> Scores:
    """Score the trained tokens of `batch` under the distribution that `sampling` draws from.

    Where the sampler recorded the candidates that its cut left, the distribution is renormalised over those: whatever model is asked, it
    is asked about the same tokens.

    Args:
        model: a causal language model, on any device: what is said about a batch is where the batch is.
        batch: N trained tokens.
        sampling: the distribution; it must be the one the tokens were drawn from.
        entropy_gradient: whether entropy is a term of the loss, or only measured.
        top_k: how many of the most likely tokens to return for each trained token; 0 for none.
        at_NK: further ids to score at the place of each trained token, for a divergence from a reference whose top K are known.
    """
    device = next(model.parameters()).device
    if batch.ids_RW.device != device:
        found = score(
            model,
            batch.to(device),
            sampling,
            entropy_gradient=entropy_gradient,
            top_k=top_k,
            at_NK=None if at_NK is None else at_NK.to(device),
        )
        return found.to(batch.ids_RW.device)
    if not len(batch.target_N):
        empty = torch.zeros(batch.slot_BT.shape)
        top = (torch.zeros(0, top_k, dtype=torch.long), torch.zeros(0, top_k)) if top_k else None
        return Scores(empty, empty, top, None if at_NK is None else torch.zeros(at_NK.shape))
    how = Replay(sampling, batch.candidate_M2)
    head = model.get_output_embeddings() if shares_prompts(model) else None  # type: ignore[operator]
    if type(head) is nn.Linear:
        states_NH, weight_VH, bias_V = hidden_states(backbone(model), batch), head.weight, head.bias
        found = linear_scores(
            states_NH, weight_VH, batch.target_N, how, bias_V=bias_V, entropy_gradient=entropy_gradient, top_k=top_k, at_NK=at_NK
        )
    else:
        found = logit_scores(_logits(model, batch), batch.target_N, how, entropy_gradient=entropy_gradient, top_k=top_k, at_NK=at_NK)
    return Scores(batch.unflatten(found.logp_N), batch.unflatten(found.entropy_N), found.top, found.at_NK)


def hidden_states(trunk: nn.Module, batch: Batch) -> Tensor:
    """States [N, H] of a model without its head that predict each trained token of `batch`, in the order of `batch.target_N`.

    A trunk that cannot share prompts reads rows of one document each, padded at the end.
    """
    if supports(trunk):
        return states(trunk, batch)
    mask = batch.attention_R1WW() if shares_prompts(trunk) else (batch.document_RW >= 0).long()
    out = trunk(input_ids=batch.ids_RW, attention_mask=mask, position_ids=batch.position_RW, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)[batch.source_N]


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """[N, V] from the model's own head, which may be adapted, or scale or cap its logits: right for any model, at the price of memory."""
    if shares_prompts(model):
        return model.get_output_embeddings()(hidden_states(backbone(model), batch))  # type: ignore[operator]
    padding_RW = (batch.document_RW >= 0).long()
    out = model(input_ids=batch.ids_RW, attention_mask=padding_RW, position_ids=batch.position_RW, use_cache=False)
    return out.logits.flatten(0, 1)[batch.source_N]
