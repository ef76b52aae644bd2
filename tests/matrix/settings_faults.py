"""Settings that are wrong before a run begins: each breaks one rule of the linter, and beside it stands a near miss that must stay silent.

The values are those of the accounts (a band of 0.2 on sequence ratios, a constant rate over 400 steps), not those of the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from tests.matrix.injection import Fault, Named
from tests.matrix.traces_write import config_of

from posttrain.core.files import read_json, write_json
from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.lint import lint, probe_facts

ABSENT = "absent"
Stage = Literal["rl", "sft", "dpo"]


@dataclass(frozen=True, slots=True)
class Broken:
    """One rule. Example: Broken("C12", "cut answers are dropped", {"objective.overlong": {"kind": "drop"}}, near={})"""

    id: str
    what: str
    change: Mapping[str, Any]
    near: Mapping[str, Any]
    """Settings close to it of which the rule has to be silent."""
    stage: Stage = "rl"
    probe: Mapping[str, float] | None = None
    """Quantiles of the answers' lengths that a probe has found, for rules that compare with them."""

    def make(self, path: Path, seed: int, near: bool = False) -> Path:
        """A folder with config.yaml: the settings of a sound run, of some size, with this change."""
        sizes = {"seed": seed, **({"rl.prompts": (16, 24, 32)[seed % 3]} if self.stage == "rl" else {})}
        config = config_of(self.stage, sizes).model_dump(mode="json")
        for name, value in (self.near if near else self.change).items():
            _put(config, name, value)
        (path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        write_json(path / "probe.json", {"figures": {"lengths": dict(self.probe or {})}})
        return path


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    place = config
    for parent in parents:
        place = place.setdefault(parent, {})
    if value is ABSENT:
        place.pop(leaf, None)
    else:
        place[leaf] = value


def linted(path: Path) -> Named:
    """What the linter says to the settings in a folder and the probe beside them; what a rule is another name for is named too."""
    config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    facts = probe_facts(read_json(path / "probe.json"))
    found = [advice.id for advice in lint(config, CATALOG.values(), facts)]
    ids = tuple(dict.fromkeys(name for id in found for name in (id, CATALOG[id].same_as) if name))
    return Named(ids, ids[0] if ids else None)


BROKEN: tuple[Broken, ...] = (
    Broken(
        "F14",
        "a token band on sequence ratios",
        {"objective.ratio": "sequence", "objective.limit.low": 0.2, "objective.limit.high": 0.2},
        {"objective.ratio": "sequence", "objective.limit.low": 3e-4, "objective.limit.high": 4e-4},
    ),  # fmt: skip
    Broken(
        "P29",
        "k3 in the loss",
        {"objective.kl": {"estimator": "k3", "placement": "loss", "coef": 0.005}},
        {"objective.kl": {"estimator": "k1", "placement": "reward", "coef": 0.005}},
    ),  # fmt: skip
    Broken("S29", "every channel z-scored", {"objective.advantage": {"kind": "channels"}}, {"objective.advantage": {"kind": "mean_std"}}),
    Broken(
        "S100",
        "a constant rate over 400 steps",
        {"rl.steps": 400, "rl.optim.schedule": "constant"},
        {"rl.steps": 400, "rl.optim.schedule": "cosine"},
    ),  # fmt: skip
    Broken("S105", "samples at temperature 0", {"sampling.temperature": 0.0}, {"sampling.temperature": 1.0}),
    Broken("S106", "groups of one", {"rl.siblings": 1}, {"rl.siblings": 8}),
    Broken("P37", "one seed for a comparison", {"seeds": [0]}, {"seeds": [0, 1, 2]}),
    Broken(
        "L8", "eight updates under a plain clip", {"rl.minibatches": 8, "objective.limit.kind": "clip"}, {"objective.limit.kind": "clip"}
    ),
    Broken("L9", "a clip that is open below, eight updates", {"rl.minibatches": 8}, {"rl.minibatches": 8, "objective.limit.dual": 3.0}),
    Broken(
        "L15",
        "what arrives first trains first",
        {"asynchronous": {"bound": 4, "order": "arrival"}},
        {"asynchronous": {"bound": 4, "order": "due"}},
    ),  # fmt: skip
    Broken(
        "L30",
        "a critic that bootstraps",
        {"objective.advantage": {"kind": "critic", "lam": 0.95, "gamma": 1.0}},
        {"objective.advantage": {"kind": "critic", "lam": 1.0, "gamma": 1.0}},
    ),  # fmt: skip
    Broken("C1", "two siblings", {"rl.siblings": 2, "rl.prompts": 32}, {"rl.siblings": 8}),
    Broken("C2", "ten steps in all", {"rl.steps": 10}, {"rl.steps": 60}),
    Broken("C3", "5e-4 from the first step", {"rl.optim.lr": 5e-4, "rl.optim.warmup": 0.0}, {"rl.optim.lr": 1e-4, "rl.optim.warmup": 0.0}),
    Broken("C4", "the rate of a 70B model", {"rl.optim.lr": 1e-6}, {"rl.optim.lr": 5e-5}),
    Broken(
        "C5",
        "a cap of 256 tokens where answers take 600",
        {"sampling.max_tokens": 256},
        {"sampling.max_tokens": 1024},
        probe={"p50": 310.0, "p99": 600.0},
    ),  # fmt: skip
    Broken(
        "C6",
        "800 steps without a KL term",
        {"rl.steps": 800, "objective.kl.estimator": "none"},
        {"rl.steps": 100, "objective.kl.estimator": "none"},
    ),
    Broken("C7", "a constant entropy bonus of 0.01", {"objective.entropy.coef": 0.01}, {"objective.entropy.coef": 0.0}),
    Broken("C8", "no pulse", {"guard.pulse_every": 0}, {"guard.pulse_every": 20}),
    Broken("C9", "no alarms", {"guard.alarms": "off"}, {"guard.alarms": "warn"}),
    Broken("C10", "no checkpoint in 200 steps", {"rl.steps": 200, "save_every": 500}, {"rl.steps": 200, "save_every": 50}),
    Broken(
        "C11",
        "drawn ahead and not corrected",
        {"asynchronous": {"bound": 2, "order": "due"}},
        {"asynchronous": {"bound": 2, "order": "due"}, "objective.correction": {"kind": "truncate"}},
    ),  # fmt: skip
    Broken("C12", "cut answers are dropped", {"objective.overlong": {"kind": "drop"}}, {"objective.overlong": {"kind": "none"}}),
    Broken("C13", "sixteen updates per phase", {"rl.minibatches": 8, "rl.epochs": 2}, {"rl.minibatches": 2}),
    Broken("C14", "temperature 0.3", {"sampling.temperature": 0.3}, {"sampling.temperature": 0.7}),
    Broken(
        "C15",
        "LoRA at the rate of full fine-tuning",
        {"lora": {"rank": 16}, "rl.optim.lr": 1e-5},
        {"lora": {"rank": 16}, "rl.optim.lr": 2e-4},
    ),
    Broken("C16", "two prompts of eight", {"rl.prompts": 2, "rl.siblings": 8}, {"rl.prompts": 8, "rl.siblings": 8}),
    Broken("C17", "36 items", {"held_out": 36}, {"held_out": 500}),
    Broken("C18", "ten passes over the demonstrations", {"sft.epochs": 10}, {"sft.epochs": 2}, "sft"),
    Broken("C19", "a beta of 0.01", {"dpo.beta": 0.01}, {"dpo.beta": 0.1}, "dpo"),
    Broken("C20", "no seed", {"seed": ABSENT}, {"seed": 7}),
    Broken("C21", "two seeds", {"seeds": [0, 1]}, {"seeds": [0, 1, 2, 3]}),
    Broken("C22", "top-p of 0.8", {"sampling.top_p": 0.8}, {"sampling.top_p": 1.0}),
    Broken(
        "C23",
        "a band of half a percent on old rollouts",
        {
            "asynchronous": {"bound": 8, "order": "due"},
            "objective.correction": {"kind": "mask", "sequence_lower": 0.996, "sequence_upper": 1.001},
        },
        {
            "asynchronous": {"bound": 8, "order": "due"},
            "objective.correction": {"kind": "mask", "sequence_lower": 0.8, "sequence_upper": 1.2},
        },
    ),
    Broken("C24", "24 prompts in 5 minibatches", {"rl.prompts": 24, "rl.minibatches": 5}, {"rl.prompts": 24, "rl.minibatches": 4}),
    Broken("C25", "32 processes for 8 prompts", {"processes": 32, "rl.prompts": 8}, {"processes": 2}),
    Broken("C26", "a coefficient of 1e-5", {"objective.kl.coef": 1e-5}, {"objective.kl.coef": 0.005}),
    Broken(
        "C27",
        "k1 in the loss",
        {"objective.kl": {"estimator": "k1", "placement": "loss", "coef": 0.01}},
        {"objective.kl": {"estimator": "k1", "placement": "reward", "coef": 0.01}},
    ),  # fmt: skip
    Broken("C28", "eight passes over the pairs", {"dpo.epochs": 8}, {"dpo.epochs": 1}, "dpo"),
    Broken("C29", "a beta of 1", {"dpo.beta": 1.0}, {"dpo.beta": 0.1}, "dpo"),
    Broken("C30", "a warm-up of half the run", {"rl.optim.warmup": 0.5}, {"rl.optim.warmup": 0.1}),
    Broken("C31", "no gates", {"guard.gates": "off"}, {"guard.gates": "warn"}),
    Broken("C32", "32 updates ahead", {"asynchronous": {"bound": 32, "order": "due"}}, {"asynchronous": {"bound": 2, "order": "due"}}),
    Broken("C33", "a rate of 1e-2", {"rl.optim.lr": 1e-2}, {"rl.optim.lr": 1e-4}),
    Broken("C34", "a pulse of 8 items", {"guard.pulse_items": 8}, {"guard.pulse_items": 64}),
    Broken("C35", "imitation of 5 steps", {"data": None, "demonstrations": 160}, {"data": None, "demonstrations": 2000}, "sft"),
    Broken("C36", "one sibling, a baseline of siblings", {"rl.siblings": 1}, {"rl.siblings": 1, "objective.advantage": {"kind": "batch"}}),
    Broken("C37", "eight samples at temperature 0", {"sampling.temperature": 0}, {"sampling.temperature": 0.8}),
    Broken("C38", "an average that nobody named", {"objective.aggregation": ABSENT}, {"objective.aggregation": "constant"}),
    Broken(
        "C39",
        "0.8 of a shared device for the sampler",
        {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.8},
        {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.6},
    ),
)
FAULTS: tuple[Fault, ...] = tuple(Fault(one.id, "settings", one.what, make=one.make, name=linted, seconds=0.1) for one in BROKEN)
