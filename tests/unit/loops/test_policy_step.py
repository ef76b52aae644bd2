"""One phase taken apart: what is scored for which objective, the advantage that reaches the batch, the gate, and who is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Group, Owner
from posttrain.engine.batch import Batch
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.values import values
from posttrain.engine.weights import weights_digest
from posttrain.loops.policy_step import (
    Actors,
    Plan,
    critic_loss,
    gate,
    learn,
    policy_gradient,
    policy_scorer,
    prepare,
    streams_of,
)
from posttrain.models.critic import Critic
from posttrain.objectives.covariance import select
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Fate
from posttrain.rollout.pack import Packing

STILL = Optim(lr=1e-30, schedule="constant", warmup=0.0)
BRISK = Optim(lr=3e-3, schedule="constant", warmup=0.0)
SHORT = Sampling(max_tokens=8)
S, F = Owner.SAMPLED, Owner.FORCED


def groups_of(toy) -> list[Group]:
    return [
        toy.group([1.0, 0.0, 0.0], task="a", ids=[(20, 2), (21, 22, 23, 2), (24, 2)]),
        toy.group([0.0, 1.0], task="b", ids=[(30, 31, 2), (2,)]),
        toy.group([0.0, 1.0, 1.0], task="c", ids=[(40, 2), (41, 42, 43, 44, 45, 2), (46, 2)]),
    ]


def worth(toy) -> Critic:
    """A critic whose values are not all 0."""
    critic = Critic.of(toy.model(seed=2))
    with torch.no_grad():
        critic.head.copy_(toy.model(seed=5).model.embed_tokens.weight[3])
    return critic


def cast(toy, objective: Objective, *, optim: Optim = BRISK, ranks: Ranks | None = None, sampling: Sampling = SHORT) -> Actors:
    """Everybody that the objective asks for; each a model of its own."""
    ranks = ranks or Ranks()
    policy = LocalTrainer(toy.model(), optim, 20, ranks, sampling, policy_scorer(objective, sampling))
    critic = LocalTrainer(worth(toy), optim, 20, ranks, sampling, values) if objective.needs_critic else None
    reference = toy.model(seed=4) if objective.kl.used else None
    return Actors(policy, critic, reference, toy.model(seed=3) if objective.needs_teacher else None)


def keyed(toy) -> list[tuple[int, Group]]:
    return list(enumerate(groups_of(toy)))


# --- streams -----------------------------------------------------------------------------------------------------------------------------

STREAMS = ("old_BT", "reference_BT", "reference_top", "teacher_BT", "values_BT", "returns_BT", "sentence_BT", "gate_BT")


@pytest.mark.parametrize(
    ("setting", "updates", "expected"),
    [
        ({"kl": {"estimator": "none"}}, 1, ()),
        ({"kl": {"estimator": "none"}}, 2, ("old_BT",)),
        ({}, 1, ("reference_BT",)),
        ({"kl": {"coef": 0.0}}, 1, ()),
        ({"kl": {"estimator": "full"}}, 1, ("reference_BT", "reference_top")),
        ({"kind": "rloo"}, 1, ("old_BT", "reference_BT")),  # a KL in the reward is measured before the update
        ({"kind": "ppo"}, 1, ("old_BT", "reference_BT", "values_BT", "returns_BT")),
        ({"kind": "grpo++", "kl": {"estimator": "none"}}, 1, ("old_BT",)),  # the gate is chosen before the update
        ({"kind": "gspo"}, 1, ()),
        ({"kind": "lpo"}, 1, ("sentence_BT",)),
        ({"advantage": "teacher", "kl": {"estimator": "none"}}, 1, ("old_BT", "teacher_BT")),
    ],
)
def test_a_stream_is_scored_only_when_the_objective_needs_it(toy, setting, updates, expected):
    objective = Objective.load(setting)
    plan = Plan(objective, epochs=updates, sentence_of=(lambda ids: (0,) * len(ids)) if objective.ratio == "sentence" else None)
    part = prepare(cast(toy, objective), keyed(toy), plan)
    for batch in part.batches:
        assert tuple(name for name in STREAMS if getattr(batch, name) is not None) == expected


@pytest.mark.parametrize(("estimator", "k", "size"), [("full", 5, 60), ("top_k", 5, 5)])
def test_an_exact_kl_compares_the_references_own_top_tokens(toy, estimator, k, size):
    objective = Objective.load({"kl": {"estimator": estimator, "k": k, "coef": 0.1}})
    actors = cast(toy, objective)
    (batch,) = prepare(actors, keyed(toy), Plan(objective)).batches
    assert batch.reference_top is not None
    ids_NK, logp_NK = batch.reference_top
    assert ids_NK.shape == logp_NK.shape == (len(batch.target_N), size)
    assert (logp_NK.diff(dim=-1) <= 0).all()
    # full: the exact divergence of the two distributions at every trained token
    assert actors.reference is not None
    scores = actors.policy.scorer(actors.policy.model, batch)
    found = streams_of(batch, scores).divergence_BT
    assert found is not None
    assert found.requires_grad
    everything = torch.arange(60).expand(len(batch.target_N), 60)
    mine, theirs = (score(model, batch, SHORT, at_NK=everything).at for model in (actors.policy.model, actors.reference))
    assert mine is not None
    assert theirs is not None
    exact = batch.unflatten((mine.exp() * (mine - theirs)).sum(-1))
    if estimator == "full":
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    else:  # one bucket for all others can only lose
        assert (found <= exact + 1e-4).all()
        assert (found < exact - 1e-3).any()


def test_rows_are_known_by_their_place_in_the_step(toy):
    def rows(ranks: Ranks) -> list[int]:
        objective = Objective()
        part = prepare(cast(toy, objective, ranks=ranks), keyed(toy), Plan(objective, packing=Packing(row_tokens=6, micro_tokens=12)))
        return [row for batch in part.batches for row in batch.row_B]

    assert sorted(rows(Ranks())) == list(range(8))
    halves = toy.together(2, rows)
    assert sorted(halves[0] + halves[1]) == list(range(8))
    assert halves[0]
    assert halves[1]


# --- credit ------------------------------------------------------------------------------------------------------------------------------


def one_row(batches: Sequence[Batch], place: int) -> tuple[Batch, int]:
    """The batch that holds the row at this place of the step, and where in it."""
    return next((batch, batch.row_B.index(place)) for batch in batches if place in batch.row_B)


def test_kl_in_the_reward_is_the_log_ratio_of_policy_and_reference(toy):
    objective = Objective.load({"kind": "rloo", "kl": {"coef": 0.1}})
    actors = cast(toy, objective)
    pair = toy.group([1.0, 0.0], ids=[(20, 50, 2), (21, 2)], owners=[(S, F, S), (S, S)])
    part = prepare(actors, [(0, pair)], Plan(objective))
    assert actors.reference is not None
    charged = []
    for place in (0, 1):
        batch, b = one_row(part.batches, place)
        gap = score(actors.policy.model, batch, SHORT).logp_BT[b] - score(actors.reference, batch, SHORT).logp_BT[b]
        charged.append(0.1 * gap[batch.mask_BT[b]].sum().item())
    expected = (1.0 - charged[0]) - (0.0 - charged[1])  # each against the other
    first, a = one_row(part.batches, 0)
    second, b = one_row(part.batches, 1)
    assert first.advantage_BT[a].tolist() == pytest.approx([expected, 0.0, expected], abs=1e-5)
    assert second.advantage_BT[b, :2].tolist() == pytest.approx([-expected, -expected], abs=1e-5)
    assert abs(charged[0]) > 0.05


def test_the_critics_values_come_off_and_its_returns_are_what_was_earned(toy):
    objective = Objective.load({"kind": "ppo", "kl": {"estimator": "none"}})
    actors = cast(toy, objective)
    assert actors.critic is not None
    part = prepare(actors, keyed(toy), Plan(objective))
    rewards = [reward for group in groups_of(toy) for reward in group.rewards]
    for place, reward in enumerate(rewards):
        batch, b = one_row(part.batches, place)
        mask = batch.mask_BT[b]
        own = values(actors.critic.model, batch)[b]  # pyright: ignore[reportArgumentType]
        assert batch.returns_BT is not None
        torch.testing.assert_close(batch.returns_BT[b][mask], torch.full((int(mask.sum()),), float(reward or 0)), atol=1e-5, rtol=0)
        torch.testing.assert_close(batch.advantage_BT[b][mask], (reward or 0) - own[mask], atol=1e-5, rtol=0)
        assert (batch.advantage_BT[b][~mask] == 0).all()


def test_a_teacher_pays_the_difference_of_log_probabilities(toy):
    objective = Objective.load({"advantage": {"kind": "teacher", "clip": 1.0}, "kl": {"estimator": "none"}})
    actors = cast(toy, objective)
    assert actors.teacher is not None
    for batch in prepare(actors, keyed(toy), Plan(objective)).batches:
        lead_BT = score(actors.teacher, batch, SHORT).logp_BT - score(actors.policy.model, batch, SHORT).logp_BT
        torch.testing.assert_close(batch.advantage_BT, torch.where(batch.mask_BT, lead_BT.clamp(-1, 1), 0.0), atol=1e-5, rtol=0)
        assert (lead_BT[batch.mask_BT].abs() > 1).any()


def test_what_was_left_out_is_added_up_over_minibatches(toy):
    groups = [toy.group([1.0, None, 0.0]), toy.group([1.0, 1.0]), toy.group([0.0, 0.0, 1.0, None]), toy.group([1.0, 0.0])]
    objective = Objective(kl={"estimator": "none"})  # pyright: ignore[reportArgumentType]
    metrics, left = learn(cast(toy, objective), groups, Plan(objective, minibatches=2))
    assert left == {"unscored": 2, "overlong": 0, "pivot": 0, "no_signal": 2, "too_few": 0}
    assert metrics["tokens"].read() == 2 * 7  # 7 rows of 2 tokens
    # advantages of 1 0: +-1; of 0 0 1: -0.7071 -0.7071 1.4142; mean of |A| over rows
    assert metrics["advantage_abs"].read() == pytest.approx((1 + 1 + 0.7071 + 0.7071 + 1.4142 + 1 + 1) / 7, abs=1e-4)


# --- the gate ----------------------------------------------------------------------------------------------------------------------------

GATED = Objective.load(
    {"kind": "grpo++", "kl": {"estimator": "none"}, "limit": {"low": 0.2, "high": 0.28, "lower": 0.05, "upper": 9.0, "fraction": 0.25}}
)


def stale(batches: Sequence[Batch], toy) -> list[Batch]:
    """The same with an old policy that has been left behind, so that some tokens are clipped."""
    with torch.no_grad():
        return [replace(batch, old_BT=score(toy.model(std=0.33), batch, SHORT).logp_BT) for batch in batches]


def marked(batches: Sequence[Batch]) -> set[tuple[int, int]]:
    """(row, position) of every gated token."""
    found = set()
    for batch in batches:
        assert batch.gate_BT is not None
        assert not (batch.gate_BT & ~batch.mask_BT).any()
        found |= {(batch.row_B[b], t) for b, t in batch.gate_BT.nonzero().tolist()}
    return found


def gated(toy, packing: Packing, size: int, seed: int = 3) -> tuple[set[tuple[int, int]], list]:
    def one(ranks: Ranks):
        actors = cast(toy, GATED, ranks=ranks)
        part = prepare(actors, keyed(toy), Plan(GATED, packing=packing))
        batches, selection = gate(actors.policy, stale(part.batches, toy), GATED, seed)
        return marked(batches), selection

    everybody = toy.together(size, one)
    return set().union(*(mine for mine, _ in everybody)), [selection for _, selection in everybody]


def test_the_gate_does_not_depend_on_packing_or_ranks(toy):
    whole, (selection,) = gated(toy, Packing(), 1)
    assert len(whole) == len(selection.chosen) == int(0.25 * selection.tokens)
    for packing, size in ((Packing(row_tokens=4, micro_tokens=4), 1), (Packing(row_tokens=9, micro_tokens=30), 2), (Packing(), 3)):
        split, selections = gated(toy, packing, size)
        assert split == whole
        assert all(other == selection for other in selections)  # every rank knows the whole choice
    assert gated(toy, Packing(), 1, seed=4)[0] != whole


def test_the_gate_is_the_rule_over_all_trained_tokens_of_the_step(toy):
    actors = cast(toy, GATED)
    part = prepare(actors, keyed(toy), Plan(GATED, packing=Packing(row_tokens=9, micro_tokens=20)))
    batches = stale(part.batches, toy)
    chosen, selection = gate(actors.policy, batches, GATED, 3)
    tokens = {}
    for batch in batches:
        with torch.no_grad():
            scores = score(actors.policy.model, batch, SHORT)
        fate_BT = policy_terms(streams_of(batch, scores), GATED).fate_BT
        for b, t in batch.mask_BT.nonzero().tolist():
            out = Fate(int(fate_BT[b, t])) is not Fate.TRAINED
            tokens[batch.row_B[b], t] = (float(scores.logp_BT[b, t]), float(batch.advantage_BT[b, t]), out)
    order = sorted(tokens)
    logp, advantage, out = (np.array([tokens[place][i] for place in order]) for i in range(3))
    expected = select(logp, advantage, out, GATED.limit, 3)  # pyright: ignore[reportArgumentType]
    assert expected == selection
    assert marked(chosen) == {order[i] for i in expected.chosen}
    assert 0 < out.sum() < len(out)
    assert not any(out[i] for i in expected.chosen)


def test_only_gated_and_clipped_tokens_lose_their_gradient(toy):
    actors = cast(toy, GATED)
    batches, _ = gate(actors.policy, stale(prepare(actors, keyed(toy), Plan(GATED)).batches, toy), GATED, 3)
    for batch in batches:
        scores = score(actors.policy.model, batch, SHORT)
        terms = policy_terms(streams_of(batch, scores), GATED)
        (slope,) = torch.autograd.grad(terms.loss_BT.sum(), scores.logp_BT)
        silent = (terms.fate_BT == Fate.GATED) | (terms.fate_BT == Fate.CLIPPED) | ~batch.mask_BT
        assert batch.gate_BT is not None
        assert torch.equal(terms.fate_BT == Fate.GATED, batch.gate_BT)
        assert torch.equal(slope == 0, silent)


def test_every_update_draws_its_own_gate_and_reports_it_once(toy, monkeypatch):
    seen = []

    def watched(trainer, batches, objective, seed):
        found = gate(trainer, batches, objective, seed)
        seen.append((seed, marked(found[0])))
        return found

    monkeypatch.setattr("posttrain.loops.policy_step.gate", watched)
    metrics, _ = learn(cast(toy, GATED, optim=STILL), groups_of(toy), Plan(GATED, epochs=4, seed=5))
    assert len({seed for seed, _ in seen}) == 4
    assert len({tuple(sorted(chosen)) for _, chosen in seen}) > 1
    assert metrics["cov_chosen"].read() == sum(len(chosen) for _, chosen in seen)
    assert metrics["fate_gated"].read() == pytest.approx(metrics["cov_selected"].read())
    again = seen[:]
    seen.clear()
    learn(cast(toy, GATED, optim=STILL), groups_of(toy), Plan(GATED, epochs=4, seed=5))
    assert seen == again


def test_two_ranks_count_a_selection_once(toy):
    def one(ranks: Ranks):
        return learn(cast(toy, GATED, optim=STILL, ranks=ranks), groups_of(toy), Plan(GATED, seed=5))[0]

    first, second = toy.together(2, one)
    alone = one(Ranks())
    for name in ("cov_chosen", "cov_eligible", "advantage_abs", "tokens"):
        assert first[name].read() == pytest.approx(alone[name].read()), name
    # a figure of the whole step is the first rank's to report; what the trainer merged is the same everywhere
    assert "cov_chosen" not in second
    assert second["tokens"].read() == alone["tokens"].read()


# --- who is trained ----------------------------------------------------------------------------------------------------------------------


def test_a_warm_up_trains_the_critic_and_leaves_the_policy_alone(toy):
    objective = Objective.load("ppo")
    actors = cast(toy, objective)
    assert actors.critic is not None
    before = weights_digest(actors.policy.model), weights_digest(actors.critic.model)
    metrics, _ = learn(actors, groups_of(toy), Plan(objective, minibatches=3, epochs=2, train_policy=False))
    after = weights_digest(actors.policy.model), weights_digest(actors.critic.model)
    assert (actors.policy.version, actors.critic.version) == (0, 6)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert not actors.policy.optimizer.state_dict()["state"]
    assert metrics.keys() >= {"critic_loss", "critic_explained_variance", "critic_clipped", "critic_lr"}
    assert not metrics.keys() & {"loss", "entropy", "lr", "ratio_max"}
    metrics, _ = learn(actors, groups_of(toy), Plan(objective, minibatches=3, epochs=2))
    assert (actors.policy.version, actors.critic.version) == (6, 12)
    assert {"loss", "critic_loss"} <= metrics.keys()


def test_values_of_a_phase_stay_those_of_its_start(toy):
    # with one update of the critic before each of the policy, advantages still use the critic that had not seen the returns
    objective = Objective.load({"kind": "ppo", "kl": {"estimator": "none"}})
    actors = cast(toy, objective)
    assert actors.critic is not None
    part = prepare(actors, keyed(toy), Plan(objective))
    batch = part.batches[0]
    before = values(actors.critic.model, batch).detach()  # pyright: ignore[reportArgumentType]
    actors.critic.step(part.batches, critic_loss(part.tokens, 0.2))
    assert batch.values_BT is not None
    torch.testing.assert_close(batch.values_BT, before, atol=1e-6, rtol=0)
    assert not torch.allclose(values(actors.critic.model, batch), before, atol=1e-4)  # pyright: ignore[reportArgumentType]


def flat_batch(toy) -> Batch:
    """Two rows of 2 and 1 trained tokens."""
    objective = Objective.load({"kind": "ppo", "kl": {"estimator": "none"}})
    group = toy.group([1.0, 0.0], ids=[(20, 2), (2,)])
    (batch,) = prepare(cast(toy, objective), [(0, group)], Plan(objective)).batches
    order = list(batch.row_B)
    returns, old = torch.tensor([[1.0, 1.0], [0.0, 9.0]])[order], torch.tensor([[0.0, 0.9], [0.3, 9.0]])[order]
    return replace(batch, returns_BT=returns, values_BT=old)


def test_critic_loss_by_hand(toy):
    # errors now: 0.5 - 1, 0.8 - 1, 0.4 - 0: (0.25 + 0.04 + 0.16) / 2 over 3 tokens here, 5 in the step
    batch = flat_batch(toy)
    now = torch.tensor([[0.5, 0.8], [0.4, 7.0]])[list(batch.row_B)]
    loss, metrics = critic_loss(5.0, None)(batch, now)
    assert loss.item() == pytest.approx(0.225 / 5)
    assert metrics["clipped"].read() == 0.0
    # what the old values explained: returns 1 1 0, residuals 1 0.1 -0.3: Var(R) 2/9, Var(res) = 1.1/3 - (0.8/3)^2 = 0.29556
    assert metrics["explained_variance"].read() == pytest.approx(1 - 0.295556 / (2 / 9), abs=1e-4)
    # a band of 0.2: 0.5 counts as 0.2 (error 0.8), 0.8 is within 0.7 to 1.1, 0.4 within 0.1 to 0.5
    loss, metrics = critic_loss(5.0, 0.2)(batch, now)
    assert loss.item() == pytest.approx((0.64 + 0.04 + 0.16) / 2 / 5)
    assert metrics["clipped"].read() == pytest.approx(1 / 3)


def test_policy_gradient_divides_by_the_whole_step(toy):
    objective = Objective.load({"kind": "dr_grpo"})
    actors = cast(toy, objective)
    (batch,) = prepare(actors, keyed(toy), Plan(objective)).batches
    scores = score(actors.policy.model, batch, SHORT)
    # on-policy the loss is -sum A / denominator
    loss, metrics = policy_gradient(objective, 64.0)(batch, scores)
    assert loss.item() == pytest.approx(-batch.advantage_BT[batch.mask_BT].sum().item() / 64)
    assert metrics["tokens"].read() == len(batch.target_N)


def test_dr_grpo_divides_by_rows_times_budget(toy):
    objective = Objective.load("dr_grpo")
    assert prepare(cast(toy, objective), keyed(toy), Plan(objective)).denominator == 8 * 8  # 8 rows, 8 tokens each at most
    part = prepare(cast(toy, Objective.load("mimo")), keyed(toy), Plan(Objective.load("mimo")))
    assert part.denominator == 3.0  # prompts
    (batch,) = part.batches
    # trained tokens of each row's whole group: 8, 4 and 10
    wanted = [8.0] * 3 + [4.0] * 2 + [10.0] * 3
    assert batch.prompt_tokens_B.tolist() == [wanted[row] for row in batch.row_B]


def test_prompt_tokens_count_siblings_that_lie_elsewhere(toy):
    part = prepare(
        cast(toy, Objective.load("mimo")), keyed(toy), Plan(Objective.load("mimo"), packing=Packing(row_tokens=4, micro_tokens=4))
    )
    assert len(part.batches) > 3
    wanted = [8.0] * 3 + [4.0] * 2 + [10.0] * 3
    for batch in part.batches:
        assert batch.prompt_tokens_B.tolist() == [wanted[row] for row in batch.row_B]


def test_entropy_has_a_gradient_only_when_it_is_paid_for(toy):
    for coef, wanted in ((0.0, False), (0.01, True)):
        objective = Objective.load({"entropy": {"coef": coef}})
        (batch,) = prepare(cast(toy, objective), keyed(toy), Plan(objective)).batches
        assert policy_scorer(objective, SHORT)(toy.model(), batch).entropy_BT.requires_grad is wanted


def test_an_entropy_bonus_raises_entropy(toy):
    ends = {}
    for coef in (0.0, 0.5):
        objective = Objective.load({"kl": {"estimator": "none"}, "entropy": {"coef": coef, "highest": 1.0}})
        actors = cast(toy, objective)
        seen = [learn(actors, groups_of(toy), Plan(objective))[0]["entropy"].read() or 0.0 for _ in range(12)]
        ends[coef] = seen[-1] - seen[0]
    assert ends[0.5] > 0.2 > ends[0.0]
