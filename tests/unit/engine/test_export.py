"""The export of a model in training: loadable, equal to the finished model, and without a trace in the training."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.engine.export import adapter_bytes, export, export_bytes, training_bytes
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.weights import weights_digest
from posttrain.models.loading import save
from posttrain.models.lora import LoRA, add_lora, merged


@pytest.fixture
def adapted(toy):
    """A model whose adapters have learnt something."""
    model = add_lora(toy.model(265), LoRA(rank=4), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1, generator=generator)
    return model


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_plain_model_comes_back_with_its_words(toy, tmp_path):
    model = toy.model(265)
    export(model, toy.tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert weights_digest(again) == weights_digest(model)
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert words.chat_template == toy.tokenizer.chat_template
    assert words.encode("a #### 12") == toy.tokenizer.encode("a #### 12")


def test_folded_adapters_have_the_bytes_of_the_merged_model(toy, tmp_path, adapted):
    export(adapted, toy.tokenizer, tmp_path / "now")
    save(merged(copy.deepcopy(adapted)), toy.tokenizer, tmp_path / "end")
    assert contents(tmp_path / "now" / "model") == contents(tmp_path / "end")


def test_the_adapters_go_on_learning_as_if_nothing_had_been_written(toy, tmp_path, adapted):
    before, state = {name: p.clone() for name, p in adapted.named_parameters()}, torch.random.get_rng_state()
    grads = {name: p.requires_grad for name, p in adapted.named_parameters()}
    export(adapted, toy.tokenizer, tmp_path)
    assert {name: p.requires_grad for name, p in adapted.named_parameters()} == grads
    assert before.keys() == dict(adapted.named_parameters()).keys()
    assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_adapter_alone_can_be_put_on_the_base_again(toy, tmp_path, adapted):
    from peft import PeftModel

    export(adapted, toy.tokenizer, tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    again = PeftModel.from_pretrained(toy.model(265), tmp_path / "adapter")
    ids = torch.tensor([[1, 5, 9, 20]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, adapted(ids).logits)


def test_sizes_are_those_of_the_files(toy, tmp_path, adapted):
    for name, model in {"plain": toy.model(265), "adapted": adapted}.items():
        folder = tmp_path / name
        export(model, toy.tokenizer, folder)
        weights = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        assert weights == pytest.approx(export_bytes(model), rel=0.05, abs=20_000)
        (folder / "state").mkdir()
        LocalTrainer(model, Optim(), 2, Ranks()).save(folder / "state")
        empty = sum(path.stat().st_size for path in (folder / "state").iterdir())
        # before the first step AdamW has no averages: a third of what will be
        assert empty == pytest.approx(training_bytes(model) / 3, rel=0.2, abs=20_000)


def test_adapters_are_counted_before_there_are_any(toy, adapted):
    plain = toy.model(265)
    # every linear layer but the tied head, which is adapted by nobody
    counted = adapter_bytes(plain, LoRA(rank=4))
    head = 12 * 4 * (32 + 265)
    assert counted - head == training_bytes(adapted)
    assert training_bytes(adapted, "adamw8bit") == training_bytes(adapted) // 2
