"""What a step of reinforcement learning warns about while it runs: signals that lead, not scores that follow."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.core.metrics import Metric
from posttrain.loops.session import Stage
from posttrain.objectives.axes import Drop
from posttrain.objectives.objective import Objective
from posttrain.objectives.shaping import survivors
from posttrain.rollout.dynamic import Filled

MISMATCH = 1e-3
"""Largest difference in nats between sampler and trainer on one token that float32 explains; beyond it the two compute different things."""
INERT = 5
"""Steps in a row without an eligible token after which the covariance rule counts as inert."""
STARVED = 0.5
"""Share of the trained tokens left out by the mismatch correction above which training starves."""


def watch_step(stage: Stage, step: int, filled: Filled, metrics: Mapping[str, Metric], objective: Objective) -> None:
    """Raise the alarms of one step; `stage.state` remembers what has to last several steps."""
    _mismatch(stage, step, metrics)
    _inert_covariance(stage, step, metrics)
    _starving(stage, step, metrics)
    if isinstance(objective.overlong, Drop):
        _survivors(stage, step, filled)


def _read(metrics: Mapping[str, Metric], name: str) -> float:
    value = metrics[name].read() if name in metrics else None
    return value or 0.0


def _raise(stage: Stage, step: int, name: str, detail: str, evidence: dict[str, float | int]) -> None:
    stage.session.run.alarm(stage.name, step, name, detail, evidence)
    stage.session.console.warn(f"{stage.name}: {detail}")


def _mismatch(stage: Stage, step: int, metrics: Mapping[str, Metric]) -> None:
    mismatch = _read(metrics, "mismatch_max")
    if mismatch > MISMATCH:
        detail = (
            f"sampler and trainer disagree by {mismatch:.2g} nats on a token; both must use the same weights, temperature, top-k and top-p"
        )
        _raise(stage, step, "sampler_trainer_mismatch", detail, {"mismatch_max": mismatch, "bound": MISMATCH})


def _inert_covariance(stage: Stage, step: int, metrics: Mapping[str, Metric]) -> None:
    if "cov_eligible" not in metrics:
        return
    stage.state["inert"] = 0 if _read(metrics, "cov_eligible") > 0 else stage.state.get("inert", 0) + 1
    if stage.state["inert"] == INERT:
        detail = (
            f"no token was eligible for the covariance rule in {INERT} steps: it does nothing; lower limit.lower, or use an advantage "
            "with a larger spread (mean_std)"
        )
        _raise(stage, step, "clip_cov_inert", detail, {"steps": INERT})


def _starving(stage: Stage, step: int, metrics: Mapping[str, Metric]) -> None:
    share = _read(metrics, "fate_mismatched") + _read(metrics, "fate_rejected")
    if share > STARVED:
        detail = f"the mismatch correction leaves out {share:.0%} of the trained tokens; widen its bands, or remove the mismatch"
        _raise(stage, step, "correction_starves", detail, {"left_out": share, "bound": STARVED})


def _survivors(stage: Stage, step: int, filled: Filled) -> None:
    """Groups that over-long filtering has emptied never reach the update, so all generated ones are counted."""
    kept = [sum(not rollout.trajectory.truncated for rollout in group.rollouts) for group in filled.generated]
    generated = sum(len(group.rollouts) for group in filled.generated)
    found = survivors(kept, generated, generated - sum(kept))
    if found.alarm:
        _raise(stage, step, "overlong_starves", f"over-long filtering {found.alarm}", {"dropped": found.dropped, "median": found.median})
