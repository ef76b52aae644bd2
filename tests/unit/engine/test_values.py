"""Values of packed rows and the critic's own training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.core.metrics import Mean, Metric
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Owner
from posttrain.engine.batch import Batch
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, LossFunction, Optim
from posttrain.engine.values import values
from posttrain.engine.weights import weights_digest
from posttrain.models.critic import Critic
from posttrain.models.lora import LoRA, add_lora
from posttrain.objectives.aggregate import aggregate
from posttrain.objectives.value import value_loss
from posttrain.rollout.pack import Packing, pack

PROMPT = (1, 5, 9)
ANSWERS = [(20, 21, 22, 2), (30, 2), (20, 33, 2)]
BRISK = Optim(lr=3e-3, schedule="constant", warmup=0.0, clip=1e6)


def critic_of(model, seed: int = 3) -> Critic:
    """A critic whose head is not zero, so that every state matters."""
    critic = Critic.of(model)
    with torch.no_grad():
        critic.head.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(seed))
    return critic


def rows_of(toy):
    return [toy.row(PROMPT, ids) for ids in ANSWERS] + [toy.row((7, 8), (40, 41, 42), "h"), toy.row((6,), (2,), "i")]


def direct(critic: Critic, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Values of `ids` after `prompt`, one sequence alone: token k is predicted by the state after prompt and ids[:k]."""
    with torch.no_grad():
        return torch.stack(
            [critic.trunk(input_ids=torch.tensor([[*prompt, *ids[:k]]])).last_hidden_state[0, -1] for k in range(len(ids))]
        ) @ (critic.head)


def by_sample(critic: Critic, batches: Sequence[Batch], count: int) -> list[Tensor]:
    found: list[Tensor] = [torch.zeros(0)] * count
    for batch in batches:
        with torch.no_grad():
            values_BT = values(critic, batch)
        for row, index in enumerate(batch.sample_B):
            found[index] = values_BT[row][batch.mask_BT[row]]
    return found


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("packing", [Packing(), Packing(row_tokens=8, micro_tokens=8), Packing(row_tokens=1, micro_tokens=1)], ids=str)
def test_siblings_and_neighbours_do_not_change_a_value(toy, share, packing):
    critic, rows = critic_of(toy.model()), rows_of(toy)
    found = by_sample(critic, pack(rows, packing, share_prompts=share), len(rows))
    for sample, got in zip(rows, found, strict=True):
        torch.testing.assert_close(got, direct(critic, sample.prompt.ids, sample.tokens.ids), atol=2e-5, rtol=0)


def test_siblings_first_tokens_are_worth_the_same(toy):
    # the value is that of the state, before the token: all siblings stand at the end of the same prompt
    found = by_sample(critic_of(toy.model()), pack(rows_of(toy), Packing()), 5)
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] != found[1][1]
    assert found[0][1] == pytest.approx(found[2][1].item(), abs=2e-6)  # both have read 20


def test_generic_forward_gives_the_same_values(toy):
    critic, rows = critic_of(toy.model()), rows_of(toy)
    shared = by_sample(critic, pack(rows, Packing()), len(rows))
    critic.config.model_type = "another"
    plain = by_sample(critic, pack(rows, Packing(), share_prompts=False), len(rows))
    for one, other in zip(shared, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_adapters_take_part(toy):
    wrapped = add_lora(toy.model(), LoRA(rank=4, alpha=8), 0)
    before = critic_of(wrapped)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    critic, rows = critic_of(wrapped), rows_of(toy)
    found = by_sample(critic, pack(rows, Packing()), len(rows))
    torch.testing.assert_close(found[0], direct(critic, PROMPT, ANSWERS[0]), atol=2e-5, rtol=0)
    assert (found[0] - direct(before, PROMPT, ANSWERS[0])).abs().max() > 1e-2


def test_what_padding_holds_does_not_matter(toy):
    critic = critic_of(toy.model())
    (batch,) = pack([toy.row(PROMPT, (20, 21, 22, 2), "g"), toy.row((7, 8), (40, 2), "h")], Packing(row_tokens=6))
    assert (batch.document_RW < 0).sum() == 3  # widths 6 and 3
    dirty = replace(batch, ids_RW=torch.where(batch.document_RW < 0, 59, batch.ids_RW))
    assert torch.equal(values(critic, batch), values(critic, dirty))


def test_untrained_tokens_are_read_and_have_no_value(toy):
    critic = critic_of(toy.model())
    owners = [Owner.SAMPLED, Owner.TOOL, Owner.TOOL, Owner.SAMPLED]
    (batch,) = pack([toy.row(PROMPT, (20, 50, 51, 2), owners=owners)], Packing())
    found = values(critic, batch)[0]
    torch.testing.assert_close(found[[0, 3]].detach(), direct(critic, PROMPT, (20, 50, 51, 2))[[0, 3]], atol=2e-5, rtol=0)
    assert found[1:3].tolist() == [0.0, 0.0]
    assert found.requires_grad


def test_nothing_trained_has_no_value(toy):
    (batch,) = pack([toy.row(PROMPT, (20, 2), owners=[Owner.FORCED, Owner.FORCED])], Packing())
    found = values(critic_of(toy.model()), batch)
    assert found.tolist() == [[0.0, 0.0]]
    assert not found.requires_grad


def regression(target: Callable[[int], float], tokens: int, clip: float | None = None, seen: list[Tensor] | None = None) -> LossFunction:
    """Mean value loss over the `tokens` trained tokens of the step; every token of row i returns target(i)."""

    def loss(batch: Batch, values_BT: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        returns_BT = torch.tensor([target(i) for i in batch.sample_B], dtype=values_BT.dtype)[:, None].expand(values_BT.shape)
        out = value_loss(values_BT, returns_BT, torch.zeros_like(values_BT), batch.mask_BT, clip)
        if seen is not None:
            seen.append(values_BT.detach())
        return aggregate(out.loss_BT, batch.mask_BT, "token_mean", tokens), {"value": Mean(values_BT.sum().item(), tokens)}

    return loss


def test_a_new_critic_leaves_the_return_as_it_is(toy):
    seen: list[Tensor] = []
    trainer = LocalTrainer(Critic.of(toy.model()), BRISK, 10, Ranks(), scorer=values)
    rows = rows_of(toy)
    metrics = trainer.step(pack(rows, Packing()), regression(lambda i: 1.0, 13, seen=seen))
    assert (seen[0] == 0).all()  # so R - V is R
    assert metrics["loss"].read() == pytest.approx(0.5)  # 0.5 * (0 - 1)^2
    assert trainer.version == 1


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_temperature_has_no_part_in_a_value(toy, temperature):
    found = []
    for sampling in (Sampling(), Sampling(temperature=temperature, top_k=2)):
        trainer = LocalTrainer(critic_of(toy.model()), BRISK, 10, Ranks(), sampling, values)
        trainer.step(pack(rows_of(toy), Packing()), regression(lambda i: 1.0, 13, seen=found))
    assert torch.equal(found[0], found[1])
    assert found[0].abs().max() > 0.1


def gradients(toy, critic: Critic, batches: Sequence[Batch]) -> tuple[Tensor, float | None]:
    """The gradient that the optimizer is handed, and the loss of the step."""
    found: list[Tensor] = []
    trainer = LocalTrainer(critic, BRISK, 10, Ranks(), scorer=values)
    trainer.optimizer.register_step_pre_hook(lambda *_: found.append(toy.gradient(critic)))
    # returns that differ between rows, so that no row can stand for another
    loss = trainer.step(batches, regression(lambda i: (-1.0) ** i * (1 + i), 13, clip=0.5))["loss"].read()
    return found[0], loss


def in_float64(critic: Critic) -> Critic:
    """The critic in double precision throughout: the library's own norm computes in float32 whatever it is given."""
    norms = [(parent, name) for parent in critic.modules() for name, child in parent.named_children() if "Norm" in type(child).__name__]
    for parent, name in norms:  # their weights are 1
        setattr(parent, name, torch.nn.RMSNorm(32, eps=1e-6))
    assert len(norms) == 5
    return critic.double()


@pytest.mark.parametrize("head", ["zero", "drawn"])
def test_one_micro_batch_and_many_give_the_same_gradient(toy, head):
    # a loss that is a mean per micro-batch grows with their number (spec/faults.md 4)
    model, rows = toy.model(), rows_of(toy)
    critics = [in_float64((Critic.of if head == "zero" else critic_of)(model)) for _ in range(3)]
    splits = [
        pack(rows, Packing(row_tokens=512)),
        pack(rows, Packing(row_tokens=8, micro_tokens=8), share_prompts=False),
        pack(rows, Packing(row_tokens=1, micro_tokens=1), share_prompts=False),
    ]
    assert [len(batches) for batches in splits] == [1, 4, 5]
    whole, *others = [gradients(toy, critic, batches) for critic, batches in zip(critics, splits, strict=True)]
    size = critics[0].head.numel()
    for part in others:
        assert part[1] == pytest.approx(whole[1], rel=1e-9)
        torch.testing.assert_close(part[0], whole[0], atol=1e-10, rtol=1e-10)
    names = [name for name, _ in critics[0].named_parameters()]
    assert names[0] == "head"
    assert whole[0][:size].norm() > 0.1
    # the trunk learns through the head: not before the head has left zero
    assert (whole[0][size:].norm() > 0.1).item() is (head == "drawn")


def test_head_gradient_against_plain_arithmetic(toy):
    # d/dhead of mean 0.5 (h . head - R)^2 at head 0 is - mean of R h
    rows, critic = rows_of(toy), Critic.of(toy.model())
    expected = torch.zeros(32)
    for i, sample in enumerate(rows):
        ids = [*sample.prompt.ids, *sample.tokens.ids]
        with torch.no_grad():
            states_TH = critic.trunk(input_ids=torch.tensor([ids])).last_hidden_state[0, len(sample.prompt) - 1 : -1]
        expected -= states_TH.sum(0) * (-1.0) ** i * (1 + i) / 13
    found, _ = gradients(toy, critic, pack(rows, Packing(row_tokens=8, micro_tokens=8)))
    torch.testing.assert_close(found[:32], expected, atol=1e-4, rtol=1e-4)
    assert expected.norm() > 0.1


@pytest.mark.parametrize("adapted", [False, True])
def test_a_critic_learns_known_returns_and_leaves_the_policy_alone(toy, adapted):
    model = toy.model()
    if adapted:
        model = add_lora(model, LoRA(rank=4, alpha=8), 0)
    rows, before = rows_of(toy), weights_digest(model)
    critic = Critic.of(model)
    trainer = LocalTrainer(critic, BRISK, 60, Ranks(), scorer=values)
    losses = [trainer.step(pack(rows, Packing()), regression(lambda i: float(i % 2), 13))["loss"].read() or 0.0 for _ in range(60)]
    # rows 1 and 3 have 5 of 13 tokens and return 1; the first token of row 1 shares its state with rows 0 and 2, which return 0
    assert losses[0] == pytest.approx(0.5 * 5 / 13)
    # what no critic can explain: one state that returns 0, 1 and 0 leaves a variance of 2/9 on each of its 3 tokens
    floor = 0.5 * 3 * (2 / 9) / 13
    assert losses[-1] < floor + 0.02 * (losses[0] - floor)
    assert losses[-1] > floor - 1e-6
    assert weights_digest(model) == before
