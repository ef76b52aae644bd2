"""Controllers of an objective: numbers that move between steps. Pure functions over plain loop state; torch-free.

    current(objective, state)                 the objective of this step
    advance(objective, state, entropy, kl)    the state of the next one

The loop stores the state, so that a resumed run continues where it stood.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.objectives.axes import Clip
from posttrain.objectives.controllers import adapt_clip_high, adapt_entropy_coef, adapt_kl_coef
from posttrain.objectives.objective import Objective


def current(objective: Objective, state: Mapping[str, float]) -> Objective:
    """`objective` with its steered numbers as `state` has them; the same object when nothing is steered."""
    changes = {}
    if "kl_coef" in state:
        changes["kl"] = objective.kl.model_copy(update={"coef": state["kl_coef"]})
    if "entropy_coef" in state:
        changes["entropy"] = objective.entropy.model_copy(update={"coef": state["entropy_coef"]})
    if "clip_high" in state:
        changes["limit"] = objective.limit.model_copy(update={"high": state["clip_high"]})
    return objective.model_copy(update=changes) if changes else objective


def advance(objective: Objective, state: Mapping[str, float], entropy: float | None, kl: float | None) -> dict[str, float]:
    """The steered numbers of the next step from this step's measurements (nats per token); unmeasured leaves them as they are.

    Keys: kl_coef (kl.target), entropy_coef (entropy.target), clip_high (limit.steer); absent when not steered.
    """
    after: dict[str, float] = {}
    if objective.kl.target is not None:
        after["kl_coef"] = adapt_kl_coef(state.get("kl_coef", objective.kl.coef), kl, objective.kl.target)
    how = objective.entropy
    if how.target is not None:
        after["entropy_coef"] = adapt_entropy_coef(state.get("entropy_coef", how.coef), entropy, how.target, how.step, how.highest)
    if isinstance(objective.limit, Clip) and objective.limit.steer is not None:
        steer, high = objective.limit.steer, state.get("clip_high", objective.limit.high)
        after["clip_high"] = adapt_clip_high(high, entropy, steer.entropy, steer.step, objective.limit.low, steer.highest)
    return after
