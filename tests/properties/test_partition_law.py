"""Any split of a step's rows into packs, micro-batches and ranks gives the gradient and the metrics of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from posttrain.core.metrics import merge, read
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.batch import Batch
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score
from posttrain.engine.trainer import LocalTrainer, LossFunction, Optim
from posttrain.loops.preference import content_key, preference, reference_logps, rows_of
from posttrain.loops.rl import GRPO, Objective, policy_gradient, prepare
from posttrain.loops.sft import imitation, unshared
from posttrain.rollout.pack import Packing, pack, shard
from posttrain.rollout.samples import Pair

PACKINGS = st.builds(Packing, row_tokens=st.integers(1, 40), micro_tokens=st.integers(1, 120))
RANKS = st.integers(1, 4)
# Without shrinking: a failing split is readable as it is, and every attempt costs a backward pass.
COMMON = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
Split = Sequence[tuple[list[Batch], LossFunction]]


def gradient_and_metrics(toy, model, split: Split) -> tuple[torch.Tensor, dict[str, float | None]]:
    """Sum over ranks and micro-batches; `split` has one entry per rank."""
    model.zero_grad()
    parts = []
    total = 0.0
    for batches, loss_function in split:
        for batch in batches:
            loss, metrics = loss_function(batch, score(model, batch, Sampling()))
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
            parts.append(metrics)
    return toy.gradient(model), {**read(merge(parts)), "loss": total}


def assert_same(one, other) -> None:
    assert one[0].norm() > 1e-3
    torch.testing.assert_close(one[0], other[0], atol=2e-5, rtol=2e-4)
    assert other[1] == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in one[1].items()}


@COMMON
@given(packing=PACKINGS, size=RANKS)
def test_imitation(toy, packing, size):
    model = toy.model()
    answers = [(20, 21, 2), tuple(range(10, 50)), (30, 2), (2,), (20, 33, 34, 35, 2), (20, 21, 2)]
    rows = [unshared(toy.row((1, 5 + i % 2), ids), i) for i, ids in enumerate(answers)]
    tokens = sum(row.tokens.trained for row in rows)
    whole = gradient_and_metrics(toy, model, [(pack(rows, Packing(row_tokens=512)), imitation(tokens))])
    split = [(pack(shard(rows, rank, size), packing), imitation(tokens)) for rank in range(size)]
    assert_same(whole, gradient_and_metrics(toy, model, split))


def test_forty_tokens_and_two_tokens_against_plain_autograd(toy):
    # the sum over all 42 tokens divided by 42; a mean of two means would weigh the two tokens twenty times as much
    model = toy.model()
    answers = [tuple(range(10, 50)), (30, 2)]
    rows = [toy.row((1, 5), ids, f"{i}") for i, ids in enumerate(answers)]
    loss = torch.zeros(())
    for ids in answers:
        logits = model(input_ids=torch.tensor([[1, 5, *ids]])).logits[0, 1:-1]
        loss = loss - logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum() / 42
    model.zero_grad()
    loss.backward()
    expected = toy.gradient(model)
    got, metrics = gradient_and_metrics(toy, model, [(pack(rows, Packing(row_tokens=1, micro_tokens=1)), imitation(42))])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)


def pairs_of(toy) -> list[Pair]:
    def response(*ids: int) -> Tokens:
        return Tokens(ids, (Owner.SAMPLED,) * len(ids))

    prompts = [Tokens((1, 5 + i), (Owner.USER,) * 2) for i in range(4)]
    answers = [((20, 2), (21, 22, 2)), ((30, 31, 32, 2), (33, 2)), ((2,), (40, 2)), ((20, 2), (23, 24, 25, 2))]
    return [
        Pair(f"p{i}", prompt, response(*good), response(*bad)) for i, (prompt, (good, bad)) in enumerate(zip(prompts, answers, strict=True))
    ]


@pytest.mark.parametrize("share", [True, False])
@COMMON
@given(packing=PACKINGS, size=RANKS)
def test_preference(toy, share, packing, size):
    model, pairs = toy.model(), pairs_of(toy)
    # a reference that is not the model, so that margins are not zero
    reference = reference_logps(toy.model(seed=4), pairs, Packing(), Ranks())
    rows = rows_of(pairs)
    whole = gradient_and_metrics(
        toy, model, [(pack(rows, Packing(row_tokens=512), whole_groups=True), preference(rows, reference, 0.1, 4))]
    )
    split = []
    for rank in range(size):
        mine = shard(rows, rank, size)
        split.append((pack(mine, packing, share_prompts=share, whole_groups=True), preference(mine, reference, 0.1, 4)))
    assert_same(whole, gradient_and_metrics(toy, model, split))


def test_preference_against_plain_autograd(toy):
    model, pairs = toy.model(), pairs_of(toy)
    other = toy.model(seed=4)

    def total(of, sample: Sample) -> torch.Tensor:
        ids = [*sample.prompt.ids, *sample.tokens.ids]
        logits = of(input_ids=torch.tensor([ids])).logits[0, len(sample.prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens.ids)[:, None]).sum()

    loss = torch.zeros(())
    reference: dict[str, float] = {}
    for pair in pairs:
        good, bad = pair.samples()
        with torch.no_grad():
            reference |= {content_key(sample): total(other, sample).item() for sample in (good, bad)}
        margin = (total(model, good) - reference[content_key(good)]) - (total(model, bad) - reference[content_key(bad)])
        loss = loss - torch.nn.functional.logsigmoid(0.1 * margin) / 4
    model.zero_grad()
    loss.backward()
    expected = toy.gradient(model)
    rows = rows_of(pairs)
    got, metrics = gradient_and_metrics(
        toy, model, [(pack(rows, Packing(row_tokens=8, micro_tokens=8), whole_groups=True), preference(rows, reference, 0.1, 4))]
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)


OBJECTIVES = [
    Objective(advantage=advantage, aggregation=aggregation, kl=kl, kl_coef=0.1)
    for (advantage, kl), aggregation in product(
        [("mean", "k2"), ("mean_std", "k3"), ("leave_one_out", "k2")],
        ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"],
    )
]


def policy_split(toy, model, objective: Objective, packing: Packing, size: int) -> Split:
    """One entry per rank, as the loop prepares them; the old policy and the reference are other models."""
    old, reference = toy.model(std=0.33), toy.model(seed=4)
    groups = [
        toy.group([1.0, 0.0, 0.0], task="a", ids=[(20, 2), (21, 22, 23, 2), (24, 2)]),
        toy.group([0.0, 1.0], task="b", ids=[(30, 31, 2), (2,)]),
        toy.group([0.0, 1.0, 1.0, None], task="c", ids=[(40, 2), (41, 42, 43, 44, 45, 2), (46, 2), (47, 2)]),
    ]
    settings_ = GRPO(objective=objective, packing=packing)
    split: list[tuple[list[Batch], Callable]] = []
    for rank in range(size):
        trainer = LocalTrainer(model, Optim(), 1, Ranks(rank, size), Sampling(max_tokens=8))
        batches, denominator = prepare(trainer, reference, list(enumerate(groups)), settings_)
        with torch.no_grad():
            batches = [replace(batch, old_BT=score(old, batch, Sampling()).logp_BT) for batch in batches]
        split.append((batches, policy_gradient(objective, denominator)))
    return split


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.advantage}-{o.kl}-{o.aggregation}")
@settings(COMMON, max_examples=4)
@given(packing=PACKINGS, size=RANKS)
def test_policy_gradient(toy, objective, packing, size):
    model = toy.model()
    whole = gradient_and_metrics(toy, model, policy_split(toy, model, objective, Packing(row_tokens=512), 1))
    assert 0 < (whole[1]["clip_fraction"] or 0) < 1
    assert_same(whole, gradient_and_metrics(toy, model, policy_split(toy, model, objective, packing, size)))
