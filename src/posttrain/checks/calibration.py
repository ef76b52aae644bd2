"""How a run ended, and what is usual for the ends of its family: bounds on drift and entropy that come from runs of one's own.

No bound on the divergence from the reference holds for every task, model and temperature; neither does one on entropy. So a family's own
stable runs say what is usual: mean + k standard deviations of their final KL is the ceiling, mean - k of their final entropy the floor.
Source: spec/book-5 1.O, Z12; spec/book-6 7.14. Torch-free: reads the records of run directories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.errors import EvidenceError
from posttrain.core.files import read_json, write_json
from posttrain.runs.run import Run

SCHEMA = 1
LEAST_RUNS = 3
"""Fewer runs show no spread that a bound could rest on."""
SIGMAS = 3.0
SATURATED = 0.5
"""Share of groups that are all right from which the others' silence is no collapse."""
LAST = 10
"""Steps at the end of a stage that count as its end."""


@dataclass(frozen=True, slots=True)
class End:
    """Means over the last steps of a stage of reinforcement learning; None for what was not recorded.

    Example: End(steps=10, entropy=0.03, kl=0.08, zero_variance=0.76, all_right=0.76, reward_std=0.13, unparseable=0.001)
    """

    steps: int
    entropy: float | None
    kl: float | None
    zero_variance: float | None
    all_right: float | None
    reward_std: float | None
    unparseable: float | None

    def dead(self, most_unanimous: float, least_spread: float) -> bool:
        """Whether groups have stopped to disagree, and not because everything is right."""
        if self.zero_variance is None:
            return False
        saturated = (self.all_right or 0.0) >= SATURATED
        quiet = self.zero_variance >= most_unanimous or (self.reward_std is not None and self.reward_std < least_spread)
        return quiet and not saturated


def end_of(lines: Sequence[Mapping[str, Any]], last: int = LAST) -> End | None:
    """The end of a stage from its metrics lines; None when it is no stage of reinforcement learning."""
    tail = [line for line in lines if "zero_variance" in line][-last:]
    if not tail:
        return None

    def mean(name: str) -> float | None:
        values = [line[name] for line in tail if isinstance(line.get(name), int | float)]
        return float(np.mean(values)) if values else None

    names = ("entropy", "kl", "zero_variance", "all_right", "reward_std", "unparseable")
    return End(len(tail), *map(mean, names))


@dataclass(frozen=True, slots=True)
class Family:
    """What is usual among runs of one kind.

    Example: Family({"stage": "grpo", ...}, ("a", "b", "c"), 3.0, kl_ceiling=0.21, entropy_floor=0.01)
    """

    key: Mapping[str, Any]
    """What its runs share: the stage, the model they start from, the task, the temperature."""
    runs: tuple[str, ...]
    sigmas: float
    kl_ceiling: float | None
    entropy_floor: float | None

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        write_json(path, {"schema": SCHEMA, **asdict(self), "key": dict(self.key), "runs": list(self.runs)})

    @classmethod
    def read(cls, path: str | Path) -> Family:
        """The inverse of `save`; raises EvidenceError for anything else."""
        record = read_json(path)
        names = ("key", "runs", "sigmas", "kl_ceiling", "entropy_floor")
        if not isinstance(record, dict) or record.get("schema") != SCHEMA or any(name not in record for name in names):
            raise EvidenceError(f"{path} is no calibration of schema {SCHEMA}; make one with posttrain promote --calibrate RUN RUN RUN")
        return cls(record["key"], tuple(record["runs"]), *(record[name] for name in names[2:]))


def stage_of(run: Run) -> str | None:
    """The last stage of reinforcement learning that a run has records of."""
    found = [str(line["stage"]) for line in run.metrics() if "zero_variance" in line]
    return found[-1] if found else None


def family_key(run: Run, stage: str) -> dict[str, Any]:
    """What makes two runs one family: everything that moves entropy and divergence besides the seed."""
    config, digests = run.config(), run.manifest["digests"]
    sampling = config.get("sampling") or {}
    skill = {name: config.get(name) for name in ("task", "task_settings", "arithmetic", "word_problems") if config.get(name)}
    objective = config.get("objective") or config.get("algorithm")
    return {
        "stage": stage,
        "model": digests.get("model"),
        "data": digests.get("data"),
        "tasks": skill,
        "temperature": sampling.get("temperature"),
        "objective": objective,
    }


def calibrate(paths: Sequence[str | Path], sigmas: float = SIGMAS, last: int = LAST) -> Family:
    """The bounds of a family from its own stable runs, at least three.

    Raises EvidenceError for fewer runs, and for one that is unfinished, given twice, without reinforcement learning, collapsed at its end,
    or of another family.
    """
    if len(paths) < LEAST_RUNS:
        raise EvidenceError(f"{len(paths)} run(s) show no usual spread; calibrate from at least {LEAST_RUNS} stable runs of the family")
    keys, ends = [], []
    for path in paths:
        key, end = _stable(Path(path), last)
        if keys and key != keys[0]:
            names = ", ".join(name for name in key if key[name] != keys[0][name])
            raise EvidenceError(
                f"{path} is of another family than {paths[0]} ({names}); calibrate from runs that differ in their seed alone"
            )
        keys.append(key)
        ends.append(end)
    resolved = [Path(path).resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise EvidenceError("a run was given twice; it would count as two that agree")
    kl, entropy = ([getattr(end, name) for end in ends] for name in ("kl", "entropy"))
    ceiling = _usual(kl, sigmas)
    floor = _usual(entropy, -sigmas)
    return Family(keys[0], tuple(path.name for path in resolved), sigmas, ceiling, None if floor is None else max(0.0, floor))


def _usual(values: Sequence[float | None], sigmas: float) -> float | None:
    """Mean + sigmas x sample standard deviation. Example: (0.1, 0.2, 0.3) with 3: 0.2 + 3 * 0.1 = 0.5."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return float(np.mean(known) + sigmas * np.std(known, ddof=1))


def _stable(path: Path, last: int) -> tuple[dict[str, Any], End]:
    run = Run.open(path)
    stage = stage_of(run)
    if stage is None:
        raise EvidenceError(f"{path} holds no reinforcement learning, so it says nothing about drift; calibrate from RL runs")
    if not run.complete:
        raise EvidenceError(f"{path} is not finished; calibrate from finished runs")
    end = end_of(run.metrics(stage), last)
    assert end is not None
    if end.dead(0.9, 1e-3):
        raise EvidenceError(f"{path} ended without disagreeing groups, so it is no stable run; leave it out")
    return family_key(run, stage), end
