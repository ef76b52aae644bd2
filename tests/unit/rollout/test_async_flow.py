"""Jobs through a world without a model: the bound holds by construction, nothing is lost, slow tasks get their share."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from async_world import FAST, REINFORCE, SLOW, Clock, Judge, Scripted, complete, simulate, source
from scipy import stats

from posttrain.core.errors import ConfigError
from posttrain.core.seeds import derive
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, StopReason, Tokens, Trajectory
from posttrain.engine.types import Completion, Request
from posttrain.rollout.asynchronous.accounting import AccountError, Count, Ledger, ks_distance
from posttrain.rollout.asynchronous.flow import Flow
from posttrain.rollout.asynchronous.jobs import Draw
from posttrain.rollout.asynchronous.live import Live, group_of
from posttrain.rollout.asynchronous.rows import Row
from posttrain.rollout.asynchronous.settings import Async

TASK = Task("t", (Message("user", "fast"),), "x")
WORLD = {"workers": 4, "rows": 16, "chunk": 4}


def offered(lived, steps: int) -> list[str]:
    """Tasks that the synchronous run of so many steps would train on."""
    return [task.id for step in range(steps) for task in lived.live.flow.source.tasks(Draw(step, 0, 8, 0))]


# --- the bound ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["due", "issue", "arrival"])
@pytest.mark.parametrize("bound", [0, 1, 2, 5])
@pytest.mark.parametrize("training", [1.0, 200.0])
def test_no_token_is_ever_older_than_the_bound(order, bound, training):
    """Training much faster and much slower than drawing: a bound that is off by one shows in one of them."""
    lived = simulate(Async(bound=bound, order=order, **WORLD), steps=30, training=training)
    assert max(line["age_max"] for line in lived.metrics) <= bound
    if training == 200.0:
        assert max(line["age_max"] for line in lived.metrics) == bound


@pytest.mark.parametrize(("bound", "updates", "ahead"), [(0, 1, 0), (0, 4, 0), (1, 1, 1), (4, 2, 2), (5, 2, 2), (3, 3, 1)])
def test_steps_ahead(bound, updates, ahead):
    assert Async(bound=bound).ahead(updates) == ahead


def test_a_bound_below_one_step_is_refused():
    with pytest.raises(ConfigError, match=r"asynchronous.bound = 3 is less than the 4 optimizer steps"):
        Async(bound=3).ahead(4)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_as_many_groups_are_in_flight_as_the_bound_allows_and_none_at_the_end(bound):
    """(version + bound + 1) * 8 groups are issued when step `version` begins; a step takes 8; at most 30 steps' worth are ever issued."""
    lived = simulate(Async(bound=bound, **WORLD), steps=30)
    assert [line["in_flight_groups"] for line in lived.metrics] == [8 * min(bound, 29 - step) for step in range(30)]


# --- who is trained -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["due", "issue"])
@pytest.mark.parametrize("bound", [1, 4])
def test_every_offered_group_is_consumed_once(order, bound):
    """Half of the tasks take ten times longer; what is consumed is exactly what the synchronous run consumes, completion by completion."""
    lived, waiting = simulate(Async(bound=bound, order=order, **WORLD)), simulate(Async(bound=0, **WORLD))
    assert Counter(lived.consumed) == Counter(offered(lived, 60))
    assert Counter(lived.lengths) == Counter(waiting.lengths)
    assert lived.metrics[-1]["account_stale_rollouts"] == 0
    assert lived.metrics[-1]["ks_task"] == 0.0
    assert lived.metrics[-1]["ks_length"] == 0.0
    assert lived.driver.now < waiting.driver.now


def test_throwing_away_what_is_late_wastes_the_long_ones():
    """The alternative: no task is starved, since it is issued again and little is in flight, but long completions are lost."""
    lived = simulate(Async(bound=1, order="arrival", **WORLD), steps=200)
    slow = sum(task.startswith("slow") for task in lived.consumed)
    there = sum(task.startswith("slow") for task in offered(lived, 200))
    table = [[slow, len(lived.consumed) - slow], [there, 1600 - there]]
    assert stats.chi2_contingency(table, correction=False).pvalue > 0.01
    assert lived.metrics[-1]["account_stale_rollouts"] > 0.05 * lived.metrics[-1]["account_trained_rollouts"]
    assert lived.metrics[-1]["ks_length"] > 0.03
    assert max(line["attempts_max"] for line in lived.metrics) > 1


def test_due_waits_no_longer_than_it_must():
    """A slow group is overtaken while it can wait, so a step does not wait for the slowest of its own issue."""
    lived = simulate(Async(bound=2, **WORLD), steps=60)
    assert max(line["waited_max"] for line in lived.metrics) == 2
    order = [task.startswith("slow") for task in lived.consumed]
    assert order != [task.startswith("slow") for task in offered(lived, 60)]


def test_starvation_shows_in_the_figures():
    ledger = Ledger()
    for n in range(100):
        ledger.offered.append(("fast", "slow")[n % 2])
        if n % 2 == 0:
            ledger.consumed.append(("fast", (4,)))
    found = ledger.fairness([[40]] * 50)
    assert found == {"ks_task": 0.5, "ks_length": 0.5}


def test_ks_distance_is_that_of_scipy():
    rng = np.random.Generator(np.random.Philox(key=1))
    one, other = rng.integers(0, 9, 40).tolist(), rng.integers(2, 12, 70).tolist()
    assert ks_distance(one, other) == pytest.approx(stats.ks_2samp(one, other).statistic)
    assert ks_distance((1, 1, 2), (1, 2, 2)) == pytest.approx(1 / 3)
    assert ks_distance((), (1,)) == 0.0


# --- the account --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["due", "issue", "arrival"])
def test_the_law_holds_at_every_step_in_rollouts_and_tokens(order):
    lived = simulate(Async(bound=2, order=order, **WORLD), steps=40)
    for line in lived.metrics:
        for unit in ("rollouts", "tokens"):
            parts = [line[f"account_{name}_{unit}"] for name in ("trained", "filtered", "stale", "errored", "in_flight")]
            assert line[f"account_generated_{unit}"] == sum(parts)
    assert lived.metrics[-1]["account_trained_tokens"] == sum(lived.lengths)
    assert max(line["account_in_flight_tokens"] for line in lived.metrics) > 0


@pytest.mark.parametrize(("unit", "change"), [("rollouts", (1, 0)), ("tokens", (0, -3))])
def test_a_broken_law_raises_with_the_sum(unit, change):
    ledger = Ledger(trained=Count(4, 20), filtered=Count(2, 10))
    ledger.check(Count(8, 40), Count(2, 10))
    ledger.stale.add(*change)
    with pytest.raises(AccountError, match=rf"\d+ {unit} were generated, and accounted for are trained .* in flight .* = "):
        ledger.check(Count(8, 40), Count(2, 10))


def test_an_update_that_reports_another_number_raises():
    flow = flow_of(bound=0)
    live = Live(flow, Clock(flow), 1)
    filled = live.fill(0, 0, None, 2, 1.0, lambda group: True)
    with pytest.raises(AccountError, match="8 rollouts of step 0 have rows, and the update reports 7"):
        live.settle(filled, {"overlong": 1}, REINFORCE)


def test_ledger_survives_json():
    lived = simulate(Async(bound=2, order="arrival", **WORLD), steps=10)
    stored = json.loads(json.dumps(lived.live.flow.ledger.json()))
    assert Ledger.of(stored).json() == lived.live.flow.ledger.json()


# --- jobs and chunks ----------------------------------------------------------------------------------------------------------------------


def flow_of(**changes) -> Flow:
    settings = Async(**({"bound": 1, "chunk": 4, "rows": 6} | changes))
    return Flow(source(), settings, settings.ahead(1))


def drawn(chunk) -> list[Completion]:
    return [complete(request, chunk.version) for request in chunk.requests]


def enter(flow: Flow, chunk) -> None:
    completions = drawn(chunk)
    flow.apply(chunk, completions, flow.turns(chunk, completions))


def test_a_job_draws_from_the_seeds_of_the_synchronous_loop():
    made = source(siblings=2, seed=5)
    (_, job) = made.jobs(Draw(3, 1, 2, 8), 10, 2)
    assert [row.seed for row in job.rows] == [derive(derive(derive(5, "rl", 3), 8), 1, index) for index in range(2)]
    again = made.again(job, 40, 4)
    assert (again.number, again.root, again.attempt, again.step, again.task) == (40, 11, 1, 4, job.task)
    assert {row.seed for row in again.rows}.isdisjoint({row.seed for row in job.rows})


def test_begun_completions_go_on_first_and_never_beyond_the_budget():
    flow = flow_of()
    flow.open(0, 0)
    flow.issue(0, 3, 0)
    first = flow.compose(0)
    assert first is not None
    assert first.keys == ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1))  # 6 of 12
    enter(flow, first)
    begun = {key for key in first.keys if key in flow.waiting}
    assert begun
    second = flow.compose(0)
    assert second is not None
    assert set(second.keys[: len(begun)]) == begun
    assert all(request.drawn and request.limit == 4 for request in second.requests[: len(begun)])
    while (chunk := flow.compose(0)) is not None:
        enter(flow, chunk)
    enter(flow, second)
    while (chunk := flow.compose(0)) is not None:
        enter(flow, chunk)
    assert sorted(flow.arrived) == [0, 1, 2]
    for job in flow.jobs.values():
        for row in job.rows:
            assert FAST // 2 <= len(row.ids) <= 3 * SLOW // 2
            assert row.ids == [(row.seed + t) % 97 for t in range(len(row.ids))]  # however many calls it took


def test_waiting_work_is_shared_between_workers():
    flow = flow_of(workers=3, rows=100)
    flow.open(0, 0)
    flow.issue(0, 3, 0)
    chunks = [flow.compose(worker) for worker in range(3)]
    assert [len(chunk.keys) for chunk in chunks if chunk is not None] == [4, 3, 2]


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion((1, 2, 3, 4, 5), (0.0,) * 5, StopReason.PAUSED, 0), "asked for at most 4 tokens and got 5"),
        (Completion((1, 2), (0.0,), StopReason.END, 0), "got 2 with 1 log-prob"),
        (Completion((), (), StopReason.PAUSED, 0), "paused before its first token"),
        (Completion((1,), (0.0,), StopReason.END, 7), "job 0 was to be drawn with version 0 and was drawn with 7"),
    ],
)
def test_a_sampler_that_breaks_its_contract_is_caught(completion, message):
    flow = flow_of(rows=1)
    flow.open(0, 0)
    flow.issue(0, 1, 0)
    chunk = flow.compose(0)
    assert chunk is not None
    with pytest.raises(ValueError, match=message):
        flow.apply(chunk, [completion], flow.turns(chunk, [completion]))


def extend(row: Row, completion: Completion, made) -> None:
    row.extend(completion, 64, row.turn(TASK, completion, made.collector))


def test_versions_are_kept_per_token_only_where_they_differ():
    made, row, prompt = source(), Row(seed=1), Tokens((1, 4), (Owner.TEMPLATE, Owner.USER))
    extend(row, Completion((5, 6), (-0.1, -0.2), StopReason.PAUSED, 3), made)
    assert row.stop is None
    assert row.request(prompt.ids, made.collector, 9) == Request((1, 4), made.collector.sampling, 1, (5, 6), 9)
    extend(row, Completion((7,), (-0.3,), StopReason.END, 4), made)
    whole = row.trajectory(TASK, 2, prompt, 9)
    assert whole == Trajectory("t", 2, prompt, (5, 6, 7), (-0.1, -0.2, -0.3), StopReason.END, "5 6 7", 3, versions=(3, 3, 4))
    assert Row.of(json.loads(json.dumps(row.json()))).trajectory(TASK, 2, prompt, 9) == whole
    once = Row(seed=1)
    extend(once, Completion((5,), (-0.1,), StopReason.END, 3), made)
    assert once.trajectory(TASK, 0, prompt, 9).versions == ()


class Asked:
    """A world that says how often it was asked."""

    def __init__(self):
        self.asked: list[str] = []

    def reply(self, text: str) -> tuple[Message, ...]:
        self.asked.append(text)
        return (Message("tool", f"{len(self.asked)}"),)


def test_a_row_goes_on_after_what_the_world_said_and_tells_a_new_world_everything_again():
    made, prompt = source(max_tokens=8), Tokens((1, 4), (Owner.TEMPLATE, Owner.USER))
    made.collector = replace(made.collector, env_of=lambda task: Asked(), turns=3)
    row = Row(seed=1)
    extend(row, Completion((5, 6), (-0.1, -0.2), StopReason.END, 3), made)
    assert (row.ids, row.start, row.drawn, row.turns) == ([5, 6, 90, 91], 4, 2, 1)
    extend(row, Completion((7,), (-0.3,), StopReason.PAUSED, 4), made)
    assert row.request(prompt.ids, made.collector, 9) == Request(
        (1, 4, 5, 6, 90, 91), made.collector.sampling, derive(1, "turn", 1), (7,), 5
    )
    again = Row.of(json.loads(json.dumps(row.json())))
    assert again.env is None
    for one in (row, again):
        extend(one, Completion((8,), (-0.4,), StopReason.END, 4), made)
        assert [message.content for message in one.messages] == ["5 6", "1", "7 8", "2"]
        assert one.env is not None
        assert one.env.asked == ["5 6", "7 8"]
        extend(one, Completion((9, 9, 9), (-0.5,) * 3, StopReason.END, 4), made)
    whole = row.trajectory(TASK, 0, prompt, 0)
    assert whole == again.trajectory(TASK, 0, prompt, 0)
    assert (whole.stop, whole.text, whole.version, whole.completion.trained) == (StopReason.TURNS, "9 9 9", 3, 7)
    assert whole.versions == (3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4)


def test_the_budget_of_all_turns_ends_an_episode():
    made = source(max_tokens=4)
    made.collector = replace(made.collector, env_of=lambda task: Asked(), turns=9)
    row = Row(seed=1)
    extend(row, Completion((5, 6), (-0.1, -0.2), StopReason.END, 0), made)
    extend(row, Completion((7, 8), (-0.1, -0.2), StopReason.PAUSED, 0), made)
    assert (row.stop, row.drawn) == (StopReason.LENGTH, 4)


def test_a_flow_goes_on_from_its_checkpoint_where_it_stood():
    """What was being drawn is drawn again; everything else is kept, tasks by their place in the stream."""
    flow = flow_of()
    flow.open(0, 0)
    flow.issue(0, 3, 0)
    lost, done = flow.compose(0), flow.compose(1)
    assert lost is not None
    assert done is not None
    enter(flow, done)
    stored = json.loads(json.dumps(flow.json()))
    other = flow_of()
    other.restore(stored)
    assert other.json() == stored
    assert set(lost.keys) <= other.waiting
    following = other.compose(0)
    assert following is not None
    assert set(following.keys).isdisjoint(lost.keys)  # begun ones before fresh ones that were issued earlier
    assert all(request.drawn for request in following.requests)
    assert [job.task for job in other.jobs.values()] == [job.task for job in flow.jobs.values()]
    assert other.issued == 3


def test_a_group_is_scored_like_one_that_was_drawn_at_once():
    made = source(grader=Judge(fails=lambda text: text.startswith("4")))
    (job,) = made.jobs(Draw(0, 0, 1, 0), 0, 0)
    extend(job.rows[0], Completion((3, 1), (-1.0,) * 2, StopReason.END, 2), made)
    extend(job.rows[1], Completion((2,), (-1.0,), StopReason.END, 2), made)
    extend(job.rows[2], Completion((4,), (-1.0,), StopReason.END, 2), made)
    extend(job.rows[3], Completion((3,) * 64, (-1.0,) * 64, StopReason.LENGTH, 2), made)
    group = group_of(job, made.collector, 2)
    assert group.rewards == (1.0, 0.0, None, 0.0)
    assert [rollout.score.status for rollout in group.rollouts] == ["scored", "scored", "error", "truncated"]


def test_scripted_hands_remember_what_they_were_given():
    hand = Scripted()
    hand.deliver("weights", 3)
    assert (hand.delivered, hand.version) == ([("weights", 3)], 3)
