"""Generated faults of the seams (sampler, trainer, tokens, masks) and of the machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.matrix.traces_healthy import after
from tests.matrix.traces_made import Rng, Trace, onset, reinforced
from tests.matrix.traces_policy import by, grows, stops_learning, towards
from tests.matrix.traces_world import Law, State


def _undelivered() -> tuple[Law, ...]:
    """The sampler keeps its first weights: what it draws never changes, while the trainer moves away from it with every update."""

    def law(s: State, r: Rng) -> None:
        s.mismatch = 2e-6 if s.step == 0 else s.mismatch + 0.02 * r.uniform(0.5, 1.5)

    return (stops_learning(), law)


def _ahead(at: int) -> tuple[Law, ...]:
    """Workers fall behind: the age of the rollouts grows to twenty updates, and sampler and trainer differ by what was learned since."""

    def law(s: State, r: Rng) -> None:
        s.lag = min(20.0, 2.0 + max(0.0, 0.35 * (s.step - at)))
        s.mismatch = 0.004 * s.lag

    return (law,)


def _noise(at: int) -> tuple[Law, ...]:
    """From the first update on the sampler draws noise: its weights were loaded into the wrong places."""

    def law(s: State, r: Rng) -> None:
        s.unparseable, s.mismatch, s.rate = 0.99, 4.0, 0.0

    return (after(at, law),)


def _not_finite(at: int) -> tuple[Law, ...]:
    """One batch with an empty row: a loss and a gradient that are no numbers, once."""
    return (lambda s, r: setattr(s, "nan", ("loss", "grad_norm") if s.step == at else ()),)


def _swings(r: Rng) -> Sequence[Law]:
    """Weights are taken anew for every micro-batch: the time of sampling swings, the trainer waits."""
    low = 5.0

    def law(s: State, r: Rng) -> None:
        s.sample_s = low * (9.0 if (s.step // 2) % 2 else 1.0)

    return (law,)


def _hangs(r: Rng) -> Sequence[Law]:
    """A collective waits for its timeout, now and then."""
    at = {onset(r, 30, 60), onset(r, 70, 100), onset(r, 110, 140)}
    return (lambda s, _: setattr(s, "train_s", 600.0 if s.step in at else 4.0),)


TOOLS: dict[str, Any] = {"turns": 2.4, "calls": 1.4, "forced": 0.8}
SEAM: tuple[Trace, ...] = (
    reinforced("F10", "tool tokens are trained", **TOOLS, trained_forced=True, rate=-0.002, twins=("P5",)),
    reinforced("P5", "padding is trained", trained_padding=True, twins=("F10",)),
    reinforced("P1", "noise from the first update on", lambda r: _noise(1), steps=60, twins=("S30", "S70")),
    reinforced("P12", "the weights never arrive", lambda r: _undelivered(), steps=100, twins=("S70", "S72"), kl_rate=0.004),
    reinforced("S70", "another precision from step 0 on", mismatch=0.05, twins=("P12", "S72"), rate=0.004),
    reinforced("S71", "the correction leaves out most tokens", mismatch=0.6, starved=0.75, rate=0.002, twins=("P12",)),
    reinforced("S72", "rollouts twenty updates old", lambda r: _ahead(onset(r, 20, 60)), twins=("P12", "S70")),
    reinforced("S75", "one batch that is not finite", lambda r: _not_finite(onset(r, 30, 120)), twins=("F5", "F14")),
    reinforced("S76", "no parameter has a gradient", grad_factor=0.0, frozen=True, twins=("F2",)),
    reinforced("S77", "control tokens in a tenth of the answers", control=0.1, twins=("S30",)),
    reinforced("S80", "what is updated is not what is sampled", frozen=True, twins=("S5", "S112", "P12")),
)
MACHINES: tuple[Trace, ...] = (
    reinforced("F7", "weights anew for every micro-batch", _swings, gpu_util=0.05, twins=("S93",)),
    reinforced("F7", "the trainer's accelerator is idle", gpu_util=0.05, twins=("S93",)),
    reinforced("F8", "memory grows without pause", lambda r: (by("rss", 9.0), by("peak", 9.0)), steps=260),
    reinforced("P36", "collectives wait for their timeout", _hangs, twins=("S94", "F7")),
    reinforced(
        "S93",
        "each step takes longer than the one before",
        lambda r: (grows("train_s", 0.008, onset(r, 10, 40)),),
        steps=220,
        twins=("F7",),
    ),
    reinforced("S94", "saving takes minutes", lambda r: (towards("checkpoint_s", 230.0, 5, onset(r, 60, 90)),), steps=220, twins=("P36",)),
)
