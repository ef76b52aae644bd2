"""The axes of a policy-gradient method, as settings. Torch-free: what each choice computes stands in the file named beside it.

    advantage     advantages.py, credit.py   how much better was this than expected
    ratio         ratios.py                  against which policy, and at which grain, is a change of probability measured
    limit         limits.py                  what happens to a token whose probability has changed too far
    correction    corrections.py             what happens to a token that sampler and trainer judge differently
    aggregation   aggregate.py               how much each token, sequence and prompt counts
    kl            kl.py                      how the policy is held near another one
    entropy, overlong, repetition            shaping.py, controllers.py

A member of an axis is a class with a `kind`; its class defaults are the setting of its source.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from posttrain.core.config import Config

RatioLevel = Literal["none", "token", "sentence", "sequence"]
Against = Literal["old", "behaviour"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "prompt_mean"]


def _by_name(value: Any) -> Any:
    """A member may be written as its kind alone: `limit=cispo`."""
    return {"kind": value} if isinstance(value, str) else value


def _choice() -> tuple[BeforeValidator, Any]:
    return BeforeValidator(_by_name), Field(discriminator="kind")


# --- advantage -------------------------------------------------------------------------------------------------------------------------


class Reward(Config):
    """No baseline: A = R (REINFORCE)."""

    kind: Literal["none"] = "none"


class Mean(Config):
    """A = R - group mean (Dr. GRPO)."""

    kind: Literal["mean"] = "mean"


class MeanStd(Config):
    """A = (R - group mean) / (group std + eps) (GRPO)."""

    kind: Literal["mean_std"] = "mean_std"
    ddof: Literal[0, 1] = 0
    """0: population standard deviation, 1: sample; they differ by sqrt(G / (G - 1))."""
    eps: float = Field(default=1e-6, ge=0)


class LeaveOneOut(Config):
    """A = R - mean of the other siblings (RLOO)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class MedianMAD(Config):
    """A = (R - median) / (MAD + eps); the sibling on the median leaves the update (MC-GRPO)."""

    kind: Literal["median_mad"] = "median_mad"
    eps: float = Field(default=1e-6, ge=0)


class MaxRL(Config):
    """A = (R - mean) / mean: expected gradient of log p instead of p, truncated at the group's size."""

    kind: Literal["max_rl"] = "max_rl"


class PassAtK(Config):
    """Credit for the best of k samples instead of each sample; k = 1 is leave-one-out."""

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=4, ge=1)


class Batch(Config):
    """REINFORCE++: returns normalised over all tokens of the step."""

    kind: Literal["batch"] = "batch"
    within: Literal["none", "group"] = "none"
    """group: subtract the group's mean first (REINFORCE++-baseline)."""
    eps: float = Field(default=1e-8, ge=0)


class Channels(Config):
    """GDPO: z-score each reward channel within the group, then add. A trap kept for comparison: correlated channels cancel."""

    kind: Literal["channels"] = "channels"
    weights: dict[str, float] = {}
    """Weight per channel of the score's parts; a channel without one weighs 1."""
    ddof: Literal[0, 1] = 0


class Critic(Config):
    """Generalised advantage estimation with a learned value function (PPO)."""

    kind: Literal["critic"] = "critic"
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    """1 with gamma 1: return minus value. 0.95 did considerably worse on language tasks (spec/recipes-of-the-labs.md G-23)."""
    whiten: bool = False
    """Normalise advantages over all tokens of the step."""


class Teacher(Config):
    """A = log teacher - log policy, per token: on-policy distillation."""

    kind: Literal["teacher"] = "teacher"
    clip: float | None = Field(default=None, gt=0)


Advantage = Annotated[
    Reward | Mean | MeanStd | LeaveOneOut | MedianMAD | MaxRL | PassAtK | Batch | Channels | Critic | Teacher,
    *_choice(),
]

# --- limit -----------------------------------------------------------------------------------------------------------------------------


class Steering(Config):
    """Moves the upper bound so that entropy stays near a target (MAI); the step size is ours, the source gives none."""

    entropy: float = Field(default=0.3, gt=0)
    """Target in nats per token."""
    step: float = Field(default=0.01, gt=0)
    highest: float = Field(default=0.5, gt=0)


class NoLimit(Config):
    """Every token keeps its ratio."""

    kind: Literal["none"] = "none"


class Clip(Config):
    """PPO's pessimistic clip: -min(rho A, clip(rho, 1 - low, 1 + high) A)."""

    kind: Literal["clip"] = "clip"
    low: float = Field(default=0.2, gt=0, lt=1)
    high: float = Field(default=0.2, gt=0)
    dual: float | None = Field(default=None, gt=1)
    """Dual clip: a token with A < 0 counts at most dual * |A|, without gradient beyond."""
    cap: float | None = Field(default=None, gt=1)
    """Bound on the ratio on every branch, also those that the clip leaves open (MAI)."""
    outer: Literal["clamp", "weight"] = "clamp"
    """What lies beyond `cap`: no gradient, or the gradient of a ratio held at the cap."""
    steer: Steering | None = None


class CISPO(Config):
    """Weight of the log-probability: sg(clip(rho, 1 - low, 1 + high)); no token loses its gradient."""

    kind: Literal["cispo"] = "cispo"
    low: float | None = Field(default=None, gt=0, lt=1)
    """None: no lower cap, as in the source."""
    high: float = Field(default=4.0, gt=0)


class Band(Config):
    """Zero gradient where the ratio is outside [lower, upper], whatever the sign of A; rho A inside."""

    kind: Literal["band"] = "band"
    lower: float = Field(default=0.8, ge=0, lt=1)
    upper: float = Field(default=1.28, gt=1)
    lower_negative: float | None = Field(default=None, ge=0, lt=1)
    """Bounds for tokens with A < 0; None: the same."""
    upper_negative: float | None = Field(default=None, gt=1)


class Squared(Config):
    """rho A - omega (log rho)^2 inside a band of the log-ratio, nothing outside (Kimi K2.5)."""

    kind: Literal["squared"] = "squared"
    omega: float = Field(default=0.1, ge=0)
    lower: float = Field(default=0.5, gt=0, lt=1)
    """Band of the ratio; the source gives neither band nor omega."""
    upper: float = Field(default=2.0, gt=1)


class SquaredSequence(Config):
    """A log pi(y) - tau / 2 (log pi(y) / pi_old(y))^2 over the whole response (Kimi k1.5)."""

    kind: Literal["squared_sequence"] = "squared_sequence"
    tau: float = Field(default=0.1, ge=0)


class Divergence(Config):
    """DPPO: no gradient where the token moves away from the old policy and its binary divergence is beyond the threshold.

    The threshold is the order of magnitude that public implementations use; it has not been measured here.
    """

    kind: Literal["divergence"] = "divergence"
    measure: Literal["tv", "kl"] = "tv"
    threshold: float = Field(default=0.15, gt=0)


class ClipCov(Config):
    """PPO clip, and no gradient on a few tokens drawn among those with high covariance of log-probability and advantage."""

    kind: Literal["clip_cov"] = "clip_cov"
    low: float = Field(default=0.2, gt=0, lt=1)
    high: float = Field(default=0.2, gt=0)
    fraction: float = Field(default=0.0002, gt=0, le=1)
    """Share of the step's tokens, at least one. Small batches need more: 2,000 tokens at the default give one."""
    lower: float = 1.0
    upper: float = 5.0

    @model_validator(mode="after")
    def _ordered(self) -> ClipCov:
        if self.lower >= self.upper:
            raise ValueError(f"clip_cov needs lower < upper, not {self.lower:g} and {self.upper:g}; e.g. lower=1, upper=5")
        return self


class KLCov(Config):
    """No clip; a KL penalty to the old policy on the tokens with the highest covariance."""

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: float = Field(default=0.0002, gt=0, le=1)
    coef: float = Field(default=1.0, gt=0)


Limit = Annotated[
    NoLimit | Clip | CISPO | Band | Squared | SquaredSequence | Divergence | ClipCov | KLCov,
    *_choice(),
]

# --- correction ------------------------------------------------------------------------------------------------------------------------


class NoCorrection(Config):
    """Sampler and trainer are taken to agree."""

    kind: Literal["none"] = "none"


class Truncate(Config):
    """Truncated importance sampling: weight sg(min(kappa, cap)), kappa = old / behaviour."""

    kind: Literal["truncate"] = "truncate"
    cap: float = Field(default=2.0, gt=1)
    level: Literal["token", "sequence"] = "token"
    """sequence: the product over the response, one weight for all its tokens."""


class Mask(Config):
    """Masked importance sampling: nothing where kappa is outside the band, per token and per sequence (IcePop, MIS-PO)."""

    kind: Literal["mask"] = "mask"
    lower: float = Field(default=0.5, ge=0, lt=1)
    upper: float = Field(default=5.0, gt=1)
    sequence_lower: float | None = Field(default=None, ge=0, lt=1)
    """Bounds of the geometric mean over the response; outside, the whole response is rejected. None: no such test."""
    sequence_upper: float | None = Field(default=None, gt=1)
    weight: Literal["ratio", "one"] = "ratio"
    """What a kept token weighs: kappa, or 1."""


class Decoupled(Config):
    """AReaL: fixed weight sg(old / behaviour), and the limit acts on current / old alone."""

    kind: Literal["decoupled"] = "decoupled"
    cap: float | None = Field(default=None, gt=1)


class BinaryKL(Config):
    """KPop: nothing where the KL between trainer and sampler on {token, any other} exceeds the threshold; the source gives none."""

    kind: Literal["binary_kl"] = "binary_kl"
    threshold: float = Field(default=0.05, gt=0)


Correction = Annotated[NoCorrection | Truncate | Mask | Decoupled | BinaryKL, *_choice()]

# --- KL, entropy, shaping --------------------------------------------------------------------------------------------------------------


class KL(Config):
    """Divergence from another policy, in the loss or in the reward. kl.py says which divergence each combination descends."""

    estimator: Literal["none", "k1", "k2", "k3", "rho_k3", "full", "top_k"] = "none"
    placement: Literal["loss", "reward"] = "loss"
    coef: float = Field(default=0.001, ge=0)
    target: float | None = Field(default=None, gt=0)
    """Nats per token to steer towards by adapting the coefficient; None keeps it fixed."""
    k: int = Field(default=32, ge=1)
    """Tokens compared one by one by top_k; all others are one bucket."""
    dtype: Literal["float32", "float64"] = "float32"
    """Arithmetic of the difference and its sum."""

    @property
    def used(self) -> bool:
        """Whether a reference has to be scored."""
        return self.estimator != "none" and (self.coef > 0 or self.target is not None)


class Entropy(Config):
    """A bonus of coef * H per token."""

    coef: float = Field(default=0.0, ge=0)
    target: float | None = Field(default=None, gt=0)
    """Nats per token: below it the coefficient rises by `step` per optimizer phase, above it falls."""
    step: float = Field(default=0.0005, gt=0)
    highest: float = Field(default=0.01, gt=0)

    @property
    def used(self) -> bool:
        """Whether the entropy needs a gradient."""
        return self.coef > 0 or self.target is not None


class KeepOverlong(Config):
    """A truncated completion keeps the score that its grader gave."""

    kind: Literal["none"] = "none"


class Ramp(Config):
    """Soft penalty: 0 up to max_tokens - buffer, then linear down to -scale (DAPO; scale 0.1: Magistral)."""

    kind: Literal["ramp"] = "ramp"
    buffer: float = Field(default=0.2, gt=0, le=1)
    """Share of max_tokens."""
    scale: float = Field(default=1.0, gt=0)


class Drop(Config):
    """Truncated completions leave the update (over-long filtering); an alarm says when too few survive."""

    kind: Literal["drop"] = "drop"


Overlong = Annotated[KeepOverlong | Ramp | Drop, *_choice()]


class Siblings(Config):
    """Independent completions of one prompt."""

    kind: Literal["siblings"] = "siblings"


class EarlyExit(Config):
    """One chain cut at several places, with an answer asked for at each (S-GRPO): rollout/early_exit.py."""

    kind: Literal["early_exit"] = "early_exit"
    cuts: int = Field(default=4, ge=1)
    cue: str = "\n#### "
    """Text that asks for the answer; read, never trained."""


Drawing = Annotated[Siblings | EarlyExit, *_choice()]


class Repetition(Config):
    """Token-level penalty: -coef of advantage on a token that completes an n-gram seen before in the same completion."""

    coef: float = Field(default=0.0, ge=0)
    n: int = Field(default=8, ge=2)
