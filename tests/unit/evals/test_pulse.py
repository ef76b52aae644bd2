"""The pulse of a training run: figures by hand, equal answers to equal questions, and what is left out when nothing was judged."""

from collections.abc import Callable

import pytest
from scripted_suites import CharRenderer, CharSampler, suite

from posttrain.core.errors import ConfigError
from posttrain.evals.pulse import Pulse, measure_pulse
from posttrain.stats.intervals import cluster_t, wilson


def answer(right: Callable[[int, int], bool]) -> CharSampler:
    """Items are "0+1" .. "3+1"; `right(item, seed)` decides whether the answer is."""

    def reply(prompt: str, seed: int) -> str:
        item = int(prompt.split("+")[0])
        return str(item + 1) if right(item, seed) else "nine"

    return CharSampler(reply)


def test_one_sample_per_item_has_a_wilson_interval():
    found = measure_pulse(answer(lambda item, seed: item < 3), CharRenderer(), suite(), 5)
    interval = wilson(3, 4)
    assert found == {
        "heldout_n": 4.0,
        "heldout_truncated": 0.0,
        "heldout_length": (3 * 2 + 5) / 4,  # a digit and the stop token, three times; "nine" and the stop token
        "heldout_parse_rate": 1.0,
        "heldout_mean": 0.75,
        "heldout_low": interval.low,
        "heldout_high": interval.high,
    }


def test_several_samples_are_clustered():
    # item 0 is always right, item 1 never, items 2 and 3 half the time: means 1, 0, .5, .5 whatever the seeds' parity would give
    turn = {2: iter([True, False]), 3: iter([False, True])}
    found = measure_pulse(answer(lambda item, seed: item == 0 or (item > 1 and next(turn[item]))), CharRenderer(), suite(samples=2), 5)
    interval = cluster_t([1.0, 0.0, 0.5, 0.5])
    assert (found["heldout_mean"], found["heldout_low"], found["heldout_high"]) == (0.5, interval.low, interval.high)


def test_the_same_weights_give_the_same_pulse():
    noisy = answer(lambda item, seed: seed % 2 == 0)
    first = measure_pulse(noisy, CharRenderer(), suite(), 5)
    assert measure_pulse(noisy, CharRenderer(), suite(), 5) == first
    assert noisy.seeds[:4] == noisy.seeds[4:]
    measure_pulse(noisy, CharRenderer(), suite(), 6)
    assert noisy.seeds[8:] != noisy.seeds[:4]


def test_a_grader_that_fails_leaves_the_mean_out():
    found = measure_pulse(CharSampler(lambda prompt, seed: "crash"), CharRenderer(), suite(), 0)
    assert found == {"heldout_n": 0.0, "heldout_truncated": 0.0, "heldout_length": 6.0}
    some = measure_pulse(CharSampler(lambda prompt, seed: "crash" if prompt[0] == "0" else "1"), CharRenderer(), suite(), 0)
    assert (some["heldout_n"], some["heldout_mean"], some["heldout_low"]) == (3.0, 0.0, cluster_t([0.0, 0.0, 0.0]).low)


def test_cut_answers_are_counted():
    found = measure_pulse(CharSampler(lambda prompt, seed: "12345", stops=False), CharRenderer(), suite(), 0)
    assert (found["heldout_truncated"], found["heldout_parse_rate"], found["heldout_mean"]) == (1.0, 0.0, 0.0)


class TwoRanks:
    """Rank 0 of two, whose mate's share is played by the same sampler."""

    def __init__(self, theirs: Callable[[], list]):
        self.theirs = theirs

    def share(self, items):
        self.rest = items[1::2]
        return items[::2]

    def interleave(self, mine):
        other = self.theirs()
        return [pair for both in zip(mine, other, strict=True) for pair in both]


def test_ranks_share_the_episodes():
    from posttrain.rollout.episodes import play

    sampler = answer(lambda item, seed: seed % 2 == 0)
    ranks = TwoRanks(lambda: play(sampler, CharRenderer(), ranks.rest))
    assert measure_pulse(sampler, CharRenderer(), suite(), 5, ranks) == measure_pulse(sampler, CharRenderer(), suite(), 5)


def test_when_it_is_due():
    pulse = Pulse(suite(), 10)
    assert [step for step in range(25) if pulse.due(step)] == [0, 10, 20]
    with pytest.raises(ConfigError, match="every 0 steps"):
        Pulse(suite(), 0)
