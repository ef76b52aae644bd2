"""Away from the reference, from other abilities, and from what was asked."""

from __future__ import annotations

from posttrain.doctor.catalog.shared import (
    FEW_DIFFER,
    HELDOUT_FALLING,
    HELDOUT_RISING,
    KL_CEILING,
    KL_CLIMBING,
    REWARD_FALLING,
    REWARD_RISING,
    SPREAD_DEAD,
)
from posttrain.doctor.combined import AllOf, Late, Not, OneOf
from posttrain.doctor.entries import Action, Entry, Layer, Status, Tier, Verdict
from posttrain.doctor.signals import Bound, Change, Level, Versus
from posttrain.doctor.trends import Steady

ENTRIES = (
    Entry(
        "F6",
        "reference drift",
        Status.LIVED,
        Layer.ALGORITHM,
        Verdict.DRIFTING,
        symptom="reward rises and KL to the reference with it, without bound; the held-out score, at a fixed budget, falls",
        onset="steps 100-300",
        cause="the leash is slack: no KL term, or too small a coefficient",
        fix="a larger KL coefficient (1e-3 is a floor for some families, 5e-3 for others), in the reward; stop earlier",
        check="kl against the family's ceiling, and the retention suite",
        source="book, ch. 118, F6",
        tier=Tier.MIDDLE,
        signs=(
            Level("kl", ">", KL_CEILING, last=5),
            KL_CLIMBING,
            OneOf((REWARD_RISING, Level("reward_mean", ">", 0.1, last=10))),
            Not(REWARD_FALLING),
            OneOf((HELDOUT_FALLING, Level("kl", ">", Bound("kl_runaway", 2.0), last=5))),
        ),
        against=(HELDOUT_RISING, SPREAD_DEAD, AllOf((FEW_DIFFER, Not(HELDOUT_FALLING)))),
        action=Action.PAUSE,
        confused={"S11": "one jump, no climb", "F4": "the text repeats itself", "S20": "the score falls at a small KL"},
    ),
    Entry(
        "S110",
        "KL beyond its ceiling",
        Status.PROVISIONAL,
        Layer.ALGORITHM,
        Verdict.DRIFTING,
        symptom="KL to the reference stays above 0.5 nats per token",
        onset="hundreds of steps",
        cause="the policy has moved far; whether that is learning or drift, KL cannot say",
        fix="measure the held-out score and the retention suite before going on",
        check="posttrain doctor calibrate on stable runs: 0.5 is a starting point, not a constant",
        source="book, ch. 114",
        tier=Tier.MIDDLE,
        signs=(Level("kl", ">", KL_CEILING, last=10, stat="every"),),
        action=Action.NOTE,
        confused={"F6": "the held-out score falls as well"},
    ),
    Entry(
        "S111",
        "off the trained form",
        Status.LIVED,
        Layer.ALGORITHM,
        Verdict.DRIFTING,
        symptom="a rising share of training answers cannot be parsed, in a run that began with the form in place",
        onset="tens of steps",
        cause="the policy drifts off the form it was taught: too high a rate, or nothing that pays for form",
        fix="go back to before the rise; a lower rate, a stronger KL term",
        check="three unparseable rollouts",
        source="book, ch. 114",
        tier=Tier.MIDDLE,
        signs=(
            OneOf(
                (
                    Change("unparseable", ">=", 0.1, over=15),
                    Change("unparseable", ">=", 0.1, over=45),
                    Steady("unparseable", ">=", 0.1, over=20),
                )
            ),
            Level("unparseable", ">", 0.1, last=5),
        ),
        against=(Level("truncated", ">", 0.5, last=5), HELDOUT_RISING),
        confused={"S30": "the form was never there", "S7": "entropy climbs at the same time"},
    ),
    Entry(
        "S10",
        "strategy spike",
        Status.LIVED,
        Layer.ALGORITHM,
        Verdict.DRIFTING,
        symptom="turns or tool calls per episode jump well above their own beginning",
        onset="about 15 steps before the reward falls",
        cause="the way of working destabilises first; the reward follows",
        fix="save a checkpoint now; lower the learning rate, or clip_cov",
        check="read the longest episodes of the last two steps",
        source="book, ch. 46",
        tier=Tier.LEADING,
        signs=(
            OneOf(
                (
                    Versus("turns", ">", 1.5, baseline=10, last=3),
                    Versus("calls", ">", 1.5, baseline=10, last=3),
                    AllOf(
                        (
                            Versus("turns", ">", 1.15, baseline=10, last=3),
                            Change("turns", ">=", 0.4, over=9),
                            Late(Level("turns", ">", 0.0), 15),
                        )
                    ),
                )
            ),
        ),
        against=(HELDOUT_RISING, REWARD_RISING),
        confused={"S25": "calls rise slowly and stay up with a flat score"},
    ),
)
