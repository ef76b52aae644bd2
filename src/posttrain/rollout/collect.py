"""Tasks to groups: render the prompt, play each sibling's episode, score it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Group, Rollout, Tokens, Trajectory
from posttrain.engine.processes import Ranks
from posttrain.engine.types import Completion, Sampler
from posttrain.envs.types import EnvOf
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.types import Grader, score
from posttrain.rollout.episodes import Opening, play


@dataclass(frozen=True, slots=True)
class Collector:
    """Everything that turns a task into a group of scored rollouts."""

    sampler: Sampler
    renderer: ChatRenderer
    grader: Grader
    sampling: Sampling
    siblings: int
    """Completions per task."""
    ranks: Ranks
    env_of: EnvOf | None = None
    """Opens the world of an episode; None when a task is answered in one turn."""
    turns: int = 1
    """Most assistant turns of an episode."""


def collect(collector: Collector, tasks: Sequence[Task], seed: int, progress: Callable[[int], None] | None = None) -> list[Group]:
    """One group per task, in task order, on every rank; each rank draws and scores its share.

    `seed` names the stream of this call; each episode draws from (seed, place of the task in the call, sibling).
    """
    openings = [
        Opening(task, index, prompt, collector.sampling, derive(seed, place, index), collector.env_of, collector.turns)
        for place, task in collector.ranks.share(list(enumerate(tasks)))
        for prompt in [collector.renderer.prompt(task.prompt)]
        for index in range(collector.siblings)
    ]
    played = iter(play(collector.sampler, collector.renderer, openings, progress))
    mine = [opening.task for opening in openings[:: collector.siblings]]
    groups = [Group(task, tuple(_scored(collector, task, next(played)) for _ in range(collector.siblings))) for task in mine]
    return collector.ranks.interleave(groups)


def _scored(collector: Collector, task: Task, trajectory: Trajectory) -> Rollout:
    return Rollout(trajectory, score(collector.grader, task, trajectory))


def trajectory_of(collector: Collector, task: Task, index: int, prompt: Tokens, completion: Completion) -> Trajectory:
    """A completion as the trajectory of sibling `index`."""
    return Trajectory(
        task_id=task.id,
        index=index,
        prompt=prompt,
        ids=completion.ids,
        logps=completion.logps,
        stop=completion.stop,
        text=collector.renderer.decode(completion.ids),
        version=completion.version,
        versions=completion.versions,
        candidates=completion.candidates,
    )


def describe(group: Group, rollout: Rollout) -> dict[str, object]:
    """A rollout as the JSON record that a run keeps."""
    trajectory, outcome = rollout.trajectory, rollout.score
    return {
        "task": trajectory.task_id,
        "index": trajectory.index,
        "prompt": group.task.prompt[-1].content,
        "completion": trajectory.transcript or trajectory.text,
        "gold": group.task.answer,
        "parsed": outcome.parsed,
        "value": outcome.value,
        "status": outcome.status.value,
        "stop": trajectory.stop.value,
        "grader": outcome.grader,
        "tokens": len(trajectory.ids),
        "version": trajectory.version,
        "newest": max(trajectory.versions, default=trajectory.version),
    }
