"""What a run of the RL loop is told: its sizes, the critic's, and the world it practises on; and what is refused before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator
from torch import nn

from posttrain.checks.user_function import load, names_a_file
from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Task
from posttrain.engine.trainer import Optim
from posttrain.engine.types import Sampler
from posttrain.envs.types import EnvOf
from posttrain.evals.pulse import Pulse
from posttrain.objectives.axes import EarlyExit, NoCorrection
from posttrain.objectives.objective import Objective, check_siblings
from posttrain.objectives.surrogates import SURROGATES, Surrogate
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.types import Grader
from posttrain.rollout.asynchronous.settings import Async


class CriticSettings(Config):
    """The value function of objectives with advantage=critic."""

    optim: Optim = Optim(lr=1e-3, schedule="constant", warmup=0.0)
    clip: float | None = Field(default=0.2, gt=0)
    """Value clipping around the values of the phase's start; None turns it off."""
    warmup: int = Field(default=10, ge=0)
    """Steps in which only the critic learns."""


DEFAULT_CRITIC = CriticSettings()


class RL(Config):
    """Settings of the loop; what is optimised is the objective."""

    steps: int = Field(default=100, ge=1)
    prompts: int = Field(default=16, ge=1)
    """Groups per step."""
    siblings: int = Field(default=8, ge=1)
    """Completions per prompt."""
    tries: float = Field(default=2.0, ge=1)
    """Dynamic sampling: at most tries * prompts groups are generated to fill a step; 1 turns it off."""
    minibatches: int = Field(default=1, ge=1)
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's rollouts; minibatches * epochs optimizer steps follow each sampling phase."""
    optim: Optim = Optim(lr=1e-4, schedule="constant", warmup=0.1)
    keep_rollouts: int = Field(default=1, ge=0)
    """Groups per step written to the run's records in full."""
    patience: int = Field(default=10, ge=1)
    """End early after this many steps in a row without any signal."""

    @model_validator(mode="after")
    def _divides(self) -> RL:
        if self.prompts % self.minibatches:
            raise ValueError(
                f"{self.prompts} prompts do not divide into {self.minibatches} minibatches; make prompts a multiple of minibatches, "
                f"e.g. {self.prompts - self.prompts % self.minibatches + self.minibatches}"
            )
        return self

    @property
    def updates(self) -> int:
        """Optimizer steps per sampling phase."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True)
class World:
    """What the policy practises on: `draw(n, seed)` gives n training tasks, `grader` judges, `renderer` speaks the model's language,
    `sampling` says how completions are drawn, `teacher` is asked by objectives with advantage=teacher, `env_of` opens the world of an
    episode of at most `turns` assistant turns, `sampler_of` makes a faster sampler, proven by checks/acceleration.py, over the model in
    training, `pulse` is measured now and then on held-out items."""

    draw: Callable[[int, int], Sequence[Task]]
    grader: Grader
    renderer: ChatRenderer
    sampling: Sampling
    teacher: nn.Module | None = None
    env_of: EnvOf | None = None
    turns: int = 1
    sampler_of: Callable[[nn.Module], Sampler] | None = None
    pulse: Pulse | None = None


def check(settings: RL, objective: Objective, sampling: Sampling, *, teacher: bool) -> None:
    """Refuse what cannot work before anything is computed; `teacher` says whether there is one."""
    if sampling.greedy:
        raise ConfigError("sampling.temperature = 0 draws identical siblings; training needs a temperature above 0, e.g. 1.0")
    surrogate_of(objective)
    try:
        check_siblings(objective, settings.siblings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if objective.needs_teacher and not teacher:
        raise ConfigError("advantage=teacher needs a teacher; give one (teacher=MODEL), or choose another advantage")
    if objective.kl.used and objective.kl.estimator in ("full", "top_k") and sampling.cuts:
        raise ConfigError(
            f"kl.estimator={objective.kl.estimator} sums over the vocabulary, and a top-k, top-p or min-p cut leaves policy and "
            "reference different parts of it; use kl.estimator=k2, or sampling.top_k=0, top_p=1 and min_p=0"
        )
    if objective.ratio == "none" and settings.updates > 1:
        raise ConfigError(
            f"ratio=none is on-policy, and {settings.updates} updates per sampling phase are not; use minibatches=1 and epochs=1, "
            "or ratio=token"
        )


def check_asynchronous(asynchronous: Async | None, settings: RL, objective: Objective) -> list[str]:
    """Refuse what cannot be drawn ahead of training; returns warnings about what can and is biased."""
    if asynchronous is None:
        return []
    asynchronous.ahead(settings.updates)
    if isinstance(objective.drawing, EarlyExit):
        raise ConfigError(
            "drawing=early_exit cuts a finished chain and asks again, which workers do not do; use drawing=siblings, or leave out "
            "asynchronous"
        )
    corrected = not isinstance(objective.correction, NoCorrection) or objective.against == "behaviour" or objective.surrogate is not None
    if asynchronous.bound == 0 or corrected:
        return []
    if objective.ratio == "none":
        raise ConfigError(
            f"ratio=none is on-policy, and asynchronous.bound = {asynchronous.bound} trains on rollouts of older policies; use "
            "objective.correction=truncate, another ratio, or asynchronous.bound=0"
        )
    return [
        f"asynchronous.bound = {asynchronous.bound} trains on rollouts of older policies, and correction=none weighs them as if this one "
        "had drawn them; objective.correction=truncate or decoupled, or objective.against=behaviour, accounts for it"
    ]


def check_episodes(env_of: EnvOf | None, objective: Objective) -> None:
    """Refuse what cannot play episodes of several turns."""
    if env_of is None:
        return
    if isinstance(objective.drawing, EarlyExit):
        raise ConfigError("drawing=early_exit cuts a single answer, and this task has tools to call; use drawing=siblings")


def surrogate_of(objective: Objective) -> Surrogate | None:
    """The objective's own loss per token: by its name, or from the user's file. Raises ConfigError when there is none of that name."""
    name = objective.surrogate
    if name is None or name in SURROGATES:
        return SURROGATES[name] if name else None
    if not names_a_file(name):
        raise ConfigError(f"unknown surrogate '{name}'; known: {', '.join(SURROGATES)}, or your own as path.py:function")
    user = load(name)
    if user.kind != "objective":
        raise ConfigError(f"'{name}' is {user.kind}, not an objective; a surrogate takes (streams) and returns a loss per token")
    return user.call
