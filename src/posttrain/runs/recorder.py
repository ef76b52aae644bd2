"""What a loop needs from the place its records go, and the recorder of processes that must not write."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from posttrain.core.files import read_json, read_jsonl

SCHEMA = 1
METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
NO_SECONDS: Mapping[str, float | None] = MappingProxyType({})
_NAME = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9_.@+=-]*")


class Recorder(Protocol):
    """The records of a run: `Run` on the first process, `SilentRun` on every other."""

    path: Path
    """The run directory."""

    def metric(
        self,
        stage: str,
        step: int,
        values: Mapping[str, float | int | str | None],
        seconds: Mapping[str, float | None] = NO_SECONDS,
    ) -> None:
        """One line of numbers; wall-clock figures go to `seconds` only."""
        ...

    def rollout(self, stage: str, record: Mapping[str, Any]) -> None:
        """One scored completion."""
        ...

    def schedule(self, stage: str, line: Mapping[str, Any]) -> None:
        """One line of an asynchronous stage's schedule: what was drawn or taken, in which order."""
        ...

    def alarm(self, stage: str, step: int, name: str, detail: str, evidence: Mapping[str, Any]) -> None:
        """Something a person should look at, with the numbers that show it."""
        ...

    def note(self, section: str, facts: Mapping[str, Any]) -> None:
        """Facts found out while running, for the manifest: `kernels`, `detected`."""
        ...

    def position(self) -> dict[str, int]:
        """Byte offsets of all JSON-lines files, to be stored in a checkpoint."""
        ...

    def rewind(self, position: Mapping[str, int]) -> None:
        """Forget every line written after `position` was taken."""
        ...

    def finish_stage(self, stage: str, info: Mapping[str, Any]) -> None:
        """Mark a stage complete; `info["digests"]` maps files to digests that `verify` checks."""
        ...

    def finished(self, stage: str) -> dict[str, Any] | None:
        """What `finish_stage` stored, None while the stage is incomplete."""
        ...

    def save_eval(self, name: str, record: Mapping[str, Any]) -> None:
        """Store an evaluation under its name."""
        ...

    def eval(self, name: str) -> dict[str, Any] | None:
        """The evaluation stored under `name`, None when there is none."""
        ...

    def checkpoint_root(self, stage: str) -> Path:
        """Directory of a stage's checkpoints."""
        ...

    def metrics(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Metric lines in the order written."""
        ...

    def rollouts(self, stage: str) -> list[dict[str, Any]]:
        """Rollout lines of a stage in the order written."""
        ...


class RunFiles:
    """Where things lie in a run directory, and how they are read. Reading never writes.

    Layout: manifest.json, config.yaml, metrics.jsonl, alarms.jsonl, rollouts/<stage>.jsonl, rollouts/<stage>.schedule.jsonl,
    evals/<name>.json, stages/<stage>.json, checkpoints/<stage>/.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def stage_file(self, stage: str) -> Path:
        """Record of a finished stage."""
        return self.path / "stages" / f"{safe_name(stage)}.json"

    def eval_file(self, name: str) -> Path:
        """Record of an evaluation."""
        return self.path / "evals" / f"{safe_name(name)}.json"

    def checkpoint_root(self, stage: str) -> Path:
        """Directory of a stage's checkpoints; it may not exist yet."""
        return self.path / "checkpoints" / safe_name(stage)

    def finished(self, stage: str) -> dict[str, Any] | None:
        """What `finish_stage` stored (with "schema" and "stage"), None while the stage is incomplete."""
        path = self.stage_file(stage)
        return read_json(path) if path.exists() else None

    def eval(self, name: str) -> dict[str, Any] | None:
        """The evaluation stored under `name` (with "schema"), None when there is none."""
        path = self.eval_file(name)
        return read_json(path) if path.exists() else None

    def metrics(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Metric lines in the order written, of one stage or of all."""
        return [line for line in read_jsonl(self.path / METRICS) if stage in (None, line["stage"])]

    def rollouts(self, stage: str) -> list[dict[str, Any]]:
        """Rollout lines of a stage in the order written."""
        return read_jsonl(self.path / rollout_name(stage))

    def alarms(self) -> list[dict[str, Any]]:
        """Alarm lines in the order written."""
        return read_jsonl(self.path / ALARMS)


class SilentRun(RunFiles):
    """Recorder of the processes that must not write. Given the run's path it reads what the first process wrote."""

    def __init__(self, path: str | Path | None = None):
        # Below the null device nothing exists and nothing can be created.
        super().__init__(os.devnull if path is None else path)

    def metric(
        self,
        stage: str,
        step: int,
        values: Mapping[str, float | int | str | None],
        seconds: Mapping[str, float | None] = NO_SECONDS,
    ) -> None:
        """Write nothing."""

    def rollout(self, stage: str, record: Mapping[str, Any]) -> None:
        """Write nothing."""

    def schedule(self, stage: str, line: Mapping[str, Any]) -> None:
        """Write nothing."""

    def alarm(self, stage: str, step: int, name: str, detail: str, evidence: Mapping[str, Any]) -> None:
        """Write nothing."""

    def note(self, section: str, facts: Mapping[str, Any]) -> None:
        """Write nothing."""

    def position(self) -> dict[str, int]:
        """No files, no offsets."""
        return {}

    def rewind(self, position: Mapping[str, int]) -> None:
        """Write nothing."""

    def finish_stage(self, stage: str, info: Mapping[str, Any]) -> None:
        """Write nothing."""

    def save_eval(self, name: str, record: Mapping[str, Any]) -> None:
        """Write nothing."""


def safe_name(name: str) -> str:
    """`name` itself when it can be a file name everywhere; raises ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name}' cannot name a stage or an evaluation; use letters, digits and _ - . @ + = (not first a dot)")
    return name


def rollout_name(stage: str) -> str:
    """Path of a stage's rollout file within the run."""
    return f"rollouts/{safe_name(stage)}.jsonl"


def schedule_name(stage: str) -> str:
    """Path of a stage's schedule within the run."""
    return f"rollouts/{safe_name(stage)}.schedule.jsonl"
