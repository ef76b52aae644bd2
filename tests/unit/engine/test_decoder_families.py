"""Every architecture: the fast decoder where the shape is Llama's, the generic one elsewhere, one contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.engine.decoder import Context, GenericDecoder, LlamaDecoder, decoder_for
from posttrain.engine.fused import fusible
from posttrain.engine.local import LocalSampler
from posttrain.engine.scoring import score
from posttrain.engine.types import Request
from posttrain.models.lora import LoRA, add_lora
from posttrain.rollout.pack import Packing, pack

SIZE: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
FAST = {
    "llama": LlamaConfig(**SIZE, num_key_value_heads=4),
    "llama with biases": LlamaConfig(**SIZE, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama 3 rotary": LlamaConfig(**SIZE, num_key_value_heads=1, rope_parameters=ROPE),
    "yarn rotary": LlamaConfig(**SIZE, num_key_value_heads=2, rope_parameters=YARN),
    "mistral": MistralConfig(**SIZE, num_key_value_heads=2, head_dim=16, sliding_window=None),
    "qwen2": Qwen2Config(**SIZE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=12),
}
GENERIC = {
    "gpt-neox": GPTNeoXConfig(**SIZE),
    "gemma 2": Gemma2Config(**SIZE, num_key_value_heads=2, head_dim=8, sliding_window=4),
    "mistral with a window": MistralConfig(**SIZE, num_key_value_heads=2, sliding_window=4),
    "dynamic rotary": LlamaConfig(**SIZE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
}


def build(config):
    """A random model of this architecture; norms and biases too, so that a forgotten one shows."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and "weight" in name else 0.0, 0.15, generator=generator)
    return model


def requests(sampling: Sampling) -> list[Request]:
    prompts = [(1, 5, 9), (1, 5, 9, 11, 12, 13), (1, 7)]
    return [Request(prompts[i % 3], sampling, derive(7, i), drawn=(20, 21)[: i % 2]) for i in range(9)]


@pytest.mark.parametrize("config", [*FAST.values(), *GENERIC.values()], ids=[*FAST, *GENERIC])
def test_sampler_agrees_with_the_library_and_with_itself(config):
    model = build(config)
    assert isinstance(decoder_for(model), LlamaDecoder if config in FAST.values() else GenericDecoder)
    asked = requests(Sampling(temperature=0.8, max_tokens=10))
    done = LocalSampler(model, frozenset({2}), frozenset({2}), max_rows=4).generate(asked)
    for request, completion in zip(asked, done, strict=True):
        read = [*request.prompt, *request.drawn, *completion.ids]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([read])).logits[0, -len(completion.ids) - 1 : -1]
        expected = (logits / 0.8).log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=1e-5, rtol=0)
        (alone,) = LocalSampler(model, frozenset({2}), frozenset({2})).generate([request])
        assert (alone.ids, alone.stop) == (completion.ids, completion.stop)


def test_adapters_are_folded_in_and_scored_alike(toy):
    model = add_lora(toy.model(std=0.1), LoRA(rank=4, alpha=8), 0).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    assert isinstance(decoder_for(model), LlamaDecoder)
    asked = [Request((1, 5, 9), Sampling(max_tokens=12), seed) for seed in range(8)]
    sampler = LocalSampler(model, frozenset({2}), frozenset({2}))
    done = sampler.generate(asked)
    (batch,) = pack([toy.row((1, 5, 9), c.ids, logps=c.logps) for c in done], Packing())
    with torch.no_grad():
        torch.testing.assert_close(score(model, batch, Sampling()).logp_BT, batch.behaviour_BT, atol=1e-5, rtol=0)
    with model.disable_adapter():
        off = sampler.generate(asked)
    base = LocalSampler(toy.model(std=0.1), frozenset({2}), frozenset({2})).generate(asked)
    assert [c.ids for c in off] == [c.ids for c in base] != [c.ids for c in done]


def test_adapters_that_are_no_plain_product_are_not_folded(toy):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear", use_dora=True)
    assert not fusible(get_peft_model(toy.model(), config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(toy, dtype):
    model = toy.model(std=0.1).to(dtype)
    contexts = [Context((1, 5, 9), (20, 21)), Context((1, 5, 9)), Context((4, 7))]
    decoder = decoder_for(model)
    logits = decoder.enter(contexts)
    live = [[*c.prompt, *c.drawn] for c in contexts]
    for token in (30, 31):
        for ids in live:
            ids.append(token)
        logits = decoder.step(torch.full((3,), token))
    with torch.no_grad():
        expected = torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in live])
    assert logits.dtype == dtype
    torch.testing.assert_close(logits, expected, atol=3e-2 if dtype is torch.bfloat16 else 1e-5, rtol=0)
    assert not fusible(add_lora(toy.model().to(torch.bfloat16), LoRA(rank=2), 0))  # 16 bits would round the adapter away
