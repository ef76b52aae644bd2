"""A pulse: a few fixed held-out items, measured every so many steps of a training run. It shows a trend and decides nothing.

The items, the noise they are answered with and the grader are the same at every measurement, so what changes is the model. Nothing of the
training is touched: requests carry seeds of their own, and no generator with a state is drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.core.errors import ConfigError
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.engine.types import Sampler
from posttrain.evals.runner import openings_for
from posttrain.evals.suite import Suite
from posttrain.render.types import Renderer
from posttrain.rewards.types import score
from posttrain.rollout.episodes import play
from posttrain.stats.intervals import cluster_t, wilson

if TYPE_CHECKING:
    from posttrain.engine.processes import Ranks

LEAST_ITEMS = 2
"""Fewer scored items have no spread, so no interval and no mean are reported."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is measured while training, and how often.

    Example: Pulse(suite, every=10).due(20)  ->  True;  .due(0) and .due(25)  ->  True, False
    """

    suite: Suite
    every: int
    """Steps between two measurements; the first is taken before the first step."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"a pulse every {self.every} steps is none; measure every 1 step or more seldom")

    def due(self, step: int) -> bool:
        """Whether it is measured when `step` steps were taken."""
        return step % self.every == 0


def measure_pulse(sampler: Sampler, renderer: Renderer, suite: Suite, seed: int, ranks: Ranks | None = None) -> dict[str, float]:
    """Metrics of the current policy on the suite's items, the same for every call with the same weights.

    Args:
        seed: of the measurement, fixed for the whole run; never the step's.
        ranks: shares the episodes among processes; every one of them has to call, and gets the same result.

    Returns heldout_n (items that were scored) and, over samples, heldout_parse_rate, heldout_truncated and heldout_length (mean tokens);
    with two scored items or more also heldout_mean and its 95 % interval, heldout_low and heldout_high: Wilson for one 0/1 sample per
    item without grader errors, else cluster-t. heldout_parse_rate is left out when the grader failed on everything.

    Example: {"heldout_mean": 0.5, "heldout_low": 0.31, "heldout_high": 0.69, "heldout_n": 24.0, "heldout_parse_rate": 1.0, ...}
    """
    openings = openings_for([suite], renderer, seed)
    if ranks is None:
        trajectories = play(sampler, renderer, openings)
    else:
        trajectories = ranks.interleave(play(sampler, renderer, ranks.share(openings)))
    scores = [score(suite.grader, opening.task, trajectory) for opening, trajectory in zip(openings, trajectories, strict=True)]
    rows = [[s.value for s in scores[at : at + suite.samples] if s.value is not None] for at in range(0, len(scores), suite.samples)]
    means = [sum(row) / len(row) for row in rows if row]
    judged = [s for s in scores if s.status is not RewardStatus.ERROR]
    found = {
        "heldout_n": float(len(means)),
        "heldout_truncated": sum(t.stop is StopReason.LENGTH for t in trajectories) / len(trajectories),
        "heldout_length": sum(t.completion.trained for t in trajectories) / len(trajectories),
    }
    if judged:
        found["heldout_parse_rate"] = sum(s.status is RewardStatus.SCORED for s in judged) / len(judged)
    if len(means) < LEAST_ITEMS:
        return found
    single = suite.samples == 1 and len(judged) == len(scores) and all(mean in (0.0, 1.0) for mean in means)
    low, high = min(0.0, *means), max(1.0, *means)  # a user's own reward may leave [0, 1]
    interval = wilson(sum(means), len(means)) if single else cluster_t(means, bounds=(low, high))
    return found | {"heldout_mean": sum(means) / len(means), "heldout_low": interval.low, "heldout_high": interval.high}
