"""What the rest of the system needs of a renderer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from posttrain.core.tasks import Message
from posttrain.core.trajectory import Tokens


class Renderer(Protocol):
    """Messages to token ids and back; `digest` is the identity of the template."""

    @property
    def digest(self) -> str: ...

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        """The tokens that precede the assistant's answer."""
        ...

    def reply(self, before: Sequence[Message], messages: Sequence[Message]) -> Tokens:
        """The tokens between an assistant's turn, which ends `before`, and its next one; `messages` stand between the two."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, its stop token left out."""
        ...
