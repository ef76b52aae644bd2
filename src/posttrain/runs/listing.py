"""Which runs there are, how far they got, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.core.files import is_leftover
from posttrain.runs.lineage import origin
from posttrain.runs.manifest import MANIFEST, READABLE, run_id
from posttrain.runs.reading import files, is_file, last_line, load_mapping, mapping, plain, scan_lines, strings
from posttrain.runs.recorder import METRICS
from posttrain.runs.verify import Problem, verify

__all__ = ["Problem", "RunSummary", "list_runs", "summarise_run", "verify"]

State = Literal["finished", "incomplete", "damaged"]


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
    state: State
    """Damaged: the manifest or the end of the metrics cannot be read; `verify` says what else is wrong."""
    id: str | None = None
    origin: str | None = None
    """Where it comes from, e.g. "one variable from 3f9a01bc: sft.optim.lr"; None for a run that starts from no other."""
    note: str | None = None
    """Why it is damaged, or that another version wrote it."""


def list_runs(root: str | Path) -> list[RunSummary]:
    """Summaries of all runs at or directly below `root`, oldest first."""
    root = Path(root)
    try:
        folders = [root, *sorted(entry for entry in root.iterdir() if entry.is_dir())]
    except OSError:
        return []
    found = [summarise_run(folder) for folder in folders if is_file(folder / MANIFEST) and not is_leftover(folder.name)]
    return sorted(found, key=lambda run: (run.created or "", run.path))


def summarise_run(path: Path) -> RunSummary:
    """One run's line. A damaged one is listed too; nothing that a directory holds makes this raise."""
    stages = tuple(file.stem for file in files(path, "stages/*.json") if not is_leftover(file.name))
    manifest, problem = load_mapping(path / MANIFEST)
    last = last_line(path / METRICS)
    problem = problem or (f"{METRICS}: {last.problem}" if last and last.problem else None)
    if problem is None and last is not None and not isinstance(last.value, dict):
        problem = f"{METRICS}: the last line is no object"
    if problem is not None:
        return RunSummary(path, None, None, stages, None, "damaged", note=problem)
    # A run that did not declare its stages is finished when every stage it began is.
    declared = strings(manifest.get("stages"))
    wanted = set(declared or (str(mapping(line.value).get("stage")) for line in scan_lines(path / METRICS) if line.problem is None))
    state: State = "finished" if wanted and wanted <= set(stages) else "incomplete"
    version = manifest.get("schema_version")
    return RunSummary(
        path,
        _text(manifest.get("kind")),
        _text(manifest.get("created")),
        stages,
        last.value if last else None,
        state,
        run_id(manifest),
        origin(manifest),
        None if version in READABLE else f"schema {plain(version, 20)}, which this version knows in part",
    )


def _text(value: Any) -> str | None:
    return plain(value, 60) if isinstance(value, str) else None
