"""What surrounds each block of a model while it computes: bfloat16, and recomputation instead of memory.

Both are put around `forward` of the blocks for the length of a `with`, and leave nothing behind in the model. The library's own switch for
recomputation works in training mode only, and a model here is in evaluation mode throughout. Embedding, residual stream, final norm, head,
log-probabilities and loss are outside the blocks and stay float32; so do weights, their gradients and the optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from posttrain.core.errors import ConfigError
from posttrain.engine.fused import config_of
from posttrain.engine.machine import Machine

Forward = Callable[..., Any]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder blocks of a Hugging Face model, first to last, through adapters and value heads.

    They are the first list of modules that is as long as the config says the model is deep. Raises ConfigError when there is none.
    """
    depth = config_of(model).get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise ConfigError(
        f"no list of {depth} blocks was found in {type(model).__name__}; use machine.precision=float32, "
        "machine.checkpoint_activations=false and machine.sharding=none with this architecture"
    )


@contextmanager
def computing(model: nn.Module, machine: Machine) -> Iterator[None]:
    """Within it `model` computes as `machine` says. May be entered again inside itself. A model of the defaults is left alone."""
    if machine.precision == "float32" and not machine.checkpoint_activations:
        yield
        return
    kind = next(model.parameters()).device.type
    inside = [(block, block.__dict__.get("forward")) for block in blocks(model)]
    for block, _ in inside:
        forward = block.forward
        if machine.precision == "bfloat16":
            forward = _in_bfloat16(forward, kind)
        if machine.checkpoint_activations:
            forward = _recomputed(forward)
        block.forward = forward
    try:
        yield
    finally:
        for block, before in inside:
            if before is None:
                del block.forward
            else:
                block.forward = before


def _in_bfloat16(forward: Forward, kind: str) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Every weight of a block is used once, so that there is nothing to cache.
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
            return forward(*args, **kwargs)

    return run


def _recomputed(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # nothing draws: no dropout

    return run


def slow_precision(machine: Machine, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """One line to tell the user when `device` computes the chosen precision in software; None when all is well.

    On a CPU without such instructions bfloat16 takes 8 to 15 times as long as float32, and is right all the same.
    """
    if machine.precision == "float32":
        return None
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
        native = re.search(r"^(flags|Features)\s*:.*\b(amx_bf16|avx512_bf16|bf16)\b", text, re.MULTILINE) is not None
    if native:
        return None
    return f"machine.precision=bfloat16 is much slower than float32 on this {device.type}, which has no instructions for it; use float32"
