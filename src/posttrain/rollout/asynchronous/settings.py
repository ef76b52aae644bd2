"""Settings of asynchronous rollouts. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError

Order = Literal["due", "issue", "arrival"]


class Async(Config):
    """How far rollouts may run ahead of training, and who draws them.

    A group is issued at most `bound` optimizer steps before it is trained, so no token can be older than that; see `ahead`.
    """

    bound: int = Field(default=1, ge=0)
    """Largest age, in optimizer steps, of any token of a trained completion; 0 waits for every rollout of a step before training on it."""
    workers: int = Field(default=1, ge=1)
    """Samplers that draw at the same time, each with weights of its own."""
    rows: int = Field(default=256, ge=1)
    """Most completions that one worker draws together."""
    chunk: int = Field(default=32, ge=1)
    """Most tokens a worker adds to each of its completions before it looks for new weights; longer completions go on with those."""
    order: Order = "due"
    """due: as they arrive, but a group whose turn can wait no longer is waited for. issue: strictly as issued. arrival: as they arrive, and
    a group that is too old is thrown away and its task issued again; slow tasks then lose (measured: design/0003-asynchronous.md)."""
    engine: Literal["threads", "processes", "ray"] = "threads"
    """Where the workers live: threads of this process, processes of this machine, or Ray actors (extra `ray`)."""
    replay: str | None = None
    """A run directory, or its rollouts/<stage>.schedule.jsonl: draw and train exactly what that run did, in one thread."""

    def ahead(self, updates: int) -> int:
        """Training steps of `updates` optimizer steps each that a group may be issued before it is trained.

        Example: bound 5 with 2 updates per step is 2 steps ahead: at most 4 optimizer steps old.
        """
        if 0 < self.bound < updates:
            raise ConfigError(
                f"asynchronous.bound = {self.bound} is less than the {updates} optimizer steps of one training step, so nothing could be "
                f"drawn ahead; use bound >= {updates}, or 0 to wait for every step's rollouts"
            )
        return self.bound // updates

    def describe(self, updates: int, prompts: int) -> str:
        """In words, for the batch equation: groups of a step and the optimizer steps of one."""
        if self.replay is not None:
            return f"rollouts replayed from {self.replay}"
        inside = f"{(self.ahead(updates) + 1) * prompts} groups in flight, no token older than {self.bound} optimizer step(s)"
        return f"{self.workers} asynchronous worker(s) as {self.engine}, at most {inside}, {self.chunk} tokens between weight swaps"
