"""How a recipe is watched while it trains: the catalog's alarms over its metrics, and pulses on held-out items that nothing else uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.files import read_json
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Task
from posttrain.doctor.alarms import Watch
from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.settings import settings_of
from posttrain.envs.types import EnvOf, TaskSource
from posttrain.evals.pulse import Pulse
from posttrain.evals.suite import Suite
from posttrain.loops.guard import Guard
from posttrain.rewards.types import Grader

LEAST = 16
"""Fewer items than this are no pulse."""


def watch_of(settings: Config, guard: Guard) -> Watch | None:
    """The alarms of a run; None when they are off. Raises ConfigError when the calibration cannot be read."""
    if guard.alarms == "off":
        return None
    config = settings.model_dump(mode="json")
    return Watch(CATALOG.values(), lambda stage: settings_of(config, stage), bounds_of(guard.calibration), act=guard.alarms == "act")


def bounds_of(calibration: str | None) -> dict[str, float]:
    """Thresholds by name, from the file that `posttrain doctor calibrate` wrote."""
    if calibration is None:
        return {}
    record: Any = read_json(Path(calibration))
    bounds = record.get("bounds") if isinstance(record, Mapping) else None
    if not isinstance(bounds, Mapping) or not all(isinstance(value, int | float) for value in bounds.values()):
        raise ConfigError(f"guard.calibration = '{calibration}' holds no bounds; write it with posttrain doctor calibrate")
    return {str(name): float(value) for name, value in bounds.items()}


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
