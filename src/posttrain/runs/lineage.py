"""Where a run comes from and what was changed on the way. More than one changed variable makes it a bundle, and it is called one.

    one variable     exactly one setting or input differs: what differs in the result can be laid at its door
    repeat           nothing differs but where it was computed
    bundle           several differ: the result says nothing about any one of them
    another stage    another recipe on the parent's model, which has no settings to compare

Code, packages and machine are no variables of an experiment, but they change numbers too: they are listed as `drift` beside the label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.runs.manifest import CONFIG, MANIFEST, SURROUNDINGS, Difference, differences, identity_digest, run_id, value_or_none
from posttrain.runs.reading import is_file, load_mapping, load_yaml_mapping, mapping, plain, strings

NEUTRAL = ("processes", "save_every", "machine.save_total_limit", "machine.export", "guard")
"""Settings that leave what is computed alone, up to the order of additions. A run may be resumed with others."""
MODEL_INPUTS = ("model", "tokenizer", "template")
FOLLOWS = {
    "model": ("model", "base", "arithmetic"),
    "tokenizer": ("model", "base"),
    "template": ("model", "system"),
    "teacher": ("teacher",),
    "data": ("data",),
}
"""Inputs whose digest follows from settings (first part of the name). Any other input is made of tasks and follows from TASKS."""
TASKS = ("task", "task_settings", "data", "held_out", "arithmetic", "word_problems", "instruct", "measure")
ONE, REPEAT, BUNDLE, STAGE = "one variable", "repeat", "bundle", "another stage"
MOST_NAMED = 6


@dataclass(frozen=True, slots=True)
class Parent:
    """The run that another one starts from. Example: Parent(Path("runs/a"), "model", rung="sft")"""

    path: Path
    via: str
    """`config`: started from its settings; `model`: from a model that it made."""
    rung: str | None = None


def find_parent(settings: Mapping[str, Any], command: Sequence[str] = ()) -> Parent | None:
    """The run whose config.yaml the command names (`--config RUN/config.yaml`), or else the one that the model comes from; None."""
    named = [after for before, after in zip(command, command[1:], strict=False) if before == "--config"]
    named += [part.removeprefix("--config=") for part in command if part.startswith("--config=")]
    for text in named:
        if Path(text).name == CONFIG and is_file(Path(text).parent / MANIFEST):
            return Parent(Path(text).parent.resolve(), "config")
    return parent_of_model(settings.get("model"))


def parent_of_model(model: Any) -> Parent | None:
    """The run that a model comes from: a run directory, RUN:RUNG, or a folder RUN/checkpoints/RUNG/... of one."""
    if not isinstance(model, str) or not model or "\0" in model:
        return None
    path = Path(model)
    if is_file(path / MANIFEST):
        return Parent(path.resolve(), "model")
    run, _, rung = model.rpartition(":")
    if run and is_file(Path(run) / MANIFEST):
        return Parent(Path(run).resolve(), "model", rung)
    path = path.resolve()
    for above in path.parents:
        inside = path.relative_to(above).parts
        if len(inside) > 1 and inside[0] == "checkpoints" and is_file(above / MANIFEST):
            return Parent(above, "model", inside[1])
    return None


def descend(
    parent: Parent, settings: Mapping[str, Any], digests: Mapping[str, Any], stages: Sequence[str], surroundings: Mapping[str, Any]
) -> dict[str, Any]:
    """The `parent` section of a manifest: who the parent is, what changed relative to it, and what that makes of this run.

    `surroundings` are this run's own sections of code, packages and machine. A parent that cannot be read has the label "unknown".
    """
    manifest, problem = load_mapping(parent.path / MANIFEST)
    old, broken = settings_in_force(parent.path, manifest)
    record: dict[str, Any] = {
        "id": run_id(manifest) if problem is None else None,
        "path": str(parent.path),
        "via": parent.via,
        "rung": parent.rung,
        "digest": identity_digest(manifest) if problem is None else None,
    }
    if problem or broken:
        return {**record, "label": "unknown", "changed": {}, "neutral": {}, "drift": [], "problem": problem or broken}
    drift = [name for name, _, _ in drifted(manifest, surroundings)]
    if parent.via == "model" and _recipe(strings(manifest.get("stages"))) != _recipe(stages):
        return {**record, "label": STAGE, "changed": {}, "neutral": {}, "drift": drift}
    apart = MODEL_INPUTS if parent.via == "model" else ()
    found = [item for item in differences(old, settings) if not (parent.via == "model" and item[0] == "model")]
    changed = [item for item in found if not _neutral(item[0])]
    changed += own_inputs(differences(mapping(manifest.get("digests")), digests), [name for name, _, _ in changed], apart)
    neutral = [item for item in found if _neutral(item[0])]
    return {**record, "label": label_of(len(changed)), "changed": _pairs(changed), "neutral": _pairs(neutral), "drift": drift}


def drifted(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """What differs in code, packages and machine between two manifests, as far as the first one recorded it."""
    found: list[Difference] = []
    for section in SURROUNDINGS:
        if section in old:  # an earlier schema did not record all of them
            keep = {"code": ("revision", "diff_digest"), "installed": ("digest",)}.get(section)
            before, after = ({section: _only(side.get(section), keep)} for side in (old, new))
            found += [item for item in differences(before, after) if not _unset(item[1]) and item[1] != value_or_none(item[2])]
    return found


def own_inputs(inputs: Sequence[Difference], settings: Sequence[str], apart: Sequence[str] = ()) -> list[Difference]:
    """Changed inputs that no changed setting explains: another model's name also means another tokenizer, and that is one change."""
    roots = {name.partition(".")[0] for name in settings}
    return [item for item in inputs if item[0] not in apart and not roots & {*FOLLOWS.get(item[0], TASKS)}]


def label_of(changed: int) -> str:
    """What a number of changed variables makes of a run."""
    return REPEAT if changed == 0 else ONE if changed == 1 else BUNDLE


def check_one_variable(parent: Mapping[str, Any] | None) -> None:
    """Raise ConfigError unless the run differs from its parent in at most one variable, naming those in which it does."""
    if parent is None:
        raise ConfigError(
            "one variable at a time needs a run to compare with: start from its settings (--config RUN/config.yaml) or its model (RUN:RUNG)"
        )
    where, label, changed = parent["path"], parent["label"], parent["changed"]
    if label == BUNDLE:
        raise ConfigError(
            f"{len(changed)} variables differ from {where}: {_some(list(changed))}; change one at a time, or do not ask for one variable: "
            f"the run is then labelled a bundle"
        )
    if label not in (ONE, REPEAT):
        reason = f"it cannot be read ({parent['problem']})" if "problem" in parent else "it is another recipe, with other settings"
        raise ConfigError(f"whether one variable differs from {where} cannot be said: {reason}; do not ask for one variable")


def settings_in_force(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A run's settings with the changes of its history, and what is wrong with them; never raises."""
    config, problem = load_yaml_mapping(path / CONFIG)
    history = manifest.get("history")
    for entry in history if isinstance(history, list) else ():
        for name, pair in mapping(mapping(entry).get("settings")).items():
            if isinstance(pair, list) and len(pair) == 2:
                _assign(config, str(name), pair[1])
    return config, problem


def origin(manifest: Mapping[str, Any]) -> str | None:
    """Where a run comes from, in a few words: "one variable from 3f9a01bc: rl.optim.lr"; None for one without a parent."""
    parent = manifest.get("parent")
    if isinstance(parent, str):
        return f"from {plain(parent)}"
    if not isinstance(parent, Mapping):
        return None
    label, changed = plain(parent.get("label"), 40), list(mapping(parent.get("changed")))
    of = f"{plain(parent.get('id'), 16)}" + (f":{plain(parent['rung'], 40)}" if parent.get("rung") else "")
    drift = " (and other code, packages or machine)" if parent.get("drift") else ""
    return f"{label} from {of}" + (f": {_some(changed)}" if changed else "") + drift


def _unset(value: Any) -> bool:
    """Whether a side of a difference lacks the name: an earlier version did not record it, which is no change."""
    return value is not None and value_or_none(value) is None


def _only(value: Any, keys: Sequence[str] | None) -> Any:
    return value if keys is None else {key: mapping(value).get(key) for key in keys}


def _neutral(name: str) -> bool:
    return f"{name}.".startswith(tuple(f"{neutral}." for neutral in NEUTRAL))


def _recipe(stages: Sequence[str]) -> tuple[str, ...]:
    """What a run trains; measuring before and after does not make another recipe."""
    return tuple(stage for stage in stages if not stage.startswith("eval."))


def _pairs(found: Sequence[Difference]) -> dict[str, list[Any]]:
    return {name: [value_or_none(old), value_or_none(new)] for name, old, new in found}


def _assign(config: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    place: Any = config
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            return
    place[leaf] = value


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(plain(name, 80) for name in names[:MOST_NAMED]) + more
