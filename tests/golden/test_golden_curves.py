"""The toy curves are what they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_curves import curves

PINNED = json.loads(Path(__file__).with_name("curves.json").read_text(encoding="utf-8"))


def test_curves_equal_the_pinned_ones():
    found = curves()
    assert found.keys() == PINNED["curves"].keys()
    # Wide enough for another processor's order of additions, narrow enough for any change of the arithmetic. What was sampled may
    # differ by a token at the edge of two, so that a mean of 32 rewards gets more room than a loss.
    for stage in ("sft", "dpo"):
        assert found[stage] == pytest.approx(PINNED["curves"][stage], rel=1e-2), stage
    assert found["grpo"] == pytest.approx(PINNED["curves"]["grpo"], abs=0.13)


def test_pinned_curves_show_learning():
    sft, dpo, grpo = (PINNED["curves"][name] for name in ("sft", "dpo", "grpo"))
    assert sft[0] > 5.0 > 1.0 > sft[-1]
    assert dpo[0] == pytest.approx(0.693147, abs=1e-4)
    assert dpo[-1] < 0.69
    assert 0 <= min(grpo) <= max(grpo) <= 1
