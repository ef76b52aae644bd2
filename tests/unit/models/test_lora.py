"""Adapters: nothing at first, the same when merged, and what the sampler sees."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.types import Request
from posttrain.engine.weights import weights_digest
from posttrain.loops.sft import SFT, imitation, sft
from posttrain.models.lora import LoRA, add_lora, is_lora, merged
from posttrain.rollout.pack import Packing, pack

IDS = torch.tensor([[1, 5, 9, 20, 21]])
SETTINGS = LoRA(rank=4, alpha=8.0)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def stirred(model):
    """The model with every B matrix set to a constant, so that the adapter does something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return model


def test_wrapped_model_computes_what_the_base_did(toy):
    expected = logits(toy.model())
    wrapped = add_lora(toy.model(), SETTINGS, 0).eval()
    assert torch.equal(logits(wrapped), expected)
    assert is_lora(wrapped)
    assert not is_lora(toy.model())


def test_only_adapters_are_trainable(toy):
    wrapped = add_lora(toy.model(), SETTINGS, 0)
    trainable = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trainable)
    # 7 linear layers in each of 2 blocks, A and B for each
    assert len(trainable) == 2 * 7 * 2


def test_no_dropout(toy):
    wrapped = add_lora(toy.model(), SETTINGS, 0)
    assert not [module for module in wrapped.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
    stirred(wrapped).train()
    assert torch.equal(logits(wrapped), logits(wrapped))


def test_initialisation_belongs_to_the_seed_alone(toy):
    before = torch.random.get_rng_state()
    one, same, other = (weights_digest(add_lora(toy.model(), SETTINGS, seed)) for seed in (0, 0, 1))
    assert one == same != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_merged_equals_adapter(toy):
    wrapped = stirred(add_lora(toy.model(), SETTINGS, 0)).eval()
    expected = logits(wrapped)
    assert not torch.allclose(expected, logits(toy.model()), atol=1e-2)
    plain = merged(wrapped)
    assert not is_lora(plain)
    torch.testing.assert_close(logits(plain), expected, atol=2e-5, rtol=1e-5)


def test_a_plain_model_is_its_own_merge(toy):
    model = toy.model()
    assert merged(model) is model


def test_alpha_scales_the_update(toy):
    # delta = alpha / rank x B A: the scale is 8 / 4 = 2
    wrapped = stirred(add_lora(toy.model(), SETTINGS, 0))
    parameters = dict(wrapped.named_parameters())
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    delta = 2.0 * parameters[f"{name}.lora_B.default.weight"] @ parameters[f"{name}.lora_A.default.weight"]
    base = parameters[f"{name}.base_layer.weight"].clone()
    plain = merged(wrapped)
    torch.testing.assert_close(dict(plain.named_parameters())["model.layers.0.self_attn.q_proj.weight"], base + delta)


def test_sampler_and_trainer_see_the_adapter(toy):
    wrapped = add_lora(toy.model(), SETTINGS, 0).eval()
    sampler = LocalSampler(wrapped, frozenset({2}), frozenset({2}))
    asked = [Request((1, 5, 9), Sampling(max_tokens=8), seed) for seed in range(6)]
    before = sampler.generate(asked)
    stirred(wrapped)
    after = sampler.generate(asked)
    assert [c.logps for c in after] != [c.logps for c in before]
    rows = [toy.row((1, 5, 9), c.ids, logps=c.logps) for c in after]
    (batch,) = pack(rows, Packing())
    with torch.no_grad():
        torch.testing.assert_close(score(wrapped, batch, Sampling()).logp_BT, batch.behaviour_BT, atol=1e-5, rtol=0)
    plain = LocalSampler(merged(wrapped), frozenset({2}), frozenset({2})).generate(asked)
    for one, other in zip(after, plain, strict=True):
        assert one.ids == other.ids
        assert one.logps == pytest.approx(other.logps, abs=1e-4)


def test_a_step_moves_adapters_and_not_the_base(toy):
    wrapped = add_lora(toy.model(), SETTINGS, 0)
    frozen = {name: p.clone() for name, p in wrapped.named_parameters() if not p.requires_grad}
    trainer = LocalTrainer(wrapped, Optim(lr=1e-2), 2, Ranks())
    batches = pack([toy.row((1, 5), (20, 2))], Packing())
    before = weights_digest(wrapped)
    first = trainer.step(batches, imitation(2))["loss"].read()
    second = trainer.step(batches, imitation(2))["loss"].read()
    assert second < first
    assert weights_digest(wrapped) != before
    assert all(torch.equal(p, frozen[name]) for name, p in wrapped.named_parameters() if name in frozen)


def test_checkpoint_holds_adapters_only(toy, tmp_path):
    wrapped = add_lora(toy.model(), SETTINGS, 0)
    trainer = LocalTrainer(wrapped, Optim(lr=1e-2), 2, Ranks())
    trainer.step(pack([toy.row((1, 5), (20, 2))], Packing()), imitation(2))
    trainer.save(tmp_path)
    other = add_lora(toy.model(), SETTINGS, 5)
    LocalTrainer(other, Optim(lr=1e-2), 2, Ranks()).restore(tmp_path)
    assert weights_digest(other) == weights_digest(wrapped)


def test_a_loop_trains_a_copy_of_an_adapted_model(toy):
    wrapped = add_lora(toy.model(), SETTINGS, 0)
    before = weights_digest(wrapped)
    owners = (Owner.USER, Owner.USER)
    rows = [Sample(Tokens((1, 5), owners), Tokens((20, 2), (Owner.DEMONSTRATED,) * 2), "r")]
    trained = sft(toy.session(), wrapped, rows, SFT(epochs=2))
    assert weights_digest(wrapped) == before != weights_digest(trained)
    assert is_lora(trained)
