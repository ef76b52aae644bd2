"""The from-scratch model, and names to models."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.engine.weights import weights_digest
from posttrain.models.loading import load, save
from posttrain.models.tiny import TinyModel, build_tiny

SHAPE = TinyModel(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, context=64)


def test_the_same_seed_gives_the_same_bytes(toy):
    before = torch.random.get_rng_state()
    one, same, other = (weights_digest(build_tiny(SHAPE, toy.tokenizer, seed)) for seed in (0, 0, 1))
    assert one == same != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_shape_and_scale(toy):
    model = build_tiny(SHAPE, toy.tokenizer, 0)
    assert model.config.vocab_size == len(toy.tokenizer) == 265
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 0)
    parameters = dict(model.named_parameters())
    assert parameters["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert parameters["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    # residual outputs: 0.02 / sqrt(2 x 2 layers) = 0.01
    assert parameters["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    assert (parameters["model.norm.weight"] == 1).all()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_first_loss_is_that_of_a_uniform_guess(toy):
    model = build_tiny(SHAPE, toy.tokenizer, 0)
    ids = torch.tensor([[1, 4, 80, 81, 6, 5]])
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(torch.log(torch.tensor(265.0)).item(), abs=0.1)


@pytest.mark.parametrize("shape", [{"hidden": 30, "heads": 4}, {"heads": 4, "kv_heads": 3}])
def test_shapes_that_do_not_divide_are_refused(toy, shape):
    with pytest.raises(ConfigError, match="must divide in that order"):
        build_tiny(TinyModel(**shape), toy.tokenizer, 0)


def test_saved_model_loads_as_it_was(toy, tmp_path):
    model = build_tiny(SHAPE, toy.tokenizer, 0)
    save(model, toy.tokenizer, tmp_path)
    again, tokenizer = load(str(tmp_path))
    assert weights_digest(again) == weights_digest(model)
    assert not again.training
    assert tokenizer.chat_template == toy.tokenizer.chat_template
    assert tokenizer("hi<|end|>")["input_ids"] == toy.tokenizer("hi<|end|>")["input_ids"]


def test_a_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be loaded .*; give a folder, a \.gguf file or a hub id") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_missing_gguf_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.gguf' does not exist"):
        load(str(tmp_path / "absent.gguf"))
