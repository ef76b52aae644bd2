"""Small hand-made frames: healthy ones of four kinds, and how to make one sick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from posttrain.doctor.catalog import (
    collapse,
    configuration,
    data,
    distillation,
    drift,
    evaluation,
    infrastructure,
    lossy,
    reward,
    seam,
    supervised,
)
from posttrain.doctor.entries import Action, Entry, suspected
from posttrain.doctor.frame import Frame, Kind, frame_of

Series = float | Callable[[int], float | None] | None
"""A constant, a value per row (None: not recorded there), or None: the metric is not recorded at all."""


def wave(t: int, size: float, period: float = 7.0) -> float:
    """A little movement without a trend, so that no column is exactly constant."""
    return size * float(np.sin(2 * np.pi * t / period) + 0.5 * np.sin(t))


def ramp(start: float, end: float, at: int, over: int, size: float = 0.0) -> Callable[[int], float]:
    """`start` until row `at`, then a line to `end` over `over` rows, with a little movement of `size`."""
    return lambda t: start + (end - start) * min(1.0, max(0.0, (t - at) / over)) + wave(t, size)


def step(start: float, end: float, at: int, size: float = 0.0) -> Callable[[int], float]:
    """`start` before row `at` and `end` from there on."""
    return lambda t: (start if t < at else end) + wave(t, size)


def seldom(series: Series, every: int = 5) -> Callable[[int], float | None]:
    """Recorded on every fifth row only."""
    return lambda t: (series(t) if callable(series) else series) if t % every == 0 else None


def around(mean: float, size: float) -> Callable[[int], float]:
    """Movement of `size` around a level."""
    return lambda t: mean + wave(t, size)


RL: Mapping[str, Series] = {
    "entropy": ramp(0.50, 0.38, 0, 70, 0.01),
    "zero_variance": around(0.2, 0.03),
    "mixed": around(0.8, 0.03),
    "all_right": around(0.1, 0.02),
    "all_wrong": around(0.1, 0.02),
    "unanimous_partial": 0.0,
    "unanimous_unparseable": 0.0,
    "reward_mean": ramp(0.35, 0.60, 0, 70, 0.01),
    "reward_mixed": around(0.48, 0.02),
    "reward_std": around(0.47, 0.01),
    "duplicates": around(0.1, 0.02),
    "repetition": around(0.02, 0.004),
    "length": around(100.0, 3.0),
    "length_p50": around(95.0, 3.0),
    "length_p95": around(160.0, 5.0),
    "kl": ramp(0.0, 0.06, 0, 70, 0.002),
    "clip_fraction": around(0.01, 0.002),
    "ratio_max": around(1.3, 0.05),
    "grad_norm": around(0.8, 0.1),
    "lr": lambda t: 1e-5 * (1 - t / 400),
    "loss": around(0.003, 0.01),
    "advantage_abs": around(0.8, 0.02),
    "mismatch_max": around(8e-6, 2e-6),
    "mismatch_mean": around(1e-7, 1e-8),
    "ess_mismatch": 1.0,
    "ess_staleness": 0.99,
    "version_lag": 0.0,
    "left_out": around(0.01, 0.002),
    "starved": 0.0,
    "dropped": 0.0,
    "survivors_median": 8.0,
    "survivors_min": 7.0,
    "left_unscored": 0.0,
    "parsed": around(0.97, 0.005),
    "unparseable": around(0.01, 0.004),
    "truncated": around(0.015, 0.004),
    "errors": 0.0,
    "control": 0.0,
    "turn_capped": around(0.02, 0.005),
    "turns": around(2.0, 0.05),
    "calls": around(1.0, 0.04),
    "repeated_calls": around(0.03, 0.01),
    "malformed_calls": around(0.01, 0.004),
    "tokens": 6400.0,
    "tokens_sampled": 6400.0,
    "tokens_forced": 900.0,
    "groups_kept": 16.0,
    "tries_per_kept": around(1.2, 0.05),
    "heldout_mean": seldom(ramp(0.34, 0.55, 0, 70, 0.005)),
    "heldout_n": seldom(400.0),
    "heldout_parse_rate": seldom(around(0.97, 0.005)),
    "heldout_truncated": seldom(0.01),
    "heldout_length": seldom(around(100.0, 2.0)),
    "seconds.sample": around(2.0, 0.1),
    "seconds.train": around(1.0, 0.05),
    "seconds.rss_mib": around(2000.0, 10.0),
    "seconds.peak_mib": ramp(2400.0, 2450.0, 0, 10),
}
SFT: Mapping[str, Series] = {
    "loss": lambda t: 0.3 + 3.0 * float(np.exp(-t / 12)) + wave(t, 0.02),
    "entropy": lambda t: 0.3 + 2.0 * float(np.exp(-t / 12)) + wave(t, 0.02),
    "token_accuracy": lambda t: 0.8 - 0.5 * float(np.exp(-t / 12)),
    "grad_norm": lambda t: 1.0 + 20.0 * float(np.exp(-t / 3)) + wave(t, 0.1),
    "lr": lambda t: 1e-4 * (1 - t / 71),
    "tokens": around(800.0, 20.0),
    "seconds.step": around(0.5, 0.02),
    "seconds.peak_mib": 2000.0,
}
PREFERENCE: Mapping[str, Series] = {
    "loss": ramp(0.693, 0.56, 0, 70, 0.01),
    "accuracy": lambda t: 0.0 if t == 0 else 0.9 + wave(t, 0.05),
    "chosen_reward": ramp(0.0, 0.08, 0, 70, 0.003),
    "rejected_reward": ramp(0.0, -0.2, 0, 70, 0.01),
    "chosen_logp": ramp(-1.2, -0.4, 0, 70, 0.03),
    "grad_norm": around(0.8, 0.1),
    "lr": lambda t: 1e-5 * (1 - t / 71),
    "seconds.step": around(0.5, 0.02),
}
DISTILL: Mapping[str, Series] = {
    "loss": around(0.1, 0.02),
    "reverse_kl": lambda t: 0.3 + 1.2 * float(np.exp(-t / 25)) + wave(t, 0.01),
    "entropy": ramp(0.5, 0.4, 0, 70, 0.01),
    "duplicates": around(0.1, 0.02),
    "mismatch_max": around(8e-6, 2e-6),
    "grad_norm": around(0.8, 0.1),
    "lr": lambda t: 1e-5 * (1 - t / 400),
    "heldout_mean": seldom(ramp(0.34, 0.55, 0, 70, 0.005)),
    "heldout_n": seldom(400.0),
}
HEALTHY: Mapping[Kind, Mapping[str, Series]] = {"rl": RL, "sft": SFT, "preference": PREFERENCE, "distill": DISTILL}


def frame(kind: Kind = "rl", rows: int = 70, only: tuple[str, ...] = (), **how: Any) -> Frame:
    """A healthy frame of a kind with some columns changed; settings, facts and events by these names.

    `only`: leave nothing but these columns, as a foreign log would.
    """
    fields = {name: how.pop(name) for name in ("settings", "facts") if name in how}
    events: Mapping[str, int] = how.pop("events", {})
    columns: dict[str, Series] = {**HEALTHY[kind], **{name.replace("__", "."): series for name, series in how.items()}}
    if only:
        columns = {name: series for name, series in columns.items() if name in only}
    made = frame_of(kind, kind, [(t, _row(columns, t)) for t in range(rows)], **fields)
    made.events.update(events)
    return made


def _row(columns: Mapping[str, Series], t: int) -> dict[str, float]:
    values = {name: series(t) if callable(series) else series for name, series in columns.items()}
    return {name: value for name, value in values.items() if value is not None}


_FAMILIES = (collapse, configuration, data, distillation, drift, evaluation, infrastructure, lossy, reward, seam, supervised)
BOOK: Mapping[str, Entry] = {entry.id: entry for family in _FAMILIES for entry in family.ENTRIES}
"""The entries F, P and S; what labs and users report has tests of its own."""


def fired(made: Frame, notes: bool = False, entries: Mapping[str, Entry] = BOOK) -> set[str]:
    """Ids suspected at any row; notes only where asked for. What is another name for an entry counts as that one."""
    ids = [entry for entry in entries.values() if suspected(entry, made).any()]
    return {entry.same_as or entry.id for entry in ids if notes or entry.action is not Action.NOTE}
