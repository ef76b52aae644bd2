"""Shapes of healthy training: what a trace looks like before a fault, and what must not be mistaken for one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.matrix.traces_world import Law, State


def after(onset: int, law: Law) -> Law:
    """A law that holds from a step on."""
    return lambda s, r: law(s, r) if s.step >= onset else None


def state(r: np.random.Generator, steps: int, **given: Any) -> State:
    """A policy like others, never quite the same: what is not given varies from seed to seed."""
    s = State(steps, **copy.deepcopy(given))

    def near(name: str, factor: float) -> None:
        if name not in given:
            setattr(s, name, getattr(s, name) * float(np.exp(factor * r.standard_normal())))

    for name, factor in {
        "entropy": 0.15,
        "length": 0.2,
        "gradient": 0.3,
        "kl_rate": 0.3,
        "sample_s": 0.3,
        "train_s": 0.3,
        "rss": 0.1,
    }.items():
        near(name, factor)
    if "skill" not in given:
        s.skill += 0.2 * r.standard_normal()
    if "entropy_end" not in given:
        s.entropy_end = s.entropy * r.uniform(0.4, 0.7)
    s.prompts = given.get("prompts", int(r.choice([16, 24, 32])))
    s.siblings = given.get("siblings", int(r.choice([8, 8, 16])))
    return s


def _breakout(s: State, r: np.random.Generator) -> None:
    s.rate = 0.004 if s.step < 0.35 * s.steps else 0.09


def _wanders(s: State, r: np.random.Generator) -> None:
    s.wander += 0.05 * r.standard_normal()


def _thinks_longer(s: State, r: np.random.Generator) -> None:
    s.length_drift = 0.012 * s.signal * s.lr / 1e-4 if s.length < 300 else 0.0


Shape = tuple[Mapping[str, Any], tuple[Law, ...]]
SHAPES: Mapping[str, Shape] = {
    "fast learner": ({"skill": -1.0, "rate": 0.055, "ceiling": 2.6}, ()),
    "slow learner": ({"skill": -0.8, "rate": 0.006}, ()),
    "breakout after a plateau": ({"skill": -3.4, "spread": 1.5, "ceiling": 1.5, "schedule": "constant"}, (_breakout,)),
    "sparse but learning": ({"skill": -4.6, "spread": 2.0, "rate": 0.06}, ()),
    "saturating": ({"skill": 0.6, "rate": 0.06, "ceiling": 5.0, "unparseable": 0.004}, ()),
    "productive sharpening": ({"skill": -0.9, "rate": 0.03, "sharpen": 0.035, "entropy_end": 0.05}, ()),
    "long noisy plateau": ({"skill": -0.2, "rate": 0.0015}, (_wanders,)),
    "dynamic sampling": ({"skill": -0.4, "rate": 0.03, "spread": 2.0, "tries": 3.0}, ()),
    "tools": ({"skill": -0.7, "rate": 0.02, "turns": 3.0, "calls": 1.9, "forced": 0.8}, ()),
    "thinks longer": ({"skill": -1.2, "rate": 0.025, "cap": 4000.0}, (_thinks_longer,)),
    "gated parts": (
        {
            "skill": -0.6,
            "rate": 0.02,
            "gated": True,
            "pays": {"form": 0.2},
            "levels": {"form": 0.8},
            "wobble": {"form": 0.15},
        },
        (),
    ),
}
"""By name: how the policy starts, and laws besides learning."""
STEPS: Mapping[str, int] = {"long noisy plateau": 400, "sparse but learning": 300, "breakout after a plateau": 160}
EXTREMES = (0.5, 0.75, 1.0)
"""Shares of the usual number of steps; runs are not all of one length."""


def healthy(name: str, r: np.random.Generator) -> tuple[State, tuple[Law, ...]]:
    """A healthy trace of a shape, with a length and a number of held-out items of its own."""
    given, laws = SHAPES[name]
    steps = int(STEPS.get(name, 200) * r.choice(EXTREMES))
    return state(r, steps, pulse_items=int(r.choice([64, 64, 200])), pulse_every=int(r.choice([5, 10])), **given), laws
