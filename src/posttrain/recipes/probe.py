"""Probe a dataset with a model before training on it: groups of siblings, buckets, group sizes, and the cheapest next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.checks.probe import Scale, probe_of
from posttrain.checks.probe_gate import probe_gate
from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.files import write_json
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.verdicts import GateVerdict
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks
from posttrain.models.loading import load
from posttrain.recipes.chat import model_of
from posttrain.recipes.single import Practice, RLRun
from posttrain.render.renderer import ChatRenderer
from posttrain.rollout.collect import Collector, collect


class ProbeRun(Config):
    """What is probed. Nothing is trained and no run is written."""

    model: str
    """A folder, a run directory (its last rung) or RUN:RUNG, a .gguf file, a hub id, or 'smollm2'."""
    task: str | None = None
    """Task source; posttrain recipes lists them."""
    task_settings: dict[str, Any] = {}
    data: str | None = None
    """Rows with `prompt` (or `question`) and `answer`, instead of a task source."""
    prompts: int = Field(default=64, ge=2)
    siblings: int = Field(default=8, ge=2)
    sampling: Sampling = Sampling(max_tokens=128)
    """As in the training run to come."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Worst and best reward of the grader."""
    system: str | None = None
    turns: int = Field(default=4, ge=1)
    """Most assistant turns of an episode, for tasks with tools to call."""
    seed: int = Field(default=0, ge=0)


def probe(settings: ProbeRun, out: str | Path | None = None, progress: Callable[[int], None] | None = None) -> GateVerdict:
    """Draw `prompts` training tasks with `siblings` answers each, and judge them; `out` is a file for the verdict (JSON).

    Example: probe(ProbeRun(model="smollm2", task="arithmetic")).figures["reading"]  ->  "learnable"
    """
    if (settings.task is None) == (settings.data is None):
        raise ConfigError("a probe needs the tasks of one place: --task NAME (posttrain recipes lists them) or --data FILE")
    given = {"model": settings.model, "task": settings.task, "task_settings": settings.task_settings, "data": settings.data}
    practice = Practice.of(RLRun.load(given), (), None)
    assert practice is not None
    practice.prove()
    model, tokenizer = load(model_of(settings.model))
    renderer = ChatRenderer(tokenizer, system=settings.system)
    sampler = LocalSampler(model, renderer.stop_ids, renderer.special_ids)
    turns = settings.turns if practice.env_of else 1
    collector = Collector(sampler, renderer, practice.grader, settings.sampling, settings.siblings, Ranks(), practice.env_of, turns)
    seed = derive(settings.seed, "probe")
    groups = collect(collector, practice.draw(settings.prompts, derive(seed, "tasks")), seed, progress)
    found = probe_gate(
        probe_of(groups, settings.sampling, Scale(*settings.reward_range)), f"{settings.task or settings.data} x {settings.model}"
    )
    if out is not None:
        write_json(out, found.as_record())
    return found
