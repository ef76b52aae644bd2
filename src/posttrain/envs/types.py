"""What a source of tasks is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from posttrain.core.errors import ConfigError
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.rewards.types import Grader

Split = Literal["train", "held_out", "harder"]
SPLITS: tuple[Split, ...] = ("train", "held_out", "harder")


class TaskSource(Protocol):
    """Tasks with known answers. Train and held-out tasks never share a prompt, whatever the seeds.

    `tasks("train", n, seed)` draws n tasks for that seed and may repeat some; `tasks("held_out", n, seed)` and `tasks("harder", n, seed)`
    ignore the seed, never repeat, and grow by appending: the first 50 of 100 are the 50. A split that a source lacks, and more tasks than
    exist, are a ConfigError.
    """

    @property
    def name(self) -> str: ...

    @property
    def grader(self) -> Grader: ...

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """`n` tasks of `split`."""
        ...

    def gold(self, task: Task) -> str:
        """A completion that the grader scores 1."""
        ...

    def wrong(self, task: Task) -> str:
        """A completion in the right form that the grader scores 0."""
        ...

    def demonstration(self, task: Task) -> Demonstration:
        """The task with its gold completion, to imitate."""
        ...


class Env(Protocol):
    """The world of one episode. Single use: every sibling gets its own, so that none sees what another did (spec/faults.md 60)."""

    def reply(self, text: str) -> tuple[Message, ...]:
        """What the world says to an assistant's turn; nothing ends the episode."""
        ...


EnvOf = Callable[[Task], Env]
"""Opens the world of one episode of a task."""


def env_of(source: object) -> EnvOf | None:
    """How `source` opens episodes of several turns; None when its tasks are answered in one."""
    return getattr(source, "env", None)


def demonstrate(task: Task, gold: str) -> Demonstration:
    """`task` answered by `gold`."""
    return Demonstration(task.id, (*task.prompt, Message("assistant", gold)))


def check_request(source: str, split: str, n: int) -> Split:
    """The split as a literal; ConfigError for an unknown split or fewer than one task."""
    if n < 1:
        raise ConfigError(f"{source}: asked for {n} tasks; ask for at least 1")
    for known in SPLITS:
        if split == known:
            return known
    raise ConfigError(f"{source}: unknown split '{split}'; use {', '.join(SPLITS)}")


def first(source: str, split: str, tasks: list[Task], n: int, remedy: str) -> list[Task]:
    """The first `n` of `tasks`; ConfigError with the number that exists when there are fewer."""
    if len(tasks) < n:
        raise ConfigError(f"{source}: {n} {split} tasks asked for, {len(tasks)} exist; ask for fewer or {remedy}")
    return tasks[:n]
