"""The forward pass on real tokens only computes what the library's own forward computes with a dense mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.core.seeds import numpy_rng
from posttrain.engine.attention import Heads, Segment, Tree, _family, layout, tree_attention
from posttrain.engine.batch import Batch
from posttrain.engine.decoder import backbone
from posttrain.engine.scoring import hidden_states
from posttrain.engine.trunk import linear, states, supports
from posttrain.models.lora import LoRA, add_lora
from posttrain.rollout.pack import Packing, pack

CLOSE = 1e-10
SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama biased, a head per key": (
        LlamaForCausalLM,
        LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
}


@pytest.fixture(autouse=True)
def norms_of_64_bits(monkeypatch):
    """The library's norms round to 32 bits whatever the model; here they must not, so that the comparison can be strict."""
    import transformers.models as models

    def forward(self, x):
        return self.weight * (x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())

    for kind in ("llama", "qwen2", "qwen3", "mistral"):
        module = getattr(getattr(models, kind), f"modeling_{kind}")
        monkeypatch.setattr(getattr(module, f"{kind.capitalize()}RMSNorm"), "forward", forward)


def model_of(name: str) -> Any:
    kind, config = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: at their defaults they would not be tested
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3, generator=generator)
    return model


def rows(toy, *, lone: bool = True):
    """Groups of 1 to 5 siblings, prompts and completions of very different lengths, a completion of one token among them."""
    rng = numpy_rng(3, "rows")
    found = [toy.row((5, 6, 7), (8,), "short"), toy.row((5, 6, 7), (9, 10, 11), "short")]
    for group, siblings in enumerate((5, 3, 4, 1, 1) if lone else (5, 3, 4)):
        prompt = rng.integers(3, 60, size=int(rng.integers(2, 14))).tolist()
        for _ in range(siblings):
            found.append(toy.row(prompt, rng.integers(3, 60, size=int(rng.integers(1, 20))).tolist(), f"{group}"))
    return found


def dense(trunk: Any, batch: Batch) -> torch.Tensor:
    """The library's forward under the whole mask."""
    out = trunk(input_ids=batch.ids_RW, attention_mask=batch.attention_R1WW(), position_ids=batch.position_RW, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)[batch.source_N]


def compare(model: Any, batches: list[Batch]) -> float:
    """Largest difference of states and gradients, relative to the largest of each."""
    trunk, worst = backbone(model), 0.0
    results = []
    for forward in (dense, states):
        model.zero_grad()
        found = torch.cat([forward(trunk, batch) for batch in batches])
        weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
        (found * weight).sum().backward()
        results.append([found.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 3
    for theirs, ours in zip(*results, strict=True):
        worst = max(worst, ((theirs - ours).abs().max() / theirs.abs().max().clamp(min=1e-9)).item())
    return worst


@pytest.mark.parametrize("name", FAMILIES)
def test_states_and_gradients_are_those_of_the_dense_mask(toy, name):
    model = model_of(name)
    assert supports(backbone(model))
    batches = pack(rows(toy), Packing(row_tokens=64, micro_tokens=128))
    assert len(batches) > 1
    assert compare(model, batches) < CLOSE


def test_single_precision_agrees_to_its_last_digits(toy):
    assert compare(model_of("llama").float(), pack(rows(toy), Packing())) < 2e-5


def test_equal_lengths_need_no_padding_and_no_mask(toy):
    samples = [toy.row((1, 2, g), (7, 8, 9, s), f"{g}") for g in range(3) for s in range(4)]
    (batch,) = pack(samples, Packing())
    (family,) = layout(batch).families
    assert family.reach is None
    assert family.prompts.source is None
    assert [block.shape for block in family.siblings] == [(12, 3)]
    assert compare(model_of("llama"), [batch]) < CLOSE


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "down_proj"]], ids=["all", "some"])
def test_lora_is_computed_low_rank_and_exact(toy, target):
    model = add_lora(model_of("qwen2"), LoRA(rank=3), 0).eval()
    if target != "all-linear":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model_of("qwen2"), LoraConfig(r=3, lora_alpha=5, target_modules=target)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: the adapter would not matter
                parameter.normal_(0.0, 0.3, generator=generator)
    model.double()
    assert supports(backbone(model))
    assert compare(model, pack(rows(toy), Packing())) < CLOSE
    with model.disable_adapter():
        assert supports(backbone(model))
        (batch,) = pack(rows(toy), Packing())
        assert torch.allclose(states(backbone(model), batch), dense(backbone(model), batch), atol=1e-10)


def test_what_was_packed_together_cannot_leak(toy):
    """Changing one sibling changes the states of that sibling only."""
    model = model_of("llama")
    samples = rows(toy)
    (batch,) = pack(samples, Packing())
    before = states(backbone(model), batch)
    slot = int((batch.branch_RW.flatten() == 2).nonzero()[0])
    row, document = slot // batch.ids_RW.shape[1], int(batch.document_RW.flatten()[slot])
    ids_RW = batch.ids_RW.clone()
    ids_RW.view(-1)[slot] = 59 - ids_RW.view(-1)[slot]
    after = states(backbone(model), replace(batch, ids_RW=ids_RW))
    source_row = batch.source_N // batch.ids_RW.shape[1]
    inside = (source_row == row) & (batch.document_RW.flatten()[batch.source_N] == document)
    inside &= batch.branch_RW.flatten()[batch.source_N] == 2
    moved = (after != before).any(-1)
    assert moved.any()
    assert not (moved & ~inside).any()


def test_only_what_a_trained_token_needs_leaves_the_last_block(toy):
    (batch,) = pack([toy.row(range(3, 13), (7, 8), "g"), toy.row(range(3, 13), (9, 8), "g")], Packing())
    plan = layout(batch)
    assert len(plan.slot_M) == 12
    assert plan.needed_K.tolist() == [9, 10, 11]  # the prompt's last token, and the first of each sibling
    assert not plan.ordered


def test_rows_that_are_no_documents_are_refused(toy):
    (batch,) = pack([toy.row((1, 2), (7, 8, 9), "g"), toy.row((1, 2), (5, 6, 4), "g")], Packing())
    branch_RW = batch.branch_RW.clone()
    branch_RW[0, 2:] = torch.tensor([1, 2, 1, 2])
    with pytest.raises(ValueError, match="whole continuations"):
        layout(replace(batch, branch_RW=branch_RW))


def test_everything_else_takes_the_modules_own_calls(toy):
    """A hook, a wrapped forward, another activation or precision, or an unknown layer must not be stepped around."""
    assert supports(backbone(model_of("llama")))
    hooked = model_of("llama")
    hooked.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: None)
    wrapped = model_of("llama")
    wrapped.model.layers[0].forward = wrapped.model.layers[0].forward
    other = model_of("llama")
    other.config.hidden_act = "gelu"
    replaced = model_of("llama")
    replaced.model.layers[0].mlp.up_proj = torch.nn.Sequential(replaced.model.layers[0].mlp.up_proj)
    normed = model_of("llama")
    normed.model.norm = torch.nn.RMSNorm(32).double()
    for model in (hooked, wrapped, other, replaced, normed, model_of("llama").bfloat16()):
        assert not supports(backbone(model))
    with torch.autocast("cpu", torch.bfloat16):
        assert not supports(backbone(model_of("llama")))
    (batch,) = pack(rows(toy), Packing())
    assert torch.equal(hidden_states(backbone(hooked), batch), dense(backbone(hooked), batch))


def test_linear_reads_a_layer_or_says_that_it_cannot():
    plain = torch.nn.Linear(3, 2)
    found = linear(plain)
    assert found is not None
    assert found.weight is plain.weight
    assert found.adapter is None
    assert linear(torch.nn.Identity()) is None


def test_attention_by_hand():
    """One head of two numbers, no rotation, equal keys: a sibling's token mixes prompt and own values evenly."""
    order: list[Segment] = []
    family = _family([Tree(Segment(0, 2), (Segment(2, 1), Segment(3, 2)))], order, 0)
    assert [tuple(segment) for segment in order] == [(0, 2), (2, 1), (3, 2)]
    joint = torch.zeros(5, 6)
    joint[:, 4] = torch.tensor([3.0, 6.0, 9.0, 12.0, 15.0])
    out = tree_attention(joint, torch.ones(5, 1, dtype=torch.complex64), [family], Heads(1, 1, 2, 1.0))
    # prompt: 3, (3+6)/2; siblings (9 in the padded block of 2, then 12, 15): (3+6+9)/3, (3+6+12)/3, (3+6+12+15)/4
    assert out[:, 0].tolist() == pytest.approx([3.0, 4.5, 6.0, 7.0, 9.0])
