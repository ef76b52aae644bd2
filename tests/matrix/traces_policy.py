"""Faults of the policy itself and of its reward, each as the sources tell it: what changes in the dynamics, from when on, and how far.

Magnitudes are those of the accounts (0.42 to 0.03 nats within 30 steps, tests passed flat at 5 %, reward held at 0.50 while the score fell
from 26.8 to 19.9 %), not those of any rule.
"""

from __future__ import annotations

import numpy as np
from tests.matrix.traces_healthy import after
from tests.matrix.traces_world import Law, State


def towards(name: str, goal: float, steps: float, onset: int = 0) -> Law:
    """A part of the state goes to a goal, most of the way within `steps`."""

    def law(s: State, r: np.random.Generator) -> None:
        value = getattr(s, name)
        setattr(s, name, value + (goal - value) * (1 - np.exp(-3.0 / steps)))

    return after(onset, law)


def by(name: str, amount: float, onset: int = 0, until: int = 10**9) -> Law:
    """A part of the state grows by an amount each step."""

    def law(s: State, r: np.random.Generator) -> None:
        if s.step < until:
            setattr(s, name, getattr(s, name) + amount)

    return after(onset, law)


def grows(name: str, share: float, onset: int = 0, most: float = 1e9) -> Law:
    """A part of the state grows by a share of itself each step."""
    return after(onset, lambda s, r: setattr(s, name, min(most, getattr(s, name) * (1 + share))))


def stops_learning(onset: int = 0) -> Law:
    """From then on updates bring no skill."""
    return after(onset, lambda s, r: setattr(s, "rate", 0.0))


def channel(name: str, goal: float, steps: float, onset: int = 0) -> Law:
    """The mean of a reward channel goes to a goal."""

    def law(s: State, r: np.random.Generator) -> None:
        s.levels[name] += (goal - s.levels[name]) * (1 - np.exp(-3.0 / steps))

    return after(onset, law)


def collapse(onset: int, steps: float = 30.0, stubs: float | None = 4.0) -> tuple[Law, ...]:
    """The policy sharpens to one mode: entropy to 0.03; answers become stubs that are right for hardly any task, or stay whole."""
    laws = [towards("entropy", 0.03, steps, onset), towards("certainty", 14.0, steps, onset), stops_learning(onset)]
    laws.append(after(onset, lambda s, r: setattr(s, "kl", s.kl + 0.012 * (1 + r.random()))))
    if stubs is None:
        laws.append(towards("identical", 0.97, steps, onset))
    else:
        late = onset + int(steps)  # the reward follows when the entropy has gone
        laws += [towards("length", stubs, steps, onset + int(steps) // 2), towards("length_sd", 0.05, steps, onset + int(steps) // 2)]
        laws.append(by("skill", -0.12, late, late + 50))
    return tuple(laws)


def starve(onset: int, share: float = 0.4, wide: float = 45.0) -> tuple[Law, ...]:
    """The training prompts leave the band at both ends: easy ones are always right, impossible ones never. Entropy stays alive."""

    def law(s: State, r: np.random.Generator) -> None:
        spread = s.spread if s.pool_spread is None else s.pool_spread
        wider = spread + (wide - spread) * (1 - np.exp(-3.0 / 40))
        s.pool_spread, s.pool_shift = wider, -wider * 2.5 * (0.5 - share)
        s.entropy_end = s.entropy
        s.unparseable = min(s.unparseable, 0.003)  # what is always right is in the right form

    return (after(onset, law), stops_learning(onset))


def repeats(onset: int, s_per: float = 60.0) -> tuple[Law, ...]:
    """Shaped reward pays for words that can be repeated: loops grow, KL rises, an independent judge's score falls."""
    return (
        towards("repetition", 0.55, s_per, onset),
        channel("keywords", 0.95, s_per, onset),
        by("heldout_loss", 0.012, onset),
        stops_learning(onset),
        after(onset, lambda s, r: setattr(s, "kl", s.kl + 0.004)),
    )


def hacked(onset: int, loss: float = 0.4, over: float = 150.0) -> tuple[Law, ...]:
    """A proxy is easier than the goal: training reward holds or climbs, an independent score goes down for good."""
    return (stops_learning(onset), by("heldout_loss", loss / over, onset, onset + int(over)), by("grader_lenient", 0.3 / over, onset))


def explodes(onset: int) -> tuple[Law, ...]:
    """A constant push on the entropy and nothing against it: it climbs towards the vocabulary's logarithm, and the text becomes noise."""
    return (
        grows("entropy", 0.045, onset, 8.0),
        after(onset, lambda s, r: setattr(s, "sharpen", 0.0)),
        after(onset, lambda s, r: setattr(s, "skill", s.skill - (0.06 if s.entropy > 1.0 else 0.0))),
        towards("unparseable", 0.5, 120, onset + 15),
    )


def ratios(onset: int) -> tuple[Law, ...]:
    """Tokens' ratios compare two networks: fat tails grow within a few steps, most tokens are clipped, then figures are not finite."""
    end = onset + 25

    def broken(s: State, r: np.random.Generator) -> None:
        s.nan = ("grad_norm", "loss")

    return (
        towards("ratio_tail", 7.5, 12, onset),
        towards("clipped", 0.9, 15, onset),
        grows("grad_factor", 0.25, onset, 300.0),
        by("skill", -0.1, onset),
        after(end, broken),
    )


def lurch(at: int) -> tuple[Law, ...]:
    """One step far too large: KL and gradient leap, the policy is in nonsense afterwards."""

    def law(s: State, r: np.random.Generator) -> None:
        s.grad_factor = 60.0 if s.step == at else 1.0
        if s.step == at:
            s.kl, s.ratio_tail, s.skill = s.kl + 4.0, 4.5, s.skill - 2.0
        elif s.step > at:
            s.ratio_tail = 0.02

    return (law,)


def drift(onset: int) -> tuple[Law, ...]:
    """The leash is slack: KL climbs without bound, reward rises with it, the held-out score at a fixed budget falls."""
    return (
        after(onset, lambda s, r: setattr(s, "leash", 0.0)),
        by("kl", 0.018, onset),
        by("heldout_loss", 0.009, onset),
        by("grader_lenient", 0.004, onset),
    )


def worse(onset: int) -> tuple[Law, ...]:
    """The policy gets worse at everything that is measured, by small steps."""
    return (stops_learning(onset), by("skill", -0.012, onset))


def spikes(onset: int, lead: int = 15) -> tuple[Law, ...]:
    """The way of working destabilises: turns and calls leap and are erratic, the reward falls some fifteen steps later."""

    def erratic(s: State, r: np.random.Generator) -> None:
        s.turns, s.calls = 2.0 * r.uniform(1.45, 2.2), 1.0 * r.uniform(1.5, 2.6)

    return (after(onset, erratic), stops_learning(onset), by("skill", -0.09, onset + lead))


def farms(name: str, onset: int = 10, steps: float = 80.0) -> tuple[Law, ...]:
    """A channel that can be had without being right is taken up; what is right stays where it was."""
    return (channel(name, 0.99, steps, onset), stops_learning())
