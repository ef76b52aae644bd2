"""Where a number stopped being finite: told once a step has failed, at no cost to the steps that do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.core.errors import PosttrainError
from posttrain.engine.batch import Batch

SHOWN = 8
"""Most rows named in a message; the fields hold all."""


@dataclass(frozen=True, slots=True)
class Place:
    """A micro-batch. Example: Place(process=0, micro_batch=1, of=4, rows=(6, 7)): the second of the four of the first process, which
    holds the rows 6 and 7 of the step."""

    process: int | None
    """None for all of them: gradients of a divided model are sums over processes before anybody sees them."""
    micro_batch: int
    """Counted from 0, within its process."""
    of: int
    rows: tuple[int, ...]
    """Identity of each row in the step (`Batch.row_B`), or its place in the list that was packed (`Batch.sample_B`)."""

    def __str__(self) -> str:
        more = f" and {len(self.rows) - SHOWN} more" if len(self.rows) > SHOWN else ""
        rows = ", ".join(map(str, self.rows[:SHOWN])) or "none"
        whose = "every process" if self.process is None else f"process {self.process}"
        return f"micro-batch {self.micro_batch} of {self.of} of {whose} (rows {rows}{more})"


@dataclass(frozen=True, slots=True)
class Trace:
    """What was not finite in a step that was not taken.

    Example: Trace(step=7, what="gradient", loss=0.31, norm=nan, parameters=("model.norm.weight",), trainable=20, place=Place(...))
    """

    step: int
    """Optimizer step, counted from 0."""
    what: Literal["loss", "gradient"]
    """Which came first: a loss that is not finite makes gradients that are not, and then it is the loss."""
    loss: float
    norm: float
    parameters: tuple[str, ...]
    """Names of those whose gradient is not finite, in the model's order; none when only the norm overflowed."""
    trainable: int
    """How many parameters there are."""
    place: Place | None
    """The first micro-batch with it; None when each alone is finite and only the sum is not."""

    def __str__(self) -> str:
        where = str(self.place) if self.place else "the sum over micro-batches: each alone is finite"
        if self.what == "loss":
            return f"{where}, whose loss is not finite"
        named = f", first '{self.parameters[0]}'" if self.parameters else ""
        return f"{where}, where the gradient of {len(self.parameters)} of {self.trainable} parameters is not finite{named}"


class Diverged(PosttrainError):
    """A loss or gradient became NaN or infinite. The step was not taken; weights and optimizer state are as they were before it."""

    exit_code = 4

    def __init__(self, message: str, trace: Trace | None = None):
        super().__init__(message)
        self.trace = trace

    @classmethod
    def at(cls, trace: Trace, lr: float) -> Diverged:
        """With the message that a user reads."""
        return cls(
            f"loss {trace.loss} and gradient norm {trace.norm} at optimizer step {trace.step}: the step was not taken; "
            f"lower optim.lr (now {lr:g}), lengthen optim.warmup, or look at {trace}",
            trace,
        )


def rows_of(batch: Batch | None) -> tuple[int, ...]:
    """The rows of a micro-batch by their identity in the step; of none when a process had no work left."""
    return () if batch is None else batch.row_B or batch.sample_B


def first_bad(losses: Sequence[float]) -> int | None:
    """Index of the first that is not finite. Example: of (0.5, nan, inf): 1."""
    return next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)


def broken(gradients: Mapping[str, Tensor | None]) -> list[str]:
    """Names of the gradients with a number that is not finite."""
    return [name for name, gradient in gradients.items() if gradient is not None and not bool(torch.isfinite(gradient).all())]


def in_order(names: Iterable[str], found: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Those of `names` that any process found, in the order of `names`."""
    everywhere = {name for part in found for name in part}
    return tuple(name for name in names if name in everywhere)
