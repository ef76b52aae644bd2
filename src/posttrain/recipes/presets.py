"""What can be run by name: presets of the ladder and single stages, with a description of every setting."""

from __future__ import annotations

import difflib
from typing import Any

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.machine import Machine, Packing
from posttrain.engine.trainer import Optim
from posttrain.envs.arithmetic import Arithmetic
from posttrain.envs.instruct import Instruct
from posttrain.envs.sources import SOURCES
from posttrain.loops.preference import DPO
from posttrain.loops.rl_settings import RL
from posttrain.loops.sft import SFT
from posttrain.models.loading import SMOLLM2
from posttrain.models.lora import LoRA
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.recipes.ladder import Ladder, Measure, Mine, Rows
from posttrain.recipes.single import DPORun, RLRun, SFTRun

PRESETS: dict[str, Ladder] = {
    "tiny": Ladder(),
    "smollm2": Ladder(
        preset="smollm2",
        model=SMOLLM2,
        machine=Machine(packing=Packing(row_tokens=256, micro_tokens=1024)),
        lora=LoRA(),
        arithmetic=Arithmetic(high=49, harder_low=50, harder_high=99),
        instruct=Instruct(grading="mentions", max_words=12),
        rows=Rows(arithmetic=600, word_problems=300, instruct=100, wrong=0.0),
        sampling=Sampling(max_tokens=24),
        sft=SFT(batch_size=16, optim=Optim(lr=5e-4)),
        mine=Mine(prompts=480, completions=4),
        dpo=DPO(batch_size=8, optim=Optim(lr=1e-4)),
        grpo=RL(steps=60, prompts=16, siblings=8, tries=1.5, optim=Optim(lr=2e-4, schedule="constant")),
        measure=Measure(arithmetic=500, harder=100, word_problems=200, retention=60),
    ),
}
SINGLE: dict[str, type[SFTRun] | type[DPORun] | type[RLRun]] = {"sft": SFTRun, "dpo": DPORun, "rl": RLRun}


def preset_named(name: str) -> Ladder:
    """A ladder preset; ConfigError with the nearest name."""
    return PRESETS[_known(name, PRESETS, "preset")]


def single_named(name: str) -> type[SFTRun] | type[DPORun] | type[RLRun]:
    """The settings class of a single stage; ConfigError with the nearest name. The name of an objective is that of a kind of rl."""
    if name in ALGORITHMS:
        raise ConfigError(f"'{name}' is an objective: posttrain train rl --set objective={name}")
    return SINGLE[_known(name, SINGLE, "recipe")]


def _known(name: str, among: dict[str, Any], what: str) -> str:
    if name in among:
        return name
    near = difflib.get_close_matches(name, among, n=1, cutoff=0.4)
    raise ConfigError(f"unknown {what} '{name}'; {f'did you mean {near[0]!r}?' if near else 'known: ' + ', '.join(among)}")


def describe(name: str | None = None) -> str:
    """Everything that can be run; or, for a name, all its settings with their values."""
    if name is None:
        return "\n".join(
            [
                "ladder presets (posttrain ladder --preset NAME):",
                *(f"  {key:14} {settings.model}: {_stages(settings)}" for key, settings in PRESETS.items()),
                "single stages (posttrain train NAME):",
                *(f"  {key:14} {(kind.__doc__ or '').splitlines()[0]}" for key, kind in SINGLE.items()),
                "task sources (--task NAME):",
                *(f"  {key:14} {(kind.__doc__ or '').splitlines()[0]}" for key, kind in SOURCES.items()),
                "settings of one: posttrain recipes NAME",
            ]
        )
    if name in PRESETS:
        return "\n".join(_settings(PRESETS[name].model_dump(mode="json")))
    if name in SINGLE:
        return "\n".join(_settings(_defaults(SINGLE[name]).model_dump(mode="json")))
    if name in SOURCES:
        return "\n".join(_settings(_defaults(SOURCES[name]).model_dump(mode="json")))
    _known(name, {**PRESETS, **SINGLE, **SOURCES}, "recipe")
    return ""


def _defaults(kind: type[Config]) -> Config:
    """Default settings; a setting without a default shows as required."""
    needed: dict[str, Any] = {key: "(required)" for key, field in kind.model_fields.items() if field.is_required()}
    return kind.model_construct(None, **needed)


def _stages(settings: Ladder) -> str:
    return f"{settings.rows.arithmetic} SFT rows, {settings.mine.prompts} prompts mined, {settings.grpo.steps} GRPO steps"


def _settings(data: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key, value in data.items():
        lines += _settings(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key} = {value}"]
    return lines
