"""Take a run up again by its directory alone, whichever recipe it is of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunError
from posttrain.recipes.ladder import STAGES, Ladder, ladder
from posttrain.recipes.presets import SINGLE
from posttrain.recipes.single import train
from posttrain.runs.run import Run


def resume(
    out: str | Path, assignments: Sequence[str] = (), *, accept_changed: Sequence[str] = (), expected_mount: str | None = None
) -> dict[str, Any]:
    """Continue the run at `out` with its own settings; returns its summary.

    Args:
        assignments: settings to change, e.g. ["processes=2", "machine.export=false"]; those that change the numbers are refused.
        accept_changed: inputs that may differ from those the run was started with, e.g. ["data", "tokenizer"].
        expected_mount: mount point, device or file system type that `out` must lie on.

    Raises RunError when it is a run of none of these recipes, and as `ladder` and `train` do. A run that was given its tasks or its reward
    in Python is continued by the call that started it, with resume=True.
    """
    run = Run.open(out)
    stages = tuple(run.manifest.get("stages") or ())
    how: dict[str, Any] = {"resume": True, "accept_changed": accept_changed, "expected_mount": expected_mount}
    if stages == STAGES:
        return ladder(Ladder.load(run.config()).override(assignments), out, **how)
    name = next((name for name in SINGLE if name in stages), None)
    if name is None:
        raise RunError(
            f"{out} has the stages {', '.join(stages) or 'none'} and is no run of a recipe; call what started it, with resume=True"
        )
    return train(SINGLE[name].load(run.config()).override(assignments), out, **how)
