"""Which runs there are, how far they got, and whether what they recorded is still what lies on the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.core.digest import digest, file_digest
from posttrain.core.errors import RunError
from posttrain.core.files import is_leftover, read_json, read_jsonl
from posttrain.runs.recorder import METRICS
from posttrain.runs.run import CONFIG, MANIFEST, Run


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of a listing.

    Example: RunSummary(Path("runs/a"), "ladder", "2026-01-01T00:00:00+00:00", ("sft",), {"stage": "dpo", "step": 3}, "incomplete")
    """

    path: Path
    kind: str | None
    created: str | None
    stages: tuple[str, ...]
    """Finished stages, in name order."""
    last: dict[str, Any] | None
    """Last metrics line."""
    state: Literal["finished", "incomplete", "damaged"]
    """Damaged: the manifest or the metrics cannot be read; `verify` says why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a run that is not as it was recorded.

    Example: Problem("checkpoints/sft/step_5/model.safetensors", "missing, though stages/sft.json records it")
    """

    file: str
    detail: str


def list_runs(root: str | Path) -> list[RunSummary]:
    """Summaries of all runs at or directly below `root`, oldest first."""
    root = Path(root)
    folders = [root, *sorted(entry for entry in root.iterdir() if entry.is_dir())] if root.is_dir() else []
    found = [_summary(folder) for folder in folders if (folder / MANIFEST).is_file() and not is_leftover(folder.name)]
    return sorted(found, key=lambda run: (run.created or "", run.path))


def verify(path: str | Path) -> list[Problem]:
    """Read every record of a run again and compare every recorded file digest; [] when all is as it was written.

    Raises RunError when `path` is not a run.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise RunError(f"{path} is not a run (it has no {MANIFEST})")
    problems = _unreadable(path, path / MANIFEST, read_json) or _config_problems(path)
    for file in sorted([*path.glob("*.jsonl"), *path.glob("rollouts/*.jsonl")]):
        problems += _unreadable(path, file, read_jsonl)
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            problems.append(Problem(_inside(path, file), "the last line is unfinished (the writer was killed); resuming removes it"))
    for file in sorted({*path.glob("*.json"), *path.glob("evals/*.json"), *path.glob("stages/*.json")} - {path / MANIFEST}):
        problems += _unreadable(path, file, read_json)
    for file in sorted(path.glob("stages/*.json")):
        if not _unreadable(path, file, read_json):
            problems += _digest_problems(path, file)
    return problems


def _summary(path: Path) -> RunSummary:
    stages = tuple(sorted(file.stem for file in path.glob("stages/*.json") if not is_leftover(file.name)))
    try:
        manifest = read_json(path / MANIFEST)
        lines = read_jsonl(path / METRICS)
    except RunError:
        return RunSummary(path, None, None, stages, None, "damaged")
    # A run that did not declare its stages is finished when every stage it began is.
    wanted = set(manifest.get("stages") or {line["stage"] for line in lines})
    complete = bool(wanted) and wanted <= set(stages)
    state: Literal["finished", "incomplete"] = "finished" if complete else "incomplete"
    return RunSummary(path, manifest.get("kind"), manifest.get("created"), stages, lines[-1] if lines else None, state)


def _config_problems(path: Path) -> list[Problem]:
    run = Run.open(path)
    try:
        found = digest(run.first_config())
    except RunError as error:
        return [Problem(CONFIG, str(error))]
    recorded = run.manifest.get("config_digest")
    if found == recorded:
        return []
    return [Problem(CONFIG, f"changed since the run began: digest {found}, {MANIFEST} records {recorded}")]


def _unreadable(root: Path, file: Path, reader: Callable[[Path], Any]) -> list[Problem]:
    try:
        reader(file)
    except RunError as error:
        return [Problem(_inside(root, file), str(error))]
    return []


def _digest_problems(root: Path, stage_file: Path) -> list[Problem]:
    record = read_json(stage_file)
    recorded: Mapping[str, str] = record.get("digests") or {}
    source = _inside(root, stage_file)
    problems = []
    for name, wanted in sorted(recorded.items()):
        file = root / name
        if not file.is_file():
            problems.append(Problem(name, f"missing, though {source} records it"))
        elif (found := file_digest(file)) != wanted:
            problems.append(Problem(name, f"changed: digest {found}, {source} records {wanted}"))
    return problems


def _inside(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()
