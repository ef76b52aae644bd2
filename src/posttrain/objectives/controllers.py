"""Coefficients that follow a measurement. Pure functions of plain numbers: the loop keeps the value and asks for the next one. No torch.

Each moves its value in one direction only when the measurement is on one side of the target, by a bounded amount per call, and leaves it
alone at the target. No measurement (None or NaN: no trained token, no scored reference) leaves it alone too.
"""

from __future__ import annotations

import math


def adapt_kl_coef(coef: float, measured: float | None, target: float, gain: float = 0.1) -> float:
    """Next KL coefficient: larger when the policy is farther from the reference than `target`, smaller when it is nearer.

    coef * (1 + gain * clip(measured / target - 1, -0.2, 0.2)), so a call changes it by at most 0.2 * gain: 2 % at the default. The factor
    cannot revive a coefficient of 0.

    Args:
        measured, target: nats, in the same unit (per token, or per response); target > 0.
        gain: above 0, below 5, so that the factor stays positive.

    Example: 0.02 at 5.5 nats for a target of 5: error 0.1, next 0.02 * 1.01 = 0.0202; at 50 nats the error counts 0.2, next 0.0204.
    Source: Ziegler et al. 2019, section 2.2.
    """
    if not target > 0 or not 0 < gain < 5:
        raise ValueError(f"KL controller with target {target} and gain {gain}: target must be positive and gain between 0 and 5")
    if measured is None or math.isnan(measured):
        return coef
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + gain * error)


def adapt_clip_high(high: float, entropy: float | None, target: float, step: float, lowest: float, highest: float) -> float:
    """Next upper clip bound: wider by `step` when entropy (nats per token) is below `target`, narrower by `step` above.

    A wider bound lets rare tokens grow, which feeds entropy; it replaces an entropy bonus. The source names the target 0.3 and no step.

    Example: 0.20 at entropy 0.25 for a target of 0.3 with step 0.01: 0.21; at 0.35: 0.19; never outside [lowest, highest].
    Source: spec/recipes-of-the-labs.md G-32 (MAI).
    """
    return _step(high, entropy, target, step, lowest, highest)


def adapt_entropy_coef(coef: float, entropy: float | None, target: float, step: float, highest: float) -> float:
    """Next coefficient of the entropy bonus: up by `step` when entropy (nats per token) is below `target`, down by `step` above.

    Stays in [0, highest]. A fixed coefficient has no stable setting: 0.01 drove entropy to its maximum, 0.001 let it drift (spec/book-2 53,
    54). The bound keeps the first from happening here.

    Example: 0.001 at entropy 0.15 for a target of 0.2 with step 0.0005: 0.0015; at 0.25: 0.0005.
    Source: Skywork-OR1 (He et al. 2025), adaptive entropy control, which also switches the bonus off while entropy is above the target.
    """
    return _step(coef, entropy, target, step, 0.0, highest)


def _step(value: float, measured: float | None, target: float, step: float, lowest: float, highest: float) -> float:
    """`value` one step up when the measurement is below target, one down when above, within bounds."""
    if not step > 0 or lowest > highest:
        raise ValueError(f"controller with step {step} and bounds {lowest} to {highest}: the step must be positive and the bounds in order")
    if measured is None or math.isnan(measured) or measured == target:
        return value
    return min(max(value + math.copysign(step, target - measured), lowest), highest)
