"""Whatever stands in an untrained slot (garbage, NaN, infinities) changes neither a value nor a gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.objectives.aggregate import aggregate
from posttrain.objectives.kl import kl_loss
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.preference import sequence_logps
from posttrain.objectives.streams import Streams

GARBAGE = st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 88.0, -3.0, 0.0])
ROWS, WIDTH = 3, 4


def policy(objective: Objective) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A policy loss whose old policy is also the sampler and the reference."""

    def loss(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        terms = policy_terms(Streams(logp, old, old, advantage, mask, old), objective)
        return aggregate(terms.loss_BT, mask, objective.aggregation, 3.0, torch.full((len(mask),), 5.0))

    return loss


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "token_mean": lambda logp, old, advantage, mask: aggregate(logp * advantage, mask, "token_mean", 7.0),
    "seq_mean_token_mean": lambda logp, old, advantage, mask: aggregate(logp * advantage, mask, "seq_mean_token_mean", 3.0),
    "seq_mean_token_sum": lambda logp, old, advantage, mask: aggregate(logp * advantage, mask, "seq_mean_token_sum", 3.0),
    "constant": lambda logp, old, advantage, mask: aggregate(logp * advantage, mask, "constant", 12.0),
    "surrogate": policy(Objective(kl={"estimator": "none"})),  # pyright: ignore[reportArgumentType]
    "cispo": policy(Objective.load("cispo")),
    "mimo": policy(Objective.load("mimo")),
    "kimi_k2.5": policy(Objective.load("kimi_k2.5")),
    "kimi_k1.5": policy(Objective.load("kimi_k1.5")),
    "dppo": policy(Objective.load("dppo")),
    "k2": lambda logp, old, advantage, mask: kl_loss(logp, old, mask, "k2").sum(),
    "k3": lambda logp, old, advantage, mask: kl_loss(logp, old, mask, "k3").sum(),
    "sequence_logps": lambda logp, old, advantage, mask: sequence_logps(logp, mask).square().sum(),
    "whole": policy(Objective.load({"kind": "grpo", "kl": {"coef": 0.1}})),
}


def evaluate(name: str, streams: list[Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    logp = streams[0].clone().requires_grad_()
    value = LOSSES[name](logp, streams[1], streams[2], mask)
    (gradient,) = torch.autograd.grad(value, logp)
    return value.detach(), gradient


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_untrained_slots_do_not_matter(name, data):
    numbers = st.lists(st.floats(-3, 3, width=32), min_size=ROWS * WIDTH, max_size=ROWS * WIDTH)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=ROWS * WIDTH, max_size=ROWS * WIDTH))).view(ROWS, WIDTH)
    clean = [torch.tensor(data.draw(numbers)).view(ROWS, WIDTH) for _ in range(3)]
    dirty = []
    for stream in clean:
        noise = torch.tensor(data.draw(st.lists(GARBAGE, min_size=ROWS * WIDTH, max_size=ROWS * WIDTH))).view(ROWS, WIDTH)
        dirty.append(torch.where(mask, stream, noise))
    if name not in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"):
        expected, slope = evaluate(name, clean, mask)
        value, gradient = evaluate(name, dirty, mask)
    else:  # `aggregate` promises this for its own argument; the product before it is the caller's
        expected, slope = reduce_only(name, clean[0], mask)
        value, gradient = reduce_only(name, dirty[0], mask)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, slope)
    assert (gradient[~mask] == 0).all()


def reduce_only(name: str, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    leaf = values.clone().requires_grad_()
    value = aggregate(leaf, mask, name, 3.0)  # pyright: ignore[reportArgumentType]
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("name", LOSSES)
def test_a_trained_slot_does_matter(name):
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    streams = [torch.full((ROWS, WIDTH), value) for value in (-1.0, -1.1, 0.5)]
    changed = [streams[0].clone(), *streams[1:]]
    changed[0][1, 2] += 0.05
    assert not torch.equal(evaluate(name, streams, mask)[0], evaluate(name, changed, mask)[0])
