"""A small Llama-shaped Hugging Face model, from scratch, so that every rung of the ladder runs on a CPU in minutes.

It is an ordinary `LlamaForCausalLM`: its checkpoints load in any tool that reads the Hugging Face format.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.seeds import derive
from posttrain.models.tokenizer import control_id


class TinyModel(Config):
    """Shape of the tiny model; the default has about 0.28M parameters with a 400-token vocabulary."""

    hidden: int = Field(default=96, ge=8)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=4, ge=1)
    mlp: int = Field(default=288, ge=8)
    context: int = Field(default=512, ge=16)
    """Longest sequence, in tokens."""


def build_tiny(shape: TinyModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A freshly initialised float32 model for `tokenizer`. The same seed gives the same bytes."""
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        raise ConfigError(f"hidden {shape.hidden} / heads {shape.heads} / kv_heads {shape.kv_heads} must divide in that order")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=control_id(tokenizer, "bos"),
        eos_token_id=control_id(tokenizer, "eos"),
        pad_token_id=control_id(tokenizer, "pad"),
    )
    with torch.random.fork_rng(devices=[]):  # the library's own initialiser draws from the global generator; its values are replaced below
        model = LlamaForCausalLM(config).float()
    _initialise(model, torch.Generator().manual_seed(derive(seed, "tiny", "init")), shape.layers)
    return model


@torch.no_grad()
def _initialise(model: nn.Module, generator: torch.Generator, layers: int) -> None:
    """Normal(0, 0.02) matrices, residual outputs scaled down by depth (GPT-2), unit norms."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter.normal_(0.0, 0.02 / (2 * layers) ** 0.5 if residual else 0.02, generator=generator)
