"""Generated supervised, preference and distillation training, healthy and with faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tests.matrix.traces_made import Rng, Trace, onset
from tests.matrix.traces_world import Row

Change = Callable[[Row, int, Rng], None]
"""What a fault does to the state of a step: `row` holds means, before noise is added to them."""


def _warm(step: int, steps: int, peak: float) -> float:
    return float(peak * min(1.0, (step + 1) / (0.1 * steps)) * 0.5 * (1 + np.cos(np.pi * step / steps)))


def _noisy(row: Row, spread: Mapping[str, float], r: Rng) -> Row:
    """Each figure with noise in proportion to it, or, for a margin around 0, of that size."""
    return {name: float(v * np.exp(spread.get(name, 0.0) * r.standard_normal())) for name, v in row.items()}


def supervised(steps: int, r: Rng, change: Change | None = None, pulse: int = 20, **given: float) -> list[Row]:
    """Imitation: the loss falls as a power of the step towards what the data leave open, token accuracy with it, generation behind it."""
    start, floor, speed = (
        given.get("start", r.uniform(2.0, 4.0)),
        given.get("floor", r.uniform(0.3, 0.8)),
        given.get("speed", r.uniform(5, 25)),
    )
    rows, n = [], 200
    for step in range(steps):
        loss = floor + (start - floor) / (1 + step / speed)
        row = {"loss": loss, "grad_norm": 1.2 * loss, "entropy": 0.9 * loss, "tokens": 3000.0, "rows": 32.0, "lr": _warm(step, steps, 2e-4)}
        row |= {"token_accuracy": 1 / (1 + 0.55 * loss), "seconds.step": 0.6, "seconds.peak_mib": 3200.0, "seconds.rss_mib": 2500.0}
        row["generates"] = max(0.02, 0.95 - 0.55 * loss)
        if change:
            change(row, step, r)
        generates = row.pop("generates")
        row = _noisy(row, {"loss": 0.05, "grad_norm": 0.15, "entropy": 0.03, "token_accuracy": 0.01, "seconds.step": 0.08}, r)
        if step % pulse == 0:
            row |= {
                "heldout_n": float(n),
                "heldout_mean": r.binomial(n, generates) / n,
                "heldout_parse_rate": 0.98,
                "heldout_truncated": 0.0,
            }
        rows.append(row)
    return rows


def preference(steps: int, r: Rng, change: Change | None = None) -> list[Row]:
    """Pairs: the margin grows, mostly because the rejected response falls; accuracy is the share of pairs with a margin above 0."""
    rows, scale = [], r.uniform(0.6, 1.0)
    for step in range(steps):
        grown = scale * (1 - np.exp(-step / (0.5 * steps)))
        state = {"chosen": 0.35 * grown, "rejected": -0.65 * grown, "spread": 0.45 * grown + 0.02, "lr": _warm(step, steps, 2e-5)}
        if change:
            change(state, step, r)
        pairs = state["chosen"] - state["rejected"] + state["spread"] * r.standard_normal(16)
        noise = 0.02 * r.standard_normal(2) * min(1.0, step)
        rows.append(
            {
                "loss": float(np.log1p(np.exp(-pairs)).mean()),
                "accuracy": float((pairs > 0).mean()) if step else 0.0,
                "chosen_reward": float(state["chosen"] + noise[0]) if step else 0.0,
                "rejected_reward": float(state["rejected"] + noise[1]) if step else 0.0,
                "chosen_logp": float(-1.2 + 10 * state["chosen"] / 12),
                "grad_norm": float(0.7 * np.exp(0.2 * r.standard_normal())),
                "lr": state["lr"],
                "pairs": 16.0,
                "seconds.step": float(0.4 * np.exp(0.08 * r.standard_normal())),
            }
        )
    return rows


def distilled(steps: int, r: Rng, change: Change | None = None) -> list[Row]:
    """On-policy distillation: reverse KL falls towards what cannot be followed, and the held-out score rises with what is learned."""
    first, left, speed = r.uniform(0.9, 1.6), r.uniform(0.06, 0.12), r.uniform(15, 40)
    score, n, entropy = r.uniform(0.2, 0.35), 500, r.uniform(0.4, 0.7)
    rows = []
    for step in range(steps):
        done = 1 - np.exp(-step / speed)
        row = {"reverse_kl": left + (first - left) * (1 - done), "score": score + 0.3 * done, "entropy": entropy * (1 - 0.25 * done)}
        row |= {"done": done, "duplicates": 0.02, "noise": 0.06, "grad_norm": 0.8, "lr": _warm(step, steps, 1e-4), "tokens": 9000.0}
        if change:
            change(row, step, r)
        goal, noise, _ = row.pop("score"), row.pop("noise"), row.pop("done")
        row = _noisy(row, {"reverse_kl": noise, "entropy": 0.02, "duplicates": 0.3, "grad_norm": 0.15}, r)
        row |= {"mismatch_max": 2e-6, "mismatch_mean": 2e-7, "version_lag": 0.0, "length": 90 * float(np.exp(0.03 * r.standard_normal()))}
        row |= {"seconds.sample": 5.0 * float(np.exp(0.08 * r.standard_normal())), "unparseable": 0.02, "truncated": 0.01}
        if step % 10 == 0:
            row |= {"heldout_n": float(n), "heldout_mean": r.binomial(n, goal) / n, "heldout_parse_rate": 0.97, "heldout_truncated": 0.01}
        rows.append(row)
    return rows


def _sft(id: str, what: str, fault: Callable[[Rng], Change], steps: int = 160, twins: tuple[str, ...] = (), **given: float) -> Trace:
    return Trace(id, what, "sft", lambda r: supervised(steps, r, fault(r), 20, **given), twins)


def _dpo(id: str, what: str, fault: Callable[[Rng], Change], steps: int = 140, twins: tuple[str, ...] = ()) -> Trace:
    return Trace(id, what, "dpo", lambda r: preference(steps, r, fault(r)), twins)


def _distil(id: str, what: str, fault: Callable[[Rng], Change], steps: int = 200, twins: tuple[str, ...] = ()) -> Trace:
    return Trace(id, what, "distill", lambda r: distilled(steps, r, fault(r)), twins)


def _always(**values: Any) -> Callable[[Rng], Change]:
    return lambda r: lambda row, step, _: row.update(values)


def _spike(r: Rng) -> Change:
    """Too high a rate: the loss leaps to several times what it was and comes back slowly."""
    at = onset(r, 40, 100)

    def change(row: Row, step: int, _: Rng) -> None:
        if step >= at:
            row["loss"] *= 1 + 6 * np.exp(-(step - at) / 12)

    return change


def _both_fall(r: Rng) -> Change:
    """Both responses become unlikely, the rejected one faster."""
    at = onset(r, 10, 40)

    def change(row: Row, step: int, _: Rng) -> None:
        if step >= at:
            row["chosen"] -= 0.02 * (step - at)
            row["rejected"] -= 0.03 * (step - at)

    return change


def _by_heart(row: Row, step: int, r: Rng) -> None:
    row["chosen"], row["rejected"], row["spread"] = 0.02 * step, -0.09 * step, 0.015 * step + 0.02


def _over(r: Rng) -> Change:
    """Pursued after nothing is left: from step 200 on diversity goes, and the score with it."""
    at = onset(r, 180, 220)

    def change(row: Row, step: int, _: Rng) -> None:
        late = max(0.0, (step - at) / 120)
        row["score"] -= 0.25 * min(1.0, late)
        row["duplicates"] += 0.5 * min(1.0, late)
        row["entropy"] *= np.exp(-1.5 * min(1.0, late))

    return change


def _swings(r: Rng) -> Change:
    """The teacher's rounding adds noise to its log-probabilities: reverse KL swings, nothing has a direction in the first fifty steps."""

    def change(row: Row, step: int, inner: Rng) -> None:
        if step < 50:
            row["reverse_kl"] = 0.9 * np.exp(0.7 * inner.standard_normal())
            row["score"] = 0.3

    return change


def _fails_too(r: Rng) -> Change:
    """The teacher is worse than the student on these prompts: following it costs score."""

    def change(row: Row, step: int, _: Rng) -> None:
        row["score"] = 0.5 - 0.3 * row["done"]

    return change


def _strange(row: Row, step: int, r: Rng) -> None:
    """The teacher scores ids that mean something else to it."""
    row["reverse_kl"], row["score"], row["noise"] = 7.5, 0.25, 0.03


OTHER: tuple[Trace, ...] = (
    _sft("S140", "the loss is flat from the first step", _always(loss=3.1, generates=0.02, token_accuracy=0.3), twins=("S142", "S76")),
    _sft("S141", "the loss spikes", _spike, twins=("S140",)),
    _sft("S142", "no token is trained", _always(loss=0.0, grad_norm=0.0, tokens=0.0), twins=("S140",)),
    _sft("S50", "imitates at 95 %, generates at 25 %", lambda r: lambda row, step, _: row.update(generates=0.25), start=2.0, floor=0.08),
    _sft("S104", "the schedule ends before the run", lambda r: lambda row, step, _: row.update(lr=row["lr"] if step < 90 else 0.0)),
    _sft("F8", "memory grows without pause", lambda r: lambda row, step, _: row.update({"seconds.rss_mib": 2500 + 8.0 * step}), steps=200),
    _dpo("S150", "chosen and rejected both fall", _both_fall, twins=("S152", "S151")),
    _dpo("S151", "labels at random", lambda r: lambda row, step, _: row.update(chosen=0.0, rejected=0.0, spread=0.12), twins=("S150",)),
    _dpo("S152", "the margin grows on pairs that are ranked", lambda r: _by_heart, steps=160, twins=("S150", "S151")),
    _distil("F9", "ids that mean something else to the teacher", lambda r: _strange, twins=("F17", "S121")),
    _distil("F15", "pursued after nothing is left", _over, steps=340, twins=("F9",)),
    _distil("F17", "a 4-bit teacher's noise", _swings, steps=120, twins=("F9",)),
    _distil("S120", "flat and small for a hundred steps", lambda r: lambda row, step, _: None, steps=330, twins=("F15", "S121")),
    _distil("S121", "student and teacher already agree", _always(reverse_kl=0.004, score=0.6), twins=("S120", "F9")),
    _distil("S122", "the teacher is worse than the student", _fails_too, steps=240, twins=("F15",)),
)
