"""A stage with two trainers: both are saved, both come back, and neither is mistaken for the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from posttrain.core.errors import ConfigError, Interrupted
from posttrain.engine.nonfinite import Diverged, Trace
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.values import values
from posttrain.engine.weights import weights_digest
from posttrain.loops.session import Stage
from posttrain.loops.sft import imitation
from posttrain.models.critic import Critic
from posttrain.objectives.aggregate import aggregate
from posttrain.objectives.value import value_loss
from posttrain.rollout.pack import Packing, pack

STEPS, WARMUP = 6, 2
OPTIM = Optim(lr=1e-3)


@dataclass
class Pair:
    """What one attempt at the stage trained."""

    policy: LocalTrainer
    critic: LocalTrainer

    @property
    def digests(self) -> tuple[str, str]:
        return weights_digest(self.policy.model), weights_digest(self.critic.model)


def pair_of(toy) -> Pair:
    model = toy.model()
    return Pair(
        LocalTrainer(model, OPTIM, STEPS - WARMUP, Ranks()), LocalTrainer(Critic.of(model), Optim(lr=1e-2), STEPS, Ranks(), scorer=values)
    )


def worth(batch, values_BT):
    """Regression of every value on 1."""
    ones_BT = torch.ones_like(values_BT)
    return aggregate(value_loss(values_BT, ones_BT, values_BT, batch.mask_BT, None).loss_BT, batch.mask_BT, "token_mean", 5), {}


def train(toy, session) -> Pair:
    """The critic learns at every step, the policy once the critic has had its warm-up."""
    pair = pair_of(toy)
    stage = Stage(session, "ppo", pair.policy, STEPS, {"critic": pair.critic})
    batches = pack([toy.row((1, 5, 9), (20, 21, 2), "a"), toy.row((1, 6), (22, 2), "b")], Packing())
    for step in stage.steps():
        metrics = {"value_loss": pair.critic.step(batches, worth)["loss"]}
        if step >= WARMUP:
            metrics["policy_loss"] = pair.policy.step(batches, imitation(5))["loss"]
        stage.record(step, metrics, {}, {}, show=())
    return pair


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_stopped_and_resumed_equals_uninterrupted(toy, stop):
    # a stop after 1 falls into the warm-up: the critic has moved and the policy has not
    straight, run = toy.recorder(), toy.recorder()
    expected = train(toy, toy.session(straight))
    with pytest.raises(Interrupted, match=f"ppo stopped after step {stop} of {STEPS}"):
        train(toy, toy.session(run, stop=toy.stop_after(stop)))
    resumed = train(toy, toy.session(run))
    assert run.lines == straight.lines
    assert resumed.digests == expected.digests
    assert (resumed.policy.version, resumed.critic.version) == (STEPS - WARMUP, STEPS)
    assert [line["value_loss"] for line in run.lines["metrics"]] == sorted(
        (line["value_loss"] for line in run.lines["metrics"]), reverse=True
    )


def test_the_records_count_the_policys_steps(toy):
    run = toy.recorder()
    train(toy, toy.session(run))
    assert [line["optimizer_step"] for line in run.lines["metrics"]] == [0, 0, 1, 2, 3, 4]


def test_a_warm_up_leaves_the_policy_as_it_was(toy):
    run = toy.recorder()
    before = weights_digest(toy.model())
    with pytest.raises(Interrupted):
        train(toy, toy.session(run, stop=toy.stop_after(WARMUP)))
    pair = pair_of(toy)
    fresh = pair.digests
    Stage(toy.session(run), "ppo", pair.policy, STEPS, {"critic": pair.critic})
    assert pair.digests[0] == fresh[0] == before
    assert pair.digests[1] != fresh[1]


def test_a_critic_that_was_not_saved_and_one_that_was_and_is_not_asked_for(toy):
    with_critic, without = toy.recorder(), toy.recorder()
    with pytest.raises(Interrupted):
        train(toy, toy.session(with_critic, stop=toy.stop_after(3)))
    lines = [dict(line) for line in with_critic.lines["metrics"]]
    with pytest.raises(ConfigError, match="was made with critic and this run trains without a second trainer"):
        Stage(toy.session(with_critic), "ppo", pair_of(toy).policy, STEPS)
    assert with_critic.lines["metrics"] == lines  # a refusal forgets nothing
    with pytest.raises(Interrupted):
        for _ in Stage(toy.session(without, stop=toy.stop_after(1)), "ppo", pair_of(toy).policy, STEPS).steps():
            pass
    pair = pair_of(toy)
    with pytest.raises(ConfigError, match="was made without a second trainer and this run trains with critic"):
        Stage(toy.session(without), "ppo", pair.policy, STEPS, {"critic": pair.critic})


def test_a_critic_of_another_shape_is_refused(toy):
    run = toy.recorder()
    with pytest.raises(Interrupted):
        train(toy, toy.session(run, stop=toy.stop_after(3)))
    pair = pair_of(toy)
    frozen = Critic.of(toy.model())
    frozen.trunk.requires_grad_(False)
    critic = LocalTrainer(frozen, OPTIM, STEPS, Ranks(), scorer=values)
    with pytest.raises(ConfigError, match="critic' holds other parameters than this model"):
        Stage(toy.session(run), "ppo", pair.policy, STEPS, {"critic": critic})


def test_a_stage_that_diverges_says_so_in_the_records(toy):
    run = toy.recorder()
    trace = Trace(step=7, what="loss", loss=float("nan"), norm=0.0, parameters=(), trainable=1, place=None)
    with pytest.raises(Diverged), toy.session(run).timed("rl"):
        raise Diverged.at(trace, 1e-3)
    assert run.lines["alarms"] == [{"stage": "rl", "step": 7, "name": "non_finite"}]
    assert run.stages == {}
