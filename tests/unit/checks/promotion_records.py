"""Records and runs for promotions: so many items right, wrong, unreadable, cut; and a run directory that holds them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.core.config import Config
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.conditions import Conditions
from posttrain.evals.record import EvalRecord, ItemResult, Outcome
from posttrain.runs.run import Run

RIGHT = Outcome(1.0, RewardStatus.SCORED, StopReason.END, 3)
WRONG = Outcome(0.0, RewardStatus.SCORED, StopReason.END, 3)
GARBLED = Outcome(0.0, RewardStatus.UNPARSEABLE, StopReason.END, 3)
CUT = Outcome(0.0, RewardStatus.TRUNCATED, StopReason.LENGTH, 9)
STATED: dict[str, Any] = {
    "dataset": "sums",
    "split": "held_out",
    "split_digest": "split",
    "items_digest": "items",
    "samples_per_item": 1,
    "sampling": Sampling(max_tokens=9),
    "thinking": "none",
    "extractor": "x/1",
    "verifier": "g/1",
    "template_digest": "template",
    "tokenizer_digest": "tokenizer",
    "seed": 0,
    "turns": 1,
}


def record(label: str, outcomes: list[Outcome], suite: str = "sums", model: str = "", **changed: Any) -> EvalRecord:
    """One item per outcome, ids i0, i1 ..."""
    conditions = Conditions(suite=suite, n_items=len(outcomes), **STATED | changed)
    return EvalRecord(conditions, label, model or f"of {label}", tuple(ItemResult(f"i{n}", (o,)) for n, o in enumerate(outcomes)))


def scored(label: str, right: int, n: int = 600, suite: str = "sums", **changed: Any) -> EvalRecord:
    """The first `right` of n items are right."""
    return record(label, [RIGHT] * right + [WRONG] * (n - right), suite, **changed)


HEALTHY: Mapping[str, float] = {
    "entropy": 0.5,
    "kl": 0.1,
    "zero_variance": 0.3,
    "all_right": 0.2,
    "reward_std": 0.4,
    "unparseable": 0.01,
}


class Settings(Config):
    """What a made-up run was started with."""

    task: str = "sums"
    seed: int = 0
    sampling: Sampling = Sampling()


def run_of(
    path: Path,
    records: list[EvalRecord],
    ends: list[Mapping[str, float]] | None = None,
    *,
    seed: int = 0,
    model: str = "base-digest",
    finished: bool = True,
) -> Path:
    """A run with evaluations before and after, and metrics of a stage of reinforcement learning."""
    stages = ("eval.before", "rl", "eval.after")
    settings = Settings(seed=seed)
    run = Run.create(path, config=settings, command=["posttrain"], seeds={"seed": seed}, digests={"model": model}, stages=stages)
    for made in records:
        run.save_eval(f"{made.label}.{made.conditions.suite}", made.to_json())
    for number, values in enumerate([HEALTHY] * 20 if ends is None else ends):
        run.metric("rl", number, dict(values))
    for stage in stages if finished else ():
        run.finish_stage(stage, {"seconds": 1.0, "position": {}, "digests": {}})
    run.close()
    return path
