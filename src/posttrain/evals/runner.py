"""Run suites: episodes out, trajectories back, records made. Two pure functions, and `evaluate`, which joins them with a sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Score, Trajectory
from posttrain.engine.types import Sampler
from posttrain.evals.record import Conditions, EvalRecord, ItemResult, Outcome, require_trustworthy
from posttrain.evals.suite import Suite
from posttrain.render.types import Renderer
from posttrain.rewards.types import score
from posttrain.rollout.episodes import Opening, play

EXAMPLES = 6
"""Items per suite of which the first sample is passed to `on_example`."""

OnExample = Callable[[dict[str, Any]], None]


def evaluate(
    sampler: Sampler,
    renderer: Renderer,
    suites: Sequence[Suite],
    *,
    seed: int,
    label: str,
    progress: Callable[[int], None] | None = None,
    on_example: OnExample | None = None,
    model_digest: str = "",
) -> dict[str, EvalRecord]:
    """Measure one model on every suite, all episodes side by side; records by suite name.

    Episodes are seeded by (seed, suite, item, sample), never by the model, so that two models answer under the same noise. Raises
    EvidenceError when a suite that does not allow truncation had 2 % or more of its completions cut.
    """
    trajectories = play(sampler, renderer, openings_for(suites, renderer, seed), progress)
    records = records_from(suites, trajectories, renderer, seed=seed, label=label, on_example=on_example, model_digest=model_digest)
    check_truncation(suites, records)
    return records


def openings_for(suites: Sequence[Suite], renderer: Renderer, seed: int) -> list[Opening]:
    """One episode per suite, item and sample, in that order; samples of one item stand together and share their prompt."""
    _require_distinct(suites)
    return [
        Opening(task, index, prompt, suite.sampling, derive(seed, "eval", suite.name, task.id, index), suite.env_of, suite.turns)
        for suite in suites
        for task in suite.tasks
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
    on_example: OnExample | None = None,
    model_digest: str = "",
) -> dict[str, EvalRecord]:
    """Score the trajectories of `openings_for(suites, renderer, seed)`, in that order. Raises EvidenceError if any is missing."""
    _require_distinct(suites)
    expected = sum(len(suite.tasks) * suite.samples for suite in suites)
    if len(trajectories) != expected:
        raise EvidenceError(f"{len(trajectories)} trajectories for {expected} evaluation episodes; none may be dropped or repeated")
    results: dict[str, list[ItemResult]] = {suite.name: [] for suite in suites}
    remaining = iter(trajectories)
    for suite, task in [(s, task) for s in suites for task in s.tasks]:
        outcomes = []
        for index in range(suite.samples):
            trajectory = next(remaining)
            judged = score(suite.grader, task, trajectory)
            outcomes.append(Outcome(judged.value, judged.status, trajectory.stop, trajectory.completion.trained))
            if on_example is not None and index == 0 and len(results[suite.name]) < EXAMPLES:
                on_example(_example(label, suite, task, trajectory, judged))
        results[suite.name].append(ItemResult(task.id, tuple(outcomes)))
    return {suite.name: EvalRecord(_conditions(suite, renderer, seed), label, model_digest, tuple(results[suite.name])) for suite in suites}


def check_truncation(suites: Sequence[Suite], records: Mapping[str, EvalRecord]) -> None:
    """Apply `require_trustworthy` to the record of every suite that does not allow truncation."""
    for suite in suites:
        if not suite.allow_truncation:
            require_trustworthy(records[suite.name])


def _conditions(suite: Suite, renderer: Renderer, seed: int) -> Conditions:
    return Conditions(
        suite=suite.name,
        items_digest=suite.items_digest,
        n_items=len(suite.tasks),
        samples_per_item=suite.samples,
        sampling=suite.sampling,
        grader=suite.grader.name,
        template_digest=renderer.digest,
        seed=seed,
        turns=suite.turns,
    )


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
