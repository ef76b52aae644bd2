"""Faults that are generated streams, written as real run directories: what cannot occur within seconds of a real run on a CPU.

Each is healthy training whose dynamics change as the sources tell it; the catalog's thresholds were set by others from the same sources.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.matrix.injection import Fault, by_doctor
from tests.matrix.traces_healthy import SHAPES, healthy
from tests.matrix.traces_made import Trace, generator
from tests.matrix.traces_other import OTHER, distilled, preference, supervised
from tests.matrix.traces_reinforced import POLICY, REWARD
from tests.matrix.traces_seam import MACHINES, SEAM
from tests.matrix.traces_world import run_rows
from tests.matrix.traces_write import named, write

TRACES: tuple[Trace, ...] = (*POLICY, *REWARD, *SEAM, *MACHINES, *OTHER)
FAULTS: tuple[Fault, ...] = tuple(
    Fault(trace.id, "trace", trace.what, make=trace.make, name=partial(named, trace.id), seconds=0.5) for trace in TRACES
)
WELL: tuple[str, ...] = (*SHAPES, "imitation", "pairs", "distillation")
"""Healthy training of every kind."""
PAIRS: tuple[tuple[str, ...], ...] = (
    ("F1", "F2"),
    ("F1", "S4"),
    ("S3", "S2"),
    ("S6", "F1"),
    ("S5", "S2"),
    ("F3", "S43", "F4"),
    ("F6", "S20"),
    ("S60", "F12", "S51"),
    ("F7", "S93"),
    ("S70", "P12", "S72"),
)
"""Look-alikes: each names its own id, and none of the others above a note."""


def make_well(shape: str, path: Path, seed: int) -> Path:
    """A healthy run directory."""
    r = generator("healthy", shape, seed)
    if shape == "imitation":
        return write(path / "run", "sft", supervised(int(r.integers(60, 200)), r))
    if shape == "pairs":
        return write(path / "run", "dpo", preference(int(r.integers(60, 200)), r))
    if shape == "distillation":
        steps = int(r.integers(60, 200))
        return write(path / "run", "distill", distilled(steps, r), {"rl.steps": steps})
    s, laws = healthy(shape, r)
    changed = {"rl.steps": s.steps, "rl.tries": s.tries, "rl.optim.schedule": s.schedule}
    return write(path / "run", "rl", run_rows(s, laws, r), changed)


def _make_some(first: int, path: Path, seed: int) -> Path:
    """Shapes in turn, so that twenty seeds see all of them."""
    return make_well(WELL[seed % len(WELL)], path, first + seed)


HEALTHY: tuple[Fault, ...] = tuple(
    Fault("healthy", "trace", f"generated streams of all shapes from seed {first} on", make=partial(_make_some, first), name=by_doctor)
    for first in (0, 500)
)
