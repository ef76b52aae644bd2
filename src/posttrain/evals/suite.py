"""A suite: fixed items, grader and decoding, decided before any model is measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from posttrain.core.config import Config
from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Task, tasks_digest
from posttrain.envs.types import EnvOf, TaskSource
from posttrain.rewards.types import Grader


@dataclass(frozen=True, slots=True)
class Origin:
    """Where items come from. Example: Origin("arithmetic", split="held_out", digest="51d0...")"""

    dataset: str
    split: str
    digest: str
    """Identity of what they were drawn from."""


def origin_of(source: TaskSource, split: str) -> Origin:
    """The origin of tasks drawn from `split` of a source: the source with its settings, and the split."""
    settings = source.model_dump(mode="json") if isinstance(source, Config) else None
    return Origin(source.name, split, digest([type(source).__name__, source.name, settings, split]))


@dataclass(frozen=True, slots=True)
class Suite:
    """What is asked, how often, how it is decoded and judged.

    Example: Suite("arithmetic", tasks, grader, Sampling(temperature=0.0, max_tokens=24), samples=1)
    """

    name: str
    tasks: tuple[Task, ...]
    grader: Grader
    sampling: Sampling
    samples: int
    """Samples per item."""
    allow_truncation: bool = False
    """Accept any share of cut completions, e.g. for a base model that has not learned to stop. The rate is reported either way."""
    env_of: EnvOf | None = None
    """Opens the world of an episode; None when an item is answered in one turn."""
    turns: int = 1
    """Most assistant turns of an episode."""
    origin: Origin | None = None
    """Where the tasks come from; None for tasks that the caller handed over, which are their own origin."""

    def __post_init__(self) -> None:
        if len(self.tasks) < 2:
            raise ConfigError(f"suite '{self.name}' has {len(self.tasks)} items; an interval needs at least 2")
        if self.samples < 1:
            raise ConfigError(f"suite '{self.name}' draws {self.samples} samples per item; draw at least 1")
        if self.samples > 1 and self.sampling.greedy:
            raise ConfigError(
                f"suite '{self.name}' draws {self.samples} greedy samples, which are all equal; set samples=1 or temperature > 0"
            )
        name, count = Counter(task.id for task in self.tasks).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"suite '{self.name}' has {count} items with id '{name}'; give each item its own id")

    @property
    def items_digest(self) -> str:
        """Identity of the items in their order."""
        return tasks_digest(self.tasks)

    @property
    def whence(self) -> Origin:
        """The origin, stated or not."""
        return self.origin or Origin(self.name, "given", self.items_digest)
