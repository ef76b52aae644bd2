"""Which file of another trainer is its log, and the evidence that it gives.

Looked for in a directory, in this order: trainer_state.json (also in the newest checkpoint-N), a W&B history (wandb-history.jsonl; any JSON
lines or CSV whose steps are in "_step" count as one), TensorBoard event files, JSON lines, CSV, JSON. Of the first sort that is found one
file is read (for TensorBoard all files of one folder). The manifest of the evidence says which: `names` are our names to theirs, `unmapped`
the columns that keep their own (`look_alikes`: why some do), `files` what was read and `not_read` what else there was of its sort.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunError
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.foreign.completions import JSON_LINES, last_completions
from posttrain.doctor.foreign.events import read_events
from posttrain.doctor.foreign.rows import read_csv, read_json_value, read_jsonl
from posttrain.doctor.foreign.table import STAGE, Table, frame_from
from posttrain.doctor.foreign.trainer_state import NAME as TRAINER_STATE
from posttrain.doctor.foreign.trainer_state import arguments, read_trainer_state
from posttrain.doctor.lines import Limits, Names, Problems
from posttrain.doctor.names import look_alike
from posttrain.runs.reading import file_size, is_file, load_json, load_yaml_mapping, mapping, plain

Reader = Callable[[Path, Table, Problems, Limits], None]
_DEEP, _MANY = 4, 20_000
"""Folders below the given one, and entries of them, that are looked through."""
_NO_LOGS = re.compile(
    r"(?:.*config|manifest|summary|tokenizer.*|special_tokens_map|vocab|added_tokens|model.*index|.*metadata|.*args|results)\.json"
)
_EVENTS = "tfevents"
KINDS = "trainer_state.json, wandb-history.jsonl, TensorBoard event files, .jsonl, .csv or .json"


def read_foreign(path: Path, user: Mapping[str, str], problems: Problems, limits: Limits) -> Evidence:
    """The evidence in a file or directory of another trainer. Raises RunError when it holds no log."""
    chosen, source, others = ([path], _sort(path), []) if is_file(path) else _search(path)
    if source is None:
        raise RunError(f"{plain(path)}: no log was found there; give a run directory, or one of {KINDS}")
    table = Table(source, Names(limits.columns))
    for file in chosen:
        _reader(file)(file, table, problems, limits)
    if source in ("jsonl", "csv") and table.key == "_step":
        source = "wandb"
    if not any(table.rows.values()) and table.broken is None:
        told = "; ".join(problems.lines()[:3]) or "it holds no row with a number"
        raise RunError(f"{plain(chosen[0])}: nothing can be read as the log of a run; {told}")
    root = path if path.is_dir() else path.parent
    table.settings |= _arguments(root)
    frame, renamed, own = frame_from(table, user)
    if table.names.dropped:
        problems.add(chosen[0].name, f"more than {limits.columns} metrics; the others are left out")
    rollouts = last_completions(list(_walk(root)), problems, limits) if path.is_dir() else []
    return Evidence(
        path=path,
        source=source,
        manifest={
            "names": renamed,
            "unmapped": own,
            "look_alikes": {name: why for name in own if (why := look_alike(name))},
            "files": [plain(file.name) for file in chosen[:20]],
            "not_read": [plain(file.name) for file in others[:20]],
        },
        frames={STAGE: frame},
        finished={} if table.finished is None else {STAGE: table.finished},
        rollouts={STAGE: rollouts} if rollouts else {},
        problems=problems.lines(),
    )


def _sort(path: Path) -> str | None:
    """What a file is, by its name."""
    name = path.name.lower()
    if name == TRAINER_STATE:
        return "trl"
    if name.startswith("wandb-history"):
        return "wandb"
    if _EVENTS in name:
        return "tensorboard"
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith((".csv", ".tsv")):
        return "csv"
    if name.endswith(".json"):
        return "trl" if _is_state(path) else "jsonl"
    return None


def _is_state(path: Path) -> bool:
    value = load_json(path).value if 0 < file_size(path) < 64 << 20 else None
    return isinstance(value, dict) and isinstance(value.get("log_history"), list)


def _reader(path: Path) -> Reader:
    name = path.name.lower()
    if _EVENTS in name:
        return read_events
    if name.endswith((".csv", ".tsv")):
        return read_csv
    if name.endswith(".json"):
        return read_trainer_state if name == TRAINER_STATE or _is_state(path) else read_json_value
    return read_jsonl


def _search(root: Path) -> tuple[list[Path], str | None, list[Path]]:
    """The files to read, what they are, and others of their sort."""
    found = [(file, sort) for file in _walk(root) if (sort := _sort_by_name(file)) is not None]
    for sort in ("trl", "wandb", "tensorboard", "jsonl", "csv", "json"):
        files = [file for file, what in found if what == sort]
        if not files:
            continue
        best = max(files, key=lambda file: _merit(root, file))
        chosen = sorted(file for file in files if file.parent == best.parent) if sort == "tensorboard" else [best]
        return chosen, "jsonl" if sort == "json" else sort, [file for file in files if file not in chosen]
    return [], None, []


def _sort_by_name(path: Path) -> str | None:
    """As `_sort`, without opening the file, and without files that are no logs by their name."""
    name = path.name.lower()
    if name.endswith(".json") and name != TRAINER_STATE:
        return None if _NO_LOGS.fullmatch(name) else "json"
    return None if JSON_LINES.fullmatch(name) else _sort(path)


def _merit(root: Path, path: Path) -> tuple[Any, ...]:
    """Sorts candidates: the newest checkpoint, a name that says metrics or history, the highest folder, the largest file, the last name."""
    checkpoint = max((int(number) for number in re.findall(r"checkpoint-(\d{1,12})", path.as_posix())), default=1 << 60)
    telling = any(word in path.name.lower() for word in ("history", "metric", "train", "log"))
    return checkpoint, telling, -len(path.relative_to(root).parts), _newest(path), file_size(path), path.name


def _newest(path: Path) -> int:
    """The time in the name of an event file."""
    found = re.search(r"tfevents\.(\d{1,15})", path.name)
    return int(found[1]) if found else 0


def _walk(root: Path) -> Iterator[Path]:
    """Regular files below `root` that are no links, in name order, so far as the bounds allow."""
    waiting, seen = [(root, 0)], 0
    while waiting:
        folder, depth = waiting.pop(0)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if seen > _MANY:
                return
            if entry.is_symlink():
                continue
            if entry.is_dir() and depth < _DEEP:
                waiting.append((Path(entry.path), depth + 1))
            elif entry.is_file():
                yield Path(entry.path)


def _arguments(root: Path) -> dict[str, Any]:
    """Settings from the config that W&B keeps beside a history: NAME: {value: ...}."""
    for place in (root / "config.yaml", root / "files" / "config.yaml"):
        if 0 < file_size(place) < 128 << 10:
            values = load_yaml_mapping(place).value
            return arguments({name: mapping(value).get("value", value) for name, value in values.items()})
    return {}
