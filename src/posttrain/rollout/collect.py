"""Tasks to groups: render the prompt, draw siblings, score each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Group, Rollout, Tokens, Trajectory
from posttrain.engine.processes import Ranks
from posttrain.engine.types import Completion, Request, Sampler
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.types import Grader, score


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


def collect(collector: Collector, tasks: Sequence[Task], seed: int, progress: Callable[[int], None] | None = None) -> list[Group]:
    """One group per task, in task order, on every rank; each rank draws and scores its share.

    `seed` names the stream of this call; each completion draws from (seed, place of the task in the call, sibling).
    """
    mine = collector.ranks.share(list(enumerate(tasks)))
    prompts = [collector.renderer.prompt(task.prompt) for _, task in mine]
    requests = [
        Request(prompt.ids, collector.sampling, derive(seed, place, index))
        for (place, _), prompt in zip(mine, prompts, strict=True)
        for index in range(collector.siblings)
    ]
    completions = iter(collector.sampler.generate(requests, progress))
    groups = []
    for (_, task), prompt in zip(mine, prompts, strict=True):
        trajectories = [trajectory_of(collector, task, index, prompt, next(completions)) for index in range(collector.siblings)]
        groups.append(Group(task, tuple(Rollout(t, score(collector.grader, task, t)) for t in trajectories)))
    return collector.ranks.interleave(groups)


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
    )


def describe(group: Group, rollout: Rollout) -> dict[str, object]:
    """A rollout as the JSON record that a run keeps."""
    trajectory, outcome = rollout.trajectory, rollout.score
    return {
        "task": trajectory.task_id,
        "index": trajectory.index,
        "prompt": group.task.prompt[-1].content,
        "completion": trajectory.text,
        "gold": group.task.answer,
        "parsed": outcome.parsed,
        "value": outcome.value,
        "status": outcome.status.value,
        "stop": trajectory.stop.value,
        "grader": outcome.grader,
        "tokens": len(trajectory.ids),
        "version": trajectory.version,
    }
