"""Signs that several entries share."""

from __future__ import annotations

from posttrain.doctor.combined import AllOf, Early, Ever, Lasting, Not, OneOf
from posttrain.doctor.signals import Bound, Change, Flat, Level
from posttrain.doctor.trends import Score, Steady

FLOOR = Bound("entropy_floor", 0.1)
CEILING = Bound("reward_ceiling", 0.9)
KL_CEILING = Bound("kl_ceiling", 0.5)

ENTROPY_LOW = Level("entropy", "<", FLOOR, last=3)
ENTROPY_ALIVE = Level("entropy", ">", Bound("entropy_alive", 0.12))
ENTROPY_WAS_ALIVE = Ever(ENTROPY_ALIVE)
ENTROPY_PLUNGES = Change("entropy", "<=", -0.3, over=15, relative=True)
"""It loses a third within ten steps: on its way to its floor, if not there yet."""
UNANIMOUS = Level("zero_variance", ">", Bound("zero_variance_ceiling", 0.9), last=5, stat="every")
SPREAD_DEAD = OneOf((UNANIMOUS, Level("reward_std", "<", Bound("reward_std_floor", 0.02), last=5, stat="every")))
SPREAD_ALIVE = OneOf((Level("mixed", ">", 0.2, last=5), Level("reward_std", ">", Bound("reward_std_floor", 0.02), last=5)))
VARIED = Ever(OneOf((Level("zero_variance", "<", 0.9, last=2), Level("reward_std", ">", 0.02, last=2))))
"""Rewards of siblings have differed at some time."""

ENTROPY_GONE = OneOf((AllOf((ENTROPY_LOW, ENTROPY_WAS_ALIVE)), ENTROPY_PLUNGES))
"""Below its floor after it was alive, or on its way there."""

REWARD_RISING = OneOf((Change("reward_mean", ">=", 0.02, over=15), Change("reward_mean", ">=", 0.02, over=45)))
REWARD_FALLING = OneOf((Change("reward_mean", "<=", -0.05, over=15), Change("reward_mean", "<=", -0.05, over=45)))
REWARD_HIGH = AllOf((Level("reward_mean", ">", CEILING, last=5), Level("reward_mean", "<=", 1.001, last=5)))
HELDOUT_RISING = OneOf(tuple(Score("heldout_mean", ">=", 0.02, over=over, sigmas=1.5) for over in (3, 6, 12)))
"""Beyond luck: it clears suspicion, and two measurements on 64 items differ by 0.02 more often than not."""
_FALL = ("heldout_mean", "<=", -0.03)
HELDOUT_FALLING = Lasting(OneOf((Score(*_FALL, over=6), Score(*_FALL, over=12), Score(*_FALL, over=24))), rows=11)
"""In two measurements at least: a run looks at a dozen windows, and one of them falls by luck. The longest is for 7 points on 500 items."""
REWARD_LOWER = OneOf(
    (
        Lasting(Change("reward_mean", "<=", -0.1, over=45), rows=120, some=True),
        Change("reward_mean", "<=", -0.03, over=90),
        Change("reward_mean", "<=", -0.03, over=180),
    )
)
"""It fell within as many steps as a held-out score takes to be seen falling."""
REWARD_FELL = OneOf((REWARD_FALLING, REWARD_LOWER))
_LEVEL = AllOf((Flat("reward_mean", 0.03, over=60), Level("reward_mean", ">", 0.1, last=10)))
REWARD_HOLDS = AllOf((OneOf((REWARD_RISING, Level("reward_mean", ">", 0.5, last=10), _LEVEL)), Not(REWARD_FELL)))
"""It rises, or stands well above zero, or stays where it is."""
KL_CLIMBING = Lasting(OneOf((Steady("kl", ">=", 0.2, over=30), Steady("kl", ">=", 0.2, over=90))), rows=20)
"""Without pause: one jump is a lurch and no drift."""
MASTERED = OneOf((AllOf((Level("all_right", ">", 0.5, last=5), Level("all_wrong", "<", 0.1, last=5))), REWARD_HIGH))
"""Most groups are all right: agreement because the tasks are solved."""
CUT = Level("truncated", ">", 0.9, last=3)
UNPARSED = OneOf((Level("unanimous_unparseable", ">", 0.8, last=3), Level("unparseable", ">", 0.9, last=3)))
FEW_DIFFER = Level("zero_variance", ">", 0.5, last=3)
"""KL and gradient are then those of the few groups that still differ, in which unlikely answers are common: no figures of the policy."""
SAME_TEXT = Ever(Early(Level("duplicates", ">", 0.7, last=3), rows=8))
"""Siblings were one text from the first steps: that is the sampler, not the prompts."""
EVALUATION_UNSURE = OneOf((Level("heldout_truncated", ">", 0.2, last=2), Level("heldout_parse_rate", "<", 0.8, last=2)))
"""The held-out score falls because answers are cut or cannot be parsed."""
DRIFTS = AllOf((Level("kl", ">", KL_CEILING, last=5), KL_CLIMBING))
"""KL beyond its ceiling and climbing: F6."""
