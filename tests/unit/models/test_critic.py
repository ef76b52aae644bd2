"""A critic is its own copy of the trunk with a head of zeros."""

from __future__ import annotations

import pytest
import torch

from posttrain.engine.weights import weights_digest
from posttrain.models.critic import Critic
from posttrain.models.lora import LoRA, add_lora

IDS = torch.tensor([[1, 5, 9, 20, 21]])


def states(trunk) -> torch.Tensor:
    with torch.no_grad():
        return trunk(input_ids=IDS).last_hidden_state[0]


def adapted(toy):
    """A model whose adapters do something: every B matrix is a constant."""
    model = add_lora(toy.model(), LoRA(rank=4, alpha=8), 0).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return model


@pytest.mark.parametrize("make", [lambda toy: toy.model(), adapted], ids=["plain", "adapted"])
def test_values_start_at_zero_on_the_models_own_states(toy, make):
    model = make(toy)
    critic = Critic.of(model)
    with torch.no_grad():
        expected = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1][0]
    assert torch.equal(states(critic.trunk), expected)
    assert critic.value(expected).tolist() == [0.0] * 5
    assert critic.head.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_is_a_dot_product(toy, dtype):
    critic = Critic.of(toy.model())
    with torch.no_grad():
        critic.head[:3] = torch.tensor([0.5, 0.0, 0.25])
    row = torch.zeros(32, dtype=dtype)
    row[:3] = torch.tensor([1.0, 2.0, -1.0])
    # 0.5 * 1 + 0 * 2 + 0.25 * -1 = 0.25, and half of it for half the state
    found = critic.value(torch.stack([row, row / 2]))
    assert found.tolist() == [0.25, 0.125]
    assert found.dtype == torch.float32


def test_no_tensor_is_shared(toy):
    model = toy.model()
    critic = Critic.of(model)
    mine = {t.data_ptr() for t in (*critic.parameters(), *critic.buffers())}
    theirs = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert mine
    assert not mine & theirs
    before = weights_digest(model)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1.0)
    assert weights_digest(model) == before


def test_the_language_head_is_left_behind(toy):
    model = toy.model()
    model.config.tie_word_embeddings = False
    model.lm_head = torch.nn.Linear(32, 60, bias=False)
    shapes = [tuple(parameter.shape) for parameter in Critic.of(model).parameters()]
    assert shapes.count((60, 32)) == 1  # the embedding
    assert shapes.count((32,)) == 5 + 1  # two norms in each of two blocks, the final norm, the value head


def test_what_is_trainable_stays_trainable(toy):
    plain = Critic.of(toy.model())
    assert all(parameter.requires_grad for parameter in plain.parameters())
    critic = Critic.of(adapted(toy))
    trainable = [name for name, parameter in critic.named_parameters() if parameter.requires_grad]
    # 7 linear layers in each of 2 blocks, A and B for each, and the head
    assert len(trainable) == 2 * 7 * 2 + 1
    assert all("lora_" in name or name == "head" for name in trainable)
    frozen = toy.model()
    frozen.requires_grad_(False)
    assert [name for name, parameter in Critic.of(frozen).named_parameters() if parameter.requires_grad] == ["head"]


def test_no_draw_from_the_global_generator(toy):
    model = toy.model()
    before = torch.random.get_rng_state()
    Critic.of(model)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_helpers_find_the_config(toy):
    model = toy.model()
    critic = Critic.of(model)
    assert critic.config.model_type == "llama"
    critic.config.model_type = "another"
    assert model.config.model_type == "llama"
    assert not critic.training
