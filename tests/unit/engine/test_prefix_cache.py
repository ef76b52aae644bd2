"""Prefixes: the tree alone, what a second call computes, and that no change of the weights goes unnoticed."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.engine.decoder import LlamaDecoder
from posttrain.engine.fused import Watch
from posttrain.engine.local import LocalSampler
from posttrain.engine.prefix_cache import Match, PrefixCache
from posttrain.engine.types import Request
from posttrain.models.lora import LoRA, add_lora

BYTES = 1 * 2 * 1 * 2 * 4
"""Of one token below: 1 layer, keys and values, 1 head, 2 numbers of 4 bytes."""


def kv(ids) -> torch.Tensor:
    """Keys and values that say which token they belong to."""
    return torch.tensor(ids, dtype=torch.float32)[None, None, None, :, None].expand(1, 2, 1, -1, 2).clone()


def add(cache: PrefixCache, ids) -> Match:
    known = cache.match(ids)
    return cache.add(ids, known, kv(ids[known.length :]))


def held(match: Match) -> list[int]:
    """The tokens whose keys and values a match leads to, in order of position."""
    by_position = dict(match.pieces())
    return [int(token) for start in sorted(by_position) for token in by_position[start][0, 0, 0, :, 0]]


def test_the_longest_prefix_is_found():
    cache = PrefixCache(1 << 20)
    add(cache, (1, 5, 9, 7))
    add(cache, (1, 5, 9, 8, 4))
    add(cache, (1, 5, 9, 8, 6))
    assert cache.bytes == (4 + 2 + 1) * BYTES  # what is shared is held once
    for ids, length in [((1, 5, 9, 8, 6, 3), 5), ((1, 5, 9, 7), 4), ((1, 5, 2), 2), ((1, 5, 9, 8, 9), 4), ((2,), 0), ((), 0)]:
        match = cache.match(ids)
        assert match.length == length
        assert held(match) == list(ids[:length])


def test_a_sequence_that_was_added_meanwhile_is_not_stored_twice():
    cache = PrefixCache(1 << 20)
    stale = cache.match((1, 5, 9))
    add(cache, (1, 5, 8))
    match = cache.add((1, 5, 9), stale, kv((1, 5, 9)))
    assert (held(match), cache.bytes) == ([1, 5, 9], 4 * BYTES)


def test_the_least_recently_used_leave_and_what_hangs_on_others_last():
    cache = PrefixCache(5 * BYTES)
    trunk = add(cache, (1, 5, 9))
    add(cache, (1, 5, 9, 7))
    add(cache, (1, 5, 9, 8))
    cache.match((1, 5, 9, 7))
    add(cache, (1, 5, 9, 6))
    assert cache.bytes <= cache.max_bytes
    assert [cache.match((1, 5, 9, last)).length for last in (7, 8, 6)] == [4, 3, 4]
    add(cache, (2, 3, 4, 5, 6))
    assert cache.match((1, 5, 9)).length == 0
    assert held(trunk) == [1, 5, 9]  # a match outlives what the cache forgets


def test_what_is_too_large_is_not_held():
    cache = PrefixCache(2 * BYTES)
    assert held(add(cache, (1, 5, 9))) == [1, 5, 9]
    assert (len(cache), cache.bytes) == (0, 0)


def test_completions_are_held_by_their_ids_until_a_prompt_continues_one():
    cache = PrefixCache(1 << 20)
    add(cache, (1, 5))
    cache.add_ids((1, 5, 9, 8))
    assert cache.match((1, 5, 9, 8)).length == 2
    assert cache.match((1, 5, 9, 7, 3)).length == 2
    assert not cache.continued  # neither goes beyond the completion
    assert cache.match((1, 5, 9, 8, 3)).length == 2
    assert cache.continued
    assert held(add(cache, (1, 5, 9, 8, 3))) == [1, 5, 9, 8, 3]  # and now takes its place
    cache.clear()
    assert (len(cache), cache.bytes, cache.continued) == (0, 0, True)


def sampler_of(model, **options) -> LocalSampler:
    return LocalSampler(model, frozenset({2}), frozenset({2}), **options)


def turn(sampler: LocalSampler, prompt, seed: int):
    return sampler.generate([Request(tuple(prompt), Sampling(max_tokens=6), seed)])[0]


def talk(sampler: LocalSampler) -> tuple[int, ...]:
    """Two turns, by which the sampler learns that prompts continue completions; the second's prompt and completion."""
    first = (1, 5, 9, *turn(sampler, (1, 5, 9), 0).ids, 30, 31)
    return (*first, *turn(sampler, first, 1).ids)


def computed(sampler: LocalSampler) -> int:
    decoder = sampler.decoder()
    assert isinstance(decoder, LlamaDecoder)
    return decoder.computed


def test_a_later_turn_reads_only_what_is_new(toy):
    model = toy.model(std=0.1)
    sampler = sampler_of(model)
    said = talk(sampler)
    before = computed(sampler)
    third = turn(sampler, (*said, 40, 41, 42), 2)
    assert computed(sampler) - before == 4  # the completion's last token, which nothing had read, and the three of the new turn
    again = turn(sampler, (*said, 40, 41, 42), 2)
    assert computed(sampler) - before == 5  # of a prompt that is known, the last token is read again for its logits
    cold = turn(sampler_of(model), (*said, 40, 41, 42), 2)
    for warm in (third, again):
        assert warm.ids == cold.ids
        assert warm.logps == pytest.approx(cold.logps, abs=1e-6)


def test_siblings_read_their_prompt_once(toy):
    sampler = sampler_of(toy.model())
    sampler.generate([Request(prompt, Sampling(max_tokens=4), seed) for seed in range(5) for prompt in ((1, 5, 9), (4, 7))])
    assert computed(sampler) == 3 + 2


def test_a_common_head_is_read_once(toy):
    sampler = sampler_of(toy.model())
    head = tuple(range(5, 45))
    sampler.generate([Request((*head, last), Sampling(max_tokens=2), last) for last in (50, 51, 52)])
    assert computed(sampler) == 40 + 3


def test_single_turns_keep_no_completions(toy):
    sampler = sampler_of(toy.model())
    sampler.generate([Request((1, 5, 9), Sampling(max_tokens=6), seed) for seed in range(8)])
    per_token = sampler.decoder().bytes_per_token()
    assert sampler.prefixes.bytes < 4 * per_token + 8 * 8 * 6


def step(model) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[1, 5, 9]])).logits.square().mean().backward()
    optimizer.step()


def fused_step(model) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(input_ids=torch.tensor([[1, 5, 9]])).logits.square().mean().backward()
    optimizer.step()


@torch.no_grad()
def copy(model) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.copy_(weight * 1.5)


def reload(model) -> None:
    model.load_state_dict({name: tensor * 1.2 for name, tensor in model.state_dict().items()})


def through_data(model) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)


def one_value(model) -> None:
    with torch.no_grad():
        model.model.norm.weight[7] *= 1.5


def other_storage(model) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data = layer.weight.data * 1.5


def other_module(model) -> None:
    model.lm_head = torch.nn.Linear(32, 60)


CHANGES = [step, fused_step, copy, reload, through_data, one_value, other_storage, other_module]


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_the_weights_goes_unnoticed(toy, change):
    model = toy.model(std=0.1)
    sampler = sampler_of(model)
    said = talk(sampler)
    stale = turn(sampler, (*said, 40), 2)
    change(model)
    warm, cold = turn(sampler, (*said, 40), 2), turn(sampler_of(model), (*said, 40), 2)
    assert warm.ids == cold.ids
    assert warm.logps == pytest.approx(cold.logps, abs=1e-6)
    assert warm.logps != pytest.approx(stale.logps, abs=1e-6)


@pytest.mark.parametrize("change", CHANGES)
def test_watch_reports_a_change_once(toy, change):
    model = toy.model()
    watch = Watch(model)
    assert [watch.changed(), watch.changed()] == [True, False]
    model(input_ids=torch.tensor([[1, 5]]))
    assert not watch.changed()
    change(model)
    assert [watch.changed(), watch.changed()] == [True, False]


def test_watch_sees_adapters_go_on_and_off(toy):
    model = add_lora(toy.model(), LoRA(rank=2), 0)
    watch = Watch(model)
    assert [watch.changed(), watch.changed()] == [True, False]
    with model.disable_adapter():
        assert watch.changed()
    assert watch.changed()
    model.merge_adapter()
    assert [watch.changed(), watch.changed()] == [True, False]


def test_a_new_version_starts_cold(toy):
    sampler = sampler_of(toy.model())
    talk(sampler)
    sampler.version = 1
    turn(sampler, (1, 5, 9), 0)
    assert computed(sampler) == 3
