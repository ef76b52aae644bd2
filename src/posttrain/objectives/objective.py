"""A policy-gradient method: one choice on every axis, checked for sense. Torch-free.

    Objective.load("gspo")                                             a named algorithm (algorithms.py)
    Objective.load({"kind": "gspo", "limit": {"high": 5e-4}})          the same with one bound changed
    --set objective=dapo --set objective.limit.high=0.3                the same from the command line

Settings that are not given come from the algorithm named by `kind`. Combinations that cannot do what their parts promise are refused with
the reason and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from posttrain.core.config import Config
from posttrain.objectives.algorithms import ALGORITHMS, GRPO_AXES, algorithm
from posttrain.objectives.axes import (
    KL,
    Advantage,
    Against,
    Aggregation,
    Band,
    Channels,
    Clip,
    ClipCov,
    Correction,
    Critic,
    Divergence,
    Drawing,
    EarlyExit,
    Entropy,
    KeepOverlong,
    KLCov,
    Limit,
    Mask,
    MaxRL,
    MeanStd,
    NoCorrection,
    NoLimit,
    Overlong,
    PassAtK,
    Ramp,
    RatioLevel,
    Repetition,
    Reward,
    Siblings,
    Squared,
    SquaredSequence,
    Teacher,
)
from posttrain.objectives.axes import Batch as BatchNormalised
from posttrain.objectives.placements import check_placement

TOKEN_SCALE = 0.05
"""A band this wide or wider is made for the ratio of one token; the geometric mean over a response moves a thousand times less."""
SEQUENCE_SCALE = 1e-3
"""A band this narrow or narrower is made for a geometric mean; one token leaves it at the first update."""


class Objective(Config):
    """The axes of one policy-gradient method; the class defaults are the algorithm "default"."""

    kind: str = "default"
    """The named algorithm that settings not given come from."""
    advantage: Advantage = MeanStd()
    ratio: RatioLevel = "token"
    against: Against = "old"
    """The policy in the ratio's denominator: `old`, before the phase's first update, or `behaviour`, what the sampler recorded."""
    limit: Limit = Clip(low=0.2, high=0.28)
    correction: Correction = NoCorrection()
    surrogate: str | None = None
    """A whole loss in place of ratio, limit and correction: a name in surrogates.py, or your own "path.py:function"."""
    aggregation: Aggregation = "token_mean"
    kl: KL = KL(estimator="k2", coef=0.005)
    entropy: Entropy = Entropy()
    overlong: Overlong = KeepOverlong()
    repetition: Repetition = Repetition()
    drawing: Drawing = Siblings()
    """How the completions of one group come about."""
    subgroups: Literal["none", "length"] = "none"
    """length: siblings are compared within the longer and the shorter half of their group. Effort levels need no setting: a prompt at
    another effort is another task, hence another group."""

    @model_validator(mode="before")
    @classmethod
    def _from_algorithm(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"kind": given}
        if not isinstance(given, Mapping):
            return given
        plain = {key: value.model_dump() if isinstance(value, Config) else value for key, value in given.items()}
        kind = algorithm(str(plain.get("kind", "default"))).name
        return merged(merged(GRPO_AXES, ALGORITHMS[kind].diff), plain) | {"kind": kind}

    @model_validator(mode="after")
    def _makes_sense(self) -> Objective:
        for check in CHECKS:
            check(self)
        return self

    @property
    def needs_critic(self) -> bool:
        """Whether a value function has to be trained."""
        return isinstance(self.advantage, Critic)

    @property
    def needs_teacher(self) -> bool:
        """Whether the advantage comes from another model's log-probabilities instead of rewards."""
        return isinstance(self.advantage, Teacher)

    @property
    def group_relative(self) -> bool:
        """Whether the baseline is made of siblings, so that a group of equal rewards carries no signal."""
        alone = isinstance(self.advantage, (Reward, Critic, Teacher))
        return not alone and not (isinstance(self.advantage, BatchNormalised) and self.advantage.within == "none")

    @property
    def needs_step_pass(self) -> bool:
        """Whether tokens are selected by a statistic of the whole optimizer step, which needs a scoring pass before it."""
        return isinstance(self.limit, (ClipCov, KLCov))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, axis by axis; a member of another kind replaces, the same kind is refined."""
    result = dict(base)
    for key, change in changes.items():
        now = {"kind": change} if isinstance(change, str) and isinstance(result.get(key), Mapping) else change
        old = result.get(key)
        refine = isinstance(old, Mapping) and isinstance(now, Mapping) and now.get("kind", old.get("kind")) == old.get("kind")
        result[key] = {**old, **now} if refine else now  # type: ignore[dict-item]
    return result


# --- what is refused -------------------------------------------------------------------------------------------------------------------


def _band_scale(o: Objective) -> None:
    widths = _widths(o)
    if not widths:
        return
    if o.ratio == "sequence" and max(widths) >= TOKEN_SCALE:
        raise ValueError(
            f"a sequence ratio is a geometric mean over the response and never leaves a token-scale band of {max(widths):g}: "
            f"the limit would be inert; use bounds near 3e-4 (limit.low=3e-4, limit.high=4e-4) or ratio=token"
        )
    if o.ratio == "token" and min(widths) <= SEQUENCE_SCALE:
        raise ValueError(
            f"a band of {min(widths):g} is made for a sequence ratio; with ratio=token nearly every token is out of it after one "
            f"update; use bounds near 0.2 or ratio=sequence"
        )


def _widths(o: Objective) -> list[float]:
    if isinstance(o.limit, (Clip, ClipCov)):
        return [o.limit.low, o.limit.high]
    if isinstance(o.limit, Band):
        lower = [bound for bound in (o.limit.lower, o.limit.lower_negative) if bound is not None]
        upper = [bound for bound in (o.limit.upper, o.limit.upper_negative) if bound is not None]
        return [1 - bound for bound in lower] + [bound - 1 for bound in upper]
    if isinstance(o.limit, Squared):
        return [1 - o.limit.lower, o.limit.upper - 1]
    return []


def _sequence_counts_once(o: Objective) -> None:
    if o.ratio == "sequence" and o.aggregation != "seq_mean_token_mean":
        raise ValueError(
            f"a sequence ratio gives one value per response; aggregation={o.aggregation} would multiply it by the response's length; "
            f"use aggregation=seq_mean_token_mean"
        )


def _ratio_and_limit(o: Objective) -> None:
    if o.ratio == "none" and not isinstance(o.limit, NoLimit):
        raise ValueError(f"limit={o.limit.kind} acts on a ratio, and ratio=none has none; use limit=none or ratio=token")
    if isinstance(o.limit, SquaredSequence) and o.ratio != "token":
        raise ValueError(f"limit=squared_sequence adds up token log-ratios; ratio={o.ratio} would count them twice; use ratio=token")
    if isinstance(o.limit, Divergence) and o.ratio != "token":
        raise ValueError(
            f"limit=divergence measures how far one token's probability has moved; ratio={o.ratio} has no such token; use ratio=token"
        )
    if isinstance(o.limit, (ClipCov, KLCov)) and o.ratio != "token":
        raise ValueError(f"limit={o.limit.kind} selects tokens; ratio={o.ratio} ties them together; use ratio=token")
    if isinstance(o.limit, Clip) and o.limit.steer and (o.ratio != "token" or o.limit.steer.highest < o.limit.high):
        raise ValueError("limit.steer moves a token-scale upper bound up to limit.steer.highest; it needs ratio=token and high <= highest")
    if isinstance(o.limit, Clip) and o.limit.cap is not None and o.limit.cap < 1 + o.limit.high:
        raise ValueError(f"limit.cap = {o.limit.cap:g} lies inside the band up to {1 + o.limit.high:g}; raise it or lower limit.high")


def _one_factor_once(o: Objective) -> None:
    if o.against == "behaviour" and not isinstance(o.correction, NoCorrection):
        raise ValueError(
            f"against=behaviour already contains the mismatch old/behaviour; correction={o.correction.kind} would count it twice; "
            f"use against=old or correction=none"
        )
    if isinstance(o.correction, Mask):
        bounds = [bound for bound in (o.correction.sequence_lower, o.correction.sequence_upper) if bound is not None]
        if any(abs(bound - 1) >= TOKEN_SCALE for bound in bounds):
            raise ValueError(
                f"correction bounds {bounds} on a sequence's geometric mean are token-scale and would never reject; "
                f"use bounds near 1, e.g. 0.996 and 1.001"
            )


def _kl_placement(o: Objective) -> None:
    if o.kl.estimator != "none" and o.kl.used:
        check_placement(o.kl.placement, o.kl.estimator)
    if o.kl.target is not None and o.kl.coef == 0:
        raise ValueError("kl.coef = 0 with a kl.target: the controller multiplies and cannot move it from 0; start at e.g. kl.coef=0.001")


def _one_controller(o: Objective) -> None:
    if isinstance(o.limit, Clip) and o.limit.steer and o.entropy.target is not None:
        raise ValueError("limit.steer and entropy.target steer the same entropy by two means; keep one")


def _positive_rewards(o: Objective) -> None:
    if isinstance(o.advantage, MaxRL) and (isinstance(o.overlong, Ramp) or (o.kl.used and o.kl.placement == "reward")):
        raise ValueError(
            "advantage=max_rl divides by the mean reward, which a penalty in the reward can turn negative; put the KL in the loss "
            "and use overlong=none or drop"
        )
    if o.subgroups != "none" and (not o.group_relative or isinstance(o.advantage, (Channels, BatchNormalised))):
        raise ValueError(
            f"subgroups={o.subgroups} splits a group of siblings; advantage={o.advantage.kind} does not compare siblings; "
            f"use subgroups=none or advantage=mean"
        )


def _teacher_alone(o: Objective) -> None:
    if o.needs_teacher and o.kl.used and o.kl.placement == "reward":
        raise ValueError(
            "advantage=teacher takes no reward, so a KL in the reward has no effect; use kl.placement=loss or kl.estimator=none"
        )


CHECKS = (
    _band_scale,
    _sequence_counts_once,
    _ratio_and_limit,
    _one_factor_once,
    _kl_placement,
    _one_controller,
    _positive_rewards,
    _teacher_alone,
)


def check_siblings(o: Objective, siblings: int) -> None:
    """Raise ValueError when groups of this size cannot carry the baseline."""
    if isinstance(o.drawing, EarlyExit):
        siblings = o.drawing.cuts + 1
    if o.group_relative and siblings < 2:
        raise ValueError(
            f"advantage={o.advantage.kind} compares siblings, and {siblings} completion per prompt has none: its advantage would always "
            f"be 0; use siblings >= 2, or advantage=none, batch or critic"
        )
    if isinstance(o.advantage, PassAtK) and o.advantage.k > siblings - 1:
        raise ValueError(f"advantage.k = {o.advantage.k} needs more than {siblings} siblings; use k <= {siblings - 1} or more siblings")


def warnings(o: Objective) -> list[str]:
    """Combinations that work and are known to disappoint."""
    found = []
    if isinstance(o.advantage, Channels):
        found.append(
            "per-channel z-scores cancel when channels are correlated: look at channel_correlation before the run (GDPO is a trap)"
        )
    if o.kl.used and o.kl.placement == "loss" and o.kl.estimator == "k3":
        found.append("k3 in the loss descends KL(reference || policy), not the KL it estimates; k2 descends KL(policy || reference)")
    if isinstance(o.advantage, Critic) and o.advantage.lam < 1:
        found.append("lam < 1 did considerably worse than 1 on language tasks (spec/recipes-of-the-labs.md G-23)")
    if isinstance(o.correction, Mask) and o.correction.sequence_upper is not None:
        found.append("a narrow sequence band can starve training: watch fate_rejected")
    return found
