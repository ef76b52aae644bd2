"""Measure a model on task sources, in conditions that are written beside the number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks, launch
from posttrain.engine.runtime import choose
from posttrain.engine.weights import weights_digest
from posttrain.envs.sources import source
from posttrain.envs.types import env_of
from posttrain.evals.conditions import MODES, Mode
from posttrain.evals.partial import Partial, require_free
from posttrain.evals.record import EvalRecord
from posttrain.evals.runner import PlayAll, check_truncation, conditions_of, items_in_batches, record_of
from posttrain.evals.suite import Suite, origin_of
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
    """500 pick a checkpoint, 1000 are for publication; fewer are a pulse."""
    skip: int = Field(default=0, ge=0)
    """Items of the split to leave out first: what picked a checkpoint must not report it."""
    samples: int = Field(default=1, ge=1)
    """Per item, when decoding is sampled."""
    sampling: Sampling = Sampling(temperature=0.0, max_tokens=256)
    system: str | None = None
    seed: int = Field(default=1, ge=0)
    turns: int = Field(default=4, ge=1)
    """Most assistant turns of an episode; tasks without a world are answered in one."""
    allow_truncation: bool = False
    """Report a score although 2 % or more of the completions were cut."""
    batch: int = Field(default=256, ge=1)
    """Items between two saves; leaves the result alone."""
    processes: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class Job:
    """A suite and the file of its record, if it is kept."""

    suite: Suite
    target: Path | None


def evaluate(settings: EvalRun, save_to: str | Path | None = None, *, resume: bool = False) -> EvalRecord:
    """Evaluate one model; the record holds the outcome of every item and the conditions, and is written to `save_to` as JSON.

    With `resume`, what an interrupted evaluation left beside `save_to` is taken over; the record is the same to the byte. Raises
    EvidenceError, after saving, when 2 % or more of the completions were truncated and that was not allowed.
    """
    if resume and save_to is None:
        raise ConfigError("nothing can be resumed without a file; name the one that was to be written")
    suite = suite_of(settings)
    return _run(settings, [Job(suite, Path(save_to) if save_to is not None else None)], resume)[suite.name]


def evaluate_set(
    settings: EvalRun, tasks: Sequence[str], modes: Sequence[str], folder: str | Path, *, resume: bool = False
) -> dict[str, EvalRecord]:
    """Evaluate one model on several tasks in several decoding modes; one record each, called TASK.MODE, in `folder`.

    "greedy" takes the most likely token and one sample per item; "sampled" draws as `settings.sampling` says, at temperature 1 where that
    is greedy. Several tasks take their default settings.
    """
    ordered = sorted(set(modes), key=lambda mode: MODES.index(checked_mode(mode)))
    if len(tasks) > 1 and settings.task_settings:
        raise ConfigError("task_settings belong to one task; evaluate that one by itself")
    if Path(folder).is_file() or Path(folder).suffix == ".json":
        raise ConfigError(f"{folder} names a file, but several records are written; name a folder")
    suites = [suite_of(in_mode(settings.model_copy(update={"task": task}), mode), mode) for task in tasks for mode in ordered]
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError(f"a task is named twice in {', '.join(tasks)}; name each once")
    return _run(settings, [Job(suite, Path(folder) / f"{suite.name}.json") for suite in suites], resume)


def checked_mode(mode: str) -> Mode:
    """A decoding mode by its name."""
    for known in MODES:
        if mode == known:
            return known
    raise ConfigError(f"unknown decoding mode '{mode}'; use {' or '.join(MODES)}")


def in_mode(settings: EvalRun, mode: str) -> EvalRun:
    """The settings with the decoding of a mode."""
    mode, sampling = checked_mode(mode), settings.sampling
    if mode == "greedy":
        return settings.model_copy(update={"sampling": Sampling(temperature=0.0, max_tokens=sampling.max_tokens), "samples": 1})
    if sampling.greedy:
        return settings.model_copy(update={"sampling": sampling.model_copy(update={"temperature": 1.0})})
    return settings


def suite_of(settings: EvalRun, mode: str | None = None) -> Suite:
    """The suite of a task, its grader proven; in a set of several modes its name says which one it is."""
    chosen = source(settings.task, **settings.task_settings)
    tasks = chosen.tasks(settings.split, settings.skip + settings.items, 0)[settings.skip :]
    prove(chosen.grader, tasks[:20], gold=chosen.gold, wrong=chosen.wrong)
    worlds = env_of(chosen)
    return Suite(
        f"{chosen.name}.{mode}" if mode else chosen.name,
        tuple(tasks),
        chosen.grader,
        settings.sampling,
        settings.samples,
        settings.allow_truncation,
        worlds,
        settings.turns if worlds else 1,
        origin_of(chosen, settings.split),
    )


def _run(settings: EvalRun, jobs: Sequence[Job], resume: bool) -> dict[str, EvalRecord]:
    if not resume:
        for job in jobs:
            if job.target is not None:
                require_free(job.target)
    resolve(settings.model)
    body = partial(_body, jobs=jobs, settings=settings, resume=resume)
    records = launch(body, choose(settings.processes).processes)
    check_truncation([job.suite for job in jobs], records)
    return records


def _body(ranks: Ranks, jobs: Sequence[Job], settings: EvalRun, resume: bool) -> dict[str, EvalRecord]:
    model, tokenizer = load(model_of(settings.model))
    renderer = ChatRenderer(tokenizer, system=settings.system)
    sampler, digest = LocalSampler(model, renderer.stop_ids, renderer.special_ids), weights_digest(model)
    records = {}
    for job in jobs:
        with _playing(ranks, sampler, renderer, job.suite) as play_all:
            records[job.suite.name] = measure_job(ranks, job, settings, renderer, digest, play_all, resume)
    return records


@contextmanager
def _playing(ranks: Ranks, sampler: LocalSampler, renderer: ChatRenderer, suite: Suite) -> Iterator[PlayAll]:
    """How the processes play episodes together, under a progress bar."""
    console = Console() if ranks.first else Console.quiet()
    total = len(suite.tasks) * suite.samples
    with console.stage(f"evaluate {suite.name}", total=len(ranks.share(range(total))), unit="episode") as bar:
        yield lambda openings: ranks.interleave(play(sampler, renderer, ranks.share(openings), bar.advance))


def measure_job(
    ranks: Ranks, job: Job, settings: EvalRun, renderer: ChatRenderer, digest: str, play_all: PlayAll, resume: bool
) -> EvalRecord:
    """One suite, batch by batch; the first process keeps the parts, and every process goes on from the same item."""
    suite, label = job.suite, settings.model
    kept = None
    if job.target is not None and ranks.first:
        kept = Partial(job.target, conditions_of(suite, renderer, settings.seed), label, digest, resume=resume)
    finished, done = ranks.first_says((kept.finished, kept.done) if kept else (None, []))
    if finished is not None:
        return finished
    items = list(done)
    for batch in items_in_batches(suite, renderer, settings.seed, settings.batch, play_all, done):
        items += batch
        if kept:
            kept.append(batch)
    record = record_of(suite, items, renderer, seed=settings.seed, label=label, model_digest=digest)
    if kept:
        kept.complete(record)
    return record
