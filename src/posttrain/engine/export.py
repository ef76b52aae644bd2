"""The model of a running training in Hugging Face format: what a checkpoint carries so that it can be tried out, served or kept.

Adapters are folded into a copy, with the sums that `merged` computes at the end: the export of the last step equals the finished model byte
for byte, and the adapters go on learning. They are written too, so that they can be served or combined as such.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from posttrain.engine.weights import PlainWeights
from posttrain.models.loading import save
from posttrain.models.lora import LoRA, is_lora

MODEL, ADAPTER = "model", "adapter"
"""Sub-folders of an export."""
_TOKENIZER_BYTES = 72
"""Per entry of the vocabulary, in tokenizer.json; measured on SmolLM2 (49,152 entries, 3.5 MB)."""
_MOMENTS = {"adamw": 8.0, "adamw8bit": 2.0}
"""Bytes per trained number that an optimizer keeps beside it."""


def export(model: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `folder`/model, loadable with AutoModelForCausalLM and AutoTokenizer, and `folder`/adapter when the model carries one.

    `model` is complete (a divided one gives its `LocalTrainer.plain`) and is not changed.
    """
    if not is_lora(model):
        save(model, tokenizer, folder / MODEL)
        return
    save(_folded(model), tokenizer, folder / MODEL)
    model.save_pretrained(folder / ADAPTER, save_embedding_layers=False)  # type: ignore[operator]


def _folded(model: nn.Module) -> nn.Module:
    """The plain model with the adapters added in. Only what carries an adapter is copied."""
    inner: nn.Module = model.get_base_model()  # type: ignore[operator]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        plain: nn.Module = type(inner)(copy.deepcopy(inner.config))  # type: ignore[call-arg]
    buffers = {name: tensor for name, tensor in inner.state_dict().items() if name in dict(inner.named_buffers())}
    found = plain.load_state_dict({**buffers, **PlainWeights(model)}, assign=True, strict=False)
    plain.tie_weights()  # type: ignore[operator]
    if wrong := [*found.unexpected_keys, *(name for name, p in plain.named_parameters() if p.is_meta)]:
        raise ValueError(f"{type(plain).__name__} folded from its adapters: tensor '{wrong[0]}' (of {len(wrong)}) is missing or unknown")
    return plain.eval()


def training_bytes(model: nn.Module, optimizer: str = "adamw") -> int:
    """What a checkpoint holds to go on from: the trainable tensors and the optimizer's averages of each."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(int(p.numel() * (p.element_size() + _MOMENTS[optimizer])) for p in trained)


def adapter_bytes(model: nn.Module, settings: LoRA, optimizer: str = "adamw") -> int:
    """The same for adapters that `model` does not carry yet: rank x (inputs + outputs) float32 numbers for every linear layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return int((4 + _MOMENTS[optimizer]) * settings.rank * sum(layer.in_features + layer.out_features for layer in layers))


def export_bytes(model: nn.Module, tokenizer: PreTrainedTokenizerFast | None = None) -> int:
    """What `export` writes: every parameter once, adapters once more, and the tokenizer."""
    words = len(tokenizer) * _TOKENIZER_BYTES if tokenizer is not None else 0
    return words + sum(p.numel() * p.element_size() for p in model.parameters())
