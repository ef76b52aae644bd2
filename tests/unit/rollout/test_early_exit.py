"""Groups of one chain cut early: where it is cut, what is forced, who wrote what, and what an early right answer earns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, RewardStatus, Rollout, Score, StopReason
from posttrain.engine.processes import Ranks
from posttrain.engine.types import Completion, Request
from posttrain.objectives.axes import EarlyExit
from posttrain.rewards.graders import FunctionGrader
from posttrain.rollout.collect import Collector
from posttrain.rollout.early_exit import collect_early_exits, cuts_of, falling

A, B, END = 73, 74, 6
S, F = Owner.SAMPLED, Owner.FORCED


@dataclass
class Thinker:
    """Chains of `length` tokens of b, and the answer a to whatever else is asked."""

    length: int
    version: int = 3
    asked: list[Request] = field(default_factory=list)
    rounds: int = 0

    def generate(self, requests: Sequence[Request], progress=None) -> list[Completion]:
        self.asked += requests
        self.rounds += 1
        ids = (B,) * (self.length - 1) + (END,) if self.rounds % 2 else (A, END)
        return [Completion(ids, (-0.5,) * len(ids), StopReason.END, self.version) for _ in requests]


def collector_of(toy, length: int = 8, budget: int = 20, grader=None, ranks: Ranks | None = None) -> Collector:
    judged = grader or FunctionGrader(lambda task, text: float("a" in text), "says-a/1")
    return Collector(Thinker(length), toy.renderer, judged, Sampling(max_tokens=budget), 1, ranks or Ranks())


def tasks(n: int) -> list[Task]:
    return [Task(f"t{i}", (Message("user", "x"),), "a") for i in range(n)]


@pytest.mark.parametrize(
    ("length", "wanted", "room", "count"), [(9, 3, 50, 3), (3, 9, 50, 2), (9, 9, 4, 3), (2, 1, 50, 1), (1, 4, 50, 0), (9, 4, 1, 0)]
)
def test_cuts_are_distinct_in_order_and_leave_something_on_both_sides(length, wanted, room, count):
    for seed in range(20):
        cuts = cuts_of(length, wanted, room, seed)
        assert len(cuts) == count
        assert cuts == sorted(set(cuts))
        assert all(1 <= cut <= length - 1 for cut in cuts)  # a token before it and one after it
        assert all(cut <= room - 1 for cut in cuts)  # and room for one token of an answer


def test_every_place_is_cut_and_the_seed_decides():
    seen = [tuple(cuts_of(9, 2, 50, seed)) for seed in range(200)]
    assert {cut for cuts in seen for cut in cuts} == set(range(1, 9))
    assert len(set(seen)) > 20
    assert cuts_of(9, 2, 50, 7) == cuts_of(9, 2, 50, 7)


def scored(toy, values: Sequence[float | None]) -> tuple[Rollout, ...]:
    return toy.group(values).rollouts


def test_each_right_answer_halves_the_ones_after_it(toy):
    found = falling(scored(toy, [0.0, 1.0, 0.0, 1.0, 1.0]))
    assert [rollout.score.value for rollout in found] == [0.0, 1.0, 0.0, 0.5, 0.25]
    assert [dict(rollout.score.parts) for rollout in found] == [{}, {"before_decay": 1.0}, {}, {"before_decay": 1.0}, {"before_decay": 1.0}]


def test_what_was_not_scored_takes_no_place_on_the_scale(toy):
    whole = scored(toy, [None, 1.0, 1.0])
    cut = Rollout(whole[1].trajectory, Score(0.5, RewardStatus.UNPARSEABLE))
    assert [rollout.score.value for rollout in falling((whole[0], cut, whole[2]))] == [None, 0.5, 1.0]


def test_an_exit_is_the_chain_so_far_the_cue_and_an_answer(toy):
    collector = collector_of(toy)
    cue = tuple(toy.tokenizer.encode("#", add_special_tokens=False))
    (group,) = collect_early_exits(collector, tasks(1), 5, how=EarlyExit(cuts=3, cue="#"))
    *exits, whole = [rollout.trajectory for rollout in group.rollouts]
    assert len(exits) == 3
    assert [trajectory.index for trajectory in (*exits, whole)] == [0, 1, 2, 3]
    assert whole.ids == (B,) * 7 + (END,)
    assert whole.completion.owners == (S,) * 8
    cuts = [trajectory.owners.index(F) for trajectory in exits]
    assert cuts == sorted(set(cuts))
    for cut, trajectory in zip(cuts, exits, strict=True):
        assert trajectory.ids == (B,) * cut + cue + (A, END)
        assert trajectory.owners == (S,) * cut + (F,) * len(cue) + (S, S)
        assert trajectory.logps == (-0.5,) * cut + (0.0,) * len(cue) + (-0.5, -0.5)
        assert trajectory.text == "b" * cut + "#a"
        assert trajectory.completion.trained == cut + 2
        assert (trajectory.stop, trajectory.version) == (StopReason.END, 3)
    # each exit says a, the chain does not: the earliest earns most
    assert group.rewards == (1.0, 0.5, 0.25, 0.0)


def test_an_exit_has_what_is_left_of_the_budget(toy):
    collector = collector_of(toy, length=18, budget=20)
    (group,) = collect_early_exits(collector, tasks(1), 5, how=EarlyExit(cuts=40, cue="###"))
    prompt = group.rollouts[0].trajectory.prompt
    exits = collector.sampler.asked[1:]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(exits) == 16  # 20 tokens less 3 of the cue and 1 of an answer
    for request in exits:
        used = len(request.prompt) - len(prompt)
        assert request.sampling.max_tokens == 20 - used >= 1
        assert request.prompt[: len(prompt)] == prompt.ids


def test_a_chain_of_one_token_has_no_exit(toy):
    (group,) = collect_early_exits(collector_of(toy, length=1), tasks(1), 5, how=EarlyExit(cuts=3, cue="#"))
    assert [rollout.trajectory.ids for rollout in group.rollouts] == [(END,)]


def test_every_request_has_a_stream_of_its_own(toy):
    collector = collector_of(toy)
    collect_early_exits(collector, tasks(3), 5, how=EarlyExit(cuts=3, cue="#"))
    seeds = [request.seed for request in collector.sampler.asked]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(seeds) == len(set(seeds)) == 12


def test_ranks_share_the_tasks_and_see_all_groups(toy):
    how = EarlyExit(cuts=3, cue="#")
    alone = collect_early_exits(collector_of(toy), tasks(5), 5, how=how)
    for groups in toy.together(2, lambda ranks: collect_early_exits(collector_of(toy, ranks=ranks), tasks(5), 5, how=how)):
        assert groups == alone


def test_a_cue_that_fills_the_budget_is_refused(toy):
    with pytest.raises(ConfigError, match=r"cue '####' takes 4 of 5 tokens; raise sampling.max_tokens"):
        collect_early_exits(collector_of(toy, budget=5), tasks(1), 5, how=EarlyExit(cue="####"))


class Recording(Thinker):
    """Also says which ids a cut left, and that the weights changed before the last token of a chain."""

    def generate(self, requests: Sequence[Request], progress=None) -> list[Completion]:
        found = super().generate(requests, progress)
        return [replace(c, candidates=tuple((i, 99) for i in c.ids), versions=(3,) * (len(c.ids) - 1) + (4,), version=3) for c in found]


def test_what_a_cut_left_and_who_drew_it_follow_the_tokens(toy):
    collector = replace(collector_of(toy), sampler=Recording(8))
    (group,) = collect_early_exits(collector, tasks(1), 5, how=EarlyExit(cuts=2, cue="#"))
    first, _, whole = [rollout.trajectory for rollout in group.rollouts]
    cut = first.owners.index(F)
    assert first.ids == (B,) * cut + (first.ids[cut],) + (A, END)
    assert first.candidates == ((B, 99),) * cut + ((),) + ((A, 99), (END, 99))
    assert first.versions == (3,) * cut + (3, 3, 4)
    assert (first.version, whole.versions) == (3, (3,) * 7 + (4,))
    assert whole.candidates == ((B, 99),) * 7 + ((END, 99),)


def test_an_answer_of_newer_weights_leaves_the_exit_as_old_as_its_chain(toy):
    class Ageing(Thinker):
        def generate(self, requests: Sequence[Request], progress=None) -> list[Completion]:
            found = super().generate(requests, progress)
            return [replace(c, version=2 + self.rounds) for c in found]

    (group,) = collect_early_exits(replace(collector_of(toy), sampler=Ageing(8)), tasks(1), 5, how=EarlyExit(cuts=1, cue="#"))
    exit_, whole = [rollout.trajectory for rollout in group.rollouts]
    cut = exit_.owners.index(F)
    assert (exit_.version, exit_.versions) == (3, (3,) * cut + (4, 4, 4))
    assert (whole.version, whole.versions, whole.candidates) == (3, (), ())
