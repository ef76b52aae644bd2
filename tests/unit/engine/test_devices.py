"""What is said about a batch is where the batch is, wherever the model is. The device without data stands in for an accelerator: an
operation that mixes devices fails there as it would on one."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from posttrain.core.sampling import Sampling
from posttrain.engine.scoring import score
from posttrain.engine.values import values
from posttrain.models.critic import Critic
from posttrain.rollout.pack import Packing, pack

AWAY = torch.device("meta")
HOME = torch.device("cpu")


def batch_of(toy):
    rows = [toy.row((1, 5, 9), (20 + i, 21, 2), "a") for i in range(3)]
    return pack(rows, Packing())[0]


def test_a_batch_moves_as_a_whole(toy):
    batch = batch_of(toy)
    moved = batch.to(AWAY)
    for field in fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        assert after.device == AWAY and after.shape == before.shape if isinstance(before, Tensor) else after == before
    assert batch.to(HOME) is batch


@pytest.mark.parametrize("asked", [{}, {"entropy_gradient": True}, {"top_k": 3}])
def test_scores_are_computed_on_the_models_device(toy, asked):
    model = toy.model().to(AWAY)
    batch = batch_of(toy)
    scores = score(model, batch.to(AWAY), Sampling(temperature=0.7), **asked)
    assert scores.logp_BT.device == scores.entropy_BT.device == AWAY
    assert scores.logp_BT.shape == batch.slot_BT.shape
    scores.logp_BT.sum().backward()
    assert all(p.grad is not None and p.grad.device == AWAY for p in model.parameters())


def test_values_are_computed_on_the_critics_device(toy):
    found = values(Critic.of(toy.model()).to(AWAY), batch_of(toy).to(AWAY))
    assert (found.device, tuple(found.shape)) == (AWAY, (3, 3))


def test_what_was_said_goes_back_to_where_the_batch_is(toy):
    # all of the way there; from the device without data nothing can come back
    batch = batch_of(toy)
    with pytest.raises(NotImplementedError, match="no data"):
        score(toy.model().to(AWAY), batch, Sampling())
    with pytest.raises(NotImplementedError, match="no data"):
        values(Critic.of(toy.model()).to(AWAY), batch)
