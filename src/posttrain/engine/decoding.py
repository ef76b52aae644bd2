"""What a decoder does, whatever model it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Context(NamedTuple):
    """What a row that enters reads: its prompt, which it may share, and what was drawn after it before."""

    prompt: tuple[int, ...]
    drawn: tuple[int, ...] = ()


class Decoder(Protocol):
    """Next-token logits for the living rows. Rows are numbered in the order in which they entered."""

    joins: bool
    """Whether rows may enter while others live, and siblings keep only one copy of their prompt."""

    def bytes_per_token(self) -> int:
        """Cache bytes that one token of one row takes."""
        ...

    def enter(self, contexts: Sequence[Context]) -> Tensor:
        """Read what each new row has to read; logits [new rows, V] of its next token."""
        ...

    def step(self, ids_R: Tensor) -> Tensor:
        """Append one token to each living row; logits [rows, V] of the next."""
        ...

    def remember(self, row: int, drawn: Sequence[int]) -> None:
        """Keep what row `row` computed, the tokens `drawn` after its prompt, for a later prompt that begins so."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows live on."""
        ...
