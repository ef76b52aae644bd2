"""Suites and the runner with a scripted sampler: seeds, order, scoring, examples, sharding, batches."""

import pytest
from scripted_suites import CharRenderer, CharSampler, EqualityGrader, suite

from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.envs.arithmetic import Arithmetic
from posttrain.evals.runner import check_truncation, conditions_of, evaluate, items_in_batches, openings_for, record_of, records_from
from posttrain.evals.suite import Origin, Suite, origin_of
from posttrain.rollout.episodes import play


def solve(prompt: str, seed: int) -> str:
    return str(int(prompt.split("+")[0]) + 1)


def test_one_call_scores_every_suite():
    sampler, ticks = CharSampler(solve), []
    records = evaluate(
        sampler, CharRenderer(), [suite("one"), suite("two", samples=2)], seed=0, label="sft", progress=ticks.append, model_digest="m"
    )
    assert len(sampler.calls) == 1
    assert len(ticks) == 4 + 8
    assert {name: record.pass_at_1 for name, record in records.items()} == {"one": 1.0, "two": 1.0}
    one = records["one"]
    assert (one.label, one.model_digest, one.mean_tokens) == ("sft", "m", 2.0)
    assert (one.conditions.template_digest, one.conditions.verifier, one.conditions.seed) == ("chars", "equal/1", 0)
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

    whole = evaluate(CharSampler(noisy), renderer, suites, seed=1, label="m", model_digest="w")
    openings = openings_for(suites, renderer, seed=1)
    parts = [play(CharSampler(noisy), renderer, openings[rank::2]) for rank in range(2)]
    merged = [parts[i % 2][i // 2] for i in range(len(openings))]
    sharded = records_from(suites, merged, renderer, seed=1, label="m", model_digest="w")
    assert {name: record.to_json() for name, record in sharded.items()} == {name: record.to_json() for name, record in whole.items()}
    assert 0 < whole["two"].pass_at_1 < 1


def test_a_missing_trajectory_is_refused():
    short = play(CharSampler(solve), CharRenderer(), openings_for([suite()], CharRenderer(), seed=0))[:-1]
    with pytest.raises(EvidenceError, match="3 trajectories for 4"):
        records_from([suite()], short, CharRenderer(), seed=0, label="m", model_digest="w")


def test_a_crashing_grader_is_an_error_not_a_wrong_answer():
    records = evaluate(
        CharSampler(lambda p, s: "crash" if p[0] == "0" else solve(p, s)), CharRenderer(), [suite()], seed=0, label="m", model_digest="w"
    )
    assert (records["sums"].error_rate, records["sums"].pass_at_1) == (0.25, 1.0)


def test_truncation_is_refused_unless_allowed():
    cut = CharSampler(solve, stops=False)
    with pytest.raises(EvidenceError, match="100.0%"):
        evaluate(cut, CharRenderer(), [suite()], seed=0, label="base", model_digest="w")
    records = evaluate(cut, CharRenderer(), [suite(allow_truncation=True)], seed=0, label="base", model_digest="w")
    assert (records["sums"].truncation_rate, records["sums"].pass_at_1) == (1.0, 0.0)
    with pytest.raises(EvidenceError, match="allow_truncation"):
        check_truncation([suite()], records)


def test_examples_show_what_was_asked_and_read():
    shown = []
    evaluate(CharSampler(solve), CharRenderer(), [suite(samples=3)], seed=0, label="sft", model_digest="w", on_example=shown.append)
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


def noisy(prompt: str, seed: int) -> str:
    return "crash" if seed % 5 == 0 else solve(prompt, seed) if seed % 2 else "nine"


def play_with(sampler: CharSampler):
    return lambda openings: play(sampler, CharRenderer(), openings)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 100])
def test_batches_do_not_change_the_record(batch):
    wanted = suite("sums", samples=3, n=7, allow_truncation=True)
    whole = evaluate(CharSampler(noisy), CharRenderer(), [wanted], seed=2, label="m", model_digest="w")["sums"]
    parts = list(items_in_batches(wanted, CharRenderer(), 2, batch, play_with(CharSampler(noisy))))
    assert [len(part) for part in parts] == [batch] * (7 // batch) + ([7 % batch] if 7 % batch else [])
    items = [item for part in parts for item in part]
    assert record_of(wanted, items, CharRenderer(), seed=2, label="m", model_digest="w").to_json() == whole.to_json()
    assert 0 < whole.error_rate < 1


def test_the_order_of_the_items_does_not_change_their_results():
    wanted = suite("sums", samples=2, n=6)
    turned = Suite("sums", wanted.tasks[::-1], wanted.grader, wanted.sampling, wanted.samples)
    one, other = (
        evaluate(CharSampler(noisy), CharRenderer(), [of], seed=2, label="m", model_digest="w")["sums"] for of in (wanted, turned)
    )
    assert {item.id: item.outcomes for item in one.items} == {item.id: item.outcomes for item in other.items}
    assert one.conditions.items_digest != other.conditions.items_digest


def test_batches_go_on_behind_the_finished_items():
    wanted, sampler = suite(n=5), CharSampler(solve)
    done = next(items_in_batches(wanted, CharRenderer(), 0, 2, play_with(sampler)))
    rest = list(items_in_batches(wanted, CharRenderer(), 0, 2, play_with(sampler), done))
    assert [[item.id for item in part] for part in rest] == [["sums-2", "sums-3"], ["sums-4"]]
    with pytest.raises(EvidenceError, match="the finished items of 'sums' are not its first 2"):
        list(items_in_batches(wanted, CharRenderer(), 0, 2, play_with(sampler), done[::-1]))
    with pytest.raises(ConfigError, match="batches of 0 items"):
        list(items_in_batches(wanted, CharRenderer(), 0, 0, play_with(sampler)))


def test_conditions_say_where_the_items_come_from():
    given = conditions_of(suite(), CharRenderer(), 3)
    assert (given.dataset, given.split, given.split_digest) == ("sums", "given", suite().items_digest)
    assert (given.extractor, given.verifier, given.thinking, given.tokenizer_digest) == ("inside equal/1", "equal/1", "none", "chars")
    stated = conditions_of(suite(origin=Origin("numbers", "held_out", "d")), CharRenderer(), 3)
    assert (stated.dataset, stated.split, stated.split_digest) == ("numbers", "held_out", "d")


def test_the_origin_follows_settings_and_split():
    origins = [origin_of(source, split) for source in (Arithmetic(), Arithmetic(high=9)) for split in ("train", "held_out")]
    assert {origin.dataset for origin in origins} == {"arithmetic"}
    assert len({origin.digest for origin in origins}) == 4
    assert origin_of(Arithmetic(), "train") == origins[0]


def test_a_named_extractor_is_stated():
    source = Arithmetic()
    arithmetic = Suite("a", tuple(source.tasks("held_out", 2, 0)), source.grader, Sampling(), 1)
    assert conditions_of(arithmetic, CharRenderer(), 0).extractor == "hash/1"
