"""The seam: a sampler with the trainer's weights passes before and after a step, one with older weights does not."""

import copy

import pytest
import torch

from posttrain.checks import preflight_sync as seam
from posttrain.core.sampling import Sampling
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import Limits
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.sft import imitation
from posttrain.rollout.pack import Packing, pack

STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})
SAMPLING = Sampling(max_tokens=6, temperature=0.7, top_k=20)


def prompts(toy):
    return [toy.row((1, 5, 9), (2,)).prompt, toy.row((1, 7, 30, 31), (2,)).prompt]


def step(toy, model, lr: float = 1e-2) -> None:
    trainer = LocalTrainer(model, Optim(lr=lr, warmup=0, schedule="constant"), 1, Ranks())
    trainer.step(pack([toy.row((1, 5, 9), (20, 21, 22, 2))], Packing()), imitation(4))


def across(toy, sampler, model, lr: float = 1e-2):
    """Checks of agreement before and sync after one step of `model`."""
    before = seam.side(sampler, model, prompts(toy), SAMPLING, 0)
    step(toy, model, lr)
    moved = seam.gap_of(before.said, seam.scored(model, prompts(toy), before.completions, SAMPLING))
    after = seam.side(sampler, model, prompts(toy), SAMPLING, 0)
    return seam.agreement_check(before, Limits()), seam.sync_check(before, after, moved, Limits())


def test_a_sampler_that_reads_the_live_weights_agrees_before_and_after(toy):
    model = toy.model()
    agreement, sync = across(toy, LocalSampler(model, STOP, CONTROL), model)
    assert (agreement.passed, sync.passed) == (True, True)
    assert "moved the trainer" in sync.detail


def test_a_sampler_that_keeps_its_weights_is_found_after_the_step_only(toy):
    model = toy.model()
    stale = LocalSampler(copy.deepcopy(model), STOP, CONTROL)
    agreement, sync = across(toy, stale, model)
    assert (agreement.passed, sync.passed) == (True, False)
    assert sync.catalog == ("P12", "P1")


def test_a_sampler_of_another_model_is_found_at_once(toy):
    agreement, _ = across(toy, LocalSampler(toy.model(seed=1), STOP, CONTROL), toy.model())
    assert agreement.passed is False


def test_another_temperature_on_the_other_side_is_found(toy):
    model = toy.model()
    sampler = LocalSampler(model, STOP, CONTROL)
    drawn = seam.side(sampler, model, prompts(toy), SAMPLING, 0)
    other = seam.scored(model, prompts(toy), drawn.completions, SAMPLING.model_copy(update={"temperature": 1.0}))
    assert seam.gap_of([logp for done in drawn.completions for logp in done.logps], other) > 0.01


def test_a_step_too_small_to_tell_decides_nothing(toy):
    model = toy.model()
    _, sync = across(toy, LocalSampler(copy.deepcopy(model), STOP, CONTROL), model, lr=1e-9)
    assert sync.passed is None


def test_numbers_that_are_none_differ_without_bound():
    assert seam.gap_of([0.0, float("nan")], [0.0, 1.0]) == float("inf")
    assert seam.gap_of([], []) == 0.0
    assert seam.gap_of([1.0, 2.0], [1.5, 2.25]) == 0.5


class Forgetful(CopySampler):
    """Takes a delivery, says so, and keeps the numbers that it had."""

    def receive(self, weights, version):
        if self.version < 0:
            super().receive(weights, version)
        self._sampler.version = self.version = version


@pytest.mark.parametrize(("kind", "passed"), [(CopySampler, True), (Forgetful, False)])
def test_a_delivery_is_proven_or_refused(toy, kind, passed):
    model = toy.model()
    courier = seam.Courier(model, kind(model, STOP, CONTROL), ((1, 5, 9), (20, 21, 22)), Limits())
    courier.send(0)
    step(toy, model)
    courier.send(1)
    courier.send(2)
    assert courier.check.passed is passed
    assert courier.check.value == (3 if passed else 1)
    assert ("did not arrive" in courier.check.detail) is not passed


def test_the_trainer_scores_with_gradient_off_what_it_drew(toy):
    model = toy.model()
    with torch.no_grad():
        found = seam.side(LocalSampler(model, STOP, CONTROL), model, prompts(toy), Sampling(max_tokens=4), 3)
    assert found.tokens == sum(len(done.ids) for done in found.completions) == len(found.said)
    assert found.gap < 1e-5
