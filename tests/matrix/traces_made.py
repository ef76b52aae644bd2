"""What a generated fault is: a stream of metrics lines from a seed, and the settings of the run that it belongs to."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.matrix.traces_healthy import SHAPES, state
from tests.matrix.traces_world import Law, Row, run_rows
from tests.matrix.traces_write import Kind, write

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Trace:
    """One generated fault.

    Example: Trace("F1", "sharpens to one stub within 30 steps", "rl", rows=lambda r: [...], twins=("F2",))
    """

    id: str
    what: str
    kind: Kind
    rows: Callable[[Rng], list[Row]]
    twins: tuple[str, ...] = ()
    """Look-alikes that must not be named above a note."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Dotted settings that differ from a sound configuration."""
    ended: bool = True
    stage: str | None = None

    def make(self, path: Path, seed: int) -> Path:
        """The run directory of a seed."""
        rows = self.rows(generator(self.id, self.what, seed))
        steps = {"rl": "rl.steps", "distill": "rl.steps"}.get(self.kind)
        changed = {**({steps: len(rows)} if steps else {}), **self.changed}
        return write(path / "run", self.kind, rows, changed, stage=self.stage, ended=self.ended)


def generator(*keys: object) -> Rng:
    """A generator of its own for every trace and seed."""
    return np.random.default_rng([zlib.crc32(str(key).encode()) for key in keys])


def onset(r: Rng, first: int, last: int) -> int:
    """A step at which a fault may set in."""
    return int(r.integers(first, last + 1))


def reinforced(
    id: str,
    what: str,
    laws: Callable[[Rng], Sequence[Law]] = lambda r: (),
    *,
    steps: int = 160,
    shape: str | None = None,
    twins: Sequence[str] = (),
    changed: Mapping[str, Any] | None = None,
    ended: bool = True,
    **given: Any,
) -> Trace:
    """A fault of reinforcement learning: how the policy starts (a healthy shape, or the usual one, with `given`), and its laws."""

    def rows(r: Rng) -> list[Row]:
        first, inner = SHAPES[shape] if shape else ({}, ())
        s = state(r, steps, **{**first, **given})
        return run_rows(s, (*inner, *laws(r)), r)

    constant = {"rl.optim.schedule": "constant"} if given.get("schedule") == "constant" else {}
    return Trace(id, what, "rl", rows, tuple(twins), {**constant, **(changed or {})}, ended)
