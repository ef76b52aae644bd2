"""Healthy real runs of every kind, in which nothing above a note may be named; and a judge for runs that were made elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.matrix.injection import Fault, Named, by_doctor, by_run
from tests.matrix.live import EPISODES, pairs_of
from tests.matrix.live_bases import base, samples_of, untrained
from tests.matrix.live_runs import Play, brisk, imitated, preferred, sick

from posttrain.engine.trainer import Optim
from posttrain.loops.preference import DPO
from posttrain.rollout.asynchronous.settings import Async

CALM = {"steps": 40, "prompts": 16, "lr": 4e-4, "schedule": "cosine"}
"""Reinforcement learning that learns its task and stays itself."""


def imitation(folder: Path, seed: int) -> Path:
    """Supervised training from a random model."""
    return imitated(folder, seed, samples_of("guesser", 512, seed), brisk(5e-3, epochs=3), untrained(seed))


def preference(folder: Path, seed: int) -> Path:
    """Preference training on right letters against wrong ones."""
    return preferred(folder, seed, pairs_of(640, seed), DPO(batch_size=16, optim=Optim(lr=2e-4)), base("guesser"))


def _well(what: str, make: object, seconds: float) -> Fault:
    return Fault("healthy", "run", what, make, by_run, seconds)  # type: ignore[arg-type]


HEALTHY = (
    _well("a real run: imitation", imitation, 1.0),
    _well("a real run: preferences", preference, 1.0),
    _well("a real run: reinforcement learning", sick(Play(rl=CALM)), 4.0),
    _well("a real run: rollouts drawn ahead", sick(Play(rl=CALM, asynchronous=Async(bound=1), objective={"correction": "truncate"})), 6.0),
    _well("a real run: episodes with a tool", sick(EPISODES, rl=CALM | {"steps": 16, "prompts": 8}), 6.0),
)
"""All of them."""


def judged(folders: Iterable[Path]) -> list[tuple[str, Named]]:
    """What the doctor names in run directories that were made elsewhere, such as a ladder over many seeds."""
    return [(folder.name, by_doctor(folder)) for folder in folders]
