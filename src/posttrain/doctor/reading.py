"""A run as evidence: a run directory of this package, live, finished, killed or copied, or the logs of another trainer.

Nothing here raises for what a file holds: what cannot be read is one line in `Evidence.problems`. Only when nothing at all can be read is
there a RunError. Torch is not needed, and neither memory nor time depends on how long the rollouts of a run are.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunError
from posttrain.doctor.derived import derived
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.facts import run_facts, stage_facts
from posttrain.doctor.foreign.find import read_foreign
from posttrain.doctor.frame import Column, Frame
from posttrain.doctor.lines import Limits, Names, Problems, figures, json_lines, last_objects, listed, records, step_of
from posttrain.doctor.settings import in_force, settings_of, stage_kind
from posttrain.runs.reading import exists, file_size, is_file, load_mapping, load_yaml_mapping, mapping, plain
from posttrain.runs.recorder import ALARMS, METRICS, safe_name

MANIFEST, CONFIG = "manifest.json", "config.yaml"
_FIELDS = frozenset({"schema", "stage", "step", "seconds"})
_MOST_YAML = 128 << 10
"""Bytes of settings: the library parses about that much in a second."""
_RESTARTS = 50
"""Times that the steps of a stage may go back; what goes back more often is no record of a run that was taken up again."""


def read_evidence(path: str | Path, *, names: Mapping[str, str] | None = None, limits: Limits | None = None) -> Evidence:
    """Everything that `path` says of a run.

    Args:
        path: a run directory, or a file or directory of another trainer (foreign/find.py says which).
        names: for another trainer's log, its names of metrics to ours; they go before the known ones (names.py).
        limits: how much is read.

    Raises RunError when there is nothing that can be read as a run.
    """
    path = Path(path)
    limits = limits or Limits()
    if not exists(path):
        raise RunError(f"{plain(path)}: there is no such file or directory; give a run directory or another trainer's log")
    problems = Problems()
    if _is_run(path, limits):
        evidence = _run(path, problems, limits)
        if not (evidence.manifest or evidence.config or evidence.frames or evidence.evals or evidence.finished):
            raise RunError(f"{plain(path)}: nothing in this run can be read; {'; '.join(problems.lines()[:3]) or 'its files are empty'}")
    else:
        evidence = read_foreign(path, names or {}, problems, limits)
    shared = run_facts(evidence)
    for name, frame in evidence.frames.items():
        frame.facts = {**shared, **stage_facts(evidence, name), **_on_disk(evidence, frame, problems)}
    return evidence


def _on_disk(evidence: Evidence, frame: Frame, problems: Problems) -> dict[str, Any]:
    """Facts that only the files themselves tell."""
    if evidence.source != "posttrain":
        return {"log.unreadable": problems.lines_of(None)}
    found: dict[str, Any] = {"log.unreadable": problems.lines_of(METRICS), "last_line_cut": problems.cut(METRICS)}
    try:
        entries = [entry.name for entry in os.scandir(evidence.path / "checkpoints" / frame.stage) if entry.is_dir()]
    except OSError:  # none, or a copy that left them out
        return found
    steps = [int(name.removeprefix("step_")) for name in entries if re.fullmatch(r"step_\d{1,15}", name)]
    found["checkpoints.kept"] = len(steps) + ("final" in entries)
    if frame.steps and frame.steps[-1] + 1 in steps and frame.stage not in evidence.finished:
        found |= {"interrupted": True, "ended_silently": False}  # who is asked to end saves first
    return found


def _is_run(path: Path, limits: Limits) -> bool:
    """Whether `path` is a run directory of this package. Others write a metrics.jsonl too; ours names stages."""
    if is_file(path / MANIFEST):
        return True
    if not is_file(path / METRICS):
        return any(exists(path / name) for name in ("stages", "evals")) and exists(path / CONFIG)
    for _, line in zip(range(20), (value for _, value in json_lines(path / METRICS, METRICS, Problems(), limits)), strict=False):
        return "stage" in line
    return exists(path / CONFIG)


def _run(path: Path, problems: Problems, limits: Limits) -> Evidence:
    manifest = _manifest(path, problems, limits)
    config = in_force(_config(path, problems), manifest)
    frames = _frames(path, manifest, config, problems, limits)
    alarms = _alarms(path, frames, problems, limits)
    return Evidence(
        path=path,
        source="posttrain",
        manifest=manifest,
        config=config,
        frames=frames,
        finished=records(path, "stages", problems, limits),
        evals=records(path, "evals", problems, limits),
        alarms=alarms,
        rollouts=_rollouts(path, problems, limits),
        gates=records(path, "gates", problems, limits),
        problems=problems.lines(),
    )


def _manifest(path: Path, problems: Problems, limits: Limits) -> dict[str, Any]:
    size = file_size(path / MANIFEST)
    if size > limits.record_bytes:
        problems.add(MANIFEST, f"{size} bytes; more than {limits.record_bytes} are not read")
        return {}
    value, problem = load_mapping(path / MANIFEST)
    if problem is not None:
        problems.add(MANIFEST, problem)
    return value


def _config(path: Path, problems: Problems) -> dict[str, Any]:
    size = file_size(path / CONFIG)
    if size > _MOST_YAML:
        problems.add(CONFIG, f"{size} bytes; more than {_MOST_YAML} are no settings")
        return {}
    value, problem = load_yaml_mapping(path / CONFIG)
    if problem is not None:
        problems.add(CONFIG, problem)
    return value


# --- metrics ---------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stage:
    """A stage while its lines are read."""

    frame: Frame
    names: Names
    restarts: int = 0
    broken: dict[str, int] = field(default_factory=dict)


def _frames(path: Path, manifest: Mapping[str, Any], config: Mapping[str, Any], problems: Problems, limits: Limits) -> dict[str, Frame]:
    """Stage to its metrics in the order in which the stages began."""
    if not exists(path / METRICS):
        problems.add(METRICS, "missing")
        return {}
    stages: dict[str, _Stage] = {}
    for number, line in json_lines(path / METRICS, METRICS, problems, limits):
        stage, step = _stage_of(line.get("stage")), step_of(line.get("step"))
        if stage is None or step is None:
            problems.add(METRICS, f"has no usable {'stage' if stage is None else 'step'}; skipped", number)
            continue
        if stage not in stages:
            if len(stages) >= limits.stages:
                problems.add(METRICS, f"begins a stage beyond the {limits.stages} that are read; skipped", number)
                continue
            stages[stage] = _Stage(Frame(stage, "other"), Names(limits.columns))
        _row(stages[stage], number, step, line, problems, limits)
    for name, stage in stages.items():
        stage.frame.kind = stage_kind(name, stage.frame.columns, config)
        stage.frame.settings = settings_of(config, name, mapping(manifest.get("method")))
        stage.frame.events |= stage.broken
        if stage.names.dropped:
            problems.add(METRICS, f"{name} has more than {limits.columns} metrics; the others are left out")
    return {name: stage.frame for name, stage in stages.items()}


def _stage_of(value: Any) -> str | None:
    """The name of a stage, when a file could carry it."""
    try:
        return safe_name(value) if isinstance(value, str) and len(value) <= 100 else None
    except ValueError:
        return None


def _row(stage: _Stage, number: int, step: int, line: Mapping[str, Any], problems: Problems, limits: Limits) -> None:
    frame = stage.frame
    if frame.steps and step <= frame.steps[-1]:
        if stage.restarts >= _RESTARTS:
            problems.add(METRICS, f"of {frame.stage} goes back to an earlier step once too often; skipped", number)
            return
        stage.restarts += 1
        problems.add(METRICS, f"of {frame.stage} goes back from step {frame.steps[-1]} to {step}; the later lines hold", number)
        cut_back(frame, step)
    if len(frame.steps) >= limits.rows:
        problems.add(METRICS, f"{frame.stage} has more than {limits.rows} lines; the others are left out")
        return
    values, broken, odd = figures(line, stage.names, skip=_FIELDS)
    took = figures(seconds, stage.names, "seconds.").known if (seconds := mapping(line.get("seconds"))) else {}
    if odd is not None:
        problems.add(METRICS, "holds a value that is no number; it counts as not known", number, odd)
    if broken is not None:
        problems.add(METRICS, "holds NaN, Infinity or a number that no float can hold; it counts as not known", number, broken)
        stage.broken.setdefault("non_finite", len(frame))
    row, columns = len(frame), frame.columns
    frame.steps.append(step)
    for part in (values, derived(values), took):
        for name, value in part.items():  # known to be finite: Frame.append would look again
            if (column := columns.get(name)) is None:
                column = columns[name] = Column()
            column.append(row, value)


def cut_back(frame: Frame, step: int) -> None:
    """Forget the rows of `step` and after: a run that was taken up again has written them anew."""
    row = bisect_right(frame.steps, step - 1)
    del frame.steps[row:]
    for column in frame.columns.values():
        if column.size and column.positions[-1] >= row:
            column.size = int(column.positions.searchsorted(row))


# --- alarms, rollouts ------------------------------------------------------------------------------------------------------------------


def _alarms(path: Path, frames: Mapping[str, Frame], problems: Problems, limits: Limits) -> list[dict[str, Any]]:
    """The alarm lines; each is also an event of its stage, those of eval.NAME and gate.NAME of the stage NAME."""
    if not exists(path / ALARMS):
        return []
    found: list[dict[str, Any]] = []
    for number, line in json_lines(path / ALARMS, ALARMS, problems, limits):
        stage, step, name = line.get("stage"), step_of(line.get("step")), line.get("name")
        if not isinstance(stage, str) or step is None or not isinstance(name, str) or not name:
            problems.add(ALARMS, "has no usable stage, step or name; skipped", number)
            continue
        if len(found) >= limits.alarms:
            problems.add(ALARMS, f"the first {limits.alarms} alarms are read, the others left out")
            break
        detail, name, stage = plain(line.get("detail", ""), 2000), plain(name), plain(stage)
        evidence = {plain(key): value for key, value in mapping(line.get("evidence")).items()}
        found.append({**line, "stage": stage, "step": step, "name": name, "detail": detail, "evidence": evidence})
        prefix, _, rest = stage.partition(".")
        inside = frames.get(stage) or (frames.get(rest) if prefix in ("eval", "gate") else None)
        if inside is not None:
            row = len(inside) - 1 if prefix == "eval" and inside.stage != stage else bisect_right(inside.steps, step) - 1
            inside.events.setdefault(name, max(0, row))
    return found


def _rollouts(path: Path, problems: Problems, limits: Limits) -> dict[str, list[dict[str, Any]]]:
    """Stage to its last rollouts."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in listed(path, "rollouts", ".jsonl", problems, replace(limits, records=limits.stages)):
        if file.name.endswith(".schedule.jsonl"):
            continue
        if lines := last_objects(file, f"rollouts/{file.name}", problems, limits):
            found[file.name.removesuffix(".jsonl")] = lines
    return found
