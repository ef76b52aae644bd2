"""Whether what a run recorded is still what lies on the disk: every record is read again, every digest computed again, counts compared.

The directory may be anybody's. Whatever it holds, the answer is a list of problems, one line each, and only files within it are opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.digest import file_digest
from posttrain.core.errors import RunError
from posttrain.runs.manifest import CONFIG, MANIFEST, READABLE
from posttrain.runs.reading import (
    Line,
    exists,
    file_size,
    files,
    is_file,
    kind,
    load_mapping,
    load_yaml_mapping,
    mapping,
    number,
    plain,
    safe_digest,
    scan_lines,
    within,
)
from posttrain.runs.recorder import ALARMS, METRICS, SCHEMA

RECORDS = ("*.json", "evals/*.json", "stages/*.json", "gates/*.json")
MOST_LINES = 5
"""Problems shown per file of lines; the others are counted."""
UNFINISHED = "the last line is unfinished (the writer was killed); resuming removes it"
SAME = 1e-9
"""Two records of one number may differ by this much: one of them has been through text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a run that is not as it was recorded.

    Example: Problem("checkpoints/sft/step_5/model.safetensors", "missing, though stages/sft.json records it")
    """

    file: str
    detail: str


def verify(path: str | Path) -> list[Problem]:
    """Read every record of a run again and compare every recorded digest and count; [] when all is as it was written.

    Raises RunError when `path` is not a run.
    """
    path = Path(path)
    if not is_file(path / MANIFEST):
        raise RunError(f"{path} is not a run (it has no {MANIFEST})")
    manifest, problem = load_mapping(path / MANIFEST)
    found = [Problem(MANIFEST, problem)] if problem else [*_manifest(manifest), *_config(path, manifest), *_patch(path, manifest)]
    found += _links(path)
    for file in files(path, "*.jsonl", "rollouts/*.jsonl"):
        found += _lines(path, file)
    records = {_inside(path, file): load_mapping(file) for file in files(path, *RECORDS)}
    records.pop(MANIFEST, None)
    found += [Problem(name, record.problem) for name, record in records.items() if record.problem]
    readable = {name: record.value for name, record in records.items() if not record.problem}
    for name, record in readable.items():
        if name.startswith("stages/"):
            found += _stage(path, name, record)
        elif name.startswith("evals/"):
            found += _eval(name, record)
    found += _summary(readable) if "summary.json" in readable else []
    found += list(_digests(path, manifest.get("produced"), MANIFEST, " when the run was finished"))
    return [Problem(plain(item.file), plain(item.detail, 400)) for item in dict.fromkeys(found)]


def unreadable(path: Path) -> list[Problem]:
    """The problems of `verify` that keep a run's records from being read at all; changed digests and missing files do not."""
    kinds = ("changed", "missing", UNFINISHED)
    return [problem for problem in verify(path) if not problem.detail.startswith(kinds)]


def _manifest(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    version = manifest.get("schema_version")
    if version not in READABLE or isinstance(version, bool):
        yield Problem(
            MANIFEST, f"has schema {plain(version, 20)}, this version reads {', '.join(map(str, READABLE))}; compared as far as known"
        )
    shapes: dict[str, tuple[type, ...]] = {"digests": (dict,), "seeds": (dict,), "command": (list,), "stages": (list,), "history": (list,)}
    for name, allowed in shapes.items():
        if name in manifest and not isinstance(manifest[name], allowed):
            yield Problem(MANIFEST, f"'{name}' must be {kind(allowed[0]())}, not {kind(manifest[name])}")
    stages = manifest.get("stages")
    if isinstance(stages, list) and (odd := [stage for stage in stages if not isinstance(stage, str)]):
        yield Problem(MANIFEST, f"'stages' must list names, not {kind(odd[0])}")
    recorded = manifest.get("record_digest")
    if recorded is None:
        return
    actual = safe_digest({name: value for name, value in manifest.items() if name != "record_digest"})
    if actual != recorded:
        yield Problem(MANIFEST, f"changed by hand: digest {actual}, it records {plain(recorded, 40)}")


def _config(path: Path, manifest: Mapping[str, Any]) -> list[Problem]:
    config, problem = load_yaml_mapping(path / CONFIG)
    if problem:
        return [Problem(CONFIG, problem)]
    found, recorded = safe_digest(config), manifest.get("config_digest")
    if found == recorded:
        return []
    return [Problem(CONFIG, f"changed since the run began: digest {found}, {MANIFEST} records {plain(recorded, 40)}")]


def _patch(path: Path, manifest: Mapping[str, Any]) -> list[Problem]:
    code = mapping(manifest.get("code"))
    name = code.get("diff_file")
    return [] if name is None else list(_digests(path, {name: code.get("diff_file_digest")}, MANIFEST))


def _links(path: Path) -> Iterator[Problem]:
    """Records that are links to somewhere else, or no files at all: they are not read."""
    wanted = [path / METRICS, path / ALARMS, path / "summary.json"]
    for pattern in ("*.jsonl", "rollouts/*.jsonl", *RECORDS):
        wanted += path.glob(pattern)
    for file in sorted(set(wanted)):
        name = _inside(path, file)
        if exists(file) and within(path, name) is None:
            yield Problem(name, "leads out of the run directory; it was not read")
        elif exists(file) and not is_file(file):
            yield Problem(name, "is not a file")


def _lines(root: Path, file: Path) -> list[Problem]:
    name = _inside(root, file)
    known = name.startswith("rollouts/")
    check = {METRICS: _metric, ALARMS: _alarm}.get(name, _record if known else _object)
    found: list[Problem] = []
    last: dict[str, int] = {}
    hidden = 0
    for line in scan_lines(file):
        problem = line.problem or check(line.value) or (_order(line, last) if name == METRICS else None)
        if problem is None:
            continue
        if len(found) < MOST_LINES:
            found.append(Problem(name, UNFINISHED if problem == "unfinished" else f"{file}:{line.number}: {problem}"))
        else:
            hidden += 1
    return [*found, Problem(name, f"and {hidden} more lines")] if hidden else found


def _order(line: Line, last: dict[str, int]) -> str | None:
    """Steps of a stage never go back: a line that does was written twice, or moved."""
    stage, step = line.value["stage"], line.value["step"]
    before = last.get(stage, -1)
    last[stage] = step
    return f"step {plain(step, 20)} of {plain(stage, 40)} follows step {plain(before, 20)}" if step < before else None


def _object(value: Any) -> str | None:
    return None if isinstance(value, dict) else f"must be an object, not {kind(value)}"


def _record(value: Any) -> str | None:
    if problem := _object(value):
        return problem
    if value.get("schema") != SCHEMA:
        return f"has schema {plain(value.get('schema'), 20)}, this version reads {SCHEMA}"
    return None


def _placed(value: Any) -> str | None:
    if problem := _record(value):
        return problem
    if not isinstance(value.get("stage"), str):
        return f"'stage' must be text, not {kind(value.get('stage'))}"
    step = value.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return f"'step' must be a whole number from 0 on, not {plain(step, 40)}"
    return None


def _metric(value: Any) -> str | None:
    if problem := _placed(value):
        return problem
    for name, item in value.items():
        if name != "seconds" and (isinstance(item, bool) or not (item is None or isinstance(item, str) or number(item) is not None)):
            return f"'{plain(name, 60)}' must be a number, text or null, not {kind(item)}"
    seconds = value.get("seconds")
    if not isinstance(seconds, dict) or any(item is not None and number(item) is None for item in seconds.values()):
        return "'seconds' must be an object of numbers"
    return None


def _alarm(value: Any) -> str | None:
    if problem := _placed(value):
        return problem
    if odd := [name for name in ("name", "detail") if not isinstance(value.get(name), str)]:
        return f"'{odd[0]}' must be text, not {kind(value.get(odd[0]))}"
    return None if isinstance(value.get("evidence"), dict) else f"'evidence' must be an object, not {kind(value.get('evidence'))}"


def _stage(root: Path, name: str, record: Mapping[str, Any]) -> Iterator[Problem]:
    stage = name.removeprefix("stages/").removesuffix(".json")
    if record.get("stage", stage) != stage:
        yield Problem(name, f"is the record of stage {plain(record['stage'], 40)}")
    yield from _digests(root, record.get("digests") or {}, name)
    position = record.get("position") or {}
    if not isinstance(position, dict):
        yield Problem(name, f"'position' must be an object, not {kind(position)}")
        return
    for file, offset in sorted(position.items()):
        place = within(root, file)
        if place is None or isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
            yield Problem(name, f"records the position {plain(offset, 20)} of {plain(file, 80)}, which is none")
        elif file_size(place) < offset:
            yield Problem(file, f"{file_size(place)} bytes, but {name} records {offset}; lines are missing")
        elif not _ends_line(place, offset):
            yield Problem(file, f"no line ends at byte {offset}, where {name} says that the stage ended; it was changed")


def _ends_line(file: Path, offset: int) -> bool:
    if offset == 0:
        return True
    try:
        with open(file, "rb") as handle:
            handle.seek(offset - 1)
            return handle.read(1) == b"\n"
    except OSError:
        return False


def _digests(root: Path, recorded: Any, source: str, when: str = "") -> Iterator[Problem]:
    """Files whose digest is another by now than `source` says, that are gone, or that no run may name."""
    if recorded is None:
        return
    if not isinstance(recorded, dict):
        yield Problem(source, f"digests must be an object, not {kind(recorded)}")
        return
    for name, wanted in sorted(recorded.items()):
        place = within(root, name)
        if place is None:
            yield Problem(source, f"names {plain(name, 120)}, which is no path within the run; it was not read")
        elif not is_file(place):
            yield Problem(name, f"missing, though {source} records it")
        elif (found := _file_digest(place)) != wanted:
            yield Problem(name, f"changed: digest {found}, {source} records {plain(wanted, 40)}{when}")


def _file_digest(file: Path) -> str:
    try:
        return file_digest(file)
    except OSError as error:
        return f"unknown ({plain(error.strerror or error)})"


def _eval(name: str, record: Mapping[str, Any]) -> Iterator[Problem]:
    items, conditions = record.get("items"), mapping(record.get("conditions"))
    if items is None:
        return
    if not isinstance(items, list):
        yield Problem(name, f"'items' must be a list, not {kind(items)}")
        return
    wanted = conditions.get("n_items")
    if wanted is not None and wanted != len(items):
        yield Problem(name, f"holds {len(items)} items, its conditions say {plain(wanted, 20)}")
    ids = [item["id"] for item in items if isinstance(item, dict) and isinstance(item.get("id"), str)]
    if len(ids) != len(items):
        yield Problem(name, f"{len(items) - len(ids)} of {len(items)} items have no id")


def _summary(records: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """The table against the records it was made from."""
    rungs = records["summary.json"].get("rungs")
    if not isinstance(rungs, list):
        yield Problem("summary.json", f"'rungs' must be a list, not {kind(rungs)}")
        return
    for rung in rungs:
        if not isinstance(rung, dict) or not isinstance(rung.get("suites"), dict):
            yield Problem("summary.json", "a rung must be an object with suites")
            continue
        for suite, figures in rung["suites"].items():
            source = f"evals/{rung.get('rung')}.{suite}.json"
            said, measured = (number(mapping(side).get("pass_at_1")) for side in (figures, mapping(records.get(source)).get("summary")))
            if said is None:
                yield Problem("summary.json", f"{plain(rung.get('rung'), 40)}, {plain(suite, 40)}: pass_at_1 must be a number")
            elif measured is not None and abs(said - measured) > SAME:
                yield Problem("summary.json", f"says pass@1 {said:.4f} for {plain(suite, 40)}, {plain(source, 120)} holds {measured:.4f}")


def _inside(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()
