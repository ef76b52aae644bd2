"""The value network of PPO: a second copy of the model's trunk that says what a state is worth instead of which token follows.

It costs what the policy costs, twice: weights and optimizer state (spec/book-1-foundations-and-math.md A4).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """A transformer trunk and one row of weights: V(s) = hidden state . head, in the units of the reward.

    `head` is [hidden size], float32, without bias, and starts at zero: every value is exactly 0 and an advantage is the bare return until
    the first step. The trunk learns from the second step on, since its gradient passes through the head. Example: a hidden state
    (1, 2, -1) under a head (0.5, 0, 0.25) is worth 0.25.
    """

    def __init__(self, trunk: nn.Module):
        super().__init__()
        self.trunk = trunk
        self.config: Any = trunk.config
        # a parameter, not nn.Linear: the library's initialiser draws from the global generator
        self.head = nn.Parameter(torch.zeros(self.config.get_text_config().hidden_size))

    @classmethod
    def of(cls, model: nn.Module) -> Critic:
        """A critic on a deep copy of the trunk of a Hugging Face causal language model. Nothing is shared with `model`.

        Adapters come along, and what was frozen stays frozen; the head is trainable in any case.
        """
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        return cls(copy.deepcopy(inner.base_model)).eval()  # type: ignore[arg-type]

    def value(self, states_NH: Tensor) -> Tensor:
        """[N] values of the trunk's hidden states [N, H], in the head's precision."""
        return states_NH.to(self.head.dtype) @ self.head
