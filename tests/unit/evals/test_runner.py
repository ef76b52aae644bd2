"""Suites and the runner with a scripted sampler: seeds, order, scoring, examples, sharding."""

from collections.abc import Callable, Sequence

import pytest

from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, RewardStatus, Score, StopReason, Tokens
from posttrain.engine.types import Completion, Request
from posttrain.evals.runner import check_truncation, evaluate, openings_for, records_from
from posttrain.evals.suite import Suite
from posttrain.rollout.episodes import play

STOP = 0


class CharRenderer:
    """One token per character; 0 ends the turn."""

    digest = "chars"

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        ids = tuple(ord(letter) for message in messages for letter in message.content)
        return Tokens(ids, (Owner.USER,) * len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != STOP)


class ScriptedSampler:
    """Answers every prompt by a function of its text and seed; an answer without the stop token is cut."""

    def __init__(self, answer: Callable[[str, int], str], stops: bool = True):
        self.version, self.answer, self.stops, self.calls = 3, answer, stops, []

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        self.calls.append(list(requests))
        done = []
        for request in requests:
            text = self.answer("".join(map(chr, request.prompt)), request.seed)
            ids = tuple(map(ord, text)) + ((STOP,) if self.stops else ())
            done.append(Completion(ids, (-0.5,) * len(ids), StopReason.END if self.stops else StopReason.LENGTH, self.version))
            if progress is not None:
                progress(1)
        return done


class EqualityGrader:
    name = "equal/1"

    def __call__(self, task: Task, text: str) -> Score:
        if text == "crash":
            raise ZeroDivisionError("boom")
        return Score(float(text == task.answer), RewardStatus.SCORED, parsed=text, grader=self.name)


def suite(name: str = "sums", samples: int = 1, temperature: float = 1.0, **more) -> Suite:
    tasks = tuple(Task(f"{name}-{i}", (Message("user", f"{i}+1"),), str(i + 1)) for i in range(4))
    return Suite(name, tasks, EqualityGrader(), Sampling(temperature=temperature, max_tokens=5), samples, **more)


def solve(prompt: str, seed: int) -> str:
    return str(int(prompt.split("+")[0]) + 1)


def test_one_call_scores_every_suite():
    sampler, ticks = ScriptedSampler(solve), []
    records = evaluate(
        sampler, CharRenderer(), [suite("one"), suite("two", samples=2)], seed=0, label="sft", progress=ticks.append, model_digest="m"
    )
    assert len(sampler.calls) == 1
    assert len(ticks) == 4 + 8
    assert {name: record.pass_at_1 for name, record in records.items()} == {"one": 1.0, "two": 1.0}
    one = records["one"]
    assert (one.label, one.model_digest, one.mean_tokens) == ("sft", "m", 2.0)
    assert (one.conditions.template_digest, one.conditions.grader, one.conditions.seed) == ("chars", "equal/1", 0)
    assert one.conditions.items_digest == suite("one").items_digest


def test_seeds_depend_on_suite_item_and_sample_only():
    openings = openings_for([suite(samples=2)], CharRenderer(), seed=7)
    assert [opening.seed for opening in openings[:3]] == [
        derive(7, "eval", "sums", "sums-0", 0),
        derive(7, "eval", "sums", "sums-0", 1),
        derive(7, "eval", "sums", "sums-1", 0),
    ]
    assert len({opening.seed for opening in openings}) == len(openings) == 8
    assert openings[0].prompt.ids == openings[1].prompt.ids == (ord("0"), ord("+"), ord("1"))
    alone = openings_for([suite()], CharRenderer(), seed=7)
    beside = openings_for([suite("other"), suite()], CharRenderer(), seed=7)
    assert beside[4:] == alone


def test_sharded_episodes_give_the_same_records():
    suites, renderer = [suite("one"), suite("two", samples=2)], CharRenderer()

    def noisy(prompt: str, seed: int) -> str:
        return solve(prompt, seed) if seed % 2 else "9"

    whole = evaluate(ScriptedSampler(noisy), renderer, suites, seed=1, label="m")
    openings = openings_for(suites, renderer, seed=1)
    parts = [play(ScriptedSampler(noisy), renderer, openings[rank::2]) for rank in range(2)]
    merged = [parts[i % 2][i // 2] for i in range(len(openings))]
    sharded = records_from(suites, merged, renderer, seed=1, label="m")
    assert {name: record.to_json() for name, record in sharded.items()} == {name: record.to_json() for name, record in whole.items()}
    assert 0 < whole["two"].pass_at_1 < 1


def test_a_missing_trajectory_is_refused():
    short = play(ScriptedSampler(solve), CharRenderer(), openings_for([suite()], CharRenderer(), seed=0))[:-1]
    with pytest.raises(EvidenceError, match="3 trajectories for 4"):
        records_from([suite()], short, CharRenderer(), seed=0, label="m")


def test_a_crashing_grader_is_an_error_not_a_wrong_answer():
    records = evaluate(ScriptedSampler(lambda p, s: "crash" if p[0] == "0" else solve(p, s)), CharRenderer(), [suite()], seed=0, label="m")
    assert (records["sums"].error_rate, records["sums"].pass_at_1) == (0.25, 1.0)


def test_truncation_is_refused_unless_allowed():
    cut = ScriptedSampler(solve, stops=False)
    with pytest.raises(EvidenceError, match="100.0%"):
        evaluate(cut, CharRenderer(), [suite()], seed=0, label="base")
    records = evaluate(cut, CharRenderer(), [suite(allow_truncation=True)], seed=0, label="base")
    assert (records["sums"].truncation_rate, records["sums"].pass_at_1) == (1.0, 0.0)
    with pytest.raises(EvidenceError, match="allow_truncation"):
        check_truncation([suite()], records)


def test_examples_show_what_was_asked_and_read():
    shown = []
    evaluate(ScriptedSampler(solve), CharRenderer(), [suite(samples=3)], seed=0, label="sft", on_example=shown.append)
    assert [example["task"] for example in shown] == [f"sums-{i}" for i in range(4)]
    assert shown[1] == {
        "label": "sft",
        "suite": "sums",
        "task": "sums-1",
        "index": 0,
        "prompt": "1+1",
        "completion": "2",
        "gold": "2",
        "parsed": "2",
        "value": 1.0,
        "status": "scored",
        "stop": "end",
        "tokens": 2,
        "detail": "",
    }


def test_suites_that_cannot_measure_are_refused():
    tasks = suite().tasks
    with pytest.raises(ConfigError, match="greedy samples"):
        suite(samples=2, temperature=0.0)
    with pytest.raises(ConfigError, match="at least 2"):
        Suite("s", tasks[:1], EqualityGrader(), Sampling(), 1)
    with pytest.raises(ConfigError, match="2 items with id 'sums-0'"):
        Suite("s", (tasks[0], tasks[0]), EqualityGrader(), Sampling(), 1)
    with pytest.raises(ConfigError, match="at least 1"):
        suite(samples=0)
    with pytest.raises(ConfigError, match="two suites are called 'sums'"):
        openings_for([suite(), suite()], CharRenderer(), seed=0)


def test_suite_digest_follows_its_conditions():
    assert suite().digest == suite().digest
    assert len({suite().digest, suite(samples=2).digest, suite(temperature=0.5).digest, suite("other").digest}) == 4
    assert suite(allow_truncation=True).digest == suite().digest
