"""Where a step of reinforcement learning gets its groups: drawn now, by the weights in training, or ahead of it, by workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

from posttrain.core.errors import ConfigError
from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.engine.delivery import Delivery
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Sampler
from posttrain.loops.rl_settings import RL, World
from posttrain.loops.session import Stage
from posttrain.objectives.axes import EarlyExit
from posttrain.objectives.objective import Objective
from posttrain.rollout.asynchronous.build import build_live, frozen_copy, sampler_of
from posttrain.rollout.asynchronous.flow import Line
from posttrain.rollout.asynchronous.jobs import Source
from posttrain.rollout.asynchronous.live import Live
from posttrain.rollout.asynchronous.schedule import read_schedule
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.collect import Collector, collect
from posttrain.rollout.credit import carries_signal
from posttrain.rollout.dynamic import Filled, fill
from posttrain.rollout.early_exit import collect_early_exits
from posttrain.runs.recorder import schedule_name

STATE = "rollouts"
"""Name of the file in a checkpoint that holds what is in flight."""


class RolloutSource(Protocol):
    """Gives the groups of a step, and is told what became of them. All ranks ask together."""

    def fill(self, step: int, objective: Objective) -> Filled:
        """The groups of a step; `objective` says which carry signal."""
        ...

    def settle(self, filled: Filled, left: Mapping[str, int], objective: Objective) -> dict[str, float | int]:
        """Figures of the step's rollouts, after its update left out `left` of those kept."""
        ...


@contextmanager
def rollout_source(stage: Stage, world: World, settings: RL, objective: Objective, asynchronous: Async | None) -> Iterator[RolloutSource]:
    """The source of a stage; its workers end with the block."""
    if asynchronous is None:
        yield Synchronous(stage, world, settings, objective)
        return
    source = Asynchronous(stage, world, settings, asynchronous)
    try:
        yield source
    finally:
        source.close()


def _collector(stage: Stage, world: World, settings: RL, sampler: Sampler) -> Collector:
    return Collector(
        sampler, world.renderer, world.grader, world.sampling, settings.siblings, stage.session.ranks, world.env_of, world.turns
    )


class Synchronous:
    """Draws a step's groups when they are asked for, by a sampler that reads the trainer's own weights.

    Every step has a sampler of its own: what one remembers of earlier steps changes last digits, and a resumed run has not seen them.
    """

    def __init__(self, stage: Stage, world: World, settings: RL, objective: Objective):
        self._stage, self._world, self._settings = stage, world, settings
        self._how = partial(collect_early_exits, how=objective.drawing) if isinstance(objective.drawing, EarlyExit) else collect

    def fill(self, step: int, objective: Objective) -> Filled:
        """See RolloutSource."""
        trainer, world, settings = self._stage.trainer, self._world, self._settings
        seed, name = self._stage.session.seed, self._stage.name
        signal = partial(carries_signal, objective=objective)
        with trainer.reading() as model:
            plain = partial(LocalSampler, stop_ids=world.renderer.stop_ids, control_ids=world.renderer.special_ids)
            delivery = Delivery(model, (world.sampler_of or plain)(model))
            delivery.send(trainer.version)
            collector = _collector(self._stage, world, settings, cast(Sampler, delivery))
            tasks = task_stream(seed, name, step, world)
            return fill(collector, tasks, settings.prompts, settings.tries, derive(seed, name, step), signal, self._how)

    def settle(self, filled: Filled, left: Mapping[str, int], objective: Objective) -> dict[str, float | int]:
        """Nothing is in flight."""
        return {}


class Asynchronous:
    """Takes groups that workers draw ahead. The first rank has the workers; the others get the groups from it."""

    def __init__(self, stage: Stage, world: World, settings: RL, asynchronous: Async):
        self._stage, self._settings = stage, settings
        self._published: int | None = None
        self._live: Live | None = None
        kept = stage.keep(STATE, self._save)
        model = stage.trainer.plain() if stage.trainer.together else stage.trainer.model
        if not stage.session.ranks.first:
            return
        collector = _collector(stage, world, settings, LocalSampler(model, world.renderer.stop_ids, world.renderer.special_ids))
        source = Source(world.draw, collector, stage.session.seed, stage.name)
        ahead, make = asynchronous.ahead(settings.updates), sampler_of(model, world.renderer)
        script = script_of(asynchronous, stage.name, resumed=stage.first > 0)
        self._live = build_live(asynchronous, source, ahead, settings.steps, make, script)
        if kept:
            self._live.restore(kept[0])

    def fill(self, step: int, objective: Objective) -> Filled:
        """See RolloutSource. A resumed stage publishes its weights before anything is drawn."""
        version, weights = self._stage.trainer.version, None
        if self._published != version:
            weights, self._published = self._copy(), version
        signal = partial(carries_signal, objective=objective)
        filled = None
        if self._live is not None:
            filled = self._live.fill(step, version, weights, self._settings.prompts, self._settings.tries, signal)
        filled = self._stage.session.ranks.first_says(filled)
        assert filled is not None
        return filled

    def settle(self, filled: Filled, left: Mapping[str, int], objective: Objective) -> dict[str, float | int]:
        """See RolloutSource; also writes the schedule so far."""
        if self._live is None:
            return {}
        figures = self._live.settle(filled, left, objective)
        self._write()
        return figures

    def close(self) -> None:
        """End the workers."""
        if self._live is not None:
            self._live.close()

    def _copy(self) -> nn.Module | None:
        """The model as it is now; None where nobody needs it."""
        trainer = self._stage.trainer
        if trainer.together:
            return trainer.plain()
        return frozen_copy(trainer.model) if self._live is not None else None

    def _save(self) -> Any:
        """What is in flight; the schedule that led to it is written first, so that a checkpoint holds both at one place."""
        return self._write(state=True)

    def _write(self, state: bool = False) -> Any:
        if self._live is None:
            return None
        lines, found = self._live.save(state)
        for line in lines:
            self._stage.session.run.schedule(self._stage.name, line)
        return found


def script_of(asynchronous: Async, stage: str, *, resumed: bool) -> list[Line]:
    """The schedule to replay; empty when there is none to. Raises ConfigError for a replay that is resumed, RunError without a schedule."""
    if asynchronous.replay is None:
        return []
    if resumed:
        raise ConfigError("a replay cannot be resumed, since it draws ahead of its own records; start it again in another --out")
    given = Path(asynchronous.replay)
    return read_schedule(given / schedule_name(stage) if given.is_dir() else given)


def task_stream(seed: int, name: str, step: int, world: World) -> Callable[[int], Sequence[Task]]:
    """Tasks for one step: each call within the step continues its own stream."""
    calls = iter(range(1 << 30))
    return lambda n: world.draw(n, derive(seed, name, "tasks", step, next(calls)))
