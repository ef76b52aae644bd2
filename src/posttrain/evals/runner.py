"""Run suites: episodes out, trajectories back, records made. Pure functions, and `evaluate`, which joins them with a sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Score, Trajectory
from posttrain.engine.types import Sampler
from posttrain.evals.conditions import Conditions
from posttrain.evals.record import EvalRecord, ItemResult, Outcome, require_trustworthy
from posttrain.evals.rendering import thinking, tokenizer_digest
from posttrain.evals.suite import Suite
from posttrain.render.types import Renderer
from posttrain.rewards.types import extractor_of, score
from posttrain.rollout.episodes import Opening, play

EXAMPLES = 6
"""Items per suite of which the first sample is passed to `on_example`."""

OnExample = Callable[[dict[str, Any]], None]
PlayAll = Callable[[list[Opening]], list[Trajectory]]
"""Plays episodes to their end, in order; where there are several processes, together with them."""


def evaluate(
    sampler: Sampler,
    renderer: Renderer,
    suites: Sequence[Suite],
    *,
    seed: int,
    label: str,
    model_digest: str,
    progress: Callable[[int], None] | None = None,
    on_example: OnExample | None = None,
) -> dict[str, EvalRecord]:
    """Measure one model on every suite, all episodes side by side; records by suite name.

    Episodes are seeded by (seed, suite, item, sample), never by the model, so that two models answer under the same noise. Raises
    EvidenceError when a suite that does not allow truncation had 2 % or more of its completions cut.
    """
    trajectories = play(sampler, renderer, openings_for(suites, renderer, seed), progress)
    records = records_from(suites, trajectories, renderer, seed=seed, label=label, on_example=on_example, model_digest=model_digest)
    check_truncation(suites, records)
    return records


def items_in_batches(
    suite: Suite, renderer: Renderer, seed: int, batch: int, play_all: PlayAll, done: Sequence[ItemResult] = ()
) -> Iterator[list[ItemResult]]:
    """The results of a suite's items, `batch` items at a time, from the first that is not `done` yet.

    What an item's result is does not depend on the batches; that they start at fixed places only keeps the arithmetic of an engine the
    same when an evaluation is resumed.
    """
    _require_distinct([suite])
    if batch < 1:
        raise ConfigError(f"batches of {batch} items hold none; take at least 1")
    if any(result.id != task.id for result, task in zip(done, suite.tasks, strict=False)) or len(done) > len(suite.tasks):
        raise EvidenceError(f"the finished items of '{suite.name}' are not its first {len(done)}; start the evaluation anew")
    for start in range(len(done), len(suite.tasks), batch):
        tasks = suite.tasks[start : start + batch]
        yield _judged(suite, tasks, play_all(_openings(suite, tasks, renderer, seed)))


def openings_for(suites: Sequence[Suite], renderer: Renderer, seed: int) -> list[Opening]:
    """One episode per suite, item and sample, in that order; samples of one item stand together and share their prompt."""
    _require_distinct(suites)
    return [opening for suite in suites for opening in _openings(suite, suite.tasks, renderer, seed)]


def _openings(suite: Suite, tasks: Sequence[Task], renderer: Renderer, seed: int) -> list[Opening]:
    return [
        Opening(task, index, prompt, suite.sampling, derive(seed, "eval", suite.name, task.id, index), suite.env_of, suite.turns)
        for task in tasks
        for prompt in [renderer.prompt(task.prompt)]
        for index in range(suite.samples)
    ]


def records_from(
    suites: Sequence[Suite],
    trajectories: Sequence[Trajectory],
    renderer: Renderer,
    *,
    seed: int,
    label: str,
    model_digest: str,
    on_example: OnExample | None = None,
) -> dict[str, EvalRecord]:
    """Score the trajectories of `openings_for(suites, renderer, seed)`, in that order. Raises EvidenceError if any is missing."""
    _require_distinct(suites)
    expected = sum(len(suite.tasks) * suite.samples for suite in suites)
    if len(trajectories) != expected:
        raise EvidenceError(f"{len(trajectories)} trajectories for {expected} evaluation episodes; none may be dropped or repeated")
    records, start = {}, 0
    for suite in suites:
        end = start + len(suite.tasks) * suite.samples
        items = _judged(suite, suite.tasks, trajectories[start:end], label, on_example)
        records[suite.name] = record_of(suite, items, renderer, seed=seed, label=label, model_digest=model_digest)
        start = end
    return records


def record_of(suite: Suite, items: Sequence[ItemResult], renderer: Renderer, *, seed: int, label: str, model_digest: str) -> EvalRecord:
    """The record of a suite whose items are all done."""
    return EvalRecord(conditions_of(suite, renderer, seed), label, model_digest, tuple(items))


def conditions_of(suite: Suite, renderer: Renderer, seed: int) -> Conditions:
    """What a score on the suite will depend on besides the model."""
    whence = suite.whence
    return Conditions(
        suite=suite.name,
        dataset=whence.dataset,
        split=whence.split,
        split_digest=whence.digest,
        items_digest=suite.items_digest,
        n_items=len(suite.tasks),
        samples_per_item=suite.samples,
        sampling=suite.sampling,
        thinking=thinking(renderer),
        extractor=extractor_of(suite.grader),
        verifier=suite.grader.name,
        template_digest=renderer.digest,
        tokenizer_digest=tokenizer_digest(renderer),
        seed=seed,
        turns=suite.turns,
    )


def check_truncation(suites: Sequence[Suite], records: Mapping[str, EvalRecord]) -> None:
    """Apply `require_trustworthy` to the record of every suite that does not allow truncation."""
    for suite in suites:
        if not suite.allow_truncation:
            require_trustworthy(records[suite.name])


def _judged(
    suite: Suite, tasks: Sequence[Task], trajectories: Sequence[Trajectory], label: str = "", on_example: OnExample | None = None
) -> list[ItemResult]:
    """Results of `tasks`, whose samples stand together in `trajectories`; the first few are shown to `on_example`."""
    results = []
    for at, task in enumerate(tasks):
        outcomes = []
        for index, trajectory in enumerate(trajectories[at * suite.samples : (at + 1) * suite.samples]):
            judged = score(suite.grader, task, trajectory)
            outcomes.append(Outcome(judged.value, judged.status, trajectory.stop, trajectory.completion.trained))
            if on_example is not None and index == 0 and at < EXAMPLES:
                on_example(_example(label, suite, task, trajectory, judged))
        results.append(ItemResult(task.id, tuple(outcomes)))
    return results


def _example(label: str, suite: Suite, task: Task, trajectory: Trajectory, judged: Score) -> dict[str, Any]:
    turns = [message.content if len(task.prompt) == 1 else f"{message.role}: {message.content}" for message in task.prompt]
    return {
        "label": label,
        "suite": suite.name,
        "task": task.id,
        "index": trajectory.index,
        "prompt": "\n".join(turns),
        "completion": trajectory.transcript or trajectory.text,
        "gold": task.answer,
        "parsed": judged.parsed,
        "value": judged.value,
        "status": str(judged.status),
        "stop": str(trajectory.stop),
        "tokens": len(trajectory.ids),
        "detail": judged.detail,
    }


def _require_distinct(suites: Sequence[Suite]) -> None:
    names = [suite.name for suite in suites]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two suites are called '{name}'; give each its own name")
