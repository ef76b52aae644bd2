"""The settings of one stage under flat dotted names, whichever recipe the stage was part of. Works on plain values: a copied run needs no
code of the loops to be understood."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.doctor.frame import Kind, kind_of
from posttrain.runs.reading import mapping, number

SECTIONS: Mapping[str, str] = {"sft": "sft", "dpo": "dpo", "grpo": "grpo", "rl": "rl", "base": "base", "mine": "mine"}
"""Stage to the section of a config that it is told."""
_KINDS: Mapping[str, Kind] = {"sft": "sft", "base": "sft", "dpo": "preference", "grpo": "rl", "rl": "rl"}
_MOST = 2000
"""Settings of one stage."""


def settings_of(config: Mapping[str, Any], stage: str, method: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The resolved settings of a stage, flat.

    The section of the stage loses its prefix (grpo.optim.lr is optim.lr), what holds for the whole run keeps its name (sampling.max_tokens,
    seed), the policy gradient is under "objective." also where the config only names an algorithm (then `method` of the manifest says what
    the name stood for). Two names are ours: "updates", optimizer steps per sampling phase, and "lora", whether adapters are trained.

    Example: settings_of({"seed": 0, "grpo": {"steps": 200, "optim": {"lr": 1e-4}}}, "grpo")
             # {"seed": 0, "steps": 200, "optim.lr": 1e-4, "lora": False}
    """
    if not config:
        return {}
    apart = {*SECTIONS.values(), "objective", "lora"}
    found = flat({name: value for name, value in config.items() if name not in apart})
    section = mapping(config.get(SECTIONS.get(stage, stage)))
    found |= flat(_base(section) if stage == "base" else section)
    lora = config.get("lora")
    found |= flat({"lora": lora}) | {"lora": isinstance(lora, Mapping)}
    if stage_kind(stage, (), config) == "rl":
        found |= flat(objective_of(config, method or {}), "objective")
        found |= _product("updates", found, "minibatches", "epochs")
        found.setdefault("asynchronous.bound", 0)  # rollouts wait for every update
    if stage == "sft" and (steps := _sft_steps(config, found)):
        found["steps"] = steps
    return found


def objective_of(config: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """The policy gradient of a config as nested plain values; {} when it cannot be told.

    Example: objective_of({"algorithm": "grpo"}, {})["limit"]["high"]  # 0.2
    """
    if isinstance(given := config.get("objective"), Mapping) and "advantage" in given:
        return dict(given)
    if not method and ("algorithm" in config or given):
        method = _resolved(config)
    if not method:
        return {}
    ratio = method.get("ratio")
    return {
        "kind": method.get("algorithm"),
        "advantage": {"kind": method.get("advantage"), **mapping(method.get("advantage_normalisation"))},
        "ratio": mapping(ratio).get("level", ratio),
        "against": mapping(ratio).get("against"),
        **{name: method[name] for name in ("limit", "correction", "aggregation", "kl", "entropy", "overlong") if name in method},
        "surrogate": mapping(method.get("surrogate")).get("name"),
    }


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a name stands for in this version, for runs whose manifest does not say what it stood for in theirs."""
    from posttrain.runs.method import method_of  # needs pydantic, which no other part of reading a run does

    name = config.get("objective", config.get("algorithm"))
    return method_of({"algorithm": name}) if isinstance(name, str) else {}


def in_force(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the changes that the manifest's history permits, as the run went on with them."""
    if not config:
        return {}
    found = copy.deepcopy(dict(config))
    history = manifest.get("history")
    for entry in history if isinstance(history, list) else ():
        for name, change in mapping(mapping(entry).get("settings")).items():
            if not isinstance(change, list) or len(change) != 2:
                continue
            *parents, leaf = str(name).split(".")
            place: Any = found
            for parent in parents:
                place = place.setdefault(parent, {}) if isinstance(place, dict) else None
            if isinstance(place, dict):
                place[leaf] = change[1]
    return found


def stage_kind(stage: str, columns: Iterable[str], config: Mapping[str, Any]) -> Kind:
    """The kind of a stage: what it measures says most, its name the rest.

    Example: stage_kind("grpo", (), {})  # "rl"
    """
    kind = kind_of(columns)
    if kind == "other":
        kind = _KINDS.get(stage, "other")
    taught = mapping(mapping(config.get("objective")).get("advantage")).get("kind") == "teacher"
    return "distill" if kind == "rl" and taught and columns else kind


def flat(values: Mapping[str, Any], prefix: str = "", most: int = _MOST) -> dict[str, Any]:
    """Nested mappings as dotted names. Lists stay whole.

    Example: flat({"optim": {"lr": 0.1, "betas": [0.9, 0.95]}})  # {"optim.lr": 0.1, "optim.betas": [0.9, 0.95]}
    """
    found: dict[str, Any] = {}
    waiting = [(prefix, values)]
    while waiting and len(found) < most:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            inner = [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
            waiting += reversed(inner)
        else:
            found[name] = value
    return found


def _base(section: Mapping[str, Any]) -> dict[str, Any]:
    """The embedded base is plain language modelling, told in names of its own."""
    named = {"optim": {"lr": section["lr"]}} if "lr" in section else {}
    return {**section, **named, **({"batch_size": section["batch"]} if "batch" in section else {})}


def _sft_steps(config: Mapping[str, Any], found: Mapping[str, Any]) -> int | None:
    """Optimizer steps of imitation, where the config says how many rows there are."""
    rows = [number(config["rows"].get(name)) for name in ("arithmetic", "word_problems", "instruct")] if _has_rows(config) else []
    if not rows and config.get("data") is None:
        rows = [number(config.get("demonstrations"))]
    total = sum(count or 0 for count in rows)
    size, epochs = number(found.get("batch_size")), number(found.get("epochs"))
    steps = epochs * -(-total // size) if total and size and epochs and size >= 1 else None
    return int(steps) if steps is not None and steps < 1e9 else None


def _has_rows(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("rows"), Mapping)


def _product(name: str, found: Mapping[str, Any], *parts: str) -> dict[str, Any]:
    factors = [number(found.get(part)) for part in parts]
    if any(factor is None for factor in factors):
        return {}
    product = 1.0
    for factor in factors:
        product *= factor or 0.0
    return {name: int(product)} if product < 1e9 else {}
