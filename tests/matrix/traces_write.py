"""Generated streams as real run directories, written through the recorder, and what names them: the doctor and a replay of the alarms."""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tests.matrix.injection import Named, by_doctor
from tests.matrix.traces_world import Row

from posttrain.core.config import Config
from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.reading import read_evidence
from posttrain.doctor.replay import replay
from posttrain.recipes.single import DPORun, RLRun, SFTRun
from posttrain.runs.run import Run

Kind = Literal["rl", "sft", "dpo", "distill"]
GIVEN: Mapping[Kind, Mapping[str, Any]] = {
    "rl": {"model": "smollm2", "task": "arithmetic", "held_out": 500, "rl": {"optim": {"schedule": "cosine"}}},
    "distill": {
        "model": "smollm2",
        "task": "arithmetic",
        "teacher": "other",
        "held_out": 500,
        "objective": {"advantage": {"kind": "teacher"}},
    },
    "sft": {"model": "smollm2", "data": "rows.jsonl", "held_out": 500},
    "dpo": {"model": "smollm2", "data": "pairs.jsonl", "held_out": 500},
}
CLASSES: Mapping[Kind, type[Config]] = {"rl": RLRun, "distill": RLRun, "sft": SFTRun, "dpo": DPORun}
STAGE: Mapping[Kind, str] = {"rl": "rl", "distill": "rl", "sft": "sft", "dpo": "dpo"}


def config_of(kind: Kind, changed: Mapping[str, Any] | None = None) -> Config:
    """A sound configuration with some dotted keys changed. Example: config_of("rl", {"rl.steps": 400})"""
    given = copy.deepcopy(dict(GIVEN[kind]))
    for name, value in (changed or {}).items():
        *parents, leaf = name.split(".")
        place = given
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return CLASSES[kind].load(given)


@cache
def _started(kind: Kind, text: str, stages: tuple[str, ...]) -> Path:
    """A run that has just begun, to start others from: looking at code and machine takes longer than all the rest."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = CLASSES[kind].load(json.loads(text))
    Run.create(folder / "run", config=config, command=["posttrain", STAGE[kind]], seeds={"seed": 0}, stages=stages).close()
    return folder / "run"


def begin(path: Path, kind: Kind, changed: Mapping[str, Any] | None = None, stages: Sequence[str] = ()) -> Run:
    """A run directory that can be written to."""
    config = config_of(kind, changed)
    started = _started(kind, json.dumps(config.model_dump(mode="json")), tuple(stages) or (STAGE[kind],))
    shutil.copytree(started, path)
    return Run.resume(path, config=config)


def write(
    path: Path, kind: Kind, rows: Iterable[Row], changed: Mapping[str, Any] | None = None, *, stage: str | None = None, ended: bool = True
) -> Path:
    """A whole run of one stage from its metrics lines; `path` is the run directory."""
    name = stage or STAGE[kind]
    run = begin(path, kind, changed, (name,))
    write_rows(run, name, rows)
    if ended:
        run.finish_stage(name, {"seconds": 1.0})
        run.finish()
    run.close()
    return path


def write_rows(run: Run, stage: str, rows: Iterable[Row]) -> None:
    """Metrics lines; what the clock decides goes to seconds, as the loops do it."""
    for step, row in enumerate(rows):
        seconds = {name.removeprefix("seconds."): value for name, value in row.items() if name.startswith("seconds.")}
        run.metric(stage, step, {name: value for name, value in row.items() if not name.startswith("seconds.")}, seconds)


def named(id: str, path: Path) -> Named:
    """What the doctor names, the alarms that the injected id raises in a replay, and its lead over the reward's fall.

    An entry that is another name for one is reported under that one's; its own alarm says that it was seen.
    """
    found = by_doctor(path)
    seen = replay(read_evidence(path), {id: CATALOG[id]})
    alarms = tuple((item.alarm.id, item.alarm.step) for item in seen.raised)
    own = (id,) if alarms and CATALOG[id].same_as in found.ids else ()
    return Named((*found.ids, *own), found.first, alarms, seen.lead(id), found.notes)
