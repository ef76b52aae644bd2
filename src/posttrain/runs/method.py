"""What a run optimises, resolved from its settings, axis by axis: what an algorithm's name stands for can change, and names lie.

Aggregation and the normalisation of advantages are two fields and neither follows from the other: one says how much a token counts, the
other what its advantage is measured in (spec/faults.md 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.core.digest import file_digest
from posttrain.core.errors import ConfigError
from posttrain.objectives.axes import Batch, Channels, Critic, MeanStd, MedianMAD
from posttrain.objectives.objective import Objective
from posttrain.objectives.placements import DESCENDS

BASELINES = {
    "none": "none",
    "mean": "group mean",
    "mean_std": "group mean",
    "leave_one_out": "mean of the other siblings",
    "median_mad": "group median",
    "max_rl": "group mean",
    "pass_at_k": "leave-one-out over sets of k",
    "channels": "group mean per channel",
    "critic": "learned values",
    "teacher": "log-probability of the policy",
}


def method_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved method of a run's settings; {} when they train no policy gradient, or say it in a way this version does not read.

    Example: method_of({"algorithm": "grpo"})["advantage_normalisation"]
             {"baseline": "group mean", "scale": "group standard deviation (ddof 0) + 1e-06"}
    """
    given = config.get("objective", {"kind": config["algorithm"]} if "algorithm" in config else None)
    if not isinstance(given, str | Mapping):
        return {}
    try:
        objective = Objective.load(given)
    except ConfigError:
        return {}
    kl = objective.kl
    return {
        "algorithm": objective.kind,
        "advantage": objective.advantage.kind,
        "advantage_normalisation": normalisation(objective),
        "aggregation": objective.aggregation,
        "ratio": {"level": objective.ratio, "against": objective.against},
        "limit": objective.limit.model_dump(mode="json"),
        "correction": objective.correction.model_dump(mode="json"),
        "surrogate": _surrogate(objective.surrogate),
        "kl": {
            "estimator": kl.estimator if kl.used else "none",
            "placement": kl.placement if kl.used else None,
            "coef": kl.coef if kl.used else 0.0,
            "target": kl.target,
            "dtype": kl.dtype if kl.used else None,
            "descends": DESCENDS.get((kl.placement, kl.estimator)) if kl.used else None,
        },
        "entropy": objective.entropy.model_dump(mode="json"),
    }


def normalisation(objective: Objective) -> dict[str, str]:
    """What advantages are measured from (`baseline`) and in (`scale`)."""
    advantage = objective.advantage
    scale = "none"
    match advantage:
        case MeanStd():
            scale = f"group standard deviation (ddof {advantage.ddof}) + {advantage.eps:g}"
        case MedianMAD():
            scale = f"median absolute deviation + {advantage.eps:g}"
        case Channels():
            scale = f"standard deviation per channel (ddof {advantage.ddof})"
        case Batch():
            scale = f"standard deviation over the step's tokens + {advantage.eps:g}"
        case Critic():
            scale = "standard deviation over the step's tokens" if advantage.whiten else "none"
        case _:
            scale = "group mean" if advantage.kind == "max_rl" else "none"
    if isinstance(advantage, Batch):
        return {"baseline": "mean of the step" if advantage.within == "none" else "group mean, then mean of the step", "scale": scale}
    return {"baseline": BASELINES.get(advantage.kind, advantage.kind), "scale": scale}


def _surrogate(name: str | None) -> dict[str, str | None] | None:
    """A whole loss by its name; of a user's own function also what its file holds."""
    if name is None:
        return None
    file = Path(name.rpartition(":")[0])
    return {"name": name, "digest": file_digest(file) if file.suffix == ".py" and file.is_file() else None}
