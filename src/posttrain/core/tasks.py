"""What is asked: messages and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.core.digest import digest

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Example: Message("user", "Compute 2 + 3.")
    """

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance: what is asked, and what a grader needs to judge the answer.

    Example: Task(id="add-2-3", prompt=(Message("user", "Compute 2 + 3."),), answer="5", meta={"op": "+"})
    """

    id: str
    prompt: tuple[Message, ...]
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A finished conversation to imitate: every assistant turn of `messages` is trained.

    Example: Demonstration("row-7", (Message("user", "hi"), Message("assistant", "hello")))
    """

    id: str
    messages: tuple[Message, ...]


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Identity of an ordered list of tasks: ids, prompts and answers, not metadata."""
    return digest([[task.id, [[m.role, m.content] for m in task.prompt], task.answer] for task in tasks])
