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
from posttrain.objectives.objective import Objective, check_siblings
from posttrain.objectives.surrogates import SURROGATES, Surrogate
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.types import Grader
from posttrain.rollout.pack import Packing


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
    packing: Packing = Packing()
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
    `sampling` says how completions are drawn, `teacher` is asked by objectives with advantage=teacher."""

    draw: Callable[[int, int], Sequence[Task]]
    grader: Grader
    renderer: ChatRenderer
    sampling: Sampling
    teacher: nn.Module | None = None


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
    if objective.kl.used and objective.kl.estimator in ("full", "top_k") and (sampling.top_k or sampling.top_p < 1):
        raise ConfigError(
            f"kl.estimator={objective.kl.estimator} sums over the vocabulary, and top-k or top-p sampling cuts policy and reference "
            "differently; use kl.estimator=k2, or sampling.top_p=1 and top_k=0"
        )
    if objective.ratio == "none" and settings.updates > 1:
        raise ConfigError(
            f"ratio=none is on-policy, and {settings.updates} updates per sampling phase are not; use minibatches=1 and epochs=1, "
            "or ratio=token"
        )


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
