"""Deliveries that arrive: the proof, what is sent, the null test, versions, and generating too early."""

from __future__ import annotations

import json

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import StopReason
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import Delivery, Limits, NotDelivered, WrongVersion, check_versions, model_logps
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.types import Completion, Request
from posttrain.engine.weights import model_digests, overall_digest
from posttrain.models.lora import LoRA, add_lora
from posttrain.rollout.pack import Packing, pack

PROMPT, IDS = (1, 5, 9, 30, 31), (20, 21, 22, 40)
STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})
REQUESTS = [Request(PROMPT, Sampling(max_tokens=6), seed) for seed in range(4)]


def trainer_of(toy, lora: bool) -> LocalTrainer:
    """With the fused optimizer, which torch's counter of changes does not see. Adapters do something from the start."""
    model = add_lora(toy.model(), LoRA(rank=4, alpha=8), 0) if lora else toy.model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return LocalTrainer(model, Optim(lr=1e-2, warmup=0, schedule="constant"), 10, Ranks())


def train(toy, trainer: LocalTrainer) -> None:
    """One real step."""
    batches = pack([toy.row((1, 5, 9), (20, 21, 22, 2))], Packing())
    trainer.step(batches, lambda batch, scores: (-scores.logp_BT.sum(), {}))


@pytest.mark.parametrize(("lora", "how"), [(False, "merged"), (True, "merged"), (True, "adapter")])
def test_every_step_arrives_and_says_so(toy, lora, how):
    trainer = trainer_of(toy, lora)
    receiver = CopySampler(trainer.model, STOP, CONTROL)
    delivery = Delivery(trainer.model, receiver, (PROMPT, IDS), how)
    sent = {(False, "merged"): 20, (True, "merged"): 14, (True, "adapter"): 28}[lora, how]
    whole = 48 if how == "adapter" else 20  # 9 tensors in each of 2 blocks, embedding and final norm; A and B of 14 linear layers
    digests = set()
    for version in range(4):
        receipt = delivery.send(version)
        digests.add(receipt.digest)
        assert receipt.digest == overall_digest(model_digests(trainer.model, how)) == overall_digest(receiver.digests())
        assert (receipt.version, receipt.tensors, receipt.proven, receipt.absent) == (version, whole, whole, ())
        assert receipt.sent == (whole if version == 0 else sent)
        assert receipt.gap is not None
        assert receipt.drawn_gap is not None
        assert max(receipt.gap, receipt.drawn_gap) <= 1e-5
        if version:
            assert receipt.moved is not None
            assert receipt.moved > 1e-3
            assert receipt.receiver_moved == pytest.approx(receipt.moved, abs=2e-5)
        assert receiver.logps(PROMPT, IDS) == pytest.approx(model_logps(trainer.model, PROMPT, IDS), abs=1e-5)
        assert {c.version for c in delivery.generate(REQUESTS)} == {version}
        train(toy, trainer)
    assert len(digests) == 4
    record = delivery.last.record() if delivery.last else {}
    assert record["absent"] == 0
    assert json.loads(json.dumps(record))["version"] == 3


def test_bytes_are_those_of_what_was_sent(toy):
    trainer = trainer_of(toy, lora=True)
    delivery = Delivery(trainer.model, CopySampler(trainer.model, STOP, CONTROL), (PROMPT, IDS), "adapter")
    base = 4 * sum(p.numel() for p in toy.model().parameters())
    trained = 4 * sum(p.numel() for p in trainer.parameters.values())
    assert delivery.send(0).bytes == base + trained
    train(toy, trainer)
    assert delivery.send(1).bytes == trained


@pytest.mark.parametrize("how", ["merged", "adapter"])
def test_nothing_changed_and_nothing_moves(toy, how):
    # a learning rate of zero for five steps (spec/faults.md 36)
    trainer = trainer_of(toy, lora=True)
    trainer.optim = Optim(lr=1e-30)
    delivery = Delivery(trainer.model, CopySampler(trainer.model, STOP, CONTROL), (PROMPT, IDS), how)
    first = delivery.send(0)
    for version in range(1, 6):
        train(toy, trainer)
        receipt = delivery.send(version)
        assert (receipt.sent, receipt.bytes, receipt.digest) == (0, 0, first.digest)
        assert (receipt.moved, receipt.receiver_moved) == (0.0, 0.0)
        assert delivery.version == version


def test_dropout_in_training_is_not_in_the_canary(toy):
    # spec/faults.md 37: the model is left in training mode, with a dropout of one half in its adapters
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(toy.model(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False))
    model.train()
    model.base_model.model.model.norm.eval()
    delivery = Delivery(model, CopySampler(model, STOP, CONTROL), (PROMPT, IDS))
    delivery.send(0)
    receipt = delivery.send(1)
    assert (receipt.moved, receipt.receiver_moved) == (0.0, 0.0)
    assert (model.training, model.base_model.model.model.norm.training) == (True, False)


def test_nothing_is_drawn_before_the_first_delivery_of_a_process(toy):
    # spec/faults.md 64: what another process delivered before it died counts for nothing
    trainer = trainer_of(toy, lora=False)
    receiver = CopySampler(trainer.model, STOP, CONTROL)
    Delivery(trainer.model, receiver, (PROMPT, IDS)).send(7)
    resumed = Delivery(trainer.model, receiver, (PROMPT, IDS))
    with pytest.raises(NotDelivered, match=r"before weights were delivered to it; call send\(version\) first, also after a resume"):
        resumed.generate(REQUESTS)
    receipt = resumed.send(7)
    assert receipt.sent == receipt.tensors == 20
    assert resumed.generate(REQUESTS)


def test_after_a_failure_everything_is_sent_again(toy):
    trainer = trainer_of(toy, lora=True)
    receiver = CopySampler(trainer.model, STOP, CONTROL)
    delivery = Delivery(trainer.model, receiver, (PROMPT, IDS))
    delivery.send(0)
    train(toy, trainer)
    receive, receiver.receive = receiver.receive, lambda weights, version: receive({}, version)
    with pytest.raises(NotDelivered):
        delivery.send(1)
    with pytest.raises(NotDelivered, match="before weights were delivered"):
        delivery.generate(REQUESTS)
    receiver.receive = receive
    assert delivery.send(1).sent == 20
    assert delivery.generate(REQUESTS)


def test_a_sampler_of_the_live_weights_is_told_the_version(toy):
    trainer = trainer_of(toy, lora=True)
    sampler = LocalSampler(trainer.model, STOP, CONTROL)
    delivery = Delivery(trainer.model, sampler, (PROMPT, IDS))
    with pytest.raises(NotDelivered, match="before weights were delivered"):
        delivery.generate(REQUESTS)
    for version in (5, 6):
        receipt = delivery.send(version)
        assert receipt.drawn_gap is not None
        assert receipt.drawn_gap <= 1e-5
        assert (receipt.version, receipt.digest, receipt.sent, sampler.version) == (version, None, 0, version)
        assert {c.version for c in delivery.generate(REQUESTS)} == {version}
        train(toy, trainer)
    assert Delivery(trainer.model, sampler).send(9).drawn_gap is None


def test_a_live_sampler_that_kept_old_numbers_is_caught(toy):
    trainer = trainer_of(toy, lora=False)
    other = LocalSampler(toy.model(), STOP, CONTROL)  # reads another model than the one in training
    delivery = Delivery(trainer.model, other, (PROMPT, IDS))
    delivery.send(0)
    train(toy, trainer)
    with pytest.raises(NotDelivered, match="version 1 did not reach generation: .* drop the sampler's prefix cache"):
        delivery.send(1)


def test_half_precision_is_sent_and_digested_as_such(toy):
    trainer = trainer_of(toy, lora=True)
    receiver = CopySampler(trainer.model, STOP, CONTROL)
    receiver.model.bfloat16()
    delivery = Delivery(trainer.model, receiver, (PROMPT, IDS), dtype=torch.bfloat16, limits=Limits(agree=1.0, noise=0.1, drawn=0))
    receipt = delivery.send(0)
    assert (receipt.proven, receipt.drawn_gap) == (20, None)
    assert receipt.gap is not None
    assert 1e-5 < receipt.gap < 1.0


def of(*versions: int, version: int | None = None) -> Completion:
    ids = (9,) * len(versions)
    return Completion(ids, (0.0,) * len(ids), StopReason.END, min(versions) if version is None else version, versions)


def test_versions_of_completions():
    plain = Completion((9, 2), (0.0, 0.0), StopReason.END, 7)
    assert check_versions([plain, of(7, 7)], 7) == 0
    assert check_versions([plain, of(6, 7), of(5, 5)], 7, staleness=2) == 2
    assert check_versions([], 7) == 0
    for completions, staleness, said in (
        ([plain, of(6, 7)], 0, r"completion 1 of 2 was drawn by version 6\.\.7, wanted 7\.\.7; deliver the weights"),
        ([of(5, 7)], 1, r"drawn by version 5\.\.7, wanted 6\.\.7"),
        ([of(8, 8)], 3, r"drawn by version 8\.\.8, wanted 4\.\.7"),
        ([of(6, 7, version=7)], 9, r"says version 7 and, of 2 tokens, versions \(6, 7\)"),
        (
            [Completion((9, 9, 2), (0.0,) * 3, StopReason.END, 7, (7,))],
            0,
            r"of 3 tokens, versions \(7,\); a sampler gives one version per token",
        ),
    ):
        with pytest.raises(WrongVersion, match=said):
            check_versions(completions, 7, staleness)


def test_a_swap_while_drawing_is_allowed_and_an_older_stamp_is_not(toy):
    trainer = trainer_of(toy, lora=False)
    receiver = CopySampler(trainer.model, STOP, CONTROL)
    delivery = Delivery(trainer.model, receiver, (PROMPT, IDS))
    delivery.send(3)
    generate = receiver.generate

    def swapped(requests, progress=None):
        receiver.version = 4
        return [of(3, 4) for _ in requests]

    receiver.generate = swapped
    assert delivery.generate(REQUESTS)
    receiver.generate = lambda requests, progress=None: [of(3, 4) for _ in requests]
    with pytest.raises(WrongVersion, match=r"completion 0 of 4 was drawn by version 3\.\.4, wanted 4\.\.4"):
        delivery.generate(REQUESTS)
    receiver.generate = generate
