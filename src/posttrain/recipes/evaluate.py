"""Measure a model on a task source, in conditions that are written beside the number."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.files import write_json
from posttrain.core.sampling import Sampling
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks, launch
from posttrain.engine.runtime import choose
from posttrain.engine.weights import weights_digest
from posttrain.envs.sources import source
from posttrain.envs.types import env_of
from posttrain.evals.record import EvalRecord
from posttrain.evals.runner import check_truncation, openings_for, records_from
from posttrain.evals.suite import Suite
from posttrain.models.loading import load, resolve
from posttrain.recipes.chat import model_of
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.proof import prove
from posttrain.rollout.episodes import play
from posttrain.runs.console import Console


class EvalRun(Config):
    """What is measured and how."""

    model: str
    """A folder, a run directory (its last rung) or RUN:RUNG, a .gguf file, a hub id, or 'smollm2'."""
    task: str
    task_settings: dict[str, Any] = {}
    split: str = "held_out"
    items: int = Field(default=500, ge=2)
    samples: int = Field(default=1, ge=1)
    sampling: Sampling = Sampling(temperature=0.0, max_tokens=256)
    system: str | None = None
    seed: int = Field(default=1, ge=0)
    turns: int = Field(default=4, ge=1)
    """Most assistant turns of an episode; tasks without a world are answered in one."""
    allow_truncation: bool = False
    """Report a score although 2 % or more of the completions were cut."""
    processes: int | None = Field(default=None, ge=1)


def evaluate(settings: EvalRun, save_to: str | Path | None = None) -> EvalRecord:
    """Evaluate one model; the record holds the outcome of every item and the conditions, and is written to `save_to` as JSON.

    Raises EvidenceError, after saving, when 2 % or more of the completions were truncated and that was not allowed.
    """
    if save_to is not None and Path(save_to).exists():
        raise ConfigError(f"{save_to} exists already; choose another file, so that no record is lost")
    chosen = source(settings.task, **settings.task_settings)
    tasks = chosen.tasks(settings.split, settings.items, 0)
    prove(chosen.grader, tasks[:20], gold=chosen.gold, wrong=chosen.wrong)
    suite = Suite(
        chosen.name,
        tuple(tasks),
        chosen.grader,
        settings.sampling,
        settings.samples,
        settings.allow_truncation,
        env_of(chosen),
        settings.turns if env_of(chosen) else 1,
    )
    resolve(settings.model)
    record = launch(partial(_body, suite=suite, settings=settings), choose(settings.processes).processes)
    if save_to is not None:
        write_json(save_to, record.to_json())
    check_truncation([suite], {suite.name: record})
    return record


def _body(ranks: Ranks, suite: Suite, settings: EvalRun) -> EvalRecord:
    console = Console() if ranks.first else Console.quiet()
    model, tokenizer = load(model_of(settings.model))
    renderer = ChatRenderer(tokenizer, system=settings.system)
    sampler = LocalSampler(model, renderer.stop_ids, renderer.special_ids)
    mine = ranks.share(openings_for([suite], renderer, settings.seed))
    with console.stage(f"evaluate {suite.name}", total=len(mine), unit="episode") as bar:
        trajectories = ranks.interleave(play(sampler, renderer, mine, lambda n: bar.advance(n)))
    digest = weights_digest(model)
    records = records_from([suite], trajectories, renderer, seed=settings.seed, label=settings.model, model_digest=digest)
    return records[suite.name]
