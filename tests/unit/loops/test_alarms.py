"""The four alarms of a step of reinforcement learning: each fires when it should, once, and stays silent otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from posttrain.core.metrics import Max, Mean, Metric
from posttrain.core.trajectory import Group, StopReason
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.alarms import INERT, MISMATCH, watch_step
from posttrain.loops.session import Stage
from posttrain.objectives.objective import Objective
from posttrain.rollout.dynamic import Filled

END, CUT = StopReason.END, StopReason.LENGTH
NOTHING = Filled((), ())
DROP = Objective.load({"kind": "grpo", "overlong": "drop"})


class Watch:
    """A stage whose steps are made up; `rung` lists (step, alarm)."""

    def __init__(self, toy):
        self.run = toy.recorder()
        self.stage = Stage(toy.session(self.run), "rl", LocalTrainer(toy.model(), Optim(), 1, Ranks()), 1)
        self.step = 0

    def see(self, metrics: Mapping[str, Metric], filled: Filled = NOTHING, objective: Objective | None = None) -> None:
        watch_step(self.stage, self.step, filled, metrics, objective or Objective())
        self.step += 1

    @property
    def rung(self) -> list[tuple[int, str]]:
        return [(line["step"], line["name"]) for line in self.run.lines["alarms"]]


@pytest.mark.parametrize(("largest", "rings"), [(2 * MISMATCH, True), (MISMATCH, False), (0.0, False)])
def test_sampler_and_trainer_disagree(toy, largest, rings):
    watch = Watch(toy)
    watch.see({"mismatch_max": Max(largest)})
    assert watch.rung == ([(0, "sampler_trainer_mismatch")] if rings else [])


def test_a_step_without_an_update_is_no_disagreement(toy):
    watch = Watch(toy)
    watch.see({})
    assert watch.rung == []


def eligible(count: int) -> dict[str, Metric]:
    return {"cov_eligible": Mean(count, 1000)}


def test_the_covariance_rule_is_inert_after_some_steps_and_says_so_once(toy):
    watch = Watch(toy)
    for _ in range(INERT + 3):
        watch.see(eligible(0))
    assert watch.rung == [(INERT - 1, "clip_cov_inert")]


def test_one_eligible_token_starts_the_count_again(toy):
    watch = Watch(toy)
    for count in [0] * (INERT - 1) + [1] + [0] * (INERT - 1):
        watch.see(eligible(count))
    assert watch.rung == []
    watch.see(eligible(0))
    assert watch.rung == [(2 * INERT - 1, "clip_cov_inert")]


def test_other_limits_are_never_inert(toy):
    watch = Watch(toy)
    for _ in range(2 * INERT):
        watch.see({"entropy": Mean(1.0, 1)})
    assert watch.rung == []
    assert "inert" not in watch.stage.state


@pytest.mark.parametrize(
    ("mismatched", "rejected", "rings"),
    # more than half of the trained tokens, whichever of the two took them
    [(600, 0, True), (0, 501, True), (300, 300, True), (500, 0, False), (250, 250, False), (0, 0, False)],
)
def test_the_correction_starves_training(toy, mismatched, rejected, rings):
    watch = Watch(toy)
    watch.see({"fate_mismatched": Mean(mismatched, 1000), "fate_rejected": Mean(rejected, 1000), "fate_clipped": Mean(900, 1000)})
    assert watch.rung == ([(0, "correction_starves")] if rings else [])


def step_of(toy, cut: int, groups: int = 4) -> Filled:
    """Groups of 8 of which `cut` each ran out of tokens."""
    made: list[Group] = [toy.group([1.0, 0.0] * 4, task=f"{i}", stops=[CUT] * cut + [END] * (8 - cut)) for i in range(groups)]
    return Filled(tuple(made), ())


@pytest.mark.parametrize(
    ("cut", "objective", "rings"),
    # a quarter of the rollouts may be dropped: 2 of 8 are, 3 of 8 are too many; without a rule that drops, nothing is lost
    [(0, DROP, False), (2, DROP, False), (3, DROP, True), (6, DROP, True), (6, Objective(), False), (6, Objective.load("dapo"), False)],
)
def test_over_long_filtering_starves_the_groups(toy, cut, objective, rings):
    watch = Watch(toy)
    watch.see({}, step_of(toy, cut), objective)
    assert watch.rung == ([(0, "overlong_starves")] if rings else [])


def test_groups_that_were_not_kept_count_as_well(toy):
    # one healthy group was kept; of the two generated 8 of 16 rollouts were cut
    healthy, emptied = step_of(toy, 0, 1).generated[0], step_of(toy, 8, 1).generated[0]
    watch = Watch(toy)
    watch.see({}, Filled((healthy, emptied), (healthy,)), DROP)
    assert watch.rung == [(0, "overlong_starves")]


def test_each_alarm_speaks_for_itself(toy):
    watch = Watch(toy)
    metrics: dict[str, Metric] = {"mismatch_max": Max(1.0), "fate_mismatched": Mean(9, 10), "fate_rejected": Mean(0, 10), **eligible(0)}
    for _ in range(INERT):
        watch.see(metrics, step_of(toy, 6), DROP)
    names = [name for _, name in watch.rung]
    assert names.count("sampler_trainer_mismatch") == names.count("correction_starves") == names.count("overlong_starves") == INERT
    assert names.count("clip_cov_inert") == 1
