"""The optimizers a trainer can take its steps with."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from posttrain.core.errors import ConfigError


def make_optimizer(
    kind: str, parameters: Sequence[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW, or AdamW whose two moments are kept in 8 bits per weight, with one scale per block of 256 (from bitsandbytes).

    Tensors of fewer than 4096 weights keep their moments in float32. Raises ConfigError when the package is not installed.
    """
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"machine.optimizer={kind} needs the package 'bitsandbytes', which is not installed; "
            "pip install 'posttrain[8bit]', or use machine.optimizer=adamw"
        )
    from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(list(parameters), lr=lr, betas=betas, weight_decay=weight_decay)
