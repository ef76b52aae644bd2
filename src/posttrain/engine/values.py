"""The critic's view of a batch: what each state is worth before its token is drawn."""

from __future__ import annotations

from torch import Tensor

from posttrain.engine.batch import Batch
from posttrain.engine.scoring import hidden_states
from posttrain.models.critic import Critic


def values(critic: Critic, batch: Batch) -> Tensor:
    """V(s_t) of every trained token t, [B, T], 0 where untrained; with gradient, when enabled.

    s_t is what had been read when t was drawn, so V(s_t) comes from the hidden state whose logits predict t: the value of the first token
    of a completion comes from the last token of the prompt. The sampling temperature has no part in it: a value is an expected return, not
    a logit (spec/faults.md 30). Hand it to a `LocalTrainer` as its scorer to train a critic.
    """
    there = batch.to(critic.head.device)
    return there.unflatten(critic.value(hidden_states(critic.trunk, there))).to(batch.ids_RW.device)
