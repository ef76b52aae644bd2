"""How a run uses the machine: precision, memory, sharding, checkpoints. Torch-free; none of it changes what is optimised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.core.config import Config


class Packing(Config):
    """How many tokens are computed together. Affects speed and memory, not the gradient."""

    row_tokens: int = 512
    """Width of a packed row; a longer document widens its row instead of being cut."""
    micro_tokens: int = 4096
    """Tokens of one forward and backward pass."""


class Machine(Config):
    """Choices of speed and memory. The defaults suit a CPU and a small model."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; weights and optimizer state stay float32."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    sharding: Literal["none", "fsdp2"] = "none"
    """fsdp2 divides weights, gradients and optimizer state over the processes."""
    packing: Packing = Packing()
    save_total_limit: int = Field(default=2, ge=1)
    """Complete checkpoints kept per stage."""
    export: bool = True
    """Write the model in Hugging Face format into every checkpoint."""
