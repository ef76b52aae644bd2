"""Weights reach vLLM, and a delivery that vLLM swallows without an error is caught."""

from __future__ import annotations

import pytest
import torch
from sampler_contract import CONTROL, PROMPTS, STOP, Case, forward_of, llama, requests

from posttrain.core.sampling import Sampling
from posttrain.engine.delivery import Delivery, Limits, NotDelivered, model_logps
from posttrain.engine.replies import EngineError
from posttrain.engine.types import Request
from posttrain.engine.vllm_sampler import VllmSampler
from posttrain.engine.weights import model_digests

CANARY = (PROMPTS[0], (20, 33, 7, 45, 12))


def trained(model, by: float = 0.03):
    """Every weight moved, as an optimizer would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * by)
    return model


@pytest.fixture(autouse=True)
def restored(vllm_case):
    """Other tests draw from the weights of the folder."""
    yield
    vllm_case.sampler.receive(dict(llama().named_parameters()), 0)


def gap(one, other) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_the_engine_holds_the_model_it_was_built_from(vllm_case):
    assert vllm_case.sampler.digests() == model_digests(llama())
    assert gap(vllm_case.sampler.logps(*CANARY), model_logps(llama(), *CANARY)) < 1e-5


def test_a_delivery_arrives_and_is_proven(vllm_case):
    model = trained(llama())
    assert gap(model_logps(model, *CANARY), model_logps(llama(), *CANARY)) > 0.01
    delivery = Delivery(model, vllm_case.sampler, CANARY)
    receipt = delivery.send(3)
    assert (receipt.version, receipt.proven, receipt.absent) == (3, receipt.tensors, ())
    assert receipt.gap is not None
    assert receipt.gap < 1e-4
    moved = delivery.send(4)
    assert (moved.sent, moved.moved) == (0, 0.0)
    trained(model, 0.02)
    again = delivery.send(5)
    assert again.sent == again.tensors
    assert again.receiver_moved is not None
    assert again.receiver_moved > 0.001
    fresh = Case(vllm_case.sampler, forward_of(model), vllm_case.tolerance, splits=False)
    asked = requests(24, Sampling(max_tokens=12))
    for request, done in zip(asked, fresh.draw(asked), strict=True):
        fresh.compare(request, done)
        assert done.version == 5


def test_part_of_a_fused_tensor_can_be_sent_alone(vllm_case):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
        model.model.layers[0].mlp.up_proj.weight.mul_(0.9)
    names = ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight")
    vllm_case.sampler.receive({name: model.get_parameter(name) for name in names}, 1)
    assert vllm_case.sampler.digests() == model_digests(model)
    assert gap(vllm_case.sampler.logps(*CANARY), model_logps(model, *CANARY)) < 1e-5


def test_prefixes_that_old_weights_computed_are_not_read(vllm_case):
    prompt = tuple(range(4, 60))  # longer than a block of the cache
    asked = [Request(prompt, Sampling(max_tokens=6), 11)]
    vllm_case.draw(asked)
    model = trained(llama(), 0.05)
    vllm_case.sampler.receive(dict(model.named_parameters()), 1)
    fresh = Case(vllm_case.sampler, forward_of(model), vllm_case.tolerance, splits=False)
    fresh.compare(asked[0], fresh.draw(asked)[0])


@pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.lora_A.weight"])
def test_a_tensor_without_a_place_is_refused(vllm_case, name):
    with pytest.raises(EngineError, match="vLLM"):
        vllm_case.sampler.receive({name: torch.zeros(96, 64)}, 1)


def test_packed_layers_stay_stale_and_the_proof_says_so(folder):
    """vLLM's own reload returns without an error. Linear layers cannot be read back, so only the canary can know."""
    sampler = VllmSampler(folder, STOP, CONTROL, context=128, prepacked=True)
    try:
        held = sampler.digests()
        assert 0 < len(held) < len(model_digests(llama()))
        assert not any("_proj" in name for name in held)
        assert gap(sampler.logps(*CANARY), model_logps(llama(), *CANARY)) < 1e-5
        model = trained(llama())
        delivery = Delivery(model, sampler, CANARY)
        with pytest.raises(NotDelivered, match="log-probabilities of the canary differ"):
            delivery.send(1)
        assert gap(sampler.logps(*CANARY), model_logps(model, *CANARY)) > 0.01
        assert gap(sampler.logps(*CANARY), model_logps(llama(), *CANARY)) > 0.001, "norms and embeddings did change"
        with pytest.raises(NotDelivered, match="nothing proves"):
            Delivery(model, sampler).send(2)
        with pytest.raises(NotDelivered, match="generation"):
            Delivery(model, _Deaf(sampler, model), CANARY, limits=Limits(drawn=8)).send(3)
    finally:
        sampler.close()


class _Deaf:
    """Scores like the trainer, draws like the engine: a receiver whose `logps` proves nothing."""

    def __init__(self, inner, model):
        self.inner, self.model = inner, model

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def logps(self, prompt, ids):
        return model_logps(self.model, prompt, ids)
