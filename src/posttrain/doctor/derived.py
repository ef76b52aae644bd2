"""Columns that follow from others: what older runs and other trainers did not record as such. One pure function, for live and read rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

_MASKED = ("left_overlong", "left_pivot", "left_unscored", "left_too_few")
"""Rollouts that a masking flag leaves out; left_no_signal is no masking."""
_FATES = ("fate_clipped", "fate_out_of_band", "fate_mismatched", "fate_rejected", "fate_gated")
_BINARY = 1e-6
"""Rewards are taken for 0 and 1 when their variance is that of a coin up to this."""


def derived(values: Mapping[str, float]) -> dict[str, float]:
    """The columns that `values`, one row of finite numbers, implies and does not hold.

    Example: derived({"unparseable": 0.1, "truncated": 0.05})  # {"parsed": 0.85}
             derived({"rollouts_kept": 64, "left_overlong": 16})  # {"dropped": 0.25}
    """
    found: dict[str, float] = {}
    _groups(values, found)
    _answers(values, found)
    if (fates := [values[name] for name in _FATES if name in values]) and "left_out" not in values:
        found["left_out"] = sum(fates)
    if "starved" not in values and "fate_mismatched" in values and "fate_rejected" in values:
        found["starved"] = values["fate_mismatched"] + values["fate_rejected"]
    masked = [values[name] for name in _MASKED if name in values]
    rollouts = values.get("rollouts_kept") or values.get("rollouts_generated") or 0.0
    if masked and rollouts > 0 and "dropped" not in values:
        found["dropped"] = sum(masked) / rollouts
    return {name: value for name, value in found.items() if isfinite(value)}


def _groups(values: Mapping[str, float], found: dict[str, float]) -> None:
    """mixed is what zero_variance leaves; a group that agrees is all right, all wrong, unparseable, or partial."""
    if "zero_variance" not in values:
        if "mixed" in values:
            found["zero_variance"] = _share(1.0 - values["mixed"])
        return
    if "mixed" not in values:
        found["mixed"] = _share(1.0 - values["zero_variance"])
    if "unanimous_partial" not in values and "all_right" in values and "all_wrong" in values:
        known = values["all_right"] + values["all_wrong"] + values.get("unanimous_unparseable", 0.0)
        found["unanimous_partial"] = _share(values["zero_variance"] - known)


def _answers(values: Mapping[str, float], found: dict[str, float]) -> None:
    if "parsed" not in values and "unparseable" in values:
        found["parsed"] = _share(1.0 - values["unparseable"] - values.get("truncated", 0.0))
    mean, std, length = values.get("reward_mean"), values.get("reward_std"), values.get("length")
    if "tokens_per_correct" in values or mean is None or std is None or length is None or not 0.0 < mean <= 1.0:
        return
    if abs(std * std - mean * (1.0 - mean)) <= _BINARY:  # rewards of 0 and 1: their mean is the share that is right
        found["tokens_per_correct"] = length / mean


def _share(value: float) -> float:
    """Rounding may leave a share a little outside of [0, 1]."""
    return min(1.0, max(0.0, value))
