"""Step checkpoints of a stage: trainable weights, optimizer, loop state and the position in every record file.

A checkpoint appears whole or not at all, and an old one goes only after its successor is complete. A stage with a second trainer (a critic
beside its policy) keeps it in a folder of its own inside the same checkpoint, so that the two can never be of different steps:

    step_40/  trainable.safetensors  optimizer.pt  state.json
              critic/  trainable.safetensors  optimizer.pt
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.core.files import atomic_dir, is_leftover, read_json, write_json
from posttrain.engine.trainer import LocalTrainer

KEEP = 2
"""Complete checkpoints kept per stage."""

NO_OTHERS: Mapping[str, LocalTrainer] = MappingProxyType({})
"""A stage with one trainer."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Example: Checkpoint(step=40, folder=.../step_40, state={"empty_steps": 0}, position={"metrics.jsonl":
    8120})"""

    step: int
    """Steps of the loop that are done: the first one to do next."""
    folder: Path
    state: dict[str, Any]
    position: dict[str, int]
    others: tuple[str, ...] = ()
    """Names of the trainers beside the stage's own, in order."""

    def restore(self, trainer: LocalTrainer, others: Mapping[str, LocalTrainer]) -> None:
        """Put every trainer back to this step. Raises ConfigError, with nothing changed, when the names in `others` are not those saved."""
        if self.others != tuple(sorted(others)):
            raise ConfigError(
                f"checkpoint '{self.folder}' was made {_with(self.others)} and this run trains {_with(others)}; "
                "resume with the settings it was made with"
            )
        trainer.restore(self.folder)
        for name, other in others.items():
            other.restore(self.folder / name)


def save_checkpoint(
    root: Path,
    step: int,
    trainer: LocalTrainer,
    state: dict[str, Any],
    position: dict[str, int],
    others: Mapping[str, LocalTrainer] = NO_OTHERS,
) -> None:
    """Write root/step_N with each of `others` in the sub-folder of its name, then drop all but the newest KEEP."""
    with atomic_dir(root / f"step_{step}") as folder:
        trainer.save(folder)
        for name, other in others.items():
            (folder / name).mkdir()
            other.save(folder / name)
        write_json(folder / "state.json", {"schema": 1, "step": step, "state": state, "position": position})
    for old in _complete(root)[:-KEEP]:
        shutil.rmtree(old)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint under `root`, if any."""
    complete = _complete(root)
    if not complete:
        return None
    newest = complete[-1]
    record = read_json(newest / "state.json")
    others = tuple(sorted(entry.name for entry in newest.iterdir() if entry.is_dir()))
    return Checkpoint(record["step"], newest, record["state"], record["position"], others)


def discard_checkpoints(root: Path) -> None:
    """Remove step checkpoints once their stage has finished and saved its model."""
    for folder in _complete(root):
        shutil.rmtree(folder)


def _complete(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if p.name.startswith("step_") and not is_leftover(p.name) and (p / "state.json").is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def _with(others: Collection[str]) -> str:
    return f"with {', '.join(sorted(others))}" if others else "without a second trainer"
