"""The sampler with a copy: what it receives, what it reports, what it forgets, and that threads wait for each other."""

from __future__ import annotations

import threading

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import NotDelivered, model_logps
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Request
from posttrain.engine.weights import PlainWeights, model_digests
from posttrain.models.lora import LoRA, add_lora

PROMPT, IDS = (1, 5, 9), (20, 21, 22)
STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})
REQUESTS = [Request(PROMPT, Sampling(max_tokens=6), seed) for seed in range(4)]


def copy_of(model) -> CopySampler:
    return CopySampler(model, STOP, CONTROL)


def stirred(model, seed: int = 3):
    """Everything trainable moved a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_it_draws_nothing_before_it_received_something(toy):
    sampler = copy_of(toy.model())
    assert sampler.version == -1
    with pytest.raises(NotDelivered, match="has received no weights; deliver them before drawing, also after a resume"):
        sampler.generate(REQUESTS)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_it_draws_what_the_trainers_model_draws(toy, lora, form):
    model = add_lora(toy.model(), LoRA(rank=4, alpha=8), 0).eval() if lora else toy.model()
    sampler = copy_of(model)
    for version in range(3):  # adapters are not added to what they were added to before
        stirred(model, version)
        sampler.receive(PlainWeights(model, form), version)
        live = LocalSampler(model, STOP, CONTROL)
        live.version = version
        found, expected = sampler.generate(REQUESTS), live.generate(REQUESTS)
        assert [c.ids for c in found] == [c.ids for c in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.logps == pytest.approx(other.logps, abs=1e-5)
            assert one.version == version
        assert sampler.logps(PROMPT, IDS) == pytest.approx(model_logps(model, PROMPT, IDS), abs=1e-5)
        assert sampler.digests() == model_digests(model, form)


def test_the_copy_is_its_own(toy):
    model = toy.model()
    sampler = copy_of(model)
    sampler.receive(PlainWeights(model), 0)
    before, reported = sampler.logps(PROMPT, IDS), sampler.digests()
    stirred(model)
    assert sampler.logps(PROMPT, IDS) == before
    assert sampler.digests() == reported != model_digests(model)


def test_a_part_replaces_a_part(toy):
    model = toy.model()
    sampler = copy_of(model)
    sampler.receive(PlainWeights(model), 0)
    old = sampler.digests()
    stirred(model)
    sampler.receive(PlainWeights(model).only(frozenset({"model.norm.weight"})), 1)
    now = sampler.digests()
    assert [name for name in now if now[name] != old[name]] == ["model.norm.weight"]
    sampler.receive({}, 2)
    assert (sampler.version, sampler.digests()) == (2, now)


@pytest.mark.parametrize("version", [3, 4])
def test_nothing_of_older_weights_is_drawn_from(toy, version):
    # the prompts were read before (spec/faults.md 33), and an equal version is no reason to believe an old cache
    model = toy.model()
    sampler = copy_of(model)
    sampler.receive(PlainWeights(model), 3)
    before = sampler.generate(REQUESTS)
    stirred(model)
    sampler.receive(PlainWeights(model), version)
    after, fresh = sampler.generate(REQUESTS), copy_of(model)
    fresh.receive(PlainWeights(model), version)
    assert after == fresh.generate(REQUESTS)
    assert [c.ids for c in after] != [c.ids for c in before]


def test_digests_are_of_what_it_holds(toy):
    model = toy.model()
    sampler = copy_of(model)
    sampler.receive(PlainWeights(model), 0)
    with torch.no_grad():
        sampler.model.model.norm.weight[0] += 1
    reported, sent = sampler.digests(), model_digests(model)
    assert [name for name in sent if reported[name] != sent[name]] == ["model.norm.weight"]


def test_from_adapters_to_merged_weights(toy):
    model = stirred(add_lora(toy.model(), LoRA(rank=4, alpha=8), 0).eval())
    sampler = copy_of(model)
    sampler.receive(PlainWeights(model, "adapter"), 0)
    sampler.receive(PlainWeights(model, "merged"), 1)
    assert sampler.digests() == model_digests(model)
    assert sampler.logps(PROMPT, IDS) == pytest.approx(model_logps(model, PROMPT, IDS), abs=1e-5)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"base_model.model.norm.weight": torch.ones(32)}, r"no place for 'base_model.model.norm.weight' \(1 unknown names, 0 halves"),
        ({"model.norm.weight": torch.ones(31)}, r"'model.norm.weight' arrived as \(31,\) and the sampler's model has \(32,\)"),
        ({"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 32)}, r"lora_A.weight' \(0 unknown names, 1 halves of an adapter"),
        ({"model.norm.lora_C.weight": torch.ones(32)}, "no place for 'model.norm.lora_C.weight'"),
    ],
)
def test_what_does_not_fit_is_refused(toy, weights, said):
    sampler = copy_of(toy.model())
    with pytest.raises(NotDelivered, match=said):
        sampler.receive(weights, 1)


def test_a_delivery_that_breaks_off_leaves_nothing_to_draw_from(toy):
    model = toy.model()
    sampler = copy_of(model)
    sampler.receive(PlainWeights(model), 0)
    assert sampler.generate(REQUESTS)
    with pytest.raises(NotDelivered):
        sampler.receive({"model.embed_tokens.weight": torch.ones(60, 32), "model.norm.weight": torch.ones(31)}, 1)
    with pytest.raises(NotDelivered, match="has received no weights"):
        sampler.generate(REQUESTS)


def test_weights_change_between_calls_and_never_within_one(toy):
    # a thread that swaps two sets of weights all the time; every completion is one of the two that each set draws, stamped as such
    models = [toy.model(seed=seed) for seed in (0, 1)]
    expected = [[c.ids for c in LocalSampler(model, STOP, CONTROL).generate(REQUESTS)] for model in models]
    assert expected[0] != expected[1]
    sampler, done = copy_of(models[0]), threading.Event()
    sampler.receive(PlainWeights(models[0]), 0)

    def swap() -> None:
        version = 1
        while not done.is_set():
            sampler.receive(PlainWeights(models[version % 2]), version)
            version += 1

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        seen = set()
        for _ in range(40):
            found = sampler.generate(REQUESTS)
            (version,) = {c.version for c in found}
            assert [c.ids for c in found] == expected[version % 2]
            seen.add(version)
            done.wait(0.002)
    finally:
        done.set()
        swapper.join()
    assert len(seen) > 2
