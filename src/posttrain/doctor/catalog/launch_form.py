"""How entries are written that settings alone can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.doctor.entries import Action, Entry, Layer, Status, Tier, Verdict
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


def advise(
    id: str,
    name: str,
    texts: tuple[str, str, str, str],
    *signs: Signal,
    against: tuple[Signal, ...] = (),
    kinds: tuple[Kind, ...] = RL,
    action: Action = Action.WARN,
    status: Status = Status.MEASURED,
    source: str = "measured on the embedded ladder",
) -> Entry:
    """An entry that the linter reads; `texts` are symptom, cause, fix and check."""
    symptom, cause, fix, check = texts
    return Entry(
        id,
        name,
        status,
        Layer.CONFIGURATION,
        Verdict.DRIFTING,
        symptom,
        "before the first step",
        cause,
        fix,
        check,
        source,
        Tier.STATIC,
        "settings",
        kinds,
        tuple(signs),
        against,
        action=action,
    )
