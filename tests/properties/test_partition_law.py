"""Any split of a step's rows into packs, micro-batches and ranks gives the gradient and the metrics of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from posttrain.core.metrics import merge, read
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Group, Owner, Rollout, Sample, Tokens
from posttrain.engine.batch import Batch
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score
from posttrain.engine.trainer import LocalTrainer, LossFunction, Optim, Scorer
from posttrain.engine.values import values
from posttrain.loops.policy_step import Actors, Plan, gate, learn, policy_gradient, policy_scorer, prepare
from posttrain.loops.preference import content_key, preference, reference_logps, rows_of
from posttrain.loops.sft import imitation, unshared
from posttrain.models.critic import Critic
from posttrain.objectives.objective import Objective
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


def plain(model, batch: Batch):
    return score(model, batch, Sampling())


def gradient_and_metrics(toy, model, split: Split, scorer: Scorer = plain) -> tuple[torch.Tensor, dict[str, float | None]]:
    """Sum over ranks and micro-batches; `split` has one entry per rank."""
    model.zero_grad()
    parts = []
    total = 0.0
    for batches, loss_function in split:
        for batch in batches:
            loss, metrics = loss_function(batch, scorer(model, batch))
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


OBJECTIVES = {
    **{
        f"{advantage}-{kl}-{aggregation}": Objective.load(
            {"advantage": advantage, "aggregation": aggregation, "kl": {"estimator": kl, "coef": 0.1}}
        )
        for (advantage, kl), aggregation in product(
            [("mean", "k2"), ("mean_std", "k3"), ("leave_one_out", "k2")],
            ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"],
        )
    },
    "prompt_mean": Objective(aggregation="prompt_mean"),
    "gspo": Objective.load("gspo"),
    "mimo": Objective.load("mimo"),
    "mis_po": Objective.load({"kind": "mis_po", "advantage": "mean", "correction": {"sequence_lower": 0.96, "sequence_upper": 1.04}}),
    "clip_cov": Objective.load({"kind": "grpo++", "limit": {"lower": 0.05, "upper": 9.0, "fraction": 0.2}}),
    "kl_cov": Objective.load({"limit": {"kind": "kl_cov", "fraction": 0.2}}),
    "full": Objective.load({"kl": {"estimator": "full", "coef": 0.1}, "entropy": {"coef": 0.01}}),
}
LONG = Sampling(max_tokens=8)


def groups_of(toy) -> list[Group]:
    """Groups of uneven size and length, whose log-probabilities a slightly different model has recorded."""
    sampler = toy.model(std=0.325)
    groups = [
        toy.group([1.0, 0.0, 0.0], task="a", ids=[(20, 2), (21, 22, 23, 2), (24, 2)]),
        toy.group([0.0, 1.0], task="b", ids=[(30, 31, 2), (2,)]),
        toy.group([0.0, 1.0, 1.0, None], task="c", ids=[(40, 2), (41, 42, 43, 44, 45, 2), (46, 2), (47, 2)]),
    ]
    return [replace(group, rollouts=tuple(_recorded(sampler, rollout) for rollout in group.rollouts)) for group in groups]


def _recorded(sampler, rollout: Rollout) -> Rollout:
    ids, prompt = rollout.trajectory.ids, rollout.trajectory.prompt.ids
    with torch.no_grad():
        logits = sampler(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return replace(rollout, trajectory=replace(rollout.trajectory, logps=tuple(logps.tolist())))


def policy_split(toy, model, objective: Objective, packing: Packing, size: int) -> Split:
    """One entry per rank, as the loop prepares them; the old policy and the reference are other models."""
    old, reference = toy.model(std=0.33), toy.model(seed=4)
    scorer = policy_scorer(objective, LONG)

    def one(ranks: Ranks) -> tuple[list[Batch], LossFunction]:
        trainer = LocalTrainer(model, Optim(), 1, ranks, LONG, scorer)
        plan = Plan(objective, packing=packing, seed=3)
        part = prepare(Actors(trainer, reference=reference if objective.kl.used else None), list(enumerate(groups_of(toy))), plan)
        with torch.no_grad():
            batches = [replace(batch, old_BT=score(old, batch, LONG).logp_BT) for batch in part.batches]
        if objective.needs_step_pass:
            batches, selection = gate(trainer, batches, objective, seed=3)
            assert 0 < len(selection.chosen) < selection.tokens
        return batches, policy_gradient(objective, part.denominator)

    return toy.together(size, one)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(COMMON, max_examples=4)
@given(packing=PACKINGS, size=RANKS)
def test_policy_gradient(toy, name, packing, size):
    model, objective = toy.model(), OBJECTIVES[name]
    scorer = policy_scorer(objective, LONG)
    whole = gradient_and_metrics(toy, model, policy_split(toy, model, objective, Packing(row_tokens=512), 1), scorer)
    left_out = sum(value or 0 for key, value in whole[1].items() if key.startswith("fate_"))
    assert 0 < left_out < 1 or name == "kl_cov"
    assert_same(whole, gradient_and_metrics(toy, model, policy_split(toy, model, objective, packing, size), scorer))


class Watched(LocalTrainer):
    """A trainer that keeps the gradient of each of its steps, summed over ranks."""

    def _reduce_gradients(self) -> float:
        norm = super()._reduce_gradients()
        self.seen = [*getattr(self, "seen", []), torch.cat([p.grad.flatten() for p in self.parameters.values() if p.grad is not None])]
        return norm


STILL = Optim(lr=1e-30, schedule="constant", warmup=0.0, clip=1e9)


def learned(toy, objective: Objective, packing: Packing, size: int) -> tuple[list[torch.Tensor], dict[str, float | None], dict[str, int]]:
    """Gradients of all steps of one phase, policy and critic in turn, with metrics and counts, by the loop's own functions."""

    def one(ranks: Ranks):
        policy = Watched(toy.model(), STILL, 4, ranks, LONG, policy_scorer(objective, LONG))
        critic = None
        if objective.needs_critic:
            worth = Critic.of(toy.model(seed=2))
            with torch.no_grad():
                worth.head.copy_(toy.model(seed=5).model.embed_tokens.weight[3])
            critic = Watched(worth, STILL, 4, ranks, LONG, values)
        actors = Actors(policy, critic, toy.model(seed=4) if objective.kl.used else None)
        metrics, left = learn(actors, groups_of(toy), Plan(objective, 2, 1, packing, value_clip=0.2))
        return [*policy.seen, *(critic.seen if critic else [])], read(metrics), left

    everybody = toy.together(size, one)
    for other in everybody[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everybody[0][0], other[0], strict=True))
    return everybody[0]


@pytest.mark.parametrize("name", ["default", "dr_grpo", "ppo", "sao", "reinforce++", "mimo", "rloo"])
@settings(COMMON, max_examples=4)
@given(packing=PACKINGS, size=RANKS)
def test_a_whole_phase(toy, name, packing, size):
    # two minibatches, one of which has a single group: with more ranks than groups some rank gets nothing
    objective = Objective.load(name)
    whole = learned(toy, objective, Packing(row_tokens=512), 1)
    assert len(whole[0]) == 2 * (1 + objective.needs_critic)
    split = learned(toy, objective, packing, size)
    for one, other in zip(whole[0], split[0], strict=True):
        assert_same((one, whole[1]), (other, split[1]))
    assert split[2] == whole[2] == {"unscored": 1, "overlong": 0, "pivot": 0, "no_signal": 0, "too_few": 0}
