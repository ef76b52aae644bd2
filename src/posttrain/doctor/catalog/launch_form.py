"""How entries are written that settings alone can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.doctor.entries import Entry, Layer, Status, Tier, Verdict
from posttrain.doctor.frame import Kind
from posttrain.doctor.rules import Rule
from posttrain.doctor.signals import Signal

GROUP_BASELINES = ("mean", "mean_std", "leave_one_out", "median_mad", "max_rl", "pass_at_k", "channels")
"""Advantages whose baseline is the other siblings."""
RL: tuple[Kind, ...] = ("rl", "distill")
TRAINED: tuple[Kind, ...] = ("sft", "preference", "rl", "distill")


def rule(said: str, *reads: str, test: Callable[[Mapping[str, Any]], bool]) -> Rule:
    """A relation between the settings `reads`. Example: rule("fewer than 4", "siblings", test=lambda s: s["siblings"] < 4)"""
    return Rule(reads, test, said)


def advise(id: str, name: str, texts: tuple[str, str, str, str], *signs: Signal, kinds: tuple[Kind, ...] = RL, **more: Any) -> Entry:
    """An entry that the linter reads.

    Example: advise("C8", "nothing is measured", ("symptom", "cause", "fix", "check"), Setting("guard.pulse_every", "==", 0))

    Args:
        texts: symptom, cause, fix and check.
        more: other fields of Entry; status and source are those of our own measurements unless they are given.
    """
    symptom, cause, fix, check = texts
    fields: dict[str, Any] = {
        "status": Status.MEASURED,
        "layer": Layer.CONFIGURATION,
        "verdict": Verdict.DRIFTING,
        "onset": "before the first step",
        "source": "measured on the embedded ladder",
        "tier": Tier.STATIC,
        "found_by": "settings",
        **more,
    }
    return Entry(id, name, symptom=symptom, cause=cause, fix=fix, check=check, kinds=kinds, signs=signs, **fields)
