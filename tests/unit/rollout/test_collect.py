"""Tasks to scored groups, with a scripted sampler; dynamic sampling and what a step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Group, RewardStatus, Rollout, Score, StopReason
from posttrain.engine.processes import Ranks
from posttrain.engine.types import Completion, Request
from posttrain.objectives.objective import Objective
from posttrain.rewards.graders import ExactTextGrader, FunctionGrader
from posttrain.rollout.collect import Collector, collect, describe, trajectory_of
from posttrain.rollout.credit import carries_signal
from posttrain.rollout.dynamic import fill
from posttrain.rollout.health import health

A, B, END = 73, 74, 6


@dataclass
class Scripted:
    """Answers in the order asked: each of `answers` in turn, over and over."""

    answers: Sequence[tuple[tuple[int, ...], StopReason]]
    version: int = 3
    asked: list[Request] = field(default_factory=list)

    def generate(self, requests, progress=None) -> list[Completion]:
        done = []
        for request in requests:
            ids, stop = self.answers[len(self.asked) % len(self.answers)]
            self.asked.append(request)
            done.append(Completion(ids, (-0.5,) * len(ids), stop, self.version))
        return done


SCRIPT = [((A, END), StopReason.END), ((B, END), StopReason.END)]
MIXED = partial(carries_signal, objective=Objective())


def collector_of(toy, script=SCRIPT, grader=None, ranks=None) -> Collector:
    return Collector(Scripted(script), toy.renderer, grader or ExactTextGrader(), Sampling(max_tokens=4), 2, ranks or Ranks())


def asked_of(collector: Collector) -> list[Request]:
    """What the scripted sampler was asked for."""
    assert isinstance(collector.sampler, Scripted)
    return collector.sampler.asked


def task(name: str) -> Task:
    return Task(name, (Message("user", name),), "a")


def test_groups_in_task_order_with_siblings_scored(toy):
    first, second = collect(collector_of(toy), [task("x"), task("y")], seed=1)
    assert (first.task.id, second.task.id) == ("x", "y")
    assert first.rewards == second.rewards == (1.0, 0.0)
    one = first.rollouts[0].trajectory
    assert one.ids == (A, END)
    assert one.logps == (-0.5, -0.5)
    assert one.text == "a"
    assert one.prompt == toy.renderer.prompt([Message("user", "x")])
    assert [(r.trajectory.index, r.trajectory.version) for r in first.rollouts] == [(0, 3), (1, 3)]


def test_every_completion_has_a_stream_of_its_own(toy):
    collector = collector_of(toy)
    collect(collector, [task("x"), task("x")], seed=1)
    seeds = [request.seed for request in asked_of(collector)]
    assert len(set(seeds)) == 4
    again = collector_of(toy)
    collect(again, [task("x"), task("x")], seed=1)
    assert [request.seed for request in asked_of(again)] == seeds
    other = collector_of(toy)
    collect(other, [task("x"), task("x")], seed=2)
    assert not {request.seed for request in asked_of(other)} & set(seeds)


def test_ranks_ask_for_what_one_process_would(toy):
    tasks = [task(name) for name in "uvwxy"]
    whole = collector_of(toy)
    collect(whole, tasks, seed=1)
    asked = set()
    for rank in range(2):
        part = collector_of(toy, ranks=Ranks(rank, 2))
        object.__setattr__(part, "ranks", _Alone(rank, 2))
        groups = collect(part, tasks, seed=1)
        assert [group.task.id for group in groups] == list("uvwxy")[rank::2]
        asked |= {(request.prompt, request.seed) for request in asked_of(part)}
    assert asked == {(request.prompt, request.seed) for request in asked_of(whole)}


class _Alone(Ranks):
    """A rank that is not connected to the others."""

    def interleave(self, mine):
        return list(mine)


def test_truncated_and_failed_are_not_the_same_as_wrong(toy):
    def explode(task, text):
        raise RuntimeError("verifier")

    cut, fine = collect(collector_of(toy, [((A, A), StopReason.LENGTH), ((A, END), StopReason.END)]), [task("x")], seed=0)[0].rollouts
    assert (cut.score.value, cut.score.status) == (0.0, RewardStatus.TRUNCATED)
    assert fine.score.value == 1.0
    failed = collect(collector_of(toy, grader=FunctionGrader(explode, "explode")), [task("x")], seed=0)[0].rollouts[0]
    assert (failed.score.value, failed.score.status) == (None, RewardStatus.ERROR)


def test_record_of_a_rollout(toy):
    (group,) = collect(collector_of(toy), [task("x")], seed=0)
    assert describe(group, group.rollouts[1]) == {
        "task": "x", "index": 1, "prompt": "x", "completion": "b", "gold": "a", "parsed": "b", "value": 0.0, "status": "scored",
        "stop": "end", "grader": "exact-text/1", "tokens": 2, "version": 3, "newest": 3,
    }  # fmt: skip


def test_fill_replaces_groups_without_signal(toy):
    # groups of two in script order: (a, a) equal, (a, b) mixed, (b, b) equal, (a, b) mixed
    a, b = SCRIPT
    wanted: list[int] = []

    def draw(n: int) -> list[Task]:
        wanted.append(n)
        return [task("x")] * n

    filled = fill(collector_of(toy, [a, a, a, b, b, b, a, b]), draw, target=2, tries=4.0, seed=0, carries_signal=MIXED)
    assert len(filled.kept) == 2
    assert [group.rewards for group in filled.generated] == [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 0.0)]
    # two, then the one that is missing, then the one that is still missing
    assert wanted == [2, 1, 1]
    assert filled.tries_per_kept == 2.0


def test_what_is_kept_is_for_the_objective_to_say(toy):
    # every group of equal rewards is kept where siblings are no baseline
    filled = fill(
        collector_of(toy, SCRIPT[:1]),
        lambda n: [task("x")] * n,
        target=2,
        tries=4.0,
        seed=0,
        carries_signal=partial(carries_signal, objective=Objective.load("ppo")),
    )
    assert len(filled.generated) == len(filled.kept) == 2
    assert filled.tries_per_kept == 1.0


def test_fill_stops_at_its_budget_and_stays_short(toy):
    # one mixed group in three; 2 wanted, at most 1.5 x 2 = 3 generated
    a, b = SCRIPT
    filled = fill(collector_of(toy, [a, a, a, b, b, b]), lambda n: [task("x")] * n, target=2, tries=1.5, seed=0, carries_signal=MIXED)
    assert (len(filled.generated), len(filled.kept), filled.tries_per_kept) == (3, 1, 3.0)


def test_fill_without_any_signal(toy):
    filled = fill(collector_of(toy, SCRIPT[:1]), lambda n: [task("x")] * n, target=2, tries=2.0, seed=0, carries_signal=MIXED)
    assert (len(filled.generated), filled.kept, filled.tries_per_kept) == (4, (), None)


def test_one_try_never_resamples(toy):
    filled = fill(collector_of(toy, SCRIPT[:1]), lambda n: [task("x")] * n, target=3, tries=1.0, seed=0, carries_signal=MIXED)
    assert len(filled.generated) == 3


def test_every_round_of_fill_draws_from_new_streams(toy):
    collector = collector_of(toy, SCRIPT[:1])
    fill(collector, lambda n: [task("x")] * n, target=2, tries=3.0, seed=0, carries_signal=MIXED)
    seeds = [request.seed for request in asked_of(collector)]
    assert len(seeds) == len(set(seeds)) == 12


def test_health_by_hand(toy):
    groups = [
        toy.group([1.0, 0.0], ids=[(20, 2), (20, 21, 22, 2)]),
        toy.group([1.0, 1.0]),
        toy.group([0.0, 0.0]),
        toy.group([None, 0.5]),
    ]
    found = health(groups)
    # scored: 1 0 1 1 0 0 0.5, mean 3.5 / 7; squared deviations 6 x 0.25 + 0 = 1.5, sqrt(1.5 / 7) = 0.46291
    assert found["reward_mean"] == pytest.approx(0.5)
    assert found["reward_std"] == pytest.approx(0.46291, abs=1e-5)
    assert (found["zero_variance"], found["all_right"], found["all_wrong"]) == (0.75, 0.25, 0.25)
    assert found["errors"] == pytest.approx(1 / 8)
    assert found["truncated"] == found["unparseable"] == 0.0
    assert found["length"] == pytest.approx((2 + 4 + 2 * 6) / 8)


def test_health_when_nothing_was_scored(toy):
    found = health([toy.group([None, None])])
    assert (found["reward_mean"], found["errors"], found["zero_variance"]) == (0.0, 1.0, 1.0)
    assert (found["all_right"], found["all_wrong"]) == (0.0, 0.0)


def test_versions_and_candidates_of_a_completion_reach_the_record(toy):
    collector = collector_of(toy)
    (prompt,) = [collector.renderer.prompt(task("x").prompt)]
    completion = Completion((A, END), (-0.5, -0.5), StopReason.END, 3, versions=(3, 5), candidates=((A, B), (END,)))
    trajectory = trajectory_of(collector, task("x"), 0, prompt, completion)
    assert (trajectory.version, trajectory.versions, trajectory.candidates) == (3, (3, 5), ((A, B), (END,)))
    rollout = Rollout(trajectory, Score(1.0, RewardStatus.SCORED))
    record = describe(Group(task("x"), (rollout,)), rollout)
    assert (record["version"], record["newest"]) == (3, 5)
