"""Step checkpoints of a stage: everything that is needed to continue it as if it had never stopped.

A checkpoint appears whole or not at all, and an old one goes only after its successor is complete. A stage with a second trainer (a critic
beside its policy) keeps it in a folder of its own inside the same checkpoint, so that the two can never be of different steps:

    step_40/  trainable.safetensors  optimizer.pt  state.json
              critic/  trainable.safetensors  optimizer.pt       every trainer beside the stage's own
              extra/   rollouts.json                             larger state: buffered groups, completions in flight
              model/   adapter/                                  the model in Hugging Face format, for people; never read back

What is in it: the weights and the optimizer with its count of steps, from which the schedule's rate follows; the step, from which the
position in the data follows (order and tasks of a step are functions of seed and step); controllers and whatever else the loop keeps
between steps; the byte position of every record file. What is not in it: the state of a random generator. Every stream is derived from the
seed and the path of its name (core/seeds.py) at the place where it is used, so there is none to store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.core.files import atomic_dir, encode_line, is_leftover, read_json, remove, write_atomic, write_json
from posttrain.engine.trainer import LocalTrainer

NO_OTHERS: Mapping[str, LocalTrainer] = MappingProxyType({})
"""A stage with one trainer."""
EXTRA = "extra"
_TAKEN = frozenset({EXTRA, "model", "adapter"})


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint holds besides the trainers. JSON values only.

    Example: Content(step=40, state={"silent": 0}, position={"metrics.jsonl": 8120}, extras={"rollouts": [[]]})
    """

    step: int
    """Steps of the loop that are done: the first one to do next."""
    state: dict[str, Any]
    position: dict[str, int]
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Each in a file of its own, read only by who asks for it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Example: Checkpoint(step=40, folder=.../step_40, state={"empty_steps": 0}, position={"metrics.jsonl":
    8120})"""

    step: int
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

    def extra(self, name: str) -> Any | None:
        """What was kept under `name`, None when nothing was."""
        file = self.folder / EXTRA / f"{name}.json"
        return read_json(file) if file.exists() else None


def save_checkpoint(
    root: Path,
    content: Content,
    trainer: LocalTrainer,
    others: Mapping[str, LocalTrainer] = NO_OTHERS,
    *,
    keep: int = 2,
    export: Callable[[Path], None] | None = None,
) -> None:
    """Write root/step_N with each of `others` in the sub-folder of its name, then drop all but the newest `keep`.

    `export` is called with the folder and adds the model in a format for others. Raises StorageError, with every earlier checkpoint intact.
    """
    if taken := sorted(_TAKEN & others.keys()):
        raise ValueError(f"'{taken[0]}' is a folder of every checkpoint; give the second trainer another name")
    with atomic_dir(root / f"step_{content.step}") as folder:
        trainer.save(folder)
        for name, other in others.items():
            (folder / name).mkdir()
            other.save(folder / name)
        for name, value in content.extras.items():
            write_atomic(folder / EXTRA / f"{name}.json", encode_line(value))
        if export is not None:
            export(folder)
        record = {"schema": 2, "step": content.step, "state": content.state, "position": content.position, "others": sorted(others)}
        write_json(folder / "state.json", record)
    for old in _complete(root)[:-keep]:
        remove(old)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint under `root`, if any."""
    complete = _complete(root)
    if not complete:
        return None
    newest = complete[-1]
    record = read_json(newest / "state.json")
    others = record["others"] if "others" in record else sorted(entry.name for entry in newest.iterdir() if entry.is_dir())
    return Checkpoint(record["step"], newest, record["state"], record["position"], tuple(others))


def discard_checkpoints(root: Path) -> None:
    """Remove step checkpoints once their stage has finished and saved its model."""
    for folder in _complete(root):
        remove(folder)


def _complete(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if p.name.startswith("step_") and not is_leftover(p.name) and (p / "state.json").is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def _with(others: Collection[str]) -> str:
    return f"with {', '.join(sorted(others))}" if others else "without a second trainer"
