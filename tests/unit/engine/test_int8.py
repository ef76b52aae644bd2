"""Int8 linear layers by hand, and the sampler over them: it follows the live weights and reports the int8 model's own log-probabilities."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.engine import int8
from posttrain.engine.int8 import (
    Int8Dense,
    Int8Linear,
    Int8Sampler,
    float_product,
    int32_product,
    integer_product,
    quantise,
    quantise_fused,
    quantised,
)
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Request
from posttrain.models.lora import LoRA, add_lora, merged

IDS = (frozenset({2}), frozenset({0, 1, 2, 3}))


def linear(weight, bias=None) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return layer


def test_integers_and_scales_by_hand():
    """max |row| / 127: 254 / 127 = 2 and -127 / 2 = -63.5 rounds to the even -64; 0.5 / 2 = 0.25 rounds to 0."""
    q, scale = quantised(torch.tensor([[254.0, -127.0, 0.5], [0.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]))
    assert q.dtype == torch.int8
    assert q.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 127, 0]]
    assert scale[0] == 2.0
    assert scale[2] == torch.tensor(1.0) / 127


def test_worked_example_is_exact():
    """Weight rows (127, -64) and (254, 127): scales 1 and 2, integers (127, -64) and (127, 64) (63.5 rounds to the even 64).
    Token (127, 64): scale 1. Products 127*127 - 64*64 = 12033 and 127*127 + 64*64 = 20225; times the scales 12033 and 40450; plus bias."""
    layer = Int8Linear(linear([[127.0, -64.0], [254.0, 127.0]], bias=[1.0, -450.0]))
    assert layer(torch.tensor([[127.0, 64.0]])).tolist() == [[12034.0, 40000.0]]


def test_a_scale_per_token_and_per_output_channel():
    """A token's result does not depend on who shares its batch, and a small output row keeps its own resolution."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 16, generator=generator) * torch.tensor([[1.0], [1e-4], [1e3]])
    layer, x = Int8Linear(linear(weight.tolist())), torch.randn(4, 16, generator=generator)
    together = layer(torch.cat([x, 1e4 * x]))
    assert torch.equal(together[:4], layer(x))
    exact = x @ weight.T
    assert ((together[:4] - exact).abs() / exact.abs().amax(0)).max() < 0.03


@pytest.mark.parametrize("size", [1, 2, 3, 40, 576, 1041, 1536])
def test_the_product_is_exact_in_integers(size):
    """Also at the largest values, where sums of pairs in 16 bits would saturate, and at width 1, which the library's kernel gets wrong."""
    for values in (127, -127):
        layer = Int8Linear(linear([[127.0] * size, [127.0] * size, [-127.0] * size]))
        out = layer(torch.full((2, size), float(values)))
        expected = float(values) * 127 * size
        assert out.tolist() == [pytest.approx([expected, expected, -expected], rel=1e-6)] * 2
    generator = torch.Generator().manual_seed(size)
    q, w = (torch.randint(-127, 128, (7, size), dtype=torch.int8, generator=generator) for _ in range(2))
    if size > 1:
        assert torch.equal(integer_product()(q, w).double(), (q.double() @ w.double().T).float().double())


def test_a_kernel_that_saturates_is_not_used(monkeypatch):
    integer_product.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(int8, "int32_product", lambda q, w: int32_product(q, w).clamp(max=2.0**15))
            assert integer_product() is float_product
    finally:
        integer_product.cache_clear()


def test_not_a_number_stays_one():
    out = Int8Linear(linear([[1.0, 2.0]]))(torch.tensor([[float("nan"), 1.0], [1.0, 1.0]]))
    assert out.isnan().tolist() == [[True], [False]]


def test_quantise_leaves_the_model_and_its_head_alone(toy):
    model = toy.model()
    before = toy.weights(model)
    view = quantise(model)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert isinstance(view.model.layers[1].self_attn.q_proj, Int8Linear)
    assert view.lm_head is model.lm_head
    assert view.model.embed_tokens is model.model.embed_tokens
    assert isinstance(quantise(model, head=True).lm_head, Int8Linear)
    assert torch.equal(toy.weights(model), before)
    ids = torch.tensor([[1, 5, 9, 11]])
    with torch.no_grad():
        gap = (view(input_ids=ids).logits - model(input_ids=ids).logits).abs().max()
    assert 1e-4 < gap < 1.0


def test_adapters_are_merged_before_they_are_quantised(toy):
    model = add_lora(toy.model(), LoRA(rank=2, alpha=4), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    ids = torch.tensor([[1, 5, 9, 11]])
    plain = merged(copy.deepcopy(model))
    with torch.no_grad(), model.disable_adapter():
        base = model(input_ids=ids).logits
    with torch.no_grad():
        adapted, expected, exact = quantise(model)(input_ids=ids).logits, quantise(plain)(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.equal(adapted, expected)
    assert (adapted - exact).abs().mean() < 0.5 * (base - exact).abs().mean()
    assert hasattr(model, "peft_config")


def requests(n: int, **sampling) -> list[Request]:
    return [Request((1, 5, 9 + i % 3), Sampling(max_tokens=8, **sampling), derive(3, i)) for i in range(n)]


def test_samples_from_the_int8_model_and_reports_its_log_probabilities(toy):
    model = toy.model()
    sampler = Int8Sampler(model, *IDS)
    sampler.version = 4
    done, view = sampler.generate(requests(6)), quantise(model)
    for request, completion in zip(requests(6), done, strict=True):
        with torch.no_grad():
            logits = view(input_ids=torch.tensor([[*request.prompt, *completion.ids]])).logits[0]
        scored = logits[len(request.prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None]).squeeze(-1)
        assert list(completion.logps) == pytest.approx(scored.tolist(), abs=1e-4)
        assert completion.version == 4
    plain = LocalSampler(model, *IDS).generate(requests(6))
    assert max(abs(a - b) for x, y in zip(done, plain, strict=True) for a, b in zip(x.logps, y.logps, strict=False)) > 1e-3


def test_follows_the_live_weights(toy):
    model = toy.model()
    sampler = Int8Sampler(model, *IDS)
    before = sampler.generate(requests(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.3)
    after = sampler.generate(requests(4))
    fresh = Int8Sampler(copy.deepcopy(model), *IDS).generate(requests(4))
    assert [c.logps for c in after] == [c.logps for c in fresh]
    assert [c.logps for c in after] != [c.logps for c in before]


@pytest.mark.parametrize("head", [False, True])
def test_the_fused_form_holds_the_same_integers(toy, head):
    """Row by row the integers of the modules: queries, keys and values of layer 0 one after the other, heads of the first two reordered."""
    model = toy.model()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(torch.linspace(0.5, 2.0, 32))
    view, fused = quantise(model, head=head), quantise_fused(model, head=head)
    attention, ready = view.model.layers[0].self_attn, fused.blocks[0]
    v = attention.v_proj.dense
    assert torch.equal(ready.qkv.weight_q_OI[-len(v.scale_O) :], v.weight_q_OI)
    q = attention.q_proj.dense.weight_q_OI.view(-1, 8, 32)
    assert torch.equal(ready.qkv.weight_q_OI[:32].view(-1, 8, 32)[:, ::2], q[:, :4])
    assert torch.equal(ready.down.weight_q_OI, view.model.layers[0].mlp.down_proj.dense.weight_q_OI)
    assert isinstance(fused.head, Int8Dense) is head


def test_other_shapes_decode_through_the_library_with_the_same_result(toy, monkeypatch):
    model = toy.model()
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight.copy_(torch.linspace(0.5, 2.0, 32))
            block.post_attention_layernorm.weight.copy_(torch.linspace(2.0, 0.5, 32))
    fast = Int8Sampler(model, *IDS).generate(requests(6))
    monkeypatch.setattr(int8, "fusible", lambda model: False)
    slow = Int8Sampler(model, *IDS).generate(requests(6))
    assert [c.ids for c in fast] == [c.ids for c in slow]
    for one, other in zip(fast, slow, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=1e-4)
