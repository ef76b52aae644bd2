"""The in-process sampler: agrees with the trainer, independent of batch mates, stops where it must, and sees new weights at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.trajectory import StopReason
from posttrain.engine.local import LocalSampler
from posttrain.engine.scoring import score
from posttrain.engine.types import Request
from posttrain.rollout.pack import Packing, pack

STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})


def sampler_of(model, stop=STOP, control=CONTROL, **options) -> LocalSampler:
    return LocalSampler(model, stop, control, **options)


def requests(n: int, sampling: Sampling | None = None) -> list[Request]:
    """`n` requests over three prompts of different lengths."""
    prompts = [(1, 5, 9), (1, 5, 9, 11, 12), (1, 7)]
    return [Request(prompts[i % 3], sampling or Sampling(max_tokens=12), derive(7, i)) for i in range(n)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12),
        Sampling(temperature=0.3, max_tokens=12),
        Sampling(temperature=2.0, max_tokens=12),
        Sampling(top_k=5, max_tokens=12),
        Sampling(top_p=0.8, max_tokens=12),
        Sampling(min_p=0.1, max_tokens=12),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, max_tokens=12),
    ],
    ids=str,
)
def test_logprobs_are_those_the_trainer_computes(toy, sampling):
    model = toy.model()
    asked = requests(12, sampling)
    done = sampler_of(model).generate(asked)
    rows = [toy.row(r.prompt, c.ids, f"{i % 3}", logps=c.logps) for i, (r, c) in enumerate(zip(asked, done, strict=True))]
    assert max(len(c.ids) for c in done) > 3
    for batch in pack(rows, Packing(row_tokens=32, micro_tokens=64)):
        with torch.no_grad():
            logp_BT = score(model, batch, sampling).logp_BT
        torch.testing.assert_close(logp_BT, batch.behaviour_BT, atol=1e-5, rtol=0)


def same(one, other) -> None:
    assert one.ids == other.ids
    assert one.stop == other.stop
    assert one.logps == pytest.approx(other.logps, abs=1e-6)


def test_result_does_not_depend_on_batch_mates_or_order(toy):
    model = toy.model(std=0.1)
    asked = requests(15)
    together = sampler_of(model).generate(asked)
    assert len({c.ids for c in together}) > 5
    for request, expected in zip(asked, together, strict=True):
        same(sampler_of(model).generate([request])[0], expected)
    order = list(range(15))
    random.Random(3).shuffle(order)
    for place, completion in zip(order, sampler_of(model).generate([asked[i] for i in order]), strict=True):
        same(completion, together[place])


def mixed(n: int) -> list[Request]:
    """`n` requests over three prompts with budgets from 1 to 12."""
    return [replace(r, sampling=Sampling(max_tokens=1 + 5 * i % 12)) for i, r in enumerate(requests(n))]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("refill", [0.3, 1.0])
def test_result_does_not_depend_on_seats(toy, monkeypatch, rows, refill):
    model = toy.model(std=0.1)
    asked = mixed(20)
    together = sampler_of(model).generate(asked)
    monkeypatch.setattr("posttrain.engine.local.REFILL", refill)
    for one, other in zip(sampler_of(model, max_rows=rows).generate(asked), together, strict=True):
        same(one, other)


def test_result_does_not_depend_on_memory(toy, monkeypatch):
    model = toy.model(std=0.1)
    together = sampler_of(model).generate(mixed(15))
    monkeypatch.setattr("posttrain.engine.local.CACHE_BYTES", 1)
    for one, other in zip(sampler_of(model).generate(mixed(15)), together, strict=True):
        same(one, other)


@pytest.mark.parametrize("crowded", [0.0, 2.0])
def test_result_does_not_depend_on_when_the_living_move_together(toy, monkeypatch, crowded):
    model = toy.model(std=0.1)
    asked = mixed(24)
    alone = [sampler_of(model).generate([request])[0] for request in asked]
    monkeypatch.setattr("posttrain.engine.decoder.CROWDED", crowded)
    for one, other in zip(sampler_of(model).generate(asked), alone, strict=True):
        same(one, other)


def test_columns_grow_with_the_rows(toy):
    model = toy.model(std=0.1)
    asked = [Request((1, 5, 9), Sampling(max_tokens=n), n) for n in (70, 40, 3)]
    together = sampler_of(model, frozenset(), frozenset()).generate(asked)
    assert [len(c.ids) for c in together] == [70, 40, 3]
    for request, completion in zip(asked, together, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*request.prompt, *completion.ids]])).logits[0, 2:-1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(completion.ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=2e-6, rtol=0)


def test_a_common_prefix_changes_nothing(toy):
    model = toy.model(std=0.1)
    head = (1, 5, 9, *range(11, 50))  # long enough to be read once for all
    asked = [Request((*head, *tail), Sampling(max_tokens=6), derive(1, i)) for i, tail in enumerate([(20,), (21, 22, 23), (20, 25)])]
    for request, completion in zip(asked, sampler_of(model).generate(asked), strict=True):
        same(sampler_of(model).generate([request])[0], completion)


def test_one_prompt_that_begins_another(toy):
    model = toy.model(std=0.1)
    asked = [Request(prompt, Sampling(max_tokens=6), derive(2, i)) for i, prompt in enumerate([(1, 5), (1, 5, 9), (1, 5, 9, 10)])]
    for request, completion in zip(asked, sampler_of(model).generate(asked), strict=True):
        same(sampler_of(model).generate([request])[0], completion)


def test_greedy_is_what_the_library_generates(toy):
    model = toy.model()
    prompts = [(1, 5, 9), (1, 5, 9, 11, 12), (1, 7), (4,)]
    done = sampler_of(model, frozenset({59}), frozenset({59})).generate(
        [Request(p, Sampling(temperature=0.0, max_tokens=30), 0) for p in prompts]
    )
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, eos_token_id=59, pad_token_id=0
        )
        assert completion.ids == tuple(out[0, len(prompt) :].tolist())
        assert set(completion.logps) == {0.0}


def test_greedy_and_sampled_requests_share_a_batch(toy):
    model = toy.model(std=0.1)
    asked = [
        Request((1, 5, 9), Sampling(temperature=0.0, max_tokens=5), 1),
        Request((1, 5, 9), Sampling(max_tokens=5), 1),
        Request((1, 5, 9), Sampling(temperature=0.0, max_tokens=5), 2),
        Request((1, 5, 9), Sampling(top_k=1, max_tokens=5), 3),
    ]
    done = sampler_of(model).generate(asked)
    for request, completion in zip(asked, done, strict=True):
        same(sampler_of(model).generate([request])[0], completion)
    assert done[0].ids == done[2].ids == done[3].ids  # one token in the support is greedy too


def only(model, token: int) -> None:
    """Make every next token `token`, whatever was read."""
    width, vocab = model.config.hidden_size, model.config.vocab_size
    model.lm_head = torch.nn.Linear(width, vocab)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(-50.0)
        model.lm_head.bias[token] = 50.0


@pytest.mark.parametrize(
    ("token", "stop", "length"),
    [(2, StopReason.END, 1), (3, StopReason.CONTROL, 1), (0, StopReason.CONTROL, 1), (20, StopReason.LENGTH, 4)],
)
def test_why_a_completion_ends(toy, token, stop, length):
    model = toy.model()
    only(model, token)
    (done,) = sampler_of(model).generate([Request((1, 5, 9), Sampling(max_tokens=4), 0)])
    assert (done.stop, done.ids) == (stop, (token,) * length)


def test_a_stop_token_on_the_last_place_is_an_end(toy):
    model = toy.model()
    only(model, 2)
    (done,) = sampler_of(model).generate([Request((1, 5, 9), Sampling(max_tokens=1), 0)])
    assert done.stop is StopReason.END


def test_every_request_has_its_own_budget(toy):
    model = toy.model()
    only(model, 20)
    done = sampler_of(model).generate([Request((1, 5, 9), Sampling(max_tokens=n), n) for n in (1, 9, 4)])
    assert [len(c.ids) for c in done] == [1, 9, 4]
    assert {c.stop for c in done} == {StopReason.LENGTH}


def test_a_longer_budget_continues_the_same_draws(toy):
    model = toy.model()
    short, long = (sampler_of(model).generate([Request((1, 5, 9), Sampling(max_tokens=n), 5)])[0] for n in (3, 12))
    assert long.ids[: len(short.ids)] == short.ids


def test_version_is_stamped(toy):
    sampler = sampler_of(toy.model())
    sampler.version = 7
    assert {c.version for c in sampler.generate(requests(3))} == {7}


def test_new_weights_are_used_at_once(toy):
    model = toy.model()
    sampler = sampler_of(model)
    before = sampler.generate(requests(6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    after = sampler.generate(requests(6))
    cold = sampler_of(model).generate(requests(6))
    assert [c.logps for c in after] == [c.logps for c in cold]
    assert [c.logps for c in after] != [c.logps for c in before]


def test_progress_counts_every_request_once(toy):
    told: list[int] = []
    sampler_of(toy.model(), max_rows=4).generate(requests(10), told.append)
    assert sum(told) == 10
    assert all(n > 0 for n in told)


def test_no_requests(toy):
    assert sampler_of(toy.model()).generate([]) == []
