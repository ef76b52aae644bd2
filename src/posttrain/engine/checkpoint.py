"""Step checkpoints of a stage: trainable weights, optimizer, loop state and the position in every record file.

A checkpoint appears whole or not at all, and an old one goes only after its successor is complete.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.files import atomic_dir, is_leftover, read_json, write_json
from posttrain.engine.trainer import LocalTrainer

KEEP = 2
"""Complete checkpoints kept per stage."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Example: Checkpoint(step=40, folder=.../step_40, state={"empty_steps": 0}, position={"metrics.jsonl":
    8120})"""

    step: int
    """Steps of the loop that are done: the first one to do next."""
    folder: Path
    state: dict[str, Any]
    position: dict[str, int]


def save_checkpoint(root: Path, step: int, trainer: LocalTrainer, state: dict[str, Any], position: dict[str, int]) -> None:
    """Write root/step_N, then drop all but the newest KEEP."""
    with atomic_dir(root / f"step_{step}") as folder:
        trainer.save(folder)
        write_json(folder / "state.json", {"schema": 1, "step": step, "state": state, "position": position})
    for old in _complete(root)[:-KEEP]:
        shutil.rmtree(old)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint under `root`, if any."""
    complete = _complete(root)
    if not complete:
        return None
    record = read_json(complete[-1] / "state.json")
    return Checkpoint(record["step"], complete[-1], record["state"], record["position"])


def discard_checkpoints(root: Path) -> None:
    """Remove step checkpoints once their stage has finished and saved its model."""
    for folder in _complete(root):
        shutil.rmtree(folder)


def _complete(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if p.name.startswith("step_") and not is_leftover(p.name) and (p / "state.json").is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))
