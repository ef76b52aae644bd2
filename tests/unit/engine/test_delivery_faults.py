"""Deliveries that do not arrive, each by a receiver with one fault: caught at the next step, by digests and by the canary alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch

from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import Delivery, NotDelivered, WrongVersion
from posttrain.engine.local import LocalSampler
from posttrain.models.lora import LoRA, add_lora

PROMPT, IDS = (1, 5, 9, 30, 31), (20, 21, 22, 40)
STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})
UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def model_of(toy, lora: bool):
    return add_lora(toy.model(), LoRA(rank=4, alpha=8), 0).eval() if lora else toy.model()


def step(model, size: float = 0.03) -> None:
    """Everything trainable moves, as after an optimizer step."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


class Faulty(CopySampler):
    """Delivers well the first time, and then with a fault."""

    blind = False
    """Cannot read its tensors back."""

    def receive(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        first = self.version == -1
        super().receive(dict(weights) if first else self.spoiled(dict(weights)), version)

    def spoiled(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return weights

    def digests(self) -> dict[str, str]:
        return {} if self.blind else super().digests()


class Skips(Faulty):
    def spoiled(self, weights):
        return {}


class KeepsOne(Faulty):
    """All but one tensor arrive."""

    def spoiled(self, weights):
        return {name: tensor for name, tensor in weights.items() if name != UP}


class Chunks(Faulty):
    """The second half of a large tensor is lost."""

    def spoiled(self, weights):
        half = weights[UP].clone()
        half[24:] = self._parameters[UP][24:]
        return weights | {UP: half}


class Swaps(Faulty):
    def spoiled(self, weights):
        return weights | {UP: weights[GATE], GATE: weights[UP]}


class ForgetsAdapters(Faulty):
    """Is sent base weights in place of merged ones."""

    base: Mapping[str, torch.Tensor]

    def spoiled(self, weights):
        return {name: self.base[name] for name in weights}


FAULTS = [
    (
        Skips,
        False,
        "merged",
        r"20 of 20 tensors differ after loading \(20 stale\): model.embed_tokens.weight expected \w{16}, found \w{16}; ",
    ),
    (Skips, True, "merged", r"14 of 20 tensors differ after loading \(14 stale\)"),
    (Skips, True, "adapter", r"28 of 48 tensors differ after loading \(28 stale\): \S+lora_A.weight expected"),
    (KeepsOne, False, "merged", rf"1 of 20 tensors differ after loading \(1 stale\): {UP} expected"),
    (Chunks, False, "merged", rf"1 of 20 tensors differ after loading \(1 with unknown numbers\): {UP} expected"),
    (Swaps, False, "merged", rf"2 of 20 .* \(1 with the numbers of another tensor, e.g. of {UP}, 1 with the .* of {GATE}\)"),
    (ForgetsAdapters, True, "merged", r"14 of 20 tensors differ after loading \(14 (stale|without the adapter)\)"),
]


def delivered(toy, fault, lora, how, blind=False):
    """A first delivery that arrives, and weights that moved since."""
    model = model_of(toy, lora)
    if lora:
        step(model)  # B is not zero
    receiver = fault(model, STOP, CONTROL)
    receiver.blind = blind
    receiver.base = dict(toy.model().named_parameters())
    delivery = Delivery(model, receiver, (PROMPT, IDS), how)
    delivery.send(0)
    step(model)
    return model, receiver, delivery


@pytest.mark.parametrize(("fault", "lora", "how", "said"), FAULTS)
def test_digests_name_what_did_not_arrive(toy, fault, lora, how, said):
    _, _, delivery = delivered(toy, fault, lora, how)
    with pytest.raises(NotDelivered, match=f"version 1 did not arrive: {said}"):
        delivery.send(1)


@pytest.mark.parametrize(("fault", "lora", "how", "said"), FAULTS)
def test_the_canary_alone_catches_it(toy, fault, lora, how, said):
    _, receiver, delivery = delivered(toy, fault, lora, how, blind=True)
    assert delivery.last is not None
    assert (delivery.last.proven, len(delivery.last.absent)) == (0, delivery.last.tensors)
    with pytest.raises(NotDelivered, match=r"version 1 did not arrive: (the trainer's canary moved by|log-probabilities of the canary)"):
        delivery.send(1)
    # the same receiver without its fault: what the canary objected to was the fault
    receiver.spoiled = lambda weights: weights
    assert delivery.send(1).proven == 0


def test_adapters_that_never_arrived_hold_the_base_weights(toy):
    # the adapters do nothing at the first delivery: base weights are the right ones, and wrong from then on (spec/faults.md 34)
    model = model_of(toy, lora=True)
    receiver = ForgetsAdapters(model, STOP, CONTROL)
    receiver.base = dict(toy.model().named_parameters())
    delivery = Delivery(model, receiver, (PROMPT, IDS))
    delivery.send(0)
    step(model)
    with pytest.raises(NotDelivered, match=r"\(14 stale\)"):
        delivery.send(1)
    # a fresh delivery cannot know what was held before, and still says what it is
    with pytest.raises(NotDelivered, match=r"14 of 20 tensors differ after loading \(14 without the adapter\)"):
        Delivery(model, receiver, (PROMPT, IDS)).send(1)


def test_adapters_that_are_held_and_not_applied(toy):
    class Holds(Faulty):
        """Stores the adapters, reports them, and computes with the base."""

        def receive(self, weights, version):
            super().receive(weights, version)
            with torch.no_grad():
                for name, base in self._base.items():
                    self._parameters[name].copy_(base)

    model = model_of(toy, lora=True)
    delivery = Delivery(model, Holds(model, STOP, CONTROL), (PROMPT, IDS), "adapter")
    assert delivery.send(0).proven == 48  # B is zero: nothing to see yet
    step(model)
    with pytest.raises(NotDelivered, match="it still computes with older weights, or without the adapters"):
        delivery.send(1)


def test_digests_of_what_was_sent_prove_nothing(toy):
    class Echoes(Skips):
        """Reports the digests of what it was sent."""

        def receive(self, weights, version):
            from posttrain.engine.weights import tensor_digest

            self.heard = getattr(self, "heard", {}) | {name: tensor_digest(tensor) for name, tensor in weights.items()}
            super().receive(weights, version)

        def digests(self):
            return self.heard

    _, _, delivery = delivered(toy, Echoes, False, "merged")
    with pytest.raises(
        NotDelivered, match=r"the trainer's canary moved by \S+ nats and the sampler's by 0; it still computes with older weights"
    ):
        delivery.send(1)


@pytest.mark.parametrize("blind", [False, True])
def test_a_cache_of_older_weights_in_generation(toy, blind):
    class Remembers(Faulty):
        """Weights and canary are right; what it draws comes from keys and values of older weights (spec/faults.md 33)."""

        def receive(self, weights, version):
            old = copy.deepcopy(self.model)
            super().receive(weights, version)
            if version:
                self._sampler = LocalSampler(old, STOP, CONTROL)
                self._sampler.version = version

    _, _, delivery = delivered(toy, Remembers, False, "merged", blind)
    with pytest.raises(NotDelivered, match="version 1 did not reach generation: .* drop the sampler's prefix cache when weights change"):
        delivery.send(1)


def test_a_cache_of_older_weights_in_the_canary(toy):
    class Remembers(Faulty):
        def logps(self, prompt, ids):
            self.known = getattr(self, "known", None) or super().logps(prompt, ids)
            return self.known

    _, _, delivery = delivered(toy, Remembers, False, "merged")
    with pytest.raises(NotDelivered, match="the sampler's by 0"):
        delivery.send(1)


def test_steps_too_small_to_tell_add_up(toy):
    # a step moves the canary by about 9e-6: less than the 3e-5 that count as a move, and four of them less than the limit of 1e-4
    model = model_of(toy, lora=False)
    receiver = Skips(model, STOP, CONTROL)
    receiver.blind = True
    delivery = Delivery(model, receiver, (PROMPT, IDS))
    delivery.send(0)
    seen: list[float | None] = []

    def steps() -> None:
        for version in range(1, 20):
            step(model, 3e-7)
            seen.append(delivery.send(version).moved)

    with pytest.raises(NotDelivered, match=r"the trainer's canary moved by [3-9]\.?\d*e-05 nats and the sampler's by 0"):
        steps()
    assert len(seen) >= 2
    assert all(moved is not None and moved < 1.5e-5 for moved in seen)


def test_a_sampler_that_changes_without_weights(toy):
    class Wanders(Faulty):
        """Adds something of its own at every delivery."""

        def receive(self, weights, version):
            super().receive(weights, version)
            with torch.no_grad():
                self.model.model.norm.weight *= 1 + 1e-5 * version
            self._sampler = LocalSampler(self.model, STOP, CONTROL)
            self._sampler.version = version

        def digests(self):
            return {}

    model = model_of(toy, lora=False)
    delivery = Delivery(model, Wanders(model, STOP, CONTROL), (PROMPT, IDS))
    delivery.send(0)
    with pytest.raises(NotDelivered, match=r"no weight changed before version 3, and the sampler's canary moved by"):
        delivery.send(3)


def test_a_trainer_that_changes_without_weights(toy):
    model = model_of(toy, lora=False)
    delivery = Delivery(model, CopySampler(model, STOP, CONTROL), (PROMPT, IDS))
    delivery.send(0)
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.01)
    with pytest.raises(NotDelivered, match="no weight changed before version 1, and the trainer's canary moved by"):
        delivery.send(1)


def test_frozen_weights_written_behind_the_trainers_back(toy):
    # digests of frozen tensors are not computed again unless torch saw a change; the canary sees what torch did not
    model = model_of(toy, lora=True)
    delivery = Delivery(model, CopySampler(model, STOP, CONTROL), (PROMPT, IDS))
    delivery.send(0)
    model.get_base_model().model.norm.weight.data.mul_(1.1)
    with pytest.raises(NotDelivered, match="the trainer's canary moved by"):
        delivery.send(1)


def test_versions_that_are_not_taken_over(toy):
    class Old(Faulty):
        def receive(self, weights, version):
            super().receive(weights, min(version, 0))

    _, _, delivery = delivered(toy, Old, False, "merged")
    with pytest.raises(NotDelivered, match=r"took version 1 and draws as version 0; its receive\(\) must set it"):
        delivery.send(1)

    class Stamps(Faulty):
        def receive(self, weights, version):
            super().receive(weights, version)
            self._sampler.version = 0

    _, _, delivery = delivered(toy, Stamps, False, "merged")
    with pytest.raises(WrongVersion, match=r"drawn by version 0\.\.0, wanted 1\.\.1"):
        delivery.send(1)


def test_without_digests_and_without_a_canary_nothing_is_proven(toy):
    model = model_of(toy, lora=False)
    receiver = Faulty(model, STOP, CONTROL)
    assert Delivery(model, receiver).send(0).gap is None
    receiver.blind = True
    with pytest.raises(NotDelivered, match=r"nothing proves version 0: the sampler confirms 0 of 20 tensors .* give Delivery a canary"):
        Delivery(model, receiver).send(0)


def test_numbers_that_are_none_do_not_pass(toy):
    class Broken(Faulty):
        def logps(self, prompt, ids):
            return [float("nan")] * len(ids)

    class Short(Faulty):
        def logps(self, prompt, ids):
            return super().logps(prompt, ids)[:-1]

    model = model_of(toy, lora=False)
    for fault, said in ((Broken, "differ by nan"), (Short, "differ by inf")):
        with pytest.raises(NotDelivered, match=said):
            Delivery(model, fault(model, STOP, CONTROL), (PROMPT, IDS)).send(0)
