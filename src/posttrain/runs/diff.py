"""Why a run does not reproduce another one: what differs between them, ordered by how likely it changes numbers, and where they part.

Everything comes from the two directories, which may be copies from other machines: a path that differs is no difference when what it named
has the same digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunError
from posttrain.runs.lineage import NEUTRAL, settings_in_force
from posttrain.runs.manifest import MANIFEST, PACKAGES, Difference, differences, run_id, value_or_none
from posttrain.runs.method import method_of
from posttrain.runs.parting import Metrics, Parting, compare_metrics
from posttrain.runs.reading import files, is_file, load_mapping, mapping, number, plain

GROUPS = ("inputs", "seeds", "method", "config", "on the way", "code", "packages", "precision", "processes and kernels", "hardware")
"""From what must change numbers to what may change last digits; `environment` and `no effect` come after these."""
ALL_GROUPS = (*GROUPS, "environment", "no effect")
CHANGERS = ("inputs", "seeds", "method", "config", "on the way", "code", "packages")
ROUNDERS = ("packages", "precision", "processes and kernels", "hardware", "environment")
NAMED_INPUTS = ("model", "teacher", "data")
"""Settings that name an input; the input's digest decides, not the name."""
KERNELS = "processes and kernels"


@dataclass(frozen=True, slots=True)
class Reason:
    """Something that differs between two runs. Example: Reason("config", "sft.optim.lr", 0.002, 0.001)"""

    group: str
    name: str
    a: Any
    b: Any
    """None where one side does not have it."""

    def __str__(self) -> str:
        return f"{plain(self.name, 80)} {_short(self.a)} -> {_short(self.b)}"


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What `explain` found."""

    ids: tuple[str, str]
    reasons: tuple[Reason, ...]
    """In the order of ALL_GROUPS."""
    same: tuple[str, ...]
    """Groups that both runs recorded and that are equal."""
    unknown: tuple[str, ...]
    """Groups that one of the runs did not record."""
    metrics: Metrics
    scores: tuple[Reason, ...]
    """Evaluations of the same name with another pass@1."""
    problems: tuple[str, ...]
    """What could not be read."""
    conclusion: str


def explain(a: str | Path, b: str | Path) -> RunDiff:
    """Compare two runs. Raises RunError when one of them is no run; what cannot be read in one is a line in `problems`."""
    sides = (_side(Path(a)), _side(Path(b)))
    first, second = sides
    reasons: list[Reason] = []
    same, unknown = [], []
    for group in ALL_GROUPS:
        before, after = first.groups.get(group), second.groups.get(group)
        if before is None or after is None:
            if group in GROUPS:
                unknown.append(group)
            continue
        found = [Reason(group, name, value_or_none(x), value_or_none(y)) for name, x, y in _plainly(before, after)]
        reasons += sorted(found, key=_by_package) if group == "packages" else found
        same += [] if found or not (before or after) else [group]
    reasons = _without_doubles(reasons, first, second)
    same = [group for group in same if not any(reason.group == group for reason in reasons)]
    relative = 1e-2 if "bfloat16" in {mapping(side.config.get("machine")).get("precision") for side in sides} else 1e-5
    metrics = compare_metrics(first.path, second.path, relative)
    problems = [f"{side.path}: {problem}" for side in sides for problem in side.problems] + list(metrics.problems)
    return RunDiff(
        (run_id(first.manifest), run_id(second.manifest)),
        tuple(reasons),
        tuple(same),
        tuple(unknown),
        metrics,
        tuple(_scores(first.path, second.path)),
        tuple(problems),
        conclude(reasons, same, metrics),
    )


def conclude(reasons: Sequence[Reason], same: Sequence[str], metrics: Metrics) -> str:
    """One line: where the runs part and what explains it best."""
    telling = [reason for reason in reasons if reason.group != "no effect"]
    alike = _list([group for group in same if group in CHANGERS])
    opening = f"same {alike}: " if alike else ""
    parting = metrics.parting
    if parting is None:
        return opening + _without_parting(telling, metrics)
    where = f"first difference at {plain(parting.stage, 40)} step {plain(parting.step, 20)} in {plain(parting.metric, 60)}"
    extent = "last digits" if parting.rounding else "more than last digits"
    return f"{opening}{where}, {extent}: {_cause(telling, parting)}"


def _without_parting(telling: Sequence[Reason], metrics: Metrics) -> str:
    if metrics.compared == 0:
        return (
            f"no metrics to compare; most likely to change them: {telling[0]}" if telling else "no metrics to compare, and no cause either"
        )
    numbers = f"the same numbers in all {metrics.compared} lines"
    if metrics.lines[0] != metrics.lines[1]:
        numbers = f"the same numbers as far as both got ({metrics.compared} of {max(metrics.lines)} lines)"
    return f"{numbers}, although {telling[0]}" + (f" and {len(telling) - 1} more differ" if telling[1:] else "") if telling else numbers


def _cause(telling: Sequence[Reason], parting: Parting) -> str:
    """The best explanation. A setting of the stage where the runs part comes before one of another stage."""
    changers = [reason for reason in telling if reason.group in CHANGERS]
    rounders = [reason for reason in telling if reason.group in ROUNDERS]
    if parting.rounding and rounders:  # what changes the computation rarely stops at the last digits
        certain = all(reason in rounders for reason in changers)
        return f"{rounders[0]} {'explains' if certain else 'would explain'} it" + _others(telling)
    if changers:
        top = min(changers, key=lambda reason: (not reason.name.startswith(f"{parting.stage}."), changers.index(reason)))
        return f"{top} is the most likely cause" + _others(telling)
    if rounders:
        return f"{rounders[0]} can only have done this by rounding that tipped a sampled token" + _others(telling)
    return "nothing that was recorded explains it; repeat one of them to see whether it reproduces itself"


def _others(telling: Sequence[Reason]) -> str:
    return f" ({len(telling) - 1} more listed)" if telling[1:] else ""


@dataclass(frozen=True, slots=True)
class _Side:
    path: Path
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Any] | None]
    """None: not recorded."""
    problems: tuple[str, ...]


def _side(path: Path) -> _Side:
    if not is_file(path / MANIFEST):
        raise RunError(f"{path} is not a run (it has no {MANIFEST}); give the directory that was --out")
    manifest, problem = load_mapping(path / MANIFEST)
    config, broken = settings_in_force(path, manifest)
    problems = [f"{MANIFEST}: {problem}"] if problem else []
    problems += [f"config.yaml: {broken}"] if broken else []
    kernels = manifest.get("kernels")
    free = {name: value for name, value in ((name, _at(config, name)) for name in NEUTRAL) if value is not None}
    groups: dict[str, Mapping[str, Any] | None] = {
        "inputs": _section(manifest, "digests"),
        "seeds": _section(manifest, "seeds"),
        "method": _section(manifest, "method") or (None if broken else method_of(config)),
        "config": None if broken else _apart(config, ("seed", *NEUTRAL)),
        "on the way": {f"change {index}": _change(entry) for index, entry in enumerate(_list_of(manifest.get("history")), start=1)},
        "code": _code(manifest),
        "packages": _packages(manifest),
        "precision": _section(manifest, "detected"),
        KERNELS: {"processes": free.get("processes"), **mapping(kernels)} if kernels or "processes" in free else None,
        "hardware": _hardware(manifest),
        "environment": _section(manifest, "environment"),
        "no effect": {name: value for name, value in free.items() if name != "processes"},
    }
    return _Side(path, manifest, config, groups, tuple(problems))


def _code(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    code, script = mapping(manifest.get("code")), mapping(manifest.get("script"))
    if "posttrain" not in manifest:
        return None
    state = {"revision": code.get("revision"), "uncommitted changes": code.get("diff_digest"), "script": script.get("digest")}
    return {"posttrain": manifest["posttrain"], **state}


def _packages(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    versions = mapping(mapping(manifest.get("installed")).get("versions"))
    recorded = _section(manifest, "packages")
    if recorded is None and not versions:
        return None
    return {**versions, **{name: version for name, version in mapping(recorded).items() if version}, "python": manifest.get("python")}


def _hardware(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    cpu = _section(manifest, "cpu")
    if cpu is None:
        return None
    gpus = [mapping(gpu).get("name") for gpu in _list_of(manifest.get("gpus"))]
    return {
        "cpu": cpu.get("model"),
        "cores": cpu.get("cores"),
        "usable cores": cpu.get("usable"),
        "gpus": gpus,
        "platform": manifest.get("platform"),
    }


def _change(entry: Any) -> dict[str, Any]:
    """What was changed on resuming: settings that matter, inputs and surroundings, without the time."""
    fields = {part: mapping(mapping(entry).get(part)) for part in ("settings", "inputs", "drift")}
    return {name: pair for part in fields.values() for name, pair in part.items()}


def _without_doubles(reasons: Sequence[Reason], a: _Side, b: _Side) -> list[Reason]:
    """One difference, one line: what the method says is not said again by the settings, nor an input's digest by its name."""
    digests = [mapping(side.manifest.get("digests")) for side in (a, b)]
    method = any(reason.group == "method" for reason in reasons)
    kept = []
    for reason in reasons:
        root = reason.name.partition(".")[0]
        if reason.group == "config" and root in ("objective", "algorithm") and method:
            continue
        if reason.group == "config" and root in NAMED_INPUTS and root in digests[0] and root in digests[1]:
            group = "no effect" if digests[0][root] == digests[1][root] else "config"
            kept.append(Reason(group, reason.name, reason.a, reason.b))
            continue
        kept.append(reason)
    return sorted(kept, key=lambda reason: ALL_GROUPS.index(reason.group))


def _plainly(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    return [item for item in differences(before, after) if value_or_none(item[1]) != value_or_none(item[2])]


def _scores(a: Path, b: Path) -> list[Reason]:
    found = []
    for file in files(a, "evals/*.json"):
        other = b / "evals" / file.name
        if not is_file(other):
            continue
        ours, theirs = (number(mapping(load_mapping(place).value.get("summary")).get("pass_at_1")) for place in (file, other))
        if ours is not None and theirs is not None and ours != theirs:
            found.append(Reason("scores", file.stem, round(ours, 4), round(theirs, 4)))
    return found


def _by_package(reason: Reason) -> tuple[int, str]:
    known = ("python", *PACKAGES)
    return (known.index(reason.name) if reason.name in known else len(known)), reason.name


def _section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = manifest.get(name)
    return value if isinstance(value, Mapping) else None


def _at(config: Mapping[str, Any], name: str) -> Any:
    place: Any = config
    for part in name.split("."):
        place = mapping(place).get(part)
    return place


def _apart(config: Mapping[str, Any], names: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Settings without those named."""
    kept = {}
    for key, value in config.items():
        if prefix + key not in names:
            kept[key] = _apart(value, names, f"{prefix}{key}.") if isinstance(value, Mapping) else value
    return kept


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def _short(value: Any) -> str:
    return "none" if value is None else plain(value, 60)
