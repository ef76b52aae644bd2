"""All failures the doctor knows, by id."""

from __future__ import annotations

from posttrain.doctor.catalog import (
    collapse,
    configuration,
    data,
    distillation,
    drift,
    evaluation,
    infrastructure,
    labs,
    launch,
    lossy,
    reward,
    seam,
    supervised,
    users,
)
from posttrain.doctor.entries import Entry, checked

CATALOG: dict[str, Entry] = checked(
    (
        *collapse.ENTRIES,
        *data.ENTRIES,
        *reward.ENTRIES,
        *evaluation.ENTRIES,
        *seam.ENTRIES,
        *infrastructure.ENTRIES,
        *configuration.ENTRIES,
        *drift.ENTRIES,
        *distillation.ENTRIES,
        *lossy.ENTRIES,
        *supervised.ENTRIES,
        *labs.ENTRIES,
        *users.ENTRIES,
        *launch.ENTRIES,
    )
)
"""Every failure, by its id."""
