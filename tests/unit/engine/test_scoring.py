"""Scores of packed rows: equal to each document alone, equal for every layout, isolated from neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Owner
from posttrain.engine.batch import Batch
from posttrain.engine.decoder import backbone
from posttrain.engine.scoring import Scores, hidden_states, score
from posttrain.rollout.pack import Packing, pack

PROMPT = (1, 5, 9)
ANSWERS = [(20, 21, 22, 2), (30, 2), (20, 33, 2)]


def direct(model, prompt, ids) -> torch.Tensor:
    """Log-probabilities of `ids` after `prompt` by the library's plain forward, one sequence alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
    return torch.stack([logits[len(prompt) - 1 + k].log_softmax(-1)[token] for k, token in enumerate(ids)])


def by_sample(model, batches: list[Batch], count: int) -> list[torch.Tensor]:
    """Scores of each packed sample; only for lists that fit one batch each."""
    found: list[torch.Tensor] = [torch.zeros(0)] * count
    for batch in batches:
        with torch.no_grad():
            logp = score(model, batch, Sampling()).logp_BT
        for row, index in enumerate(batch.sample_B):
            found[index] = logp[row][batch.mask_BT[row]]
    return found


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("packing", [Packing(), Packing(row_tokens=8, micro_tokens=8), Packing(row_tokens=1, micro_tokens=1)], ids=str)
def test_siblings_and_neighbours_do_not_change_a_score(toy, share, packing):
    model = toy.model()
    rows = [toy.row(PROMPT, ids) for ids in ANSWERS] + [toy.row((7, 8), (40, 41, 42), "h"), toy.row((6,), (2,), "i")]
    found = by_sample(model, pack(rows, packing, share_prompts=share), len(rows))
    for sample, logp in zip(rows, found, strict=True):
        torch.testing.assert_close(logp, direct(model, sample.prompt.ids, sample.tokens.ids), atol=2e-5, rtol=0)


def test_generic_forward_gives_the_same_scores(toy):
    model = toy.model()
    rows = [toy.row(PROMPT, ids) for ids in ANSWERS]
    shared = by_sample(model, pack(rows, Packing()), 3)
    model.config.model_type = "another"
    plain = by_sample(model, pack(rows, Packing(), share_prompts=False), 3)
    for one, other in zip(shared, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_a_neighbour_has_no_gradient_from_a_document(toy):
    # d(score of document h)/d(embedding of a token only g reads) must be exactly 0
    model = toy.model()
    model.config.tie_word_embeddings = False
    table = torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight.detach().clone(), freeze=False)
    model.set_input_embeddings(table)
    (batch,) = pack([toy.row(PROMPT, (20, 21, 2), "g"), toy.row((7, 8), (40, 2), "h")], Packing(row_tokens=64))
    assert batch.ids_RW.shape == (1, 8)
    score(model, batch, Sampling()).logp_BT[batch.sample_B.index(1)].sum().backward()
    assert table.weight.grad is not None
    assert (table.weight.grad[[1, 5, 9, 20, 21]] == 0).all()
    assert (table.weight.grad[[7, 8, 40]] != 0).any()


def test_what_padding_holds_does_not_matter(toy):
    model = toy.model()
    (batch,) = pack([toy.row(PROMPT, (20, 21, 22, 2), "g"), toy.row((7, 8), (40, 2), "h")], Packing(row_tokens=6))
    assert (batch.document_RW < 0).sum() == 3  # widths 6 and 3
    dirty = replace(batch, ids_RW=torch.where(batch.document_RW < 0, 59, batch.ids_RW))
    assert torch.equal(score(model, batch, Sampling()).logp_BT, score(model, dirty, Sampling()).logp_BT)


def test_untrained_tokens_are_read_but_not_scored(toy):
    model = toy.model()
    owners = [Owner.SAMPLED, Owner.TOOL, Owner.TOOL, Owner.SAMPLED]
    (batch,) = pack([toy.row(PROMPT, (20, 50, 51, 2), owners=owners)], Packing())
    out = score(model, batch, Sampling())
    expected = direct(model, PROMPT, (20, 50, 51, 2))
    assert batch.mask_BT.tolist() == [[True, False, False, True]]
    torch.testing.assert_close(out.logp_BT[0, [0, 3]].detach(), expected[[0, 3]], atol=2e-5, rtol=0)
    assert out.logp_BT[0, 1:3].tolist() == [0.0, 0.0]
    assert out.entropy_BT[0, 1:3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.3, 0.5, 2.0])
def test_temperature_belongs_to_the_score(toy, temperature):
    model = toy.model()
    (batch,) = pack([toy.row(PROMPT, (20, 2))], Packing())
    got = score(model, batch, Sampling(temperature=temperature)).logp_BT[0, 0].item()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    assert got == pytest.approx((logits / temperature).log_softmax(-1)[20].item(), abs=2e-5)


def test_more_targets_than_one_slice(toy, monkeypatch):
    model = toy.model()
    rows = [toy.row(PROMPT, ids) for ids in ANSWERS]
    (batch,) = pack(rows, Packing())
    whole = score(model, batch, Sampling())
    monkeypatch.setattr("posttrain.objectives.kernel.SLICE", 120)  # two rows of 60
    parts = score(model, batch, Sampling())
    torch.testing.assert_close(parts.logp_BT, whole.logp_BT, atol=1e-6, rtol=0)
    torch.testing.assert_close(parts.entropy_BT, whole.entropy_BT, atol=1e-6, rtol=0)


class Adapted(torch.nn.Module):
    """A head that is no plain linear layer: what it wraps, times `scale`. Like an adapter it shows the weight of what it wraps."""

    def __init__(self, head: torch.nn.Linear, scale: float = 1.0):
        super().__init__()
        self.head, self.scale = head, scale

    @property
    def weight(self) -> torch.Tensor:
        return self.head.weight

    @property
    def bias(self) -> None:
        return None

    def forward(self, states):
        return self.head(states) * self.scale


def everything(model, batch: Batch, sampling: Sampling) -> tuple[Scores, torch.Tensor]:
    """All that a score can hold, and the gradient by the embedding of a loss that uses all of it."""
    at_NK = torch.arange(2 * len(batch.target_N)).view(-1, 2) % 60
    scores = score(model, batch, sampling, entropy_gradient=True, top_k=3, at_NK=at_NK)
    model.zero_grad()
    assert scores.at is not None
    (scores.logp_BT.sum() + 0.3 * scores.entropy_BT.square().sum() + 0.1 * scores.at.square().sum()).backward()
    return scores, model.get_input_embeddings().weight.grad.clone()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6)], ids=str)
@pytest.mark.parametrize("kind", ["adapted head", "generic model"])
def test_every_path_has_the_same_contract(toy, sampling, kind):
    model = toy.model()
    (batch,) = pack([toy.row(PROMPT, ids) for ids in ANSWERS], Packing(), share_prompts=False)
    expected, by_expected = everything(model, batch, sampling)
    if kind == "adapted head":
        model.lm_head = Adapted(model.lm_head)
    else:
        model.config.model_type = "another"
    found, by_found = everything(model, batch, sampling)
    assert found.top is not None
    assert expected.top is not None
    assert torch.equal(found.top[0], expected.top[0])
    assert found.top[0].shape == (len(batch.target_N), 3)
    for one, other in zip((*found[:2], found.top[1], found.at), (*expected[:2], expected.top[1], expected.at), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
    assert by_expected.norm() > 0.1
    torch.testing.assert_close(by_found, by_expected, atol=2e-5, rtol=1e-4)


def test_an_adapted_head_is_asked_itself(toy):
    model = toy.model()
    (batch,) = pack([toy.row(PROMPT, (20, 2))], Packing())
    halved = score(model, batch, Sampling(temperature=2.0)).logp_BT
    model.lm_head = Adapted(model.lm_head, 0.5)
    torch.testing.assert_close(score(model, batch, Sampling()).logp_BT, halved, atol=1e-5, rtol=0)


def test_a_head_with_a_bias(toy):
    model = toy.model()
    (batch,) = pack([toy.row(PROMPT, (20, 2))], Packing())
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 60))
    got = score(model, batch, Sampling()).logp_BT[0, 0].item()
    assert got == pytest.approx((logits + torch.linspace(-1, 1, 60)).log_softmax(-1)[20].item(), abs=2e-5)


def test_extras_stand_in_the_order_of_the_targets(toy):
    model = toy.model()
    (batch,) = pack([toy.row(PROMPT, ids) for ids in ANSWERS], Packing(row_tokens=8, micro_tokens=64))
    scores = score(model, batch, Sampling(), at_NK=batch.target_N[:, None])
    assert scores.top is None
    assert scores.at is not None
    assert torch.equal(batch.unflatten(scores.at[:, 0]), scores.logp_BT)
    assert not score(model, batch, Sampling()).entropy_BT.requires_grad


@pytest.mark.parametrize("model_type", ["llama", "another"])
def test_hidden_states_are_those_that_predict_the_targets(toy, model_type):
    model = toy.model()
    model.config.model_type = model_type
    batches = pack([toy.row(PROMPT, ids) for ids in ANSWERS], Packing(row_tokens=16), share_prompts=False)
    for batch in batches:
        states_NH = hidden_states(backbone(model), batch)
        assert states_NH.shape == (len(batch.target_N), 32)
        logp_N = model.lm_head(states_NH).log_softmax(-1).gather(-1, batch.target_N[:, None]).squeeze(-1)
        for row, index in enumerate(batch.sample_B):
            found = batch.unflatten(logp_N)[row][batch.mask_BT[row]].detach()
            torch.testing.assert_close(found, direct(model, PROMPT, ANSWERS[index]), atol=2e-5, rtol=0)


def test_entropy_of_a_score(toy):
    model = toy.model()
    (batch,) = pack([toy.row(PROMPT, (20, 2))], Packing())
    with torch.no_grad():
        p = model(input_ids=torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    assert score(model, batch, Sampling()).entropy_BT[0, 0].item() == pytest.approx(-(p * p.log()).sum().item(), abs=2e-5)


def test_pad_token_equal_to_the_closing_token_is_harmless(toy):
    # padding is known by document -1: filling it with the id of the closing token changes nothing, and that token stays a target
    model = toy.model()
    rows = [toy.row(PROMPT, (20, 21, 0), "g"), toy.row((7,), (40, 0), "h")]
    found = by_sample(model, pack(rows, Packing(row_tokens=5)), 2)
    for sample, logp in zip(rows, found, strict=True):
        assert len(logp) == len(sample.tokens)
        torch.testing.assert_close(logp, direct(model, sample.prompt.ids, sample.tokens.ids), atol=2e-5, rtol=0)


def test_nothing_to_train_scores_nothing(toy):
    (batch,) = pack([toy.row(PROMPT, (20, 2), owners=[Owner.FORCED, Owner.FORCED])], Packing())
    out = score(toy.model(), batch, Sampling())
    assert out.logp_BT.tolist() == [[0.0, 0.0]]
    assert not out.logp_BT.requires_grad
    extras = score(toy.model(), batch, Sampling(), top_k=3, at_NK=torch.zeros(0, 2, dtype=torch.long))
    assert extras.top is not None
    assert extras.at is not None
    assert [t.shape for t in (*extras.top, extras.at)] == [(0, 3), (0, 3), (0, 2)]
