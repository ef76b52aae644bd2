"""How a recipe is watched while it trains: the catalog's alarms over its metrics, and pulses on held-out items that nothing else uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.checks.calibration import Family
from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Task
from posttrain.doctor.alarms import Watch
from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.entries import Action
from posttrain.doctor.lint import lint
from posttrain.doctor.postmortem import postmortem_of
from posttrain.doctor.postmortem_file import FILE, postmortem_text, write_postmortem
from posttrain.doctor.reading import read_evidence
from posttrain.doctor.settings import settings_of
from posttrain.envs.types import EnvOf, TaskSource
from posttrain.evals.pulse import Pulse
from posttrain.evals.suite import Suite
from posttrain.loops.guard import Guard
from posttrain.rewards.types import Grader

LEAST = 16
"""Fewer items than this are no pulse."""


def watch_of(settings: Config, guard: Guard) -> Watch | None:
    """The alarms of a run; None when they are off."""
    if guard.alarms == "off":
        return None
    config = settings.model_dump(mode="json")
    return Watch(CATALOG.values(), lambda stage: settings_of(config, stage), bounds_of(guard.calibration), act=guard.alarms == "act")


def advice_of(settings: Config, guard: Guard) -> list[str]:
    """What the settings alone say against a run that is about to begin, one line each; notes are for `posttrain lint`."""
    if guard.alarms == "off":
        return []
    found = lint(settings.model_dump(mode="json"), CATALOG.values())
    return [f"{advice.stage}: {advice.sentence}" for advice in found if advice.action is not Action.NOTE]


def leave_postmortem(run: Path) -> Path | None:
    """After an alarm has stopped the run: postmortem.md, filled from its records. None after a pause, or where somebody has written one."""
    evidence = read_evidence(run)
    last = evidence.alarms[-1].get("evidence") if evidence.alarms else None
    if not isinstance(last, Mapping) or last.get("action") != Action.STOP or (run / FILE).exists():
        return None
    return write_postmortem(run, postmortem_text(postmortem_of(evidence, CATALOG)))


def bounds_of(calibration: str | None) -> dict[str, float]:
    """Thresholds by name, from the file of `posttrain promote --calibrate`; what it could not tell keeps the catalog's."""
    if calibration is None:
        return {}
    family = Family.read(calibration)
    usual = {"kl_ceiling": family.kl_ceiling, "entropy_floor": family.entropy_floor}
    return {name: bound for name, bound in usual.items() if bound is not None}


def spare(source: TaskSource, measured: int, guard: Guard) -> list[Task]:
    """Held-out tasks beyond the first `measured`, as many as a pulse takes; none when the source has no more."""
    try:
        return source.tasks("held_out", measured + guard.pulse_items, 0)[measured:]
    except ConfigError:
        return []


def pulse_of(
    guard: Guard, tasks: Sequence[Task], grader: Grader, sampling: Sampling, env_of: EnvOf | None = None, turns: int = 1
) -> Pulse | None:
    """The pulse on the first of `tasks`, decoded as in training; None when it is off or there are too few.

    `tasks` should be held out from training and from what the run reports: an alarm that ends a run has looked at them.
    """
    items = tuple(tasks[: guard.pulse_items])
    if guard.pulse_every == 0 or len(items) < LEAST:
        return None
    return Pulse(Suite("pulse", items, grader, sampling, 1, True, env_of, turns), guard.pulse_every)
