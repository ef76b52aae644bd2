"""A run directory as one entry of a bake-off: what it spent, whether its log is complete, its series and its evaluations.

Reads what any version wrote and anybody may have changed: what cannot be used is a problem of that run, said in one line.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import EvidenceError, RunError
from posttrain.core.files import is_leftover
from posttrain.evals.record import EvalRecord
from posttrain.runs.manifest import CONFIG, MANIFEST
from posttrain.runs.reading import files, load_mapping, load_yaml_mapping, mapping, number, plain, scan_lines
from posttrain.runs.recorder import METRICS

MOST_STEPS = 10**9
SPENT = {"rollouts": "rollouts_generated", "tokens": "tokens"}
"""Kind of budget to the metric whose sum it is."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """One run of one arm.

    Example: Entrant("gspo", Path("runs/gspo"), "rl", 0, "2026-01-01T00:00:00+00:00", {"steps": 100}, {"reward_mean": {0: 0.1}}, {}, ())
    """

    arm: str
    path: Path
    stage: str
    seed: int | None
    started: str
    spent: Mapping[str, float]
    """Steps, rollouts, tokens and seconds, where the log has them."""
    series: Mapping[str, Mapping[int, float]]
    """Metric to step to value, finite values only."""
    records: Mapping[str, EvalRecord]
    """Suite to the evaluation after the stage."""
    problems: tuple[str, ...]
    """Why the log is incomplete; such a run cannot win what was measured over the whole budget."""
    notes: tuple[str, ...] = ()
    """What could not be read and is left out."""

    @property
    def complete(self) -> bool:
        """Whether the stage ran to its end and every step is in the log."""
        return not self.problems

    @property
    def last(self) -> int:
        """The last step in the log; -1 when there is none."""
        return max((step for steps in self.series.values() for step in steps), default=-1)


def entrants(arguments: Sequence[str], stage: str | None = None) -> list[Entrant]:
    """Runs given as DIR or ARM=DIR; the same ARM several times are its seeds. Raises RunError or EvidenceError."""
    if len(arguments) < 2:
        raise EvidenceError(f"a bake-off needs two or more runs, got {len(arguments)}")
    found, seen = [], set()
    for argument in arguments:
        arm, equals, place = argument.partition("=")
        path = Path(place if equals else argument)
        key = path.resolve()
        if key in seen:
            raise EvidenceError(f"{path} is given twice; every run counts once")
        seen.add(key)
        found.append(read_entrant(path, arm if equals else path.resolve().name, stage))
    stages = {entrant.stage for entrant in found}
    if len(stages) > 1:
        raise EvidenceError(f"the runs end with different stages ({', '.join(sorted(stages))}); name the one to compare with --stage")
    return found


def read_entrant(path: Path, arm: str, stage: str | None = None) -> Entrant:
    """One run; `stage` is the last one in its log unless it is named. Raises RunError when `path` is no run."""
    manifest, problem = load_mapping(path / MANIFEST)
    if problem is not None:
        raise RunError(f"{path} is not a run ({MANIFEST}: {problem}); give the directory that was --out")
    lines, notes = _lines(path)
    chosen = stage or (lines[-1]["stage"] if lines else "")
    if not chosen:
        raise RunError(f"{path}: its log has no step, so there is nothing to compare; let it train first")
    mine = [line for line in lines if line["stage"] == chosen]
    if not mine:
        known = ", ".join(sorted({plain(line["stage"], 40) for line in lines})[:8]) or "none"
        raise RunError(f"{path}: no step of stage '{plain(chosen, 40)}' in its log; its stages are {known}")
    series: dict[str, dict[int, float]] = {}
    for line in mine:
        for name, value in line.items():
            if name not in ("schema", "step") and (finite := number(value)) is not None:
                series.setdefault(name, {})[line["step"]] = finite
    records, unread = _records(path, chosen)
    seed = mapping(manifest.get("seeds")).get("seed")
    return Entrant(
        arm=plain(arm, 40),
        path=path,
        stage=plain(chosen, 40),
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        started=manifest["created"] if isinstance(manifest.get("created"), str) else "",
        spent=_spent(mine, series),
        series=series,
        records=records,
        problems=tuple(_problems(path, chosen, [line["step"] for line in mine])),
        notes=(*notes, *unread),
    )


def _lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Metric lines with a stage and a step, and what was wrong with the others."""
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for line in scan_lines(path / METRICS):
        value = mapping(line.value)
        step = value.get("step")
        whole = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MOST_STEPS
        if whole and isinstance(value.get("stage"), str):
            lines.append(dict(value))
        else:
            notes.append(f"{METRICS}:{line.number} is left out: {line.problem or 'not a line of metrics'}")
    return lines, notes[:3] + ([f"{METRICS}: {len(notes) - 3} more lines are left out"] if len(notes) > 3 else [])


def _problems(path: Path, stage: str, steps: Sequence[int]) -> list[str]:
    last, distinct = max(steps), set(steps)
    found = []
    planned = _planned(path, stage)
    if planned is not None and last + 1 < planned:
        found.append(f"the log ends at step {last}, the last of {planned} is {planned - 1}")
    if missing := last + 1 - len(distinct):
        found.append(f"{missing} of the {last + 1} steps up to the last are missing from the log")
    if len(steps) > len(distinct):
        found.append(f"{len(steps) - len(distinct)} steps are in the log twice")
    if not files(path, f"stages/{glob.escape(stage)}.json"):
        found.append(f"stage '{plain(stage, 40)}' was never finished")
    return found


def _planned(path: Path, stage: str) -> int | None:
    """Steps that the settings ask for, where they say so (rl and grpo do; epochs of data do not)."""
    steps = mapping(load_yaml_mapping(path / CONFIG).value.get(stage)).get("steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0 else None


def _spent(lines: Sequence[Mapping[str, Any]], series: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    spent: dict[str, float] = {"steps": float(len({line["step"] for line in lines}))}
    spent |= {kind: sum(series[name].values()) for kind, name in SPENT.items() if name in series}
    clocks = [value for line in lines for name, value in mapping(line.get("seconds")).items() if name != "peak_mib"]
    seconds = [finite for value in clocks if (finite := number(value)) is not None]
    return spent | ({"seconds": sum(seconds)} if seconds else {})


def _records(path: Path, stage: str) -> tuple[dict[str, EvalRecord], list[str]]:
    """The evaluations after the stage by suite: those labelled "after", or by the stage itself."""
    found: dict[str, EvalRecord] = {}
    notes = []
    for label in dict.fromkeys((stage, "after")):
        for file in files(path, f"evals/{glob.escape(label)}.*.json"):
            if is_leftover(file.name):
                continue
            value, problem = load_mapping(file)
            try:
                if problem is not None:
                    raise EvidenceError(problem)
                found[plain(file.name.removeprefix(f"{label}.").removesuffix(".json"), 60)] = EvalRecord.from_json(value)
            except EvidenceError as error:
                notes.append(f"evals/{plain(file.name, 60)} is left out: {plain(error)}")
    return found, notes
