"""Digests, and the plain model behind a model in training: by name, by value, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import pickle

import pytest
import torch
from torch import nn

from posttrain.core.errors import ConfigError
from posttrain.engine.weights import DigestCache, PlainWeights, fold, model_digests, overall_digest, tensor_digest, weights_digest
from posttrain.models.lora import LoRA, add_lora, merged

IDS = torch.tensor([[1, 5, 9, 20, 21]])


def adapted(toy):
    """A model with adapters that do something."""
    wrapped = add_lora(toy.model(), LoRA(rank=4, alpha=8), 0).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return wrapped


def test_a_digest_is_of_numbers_shape_and_type():
    ones = torch.ones(2, 3)
    assert tensor_digest(ones) == tensor_digest(torch.ones(3, 2).T) == tensor_digest(nn.Parameter(ones))
    changed = ones.clone()
    changed[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    others = [changed, ones.view(3, 2), ones.double(), ones.bfloat16(), -ones, torch.ones(())]
    assert len({tensor_digest(t) for t in (ones, *others)}) == 7
    assert tensor_digest(torch.zeros(0)) != tensor_digest(torch.zeros(0, 2))
    assert len(tensor_digest(ones)) == 16


def test_the_digest_of_all_is_of_names_and_digests():
    one = {"a": "1", "b": "2"}
    assert overall_digest(one) == overall_digest({"b": "2", "a": "1"})
    assert len({overall_digest(d) for d in (one, {"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "b": "3"}, {"a": "1", "c": "2"})}) == 5


def test_the_digest_of_a_model_is_over_names_shapes_and_bytes(toy):
    model = toy.model()
    hasher = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        hasher.update(f"{name}{tuple(p.shape)}torch.float32".encode() + p.detach().numpy().tobytes())
    assert weights_digest(model) == hasher.hexdigest()[:16]


def test_a_plain_model_is_itself(toy):
    model = toy.model()
    weights = PlainWeights(model)
    assert list(weights) == sorted(name for name, _ in model.named_parameters())
    assert "lm_head.weight" not in weights  # tied to the embedding
    assert weights["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
    assert not weights.frozen
    model.model.norm.weight.requires_grad_(False)
    assert list(PlainWeights(model).frozen) == ["model.norm.weight"]
    before = model_digests(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    assert [name for name, found in model_digests(model).items() if found != before[name]] == ["model.layers.1.mlp.up_proj.weight"]


def test_merged_adapters_have_the_bytes_that_the_library_merges(toy):
    wrapped = adapted(toy)
    before = weights_digest(wrapped)
    digests = model_digests(wrapped)
    assert weights_digest(wrapped) == before  # not consumed
    plain = merged(copy.deepcopy(wrapped))
    assert digests == model_digests(plain)
    assert digests != model_digests(toy.model())
    # and by another route: a plain model filled with them computes what the adapted one does
    filled = toy.model(seed=7)
    filled.load_state_dict(dict(PlainWeights(wrapped)), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(filled(input_ids=IDS).logits, wrapped(input_ids=IDS).logits, atol=1e-5, rtol=0)
    weights = PlainWeights(wrapped)
    assert "model.norm.weight" in weights.frozen
    assert "model.layers.0.mlp.up_proj.weight" not in weights.frozen


def test_adapters_by_name_and_what_a_receiver_makes_of_them(toy):
    wrapped = adapted(toy)
    parts, whole, base = PlainWeights(wrapped, "adapter"), PlainWeights(wrapped), PlainWeights(toy.model())
    layers = [name.removesuffix(".lora_A.weight") for name in parts if name.endswith(".lora_A.weight")]
    assert len(layers) == 14  # 7 linear layers in each of 2 blocks
    assert set(parts) - set(base) == {f"{layer}.lora_{x}.weight" for layer in layers for x in "AB"}
    assert set(parts.frozen) == set(base)
    for layer in layers:
        assert torch.equal(parts[f"{layer}.weight"], base[f"{layer}.weight"])
        sum_ = fold(parts[f"{layer}.weight"], parts[f"{layer}.lora_A.weight"], parts[f"{layer}.lora_B.weight"])
        assert (sum_ - base[f"{layer}.weight"]).abs().max() > 1e-3
        torch.testing.assert_close(sum_, whole[f"{layer}.weight"], atol=1e-6, rtol=0)


def test_two_adapters_at_once(toy):
    from peft import LoraConfig

    wrapped = adapted(toy)
    wrapped.add_adapter("more", LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights=False))
    wrapped.base_model.set_adapter(["default", "more"])
    plain = merged(copy.deepcopy(wrapped))
    parts, whole = PlainWeights(wrapped, "adapter"), PlainWeights(wrapped)
    name = "model.layers.0.self_attn.q_proj"
    assert parts[f"{name}.lora_A.weight"].shape == (6, 32)
    expected = plain.get_parameter(f"{name}.weight")
    torch.testing.assert_close(whole[f"{name}.weight"], expected, atol=0, rtol=0)
    torch.testing.assert_close(fold(*(parts[f"{name}{x}.weight"] for x in ("", ".lora_A", ".lora_B"))), expected, atol=1e-6, rtol=0)


def test_what_cannot_be_delivered_is_refused(toy):
    from peft import LoraConfig, get_peft_model

    for options, named in (
        ({"use_dora": True}, "the adapter of 'model.layers.0.mlp.up_proj' cannot be delivered"),
        ({"modules_to_save": ["norm"]}, "trainable tensor '.*norm.modules_to_save.default.weight' cannot be delivered"),
    ):
        wrapped = get_peft_model(toy.model(), LoraConfig(r=2, target_modules=["up_proj"], **options))
        with pytest.raises(ConfigError, match=named):
            PlainWeights(wrapped)
    wrapped = adapted(toy)
    wrapped.merge_adapter()
    with pytest.raises(ConfigError, match="it is merged"):
        PlainWeights(wrapped)


def test_part_of_the_weights_other_types_and_pickling(toy):
    weights = PlainWeights(adapted(toy), dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    part = weights.only(frozenset({name, "model.norm.weight", "nothing"}))
    assert list(part) == [name, "model.norm.weight"]
    assert list(part.frozen) == ["model.norm.weight"]
    assert part[name].dtype == torch.bfloat16
    arrived = pickle.loads(pickle.dumps(part))
    assert type(arrived) is dict
    assert torch.equal(arrived[name], part[name])


def test_a_cached_digest_notices_changes_in_place_and_other_tensors():
    cache, tensor = DigestCache(), torch.zeros(4)
    first = cache.of("a", tensor)
    assert cache.of("a", tensor) == first == tensor_digest(torch.zeros(4))
    tensor[2] = 1.0
    assert cache.of("a", tensor) == tensor_digest(tensor) != first
    assert cache.of("a", torch.ones(4)) == tensor_digest(torch.ones(4))
    assert cache.of("b", torch.zeros(4)) == first
    # another tensor in the same memory
    numbers = torch.zeros(4)
    assert cache.of("c", numbers[:]) == first
    numbers.data.fill_(1.0)
    assert cache.of("c", numbers[:]) == tensor_digest(torch.ones(4))


def test_a_digest_is_computed_once_for_what_does_not_change(monkeypatch):
    cache, source, counted = DigestCache(), torch.zeros(4), []
    monkeypatch.setattr("posttrain.engine.weights.tensor_digest", lambda tensor: counted.append(tensor) or f"{tensor.sum().item()}")
    assert [cache.of("a", source.detach() + 1, source) for _ in range(3)] == ["4.0"] * 3
    assert len(counted) == 1
    source += 1
    assert cache.of("a", source.detach() + 1, source) == "8.0"
