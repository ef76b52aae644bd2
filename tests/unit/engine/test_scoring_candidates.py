"""Candidates from sampler to trainer: the same tokens, renormalised over the same ids, to 1e-5."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import uniforms
from posttrain.core.trajectory import Owner
from posttrain.engine.local import LocalSampler
from posttrain.engine.scoring import score
from posttrain.engine.types import Request
from posttrain.objectives.logprobs import draw, warp
from posttrain.rollout.pack import Packing, pack

PROMPTS = [(1, 5, 9), (7, 8)]
SAMPLINGS = [
    Sampling(temperature=temperature, max_tokens=6, **cut)
    for temperature in (0.3, 1.0, 2.0)
    for cut in ({"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.95, "min_p": 0.02})
]


def drawn(model, prompt, sampling: Sampling, seed: int):
    """Ids, log-probabilities and kept ids by the plainest sampler: one full forward per token, without a cache."""
    ids, logps, kept = [], [], []
    for uniform in uniforms(seed, sampling.max_tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[:, -1]
        token, logp = draw(logits, sampling, torch.tensor([uniform]))
        kept.append(tuple(warp(logits, sampling)[0].isfinite().nonzero().flatten().tolist()))
        ids.append(int(token))
        logps.append(float(logp))
    return tuple(ids), tuple(logps), tuple(kept)


def sampled_rows(toy, model, sampling):
    """Three siblings of two prompts, as a sampler that records its candidates would hand them over."""
    rows = []
    for place, prompt in enumerate(PROMPTS):
        for sibling in range(3):
            ids, logps, kept = drawn(model, prompt, sampling, seed=10 * place + sibling)
            rows.append(replace(toy.row(prompt, ids, f"{place}", logps=logps), candidates=kept))
    return rows


def wrong_edge(row):
    """The row as a sampler recorded it that cut elsewhere: fewer ids at the first token, one more at the second."""
    kept = list(row.candidates)
    kept[0] = (row.tokens.ids[0],)
    kept[1] = tuple(sorted({*kept[1], next(i for i in range(60) if i not in kept[1])}))
    return replace(row, candidates=tuple(kept))


@pytest.mark.parametrize("model_type", ["llama", "another"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_trainer_says_of_every_token_what_the_sampler_said(toy, sampling, model_type):
    model = toy.model()
    rows = sampled_rows(toy, model, sampling)
    model.config.model_type = model_type
    found = 0
    for batch in pack(rows, Packing(row_tokens=20, micro_tokens=20), share_prompts=model_type == "llama"):
        out = score(model, batch, sampling)
        assert (out.logp_BT - batch.behaviour_BT)[batch.mask_BT].abs().max() <= 1e-5
        found += len(batch.target_N)
    assert found == 36


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_at_the_edge_the_record_counts_and_not_the_trainers_own_cut(toy, sampling):
    # what the sampler's distribution was over its own set: the temperature alone, then the set
    model = toy.model()
    rows = [wrong_edge(row) for row in sampled_rows(toy, model, sampling)]
    (batch,) = pack(rows, Packing(row_tokens=64))
    out = score(model, batch, sampling)
    moved = 0
    for b, index in enumerate(batch.sample_B):
        row = rows[index]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*row.prompt.ids, *row.tokens.ids]])).logits[0] / sampling.temperature
        for k, (token, kept) in enumerate(zip(row.tokens.ids, row.candidates, strict=True)):
            place = logits[len(row.prompt) - 1 + k]
            expected = float(place[token] - place[list(kept)].logsumexp(-1))
            assert abs(float(out.logp_BT[b, k].detach()) - expected) <= 1e-5
            moved += abs(float(batch.behaviour_BT[b, k]) - expected) > 1e-4
    assert moved >= 1  # the sets that were changed change the numbers
    own = score(model, replace(batch, candidate_M2=None), sampling)
    assert (own.logp_BT - out.logp_BT).abs().max() > 1e-3


def test_reference_and_teacher_are_asked_about_the_same_ids(toy):
    # another model cuts elsewhere: over the recorded set its log-probabilities still sum to one
    sampling = Sampling(top_k=4, max_tokens=6)
    policy, other = toy.model(), toy.model(seed=9)
    rows = sampled_rows(toy, policy, sampling)[:1]
    (batch,) = pack(rows, Packing())
    ids = torch.tensor(rows[0].candidates)
    whole = score(other, batch, sampling, at_NK=ids).at
    assert whole is not None
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(6), atol=1e-5, rtol=0)
    # cut anew, its own four ids and the drawn one share the mass
    anew = score(other, replace(batch, candidate_M2=None), sampling, at_NK=ids).at
    assert anew is not None
    assert (anew.exp().sum(-1) < 0.9).any()


def test_forced_tokens_have_no_set_and_rows_without_a_record_are_cut_anew(toy):
    model, sampling = toy.model(), Sampling(top_k=3, max_tokens=6)
    (row, *_) = sampled_rows(toy, model, sampling)
    owners = (Owner.SAMPLED, Owner.FORCED, *(Owner.SAMPLED,) * 4)
    forced = replace(row, tokens=replace(row.tokens, owners=owners), candidates=(row.candidates[0], (), *row.candidates[2:]))
    plain = replace(row, candidates=(), group="plain")
    (batch,) = pack([forced, plain], Packing(row_tokens=64))
    out = score(model, batch, sampling)
    one, other = (out.logp_BT[batch.sample_B.index(i)] for i in (0, 1))
    assert one[1] == 0
    torch.testing.assert_close(one[[0, 2, 3, 4, 5]], other[[0, 2, 3, 4, 5]], atol=1e-5, rtol=0)
    assert (other.detach() - torch.tensor(row.logps)).abs().max() <= 1e-5


def test_the_gradient_is_that_of_the_renormalised_distribution(toy):
    model, sampling = toy.model(), Sampling(temperature=0.7, top_k=5, max_tokens=6)
    rows = [wrong_edge(row) for row in sampled_rows(toy, model, sampling)]
    (batch,) = pack(rows, Packing(row_tokens=64))
    weight_BT = torch.linspace(0.1, 2, batch.slot_BT.numel()).view(batch.slot_BT.shape)
    (weight_BT * score(model, batch, sampling).logp_BT).sum().backward()
    found = toy.gradient(model)
    model.zero_grad()
    loss = torch.zeros(())
    for b, index in enumerate(batch.sample_B):
        row = rows[index]
        logits = model(input_ids=torch.tensor([[*row.prompt.ids, *row.tokens.ids]])).logits[0] / 0.7
        for k, (token, kept) in enumerate(zip(row.tokens.ids, row.candidates, strict=True)):
            place = logits[len(row.prompt) - 1 + k]
            loss = loss + weight_BT[b, k] * place[list(kept)].log_softmax(-1)[kept.index(token)]
    loss.backward()
    expected = toy.gradient(model)
    assert expected.norm() > 1
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_from_the_local_sampler_to_the_trainer(toy, sampling):
    model = toy.model()
    sampler = LocalSampler(model, frozenset({2}), frozenset({0, 1, 2, 3}))
    requests = [Request(prompt, sampling, seed) for prompt in PROMPTS for seed in range(4)]
    completions = sampler.generate(requests)
    rows = [
        replace(toy.row(request.prompt, c.ids, f"{request.prompt}", logps=c.logps), candidates=c.candidates)
        for request, c in zip(requests, completions, strict=True)
    ]
    assert all(len(c.candidates) == len(c.ids) for c in completions)
    assert any(len(ids) > 1 for c in completions for ids in c.candidates)
    for batch in pack(rows, Packing(row_tokens=20, micro_tokens=20)):
        assert batch.candidate_M2 is not None
        gap_BT = score(model, batch, sampling).logp_BT - batch.behaviour_BT
        assert gap_BT[batch.mask_BT].abs().max() <= 1e-5
