"""Planning: how many seeds or items a claim needs, and how small an effect a budget can see.

Only the spread between independent runs that differ in their seed says how many seeds a training claim needs. The wobble between the
checkpoints of one run, the error of a finite evaluation and the spread within one evaluation are other numbers, usually smaller, and a
budget made from them is too small; `SigmaEstimate` carries its kind, and the functions here refuse the wrong one.

Quantiles are exact and the result is rounded up: 16, 25, 44 and 99 seeds per arm for effects of 5, 4, 3 and 2 points at sigma 0.05.
The rounded 1.96 and 0.84 that are often used give 98 for the last. Seeds are not items: 99 seeds resolve 2 points between two
configurations, while 100 items leave +-9.8 points on one score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy import special

from posttrain.core.errors import EvidenceError
from posttrain.stats.bootstrap import mean, percentile
from posttrain.stats.intervals import Interval, all_equal, checked_level, finite_values, normal_quantile

SigmaKind = Literal["seed_to_seed", "checkpoint_to_checkpoint", "eval_sampling", "within_eval"]

WRONG_SIGMA: dict[str, str] = {
    "checkpoint_to_checkpoint": "checkpoints of one run share their seed, so they show its wobble and not the spread between runs",
    "eval_sampling": "it shrinks with more items, while the spread between runs does not",
    "within_eval": "it is the spread between items or samples of one model, not between runs",
}
"""Why a standard deviation of this kind does not size a seed budget."""

ClaimKind = Literal["bounded_measurement", "training_delta", "stability"]

SINGLE_SEED_REFUSED: dict[str, str] = {
    "training_delta": "the spread between seeds dominates a training gain, and one run does not show it; train more seeds",
    "stability": "one run that did not diverge says nothing about the next one; train more seeds",
}
"""Why a claim of this kind cannot rest on one seed."""


@dataclass(frozen=True, slots=True)
class SigmaEstimate:
    """A standard deviation, what it is the deviation of, and how many values it was estimated from.

    Example: SigmaEstimate(kind="seed_to_seed", value=0.05, n_runs=4)
    """

    kind: SigmaKind
    value: float
    n_runs: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(SigmaKind):
            raise EvidenceError(f"sigma of kind '{self.kind}' is unknown; use one of {', '.join(get_args(SigmaKind))}")
        if not (self.value > 0 and math.isfinite(self.value)):
            raise EvidenceError(f"a sigma of {self.value} cannot plan anything; runs that agree exactly are copies with one seed")
        if self.n_runs < 2:
            raise EvidenceError(f"a sigma from {self.n_runs} run(s) is a guess; estimate it from at least 2")

    @classmethod
    def from_runs(cls, values: Sequence[float]) -> SigmaEstimate:
        """From the final scores of independent runs of one configuration, one value per seed.

        >>> SigmaEstimate.from_runs([0.50, 0.54, 0.58])
        SigmaEstimate(kind='seed_to_seed', value=0.04, n_runs=3)
        """
        row = finite_values(values)
        if len(row) < 2:
            raise EvidenceError(f"a sigma from {len(row)} run(s) is a guess; estimate it from at least 2")
        if all_equal(row):
            raise EvidenceError(f"all {len(row)} runs score {row[0]:g}, so they look like copies with one seed; vary the seed")
        return cls("seed_to_seed", round(float(row.std(ddof=1)), 12), len(row))

    def interval(self, level: float = 0.95) -> Interval:
        """Chi-square interval of sigma for normal scores: from 4 runs, the true value may be 0.57 to 3.7 times the estimate."""
        freedom, tail = self.n_runs - 1, (1 - checked_level(level)) / 2
        low, high = (self.value * math.sqrt(freedom / float(special.chdtri(freedom, p))) for p in (tail, 1 - tail))
        return Interval(low, high, level, "chi-square")


def seeds_needed(delta: float, sigma: SigmaEstimate, level: float = 0.95, power: float = 0.8) -> int:
    """Seeds per arm to see a difference `delta` between two configurations: (z_a + z_b)^2 2 sigma^2 / delta^2, rounded up.

    At least 2, however large the effect, because one seed shows no spread. The formula takes sigma as known; a t test with fewer than
    about 10 seeds needs one or two more.

    >>> [seeds_needed(delta, SigmaEstimate("seed_to_seed", 0.05, 4)) for delta in (0.05, 0.04, 0.03, 0.02)]
    [16, 25, 44, 99]
    """
    needed = 2 * (_z_sum(level, power) * _seed_sigma(sigma) / _effect(delta)) ** 2
    return max(2, math.ceil(needed - 1e-9))


def min_detectable_effect(seeds: int, sigma: SigmaEstimate, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest difference that `seeds` per arm can see.

    >>> round(min_detectable_effect(16, SigmaEstimate("seed_to_seed", 0.05, 4)), 4)  # 2.8016 * .05 * sqrt(2 / 16)
    0.0495
    """
    if seeds < 1:
        raise EvidenceError(f"{seeds} seeds see nothing; plan at least 2")
    return _z_sum(level, power) * _seed_sigma(sigma) * math.sqrt(2 / seeds)


def items_needed(gap: float, discordance: float | None = None, rate: float = 0.5, level: float = 0.95, power: float = 0.8) -> int:
    """Items to see a gap between two success rates: on the same items if `discordance` is given, otherwise items per arm.

    `discordance` is the share of items on which the two models differ, taken from a pilot; at least `gap`. Paired is the formula of
    Connor (1987) and 2 / gap items more, which is what the exact McNemar test costs. Unpaired uses 2 rate (1 - rate) as the variance.
    Sizing by the width of one score (`half_width`) is not enough: +-4.4 points at 500 items do not resolve 5 points between two models.

    >>> items_needed(0.05), items_needed(0.05, discordance=0.2)
    (1570, 666)
    """
    _effect(gap)
    if discordance is None:
        return math.ceil(2 * _rate(rate) * (1 - rate) * (_z_sum(level, power) / gap) ** 2 - 1e-9)
    if not abs(gap) <= discordance <= 1:
        raise EvidenceError(f"a gap of {gap:g} needs a discordance between {abs(gap):g} and 1, got {discordance:g}")
    return math.ceil(_paired_items(abs(gap), discordance, *_quantiles(level, power)) - 1e-9)


def min_detectable_gap(n: int, discordance: float | None = None, rate: float = 0.5, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest gap that n items can see: paired if `discordance` is given, otherwise with n items per arm.

    >>> round(min_detectable_gap(500), 3), round(min_detectable_gap(500, discordance=0.2), 3)
    (0.089, 0.058)
    """
    if n < 2:
        raise EvidenceError(f"{n} item(s) see no gap; plan more items")
    z_a, z_b = _quantiles(level, power)
    if discordance is None:
        return (z_a + z_b) * math.sqrt(2 * _rate(rate) * (1 - rate) / n)
    if not 0 < discordance <= 1:
        raise EvidenceError(f"discordance {discordance:g} is not between 0 and 1; take the share of items on which a pilot pair differs")
    if _paired_items(discordance, discordance, z_a, z_b) > n:
        raise EvidenceError(f"{n} items of which {discordance:.0%} differ see no gap at all; plan more items")
    low, high = 0.0, discordance
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _paired_items(middle, discordance, z_a, z_b) <= n else (middle, high)
    return high


def p_mixed(p: float, group: int) -> float:
    """The chance that a group of samples at success rate p holds both outcomes, and so carries signal: 1 - p^G - (1 - p)^G.

    >>> p_mixed(0.5, 2), round(p_mixed(0.05, 8), 3)
    (0.5, 0.337)
    """
    if group < 1:
        raise EvidenceError(f"a group of {group} is empty; use at least 2 samples per prompt")
    return max(0.0, 1 - _rate(p) ** group - (1 - p) ** group)


@dataclass(frozen=True, slots=True)
class SingleSeedBound:
    """How far a bounded measurement of one run may be off: the larger of its two parts.

    Example: SingleSeedBound(bound=0.02, prompt_half_width=0.02, setting_spread=0.016, prompts=64, settings=3)
    """

    bound: float
    prompt_half_width: float
    """Half the bootstrap interval of the mean over prompts."""
    setting_spread: float
    """Largest minus smallest mean over the settings tried, such as temperatures."""
    prompts: int
    settings: int


def single_seed_bound(
    per_prompt: Sequence[float],
    setting_means: Sequence[float],
    kind: ClaimKind = "bounded_measurement",
    seed: int = 0,
    level: float = 0.95,
) -> SingleSeedBound:
    """max(prompt-level bootstrap half-width, spread across settings) of a quantity measured on one run, such as an acceptance length.

    A training gain or a claim of stability is refused whatever the numbers: neither part sees the spread between seeds.

    >>> bound = single_seed_bound([2.9, 3.1, 3.0, 3.2, 2.8, 3.0, 3.1, 2.9], [3.00, 3.15])
    >>> round(bound.prompt_half_width, 2), round(bound.bound, 2)
    (0.11, 0.15)
    """
    if kind != "bounded_measurement":
        raise EvidenceError(f"a claim of kind '{kind}' cannot rest on one seed: {SINGLE_SEED_REFUSED.get(kind, 'unknown kind')}")
    settings = finite_values(setting_means)
    if len(settings) < 2:
        raise EvidenceError(f"{len(settings)} setting(s) show no spread; measure at least 2, such as two temperatures")
    prompts = percentile(per_prompt, mean, seed, level)
    half, spread = (prompts.high - prompts.low) / 2, float(np.ptp(settings))
    return SingleSeedBound(max(half, spread), half, spread, len(per_prompt), len(settings))


def _seed_sigma(sigma: SigmaEstimate) -> float:
    if sigma.kind != "seed_to_seed":
        raise EvidenceError(f"a {sigma.kind} sigma cannot size a seed budget: {WRONG_SIGMA[sigma.kind]}; use SigmaEstimate.from_runs")
    return sigma.value


def _paired_items(gap: float, discordance: float, z_a: float, z_b: float) -> float:
    return ((z_a * math.sqrt(discordance) + z_b * math.sqrt(discordance - gap**2)) / gap) ** 2 + 2 / gap


def _effect(delta: float) -> float:
    if not (math.isfinite(delta) and delta != 0):
        raise EvidenceError(f"an effect of {delta} cannot be planned for; name the smallest difference that matters")
    return delta


def _rate(rate: float) -> float:
    if not 0 <= rate <= 1:
        raise EvidenceError(f"success rate {rate} is not between 0 and 1")
    return rate


def _quantiles(level: float, power: float) -> tuple[float, float]:
    if not 0.5 <= power < 1:
        raise EvidenceError(f"power {power} is not between 0.5 and 1; 0.8 is usual")
    return normal_quantile(0.5 + checked_level(level) / 2), normal_quantile(power)


def _z_sum(level: float, power: float) -> float:
    return sum(_quantiles(level, power))
