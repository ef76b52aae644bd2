"""What a step of reinforcement learning leaves in the records: counts that reconcile, what masking left, how old the rollouts were, and now
and then a pulse on held-out items."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from posttrain.core.metrics import Metric
from posttrain.core.seeds import derive
from posttrain.core.trajectory import RewardStatus, Rollout
from posttrain.engine.local import LocalSampler
from posttrain.engine.trainer import LocalTrainer
from posttrain.evals.pulse import measure_pulse
from posttrain.loops.rl_settings import RL, World
from posttrain.loops.session import Stage, Stopwatch
from posttrain.objectives.axes import Drop
from posttrain.objectives.objective import Objective
from posttrain.rollout.collect import describe
from posttrain.rollout.dynamic import Filled
from posttrain.rollout.health import health


def report(
    stage: Stage,
    step: int,
    filled: Filled,
    metrics: dict[str, Metric],
    left: Mapping[str, int],
    watch: Stopwatch,
    settings: RL,
    figures: Mapping[str, float | int],
) -> None:
    """Record the step, and keep some rollouts in full."""
    kept = sum(len(group.rollouts) for group in filled.kept)
    counts = {
        "groups_generated": len(filled.generated),
        "groups_kept": len(filled.kept),
        "rollouts_generated": sum(len(group.rollouts) for group in filled.generated),
        "rollouts_kept": kept,
        "rollouts_trained": kept - sum(left.values()),
        "tries_per_kept": filled.tries_per_kept,
        **{f"left_{reason}": count for reason, count in left.items()},
        **figures,
        **{f"steered_{key}": value for key, value in stage.state.get("steered", {}).items()},
    }
    stage.record(
        step, metrics, {**health(filled.generated), **counts}, watch.seconds, show=("reward_mean", "entropy", "length", "tries_per_kept")
    )
    for group in filled.generated[: settings.keep_rollouts]:
        for rollout in group.rollouts:
            stage.session.run.rollout(stage.name, {"step": step, **describe(group, rollout)})
    stage.state["silent"] = 0 if filled.kept else stage.state.get("silent", 0) + 1


def survival(filled: Filled, objective: Objective, version: int, epochs: int = 1) -> dict[str, float]:
    """What masking left of the generated groups, and how old their rollouts were when the update began at `version`.

    survivors_median, survivors_min: rollouts of a group that can be trained: they were scored, and no over-long rule drops them.  dropped:
    share of the generated rollouts that such a rule or a grader's failure removes.  tokens_sampled, tokens_forced: of the kept groups, what
    the policy drew, once per pass over them, and what tools or the harness wrote between.  version_lag: mean age in updates, of the kept
    groups. Where none was kept, nothing is said of them.
    """
    cuts = isinstance(objective.overlong, Drop)
    left = [sum(_usable(rollout, cuts) for rollout in group.rollouts) for group in filled.generated]
    total = sum(len(group.rollouts) for group in filled.generated)
    kept = [rollout.trajectory for group in filled.kept for rollout in group.rollouts]
    found = {"survivors_median": float(median(left)), "survivors_min": float(min(left)), "dropped": 1.0 - sum(left) / total}
    if kept:
        sampled = sum(trajectory.completion.trained for trajectory in kept)
        found["tokens_sampled"] = float(sampled * epochs)
        found["tokens_forced"] = float(sum(len(trajectory.ids) for trajectory in kept) - sampled)
        found["version_lag"] = version - sum(trajectory.version for trajectory in kept) / len(kept)
    return found


def _usable(rollout: Rollout, cuts: bool) -> bool:
    return rollout.score.status is not RewardStatus.ERROR and not (cuts and rollout.trajectory.truncated)


def pulse(stage: Stage, step: int, trainer: LocalTrainer, world: World) -> dict[str, float]:
    """Figures on held-out items before the step, when they are due. The training draws what it would have drawn without them."""
    if world.pulse is None or not world.pulse.due(step):
        return {}
    with trainer.reading() as model:
        sampler = LocalSampler(model, world.renderer.stop_ids, world.renderer.special_ids)
        seed = derive(stage.session.seed, stage.name, "pulse")
        return measure_pulse(sampler, world.renderer, world.pulse.suite, seed, stage.session.ranks)


def give_up(stage: Stage, step: int, filled: Filled, settings: RL) -> None:
    """Say why training ends early: no signal is left, or there never was any. The policy so far is the result."""
    reward = health(filled.generated)["reward_mean"]
    verdict = (
        "mastered: choose harder tasks" if reward > 0.5 else "out of reach: choose easier tasks, more siblings, or teach the format first"
    )
    detail = f"{settings.patience} steps in a row without a group of mixed rewards (mean reward {reward:.2f}); the task is {verdict}"
    stage.session.run.alarm(stage.name, step, "no_signal", detail, {"reward_mean": reward, "steps": settings.patience})
    stage.session.console.warn(f"{stage.name} ends early: {detail}")
