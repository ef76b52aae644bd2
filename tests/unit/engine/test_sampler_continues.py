"""A completion drawn in several calls, and what the sampler records about its cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.trajectory import StopReason
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Completion, Request
from posttrain.objectives.logprobs import warp

PROMPTS = [(1, 5, 9), (1, 5, 9, 11, 12), (1, 7)]


def sampler_of(model, **options) -> LocalSampler:
    return LocalSampler(model, frozenset({2}), frozenset({0, 1, 2, 3}), **options)


def asked(n: int, sampling: Sampling) -> list[Request]:
    return [Request(PROMPTS[i % 3], sampling, derive(7, i)) for i in range(n)]


def in_chunks(sampler: LocalSampler, requests: list[Request], sizes: list[int]) -> list[list[Completion]]:
    """The completions of every call, per request; call k draws at most sizes[k] tokens, the last size repeats."""
    parts: list[list[Completion]] = [[] for _ in requests]
    call, left = 0, list(range(len(requests)))
    while left:
        assert call < 20, "a completion that never ends"
        limit = sizes[min(call, len(sizes) - 1)]
        drawn = {i: tuple(token for part in parts[i] for token in part.ids) for i in left}
        done = sampler.generate([replace(requests[i], drawn=drawn[i], limit=limit) for i in left])
        for i, completion in zip(left, done, strict=True):
            parts[i].append(completion)
        left = [i for i in left if parts[i][-1].stop is StopReason.PAUSED]
        call += 1
    return parts


@pytest.mark.parametrize("sizes", [[1], [2], [5], [1, 7, 3]], ids=str)
@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_chunks_draw_what_one_call_draws(toy, sizes, prefix_bytes):
    model = toy.model(std=0.1)
    requests = asked(9, Sampling(max_tokens=12))
    whole = sampler_of(model).generate(requests)
    assert len({len(c.ids) for c in whole}) > 2
    for parts, expected in zip(in_chunks(sampler_of(model, prefix_bytes=prefix_bytes), requests, sizes), whole, strict=True):
        assert tuple(token for part in parts for token in part.ids) == expected.ids
        assert [logp for part in parts for logp in part.logps] == pytest.approx(expected.logps, abs=1e-6)
        assert parts[-1].stop is expected.stop
        assert all(part.stop is StopReason.PAUSED for part in parts[:-1])
        assert all(len(part.ids) == size for part, size in zip(parts[:-1], sizes, strict=False))


def test_rows_that_continue_and_rows_that_start_share_a_batch(toy):
    model = toy.model(std=0.1)
    requests = asked(9, Sampling(max_tokens=12))
    whole = sampler_of(model).generate(requests)
    cut = [i % 5 % len(c.ids) for i, c in enumerate(whole)]
    assert 0 in cut
    assert max(cut) > 2
    rest = sampler_of(model, max_rows=4).generate([replace(r, drawn=c.ids[:n]) for r, c, n in zip(requests, whole, cut, strict=True)])
    for part, completion, n in zip(rest, whole, cut, strict=True):
        assert part.ids == completion.ids[n:]
        assert part.logps == pytest.approx(completion.logps[n:], abs=1e-6)


def test_the_budget_counts_what_was_drawn(toy):
    sampler = LocalSampler(toy.model(), frozenset(), frozenset())
    request = Request((1, 5, 9), Sampling(max_tokens=5), 3, drawn=(20, 21, 22))
    (last,) = sampler.generate([request])
    assert (len(last.ids), last.stop) == (2, StopReason.LENGTH)
    (exact,) = sampler.generate([replace(request, limit=2)])
    assert (len(exact.ids), exact.stop) == (2, StopReason.LENGTH)  # the limit coincides with the end: nothing is left to draw
    (paused,) = sampler.generate([replace(request, limit=1)])
    assert (len(paused.ids), paused.stop) == (1, StopReason.PAUSED)


@pytest.mark.parametrize(
    ("drawn", "limit", "stop"),
    [((20, 21), None, StopReason.LENGTH), ((20, 2), None, StopReason.END), ((20, 3), 1, StopReason.CONTROL), ((20,), 0, StopReason.PAUSED)],
)
def test_nothing_left_to_draw(toy, drawn, limit, stop):
    told: list[int] = []
    requests = [
        Request((1, 5), Sampling(max_tokens=2 if stop is StopReason.LENGTH else 9), 1, drawn, limit),
        *asked(2, Sampling(max_tokens=3)),
    ]
    done = sampler_of(toy.model()).generate(requests, told.append)
    assert (done[0].ids, done[0].logps, done[0].stop) == ((), (), stop)
    assert all(c.ids for c in done[1:])
    assert sum(told) == 3


CUTS = [
    Sampling(top_k=4, max_tokens=8),
    Sampling(top_p=0.7, max_tokens=8),
    Sampling(temperature=0.6, top_k=9, top_p=0.8, min_p=0.05, max_tokens=8),
]


@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_candidates_are_what_the_cut_left(toy, sampling):
    model = toy.model()
    requests = asked(6, sampling)
    for request, completion in zip(requests, sampler_of(model).generate(requests), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*request.prompt, *completion.ids]])).logits[0, len(request.prompt) - 1 : -1]
        left = [tuple(row.nonzero()[:, 0].tolist()) for row in ~warp(logits, sampling).isneginf()]
        assert list(completion.candidates) == left
        assert all(token in ids for token, ids in zip(completion.ids, completion.candidates, strict=True))


def test_no_candidates_without_a_cut(toy):
    requests = [*asked(2, Sampling(max_tokens=4)), *asked(2, CUTS[0])]
    done = sampler_of(toy.model()).generate(requests)
    assert [len(c.candidates) == len(c.ids) for c in done] == [False, False, True, True]
    assert done[0].candidates == ()


def test_chunks_carry_their_own_candidates(toy):
    model = toy.model(std=0.1)
    requests = asked(4, CUTS[1])
    whole = sampler_of(model).generate(requests)
    for parts, expected in zip(in_chunks(sampler_of(model), requests, [3]), whole, strict=True):
        assert tuple(ids for part in parts for ids in part.candidates) == expected.candidates
