"""What each objective is documented to do with one token, written once more in plain Python numbers.

`value` is the surrogate that is maximised, `slope` its derivative by the token's log-probability. Written by cases from the definitions,
not from the tensor code, so that the two can disagree. Sources: the tables in limits.py, corrections.py, ratios.py, kl.py and aggregate.py;
spec/recipes-of-the-labs.md T46.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from posttrain.objectives.axes import (
    CISPO,
    Aggregation,
    Band,
    BinaryKL,
    Clip,
    ClipCov,
    Correction,
    Decoupled,
    Divergence,
    KLCov,
    Limit,
    Mask,
    NoCorrection,
    NoLimit,
    RatioLevel,
    Squared,
    SquaredSequence,
    Truncate,
)
from posttrain.objectives.objective import Objective
from posttrain.objectives.surrogates import SURROGATES

FORMULAS = {
    "none": "rho A",
    "clip": "rho A, 0 beyond the bound on the side of A",
    "cispo": "min(rho, cap) A",
    "band": "rho A inside the band, 0 outside",
    "squared": "rho A - 2 omega log rho inside the band, 0 outside",
    "squared_sequence": "A - tau log(pi(y) / pi_old(y))",
    "divergence": "rho A, 0 when moving away beyond the threshold",
    "clip_cov": "as clip, 0 on gated tokens",
    "kl_cov": "rho A, minus coef log rho on gated tokens",
}
"""d surrogate / d logp of a token, by limit."""


EXACT_KL = ("full", "top_k")
"""Estimators that are sums over the vocabulary: no matter of the sampled token."""


class Effect(NamedTuple):
    """What one token contributes."""

    value: float
    slope: float


@dataclass(frozen=True, slots=True)
class Token:
    """One trained token as an objective sees it. `log_ratio` is that of its token, sentence or sequence."""

    log_ratio: float
    advantage: float
    logp: float = 0.0
    base: float = 0.0
    """Log-probability under the policy that the ratio is measured against."""
    total: float = 0.0
    """Sum of the token log-ratios over the response."""
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The trained tokens of one response, in order."""

    logp: Sequence[float]
    old: Sequence[float]
    behaviour: Sequence[float]
    reference: Sequence[float]
    advantage: Sequence[float]
    sentence: Sequence[int]
    gate: Sequence[bool]


def effects(row: Row, objective: Objective) -> list[Effect]:
    """Loss and its derivative by logp for each token of a response: correction * limit(ratio), and the KL term if it stands in the loss.

    Of a whole surrogate only the slope is documented; its value is given as NaN.
    """
    base = row.old if objective.against == "old" else row.behaviour
    deltas = [logp - other for logp, other in zip(row.logp, base, strict=True)]
    ratios = log_ratios(deltas, row.sentence, objective.ratio)
    kappas = [old - seen for old, seen in zip(row.old, row.behaviour, strict=True)]
    found = []
    for t, log_ratio in enumerate(ratios):
        if objective.surrogate:
            slope = companion(objective.surrogate)(row.logp[t] - row.old[t], row.advantage[t])
            loss, change = math.nan, -slope
        else:
            token = Token(log_ratio, row.advantage[t], row.logp[t], base[t], sum(deltas), row.gate[t])
            value, slope = limit_effect(token, objective.limit)
            weight = correction_weight(kappas, t, row.old[t], row.behaviour[t], objective.correction)
            loss, change = -weight * value, -weight * slope
        if objective.kl.used and objective.kl.placement == "loss" and objective.kl.estimator not in EXACT_KL:
            term = kl_effect(row.logp[t] - row.reference[t], objective.kl.estimator)
            rho = math.exp(row.logp[t] - row.old[t]) if objective.kl.estimator == "rho_k3" else 1.0
            loss, change = loss + objective.kl.coef * rho * term.value, change + objective.kl.coef * rho * term.slope
        found.append(Effect(loss, change))
    return found


def companion(surrogate: str) -> Callable[[float, float], float]:
    """The documented coefficient of a registered surrogate: NAME_coefficient(log_ratio, advantage), in the same file."""
    function = SURROGATES[surrogate]
    return getattr(sys.modules[function.__module__], f"{function.__name__}_coefficient")


def log_ratios(deltas: Sequence[float], sentence: Sequence[int], level: RatioLevel) -> list[float]:
    """The log-ratio that each token is judged by. Example: deltas 0.2 and 0.0 at level "sequence": 0.1 and 0.1."""
    if level == "none":
        return [0.0 for _ in deltas]
    if level == "token":
        return list(deltas)
    if level == "sequence":
        return [sum(deltas) / len(deltas) for _ in deltas]
    found = []
    for own in sentence:
        members = [delta for delta, other in zip(deltas, sentence, strict=True) if other == own]
        found.append(sum(members) / len(members))
    return found


def limit_effect(token: Token, limit: Limit) -> Effect:
    """Surrogate and slope of one token under a limit."""
    rho, a = math.exp(token.log_ratio), token.advantage
    match limit:
        case NoLimit():
            return Effect(rho * a, rho * a)
        case Clip():
            return _clip(rho, a, limit)
        case CISPO():
            weight = min(rho, 1 + limit.high) if limit.low is None else min(max(rho, 1 - limit.low), 1 + limit.high)
            return Effect(weight * a, weight * a)
        case Band():
            lower = limit.lower_negative if a < 0 and limit.lower_negative is not None else limit.lower
            upper = limit.upper_negative if a < 0 and limit.upper_negative is not None else limit.upper
            return Effect(rho * a, rho * a) if lower <= rho <= upper else Effect(0.0, 0.0)
        case Squared():
            if not limit.lower <= rho <= limit.upper:
                return Effect(0.0, 0.0)
            return Effect(rho * a - limit.omega * token.log_ratio**2, rho * a - 2 * limit.omega * token.log_ratio)
        case SquaredSequence():
            return Effect(a - limit.tau / 2 * token.total * token.log_ratio, a - limit.tau * token.total)
        case Divergence():
            away = (a > 0 and rho > 1) or (a < 0 and rho < 1)
            far = _moved(math.exp(token.base), math.exp(token.logp), limit) > limit.threshold
            return Effect(0.0, 0.0) if away and far else Effect(rho * a, rho * a)
        case ClipCov():
            free = _clip(rho, a, Clip(low=limit.low, high=limit.high))
            return Effect(free.value, 0.0) if token.gated else free
        case KLCov():
            if not token.gated:
                return Effect(rho * a, rho * a)
            return Effect(rho * a - limit.coef * token.log_ratio**2 / 2, rho * a - limit.coef * token.log_ratio)


def _clip(rho: float, a: float, limit: Clip) -> Effect:
    """By the sign of A: a positive one is bounded above, a negative one below, and above only by `dual` and `cap`."""
    if a >= 0:
        return Effect(rho * a, rho * a) if rho <= 1 + limit.high else Effect((1 + limit.high) * a, 0.0)
    if rho < 1 - limit.low:
        return Effect((1 - limit.low) * a, 0.0)
    highest = min(math.inf if bound is None else bound for bound in (limit.dual, limit.cap))
    if rho <= highest:
        return Effect(rho * a, rho * a)
    held = limit.outer == "weight" and highest == limit.cap
    return Effect(highest * a, highest * a if held else 0.0)


def _moved(old: float, new: float, limit: Divergence) -> float:
    """Divergence between the coins {this token, any other}."""
    if limit.measure == "tv":
        return abs(new - old)
    return _coin(old, new)


def _coin(p: float, q: float) -> float:
    """KL of two coins, in nats."""
    return p * math.log(p / q) + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


def correction_weight(kappas: Sequence[float], t: int, old: float, behaviour: float, how: Correction) -> float:
    """Weight of token t of a response whose log(old / behaviour) are `kappas`."""
    kappa = math.exp(kappas[t])
    match how:
        case NoCorrection():
            return 1.0
        case Truncate():
            return min(math.exp(sum(kappas)) if how.level == "sequence" else kappa, how.cap)
        case Decoupled():
            return kappa if how.cap is None else min(kappa, how.cap)
        case BinaryKL():
            return 1.0 if _coin(math.exp(old), math.exp(behaviour)) <= how.threshold else 0.0
        case Mask():
            mean = math.exp(sum(kappas) / len(kappas))
            low = -math.inf if how.sequence_lower is None else how.sequence_lower
            high = math.inf if how.sequence_upper is None else how.sequence_upper
            if not (low <= mean <= high and how.lower <= kappa <= how.upper):
                return 0.0
            return kappa if how.weight == "ratio" else 1.0


def kl_effect(x: float, estimator: str) -> Effect:
    """KL term of a token with x = log(policy / reference), and its derivative by logp, in the loss."""
    if estimator == "k2":
        return Effect(x * x / 2, x)
    k3 = math.exp(-x) - 1 + x
    if estimator == "k3":
        return Effect(k3, 1 - math.exp(-x))
    if estimator == "rho_k3":
        return Effect(k3, x)
    raise ValueError(f"{estimator} is no per-token term of a loss")


def token_weight(how: Aggregation, length: int, prompt_tokens: float) -> float:
    """Weight of each token of a response before division by the denominator."""
    if how == "seq_mean_token_mean":
        return 1 / length
    if how == "prompt_mean":
        return 1 / prompt_tokens
    return 1.0
