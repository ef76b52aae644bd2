"""A run directory as the doctor reads it: frames, records and what could not be read. Nothing here touches the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.doctor.frame import Frame


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one run.

    Example: Evidence(Path("runs/a"), frames={"grpo": frame}, finished={"sft": {...}})
    """

    path: Path
    source: str = "posttrain"
    """Who wrote the records: posttrain, trl, csv, jsonl, tensorboard or wandb."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config as nested plain values; {} when unknown."""
    frames: Mapping[str, Frame] = field(default_factory=dict)
    """Stage to its metrics, in the order in which the stages ran."""
    finished: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Stage to what it left when it ended; a stage that is in `frames` only did not end."""
    evals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Evaluation name, e.g. "sft.arithmetic", to its record as plain JSON."""
    alarms: Sequence[Mapping[str, Any]] = ()
    """Lines of alarms.jsonl in order: stage, step, name, detail, evidence."""
    rollouts: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Stage to the last rollouts that were kept in full (a bounded number)."""
    gates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a gate (probe, preflight, handover.sft) to its record."""
    problems: Sequence[str] = ()
    """What could not be read, one line each."""
