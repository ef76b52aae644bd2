"""The local sampler on SmolLM2-135M; see sampler.py."""

from __future__ import annotations

import shared
from harness import Bench
from sampler import SMOLLM2_NEW, SMOLLM2_PROMPTS, measure


def run(bench: Bench) -> None:
    """Against `generate` and against the products."""
    conditions = f"SmolLM2-135M, prompts of 30 to 40 tokens, {SMOLLM2_NEW} new tokens each, temperature 1, float32"
    name = f"sampler, SmolLM2-135M, {SMOLLM2_PROMPTS} x {shared.SIBLINGS}"
    measure(bench, name, {"model": "smollm2", "prompts": SMOLLM2_PROMPTS}, (1.7, 0.75), conditions)
