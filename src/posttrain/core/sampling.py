"""How a completion is drawn. The same record configures sampler, trainer and evaluation, so that they cannot disagree."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.config import Config


class Sampling(Config):
    """Decoding conditions. `temperature=0` is greedy; the defaults sample the model's own distribution untouched."""

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Drop tokens less likely than min_p times the most likely one; 0 keeps all."""
    max_tokens: int = Field(default=32, ge=1)
    """Longest completion, the stop token included."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0
