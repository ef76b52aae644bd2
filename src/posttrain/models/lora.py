"""Low-rank adapters through peft, initialised from a named stream."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from posttrain.core.config import Config
from posttrain.core.seeds import derive


class LoRA(Config):
    """Adapter settings. Defaults: rank 16 on every linear layer of the blocks, no dropout (a dropped unit makes the policy ratio differ
    from 1)."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, gt=0)
    target: str = "all-linear"


def add_lora(model: nn.Module, settings: LoRA, seed: int) -> nn.Module:
    """Wrap `model` with trainable adapters; base weights are frozen. B starts at zero, so the wrapped model computes what the base did."""
    from peft import LoraConfig, get_peft_model  # slow import, needed only here

    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.target, lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):
        wrapped = get_peft_model(model, config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(derive(seed, "lora", "init"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name:
                bound = parameter.shape[1] ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
    return wrapped


def is_lora(model: nn.Module) -> bool:
    """Whether `model` carries adapters."""
    return hasattr(model, "peft_config")


def merged(model: nn.Module) -> nn.Module:
    """The plain model with adapters folded in (the adapters are consumed); a plain model is returned unchanged."""
    return model.merge_and_unload() if is_lora(model) else model  # type: ignore[operator]
