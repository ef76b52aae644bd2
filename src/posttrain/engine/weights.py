"""The identity of a set of weights."""

from __future__ import annotations

import hashlib

from torch import nn


def weights_digest(model: nn.Module) -> str:
    """16 hex digits over names, shapes and bytes of all parameters."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        hasher.update(parameter.detach().contiguous().cpu().view(-1).numpy().tobytes())
    return hasher.hexdigest()[:16]
