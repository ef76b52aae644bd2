"""Real small runs: the package's loops, recorder, watch over the whole catalog and pulses, in seconds. What is sick about a run is a
setting, or an object handed to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.matrix.live_bases import base, draw, held_out, quiet, speech
from torch import nn

from posttrain.core.errors import Halted
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Sample
from posttrain.engine.nonfinite import Diverged
from posttrain.engine.trainer import Optim
from posttrain.engine.types import Sampler
from posttrain.envs.types import EnvOf
from posttrain.evals.pulse import Pulse
from posttrain.evals.suite import Suite
from posttrain.loops.guard import Guard
from posttrain.loops.preference import DPO, dpo
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, World
from posttrain.loops.session import Session
from posttrain.loops.sft import SFT, sft
from posttrain.objectives.objective import Objective
from posttrain.recipes.guarding import watch_of
from posttrain.recipes.single import DPORun, RLRun, SFTRun
from posttrain.rewards.graders import ExactTextGrader
from posttrain.rewards.types import Grader
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.samples import Pair
from posttrain.runs.run import Run

MODEL = "toy"
PULSED = 48
"""Held-out items of a pulse."""


@dataclass(frozen=True)
class Play:
    """A run of reinforcement learning. Factories give every run objects of its own.

    Example: Play(rl={"steps": 20, "lr": 0.3}) is 20 steps at a rate that is far too high
    """

    base: str = "guesser"
    rl: Mapping[str, Any] = field(default_factory=dict)
    """Over prompts=8, siblings=8, tries=1, a constant rate of 1e-3 after a tenth of warm-up; lr and schedule belong to the optimizer."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    grader: Callable[[], Grader] = ExactTextGrader
    draw: Callable[[], Callable[[int, int], Sequence[Task]]] = lambda: draw
    env_of: Callable[[], EnvOf] | None = None
    turns: int = 1
    sampler_of: Callable[[], Callable[[nn.Module], Sampler]] | None = None
    asynchronous: Async | None = None
    pulse_every: int = 4
    pulsed: Callable[[], Grader] = ExactTextGrader
    """The grader of the pulse, which judges what is wanted whatever is paid for."""
    pulse_sampling: Mapping[str, Any] | None = None
    pulse_tasks: Callable[[int], Sequence[Task]] = held_out
    alarms: str = "warn"


def settings_of(play: Play, seed: int) -> RLRun:
    """What the run is told, as its config.yaml keeps it."""
    told = {"steps": 40, "prompts": 8, "siblings": 8, "tries": 1.0, "keep_rollouts": 0, **play.rl}
    optim = {"lr": 1e-3, "schedule": "constant", "warmup": 0.1}
    optim |= {name: told.pop(name) for name in ("lr", "schedule", "clip", "warmup") if name in told}
    return RLRun(
        model=MODEL,
        seed=seed,
        save_every=50,
        turns=play.turns,
        sampling=Sampling.load({"max_tokens": 4, **play.sampling}),
        rl=RL.load({**told, "optim": optim}),
        objective=Objective.load({"kl": {"estimator": "k2", "coef": 1e-3}, **play.objective}),
        asynchronous=play.asynchronous,
        guard=Guard.load({"alarms": play.alarms, "pulse_every": play.pulse_every, "pulse_items": PULSED}),
    )


def world_of(play: Play, settings: RLRun) -> World:
    """What the policy practises on."""
    _, renderer = speech()
    env_of = None if play.env_of is None else play.env_of()
    measured = settings.sampling if play.pulse_sampling is None else Sampling.load(play.pulse_sampling)
    suite = Suite("pulse", tuple(play.pulse_tasks(PULSED)), play.pulsed(), measured, 1, True, env_of, play.turns)
    pulse = Pulse(suite, play.pulse_every) if play.pulse_every else None
    faster = None if play.sampler_of is None else play.sampler_of()
    return World(play.draw(), play.grader(), renderer, settings.sampling, None, env_of, play.turns, faster, pulse)


def played(folder: Path, seed: int, play: Play) -> Path:
    """The run directory of a run of reinforcement learning. A run that an alarm or a broken number ends is left as it is."""
    settings = settings_of(play, seed)
    world, model = world_of(play, settings), base(play.base)
    body = lambda session: rl(session, model, world, settings.rl, settings.objective, asynchronous=play.asynchronous)  # noqa: E731
    return recorded(folder, settings, "rl", body)


def imitated(folder: Path, seed: int, samples: Sequence[Sample], how: SFT, model: nn.Module) -> Path:
    """The run directory of supervised training."""
    settings = SFTRun(model=MODEL, seed=seed, save_every=50, task="arithmetic", sft=how)
    return recorded(folder, settings, "sft", lambda session: sft(session, model, samples, how))


def preferred(folder: Path, seed: int, pairs: Sequence[Pair], how: DPO, model: nn.Module) -> Path:
    """The run directory of preference training."""
    settings = DPORun(model=MODEL, seed=seed, save_every=50, data="pairs.jsonl", dpo=how)
    return recorded(folder, settings, "dpo", lambda session: dpo(session, model, pairs, how))


def recorded(
    folder: Path,
    settings: Any,
    name: str,
    body: Callable[[Session], nn.Module],
    before: Callable[[Session], None] | None = None,
    after: Callable[[Session, nn.Module], None] | None = None,
) -> Path:
    """Run one stage as the recipes do: the run's own recorder, the watch over the whole catalog, an entry when it ends. What is measured
    `before` and `after` it are stages of their own."""
    path = folder / "run"
    stages = [*(["eval.before"] if before else []), name, *(["eval.after"] if after else [])]
    run = Run.create(path, config=settings, command=["posttrain"], seeds={"seed": settings.seed}, stages=stages)
    session = quiet(run, settings.seed)
    session.save_every = settings.save_every
    session.guard, session.watcher = settings.guard, watch_of(settings, settings.guard)
    with closing(run):
        if before:
            before(session)
        with suppress(Halted, Diverged):
            with session.timed(name):
                trained = body(session)
            if after:
                after(session, trained)
        run.finish()
    return path


def sick(play: Play, **changes: Any) -> Callable[[Path, int], Path]:
    """How a fault is made: this run, changed."""
    return lambda folder, seed: played(folder, seed, dataclasses.replace(play, **changes))


def brisk(lr: float, epochs: int = 1, batch_size: int = 32, clip: float = 1.0) -> SFT:
    """Supervised settings with a warm-up and a linear rate."""
    return SFT(epochs=epochs, batch_size=batch_size, optim=Optim(lr=lr, clip=clip))
