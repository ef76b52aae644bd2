"""Recomputed blocks give the same gradient with less memory; bfloat16 stays inside the blocks; nothing is left behind in the model."""

from __future__ import annotations

import copy
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, OPTConfig

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.activation import blocks, computing, slow_precision
from posttrain.engine.machine import Machine
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import hidden_states, score
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.values import values
from posttrain.loops.sft import imitation
from posttrain.models.critic import Critic
from posttrain.models.lora import LoRA, add_lora
from posttrain.rollout.pack import Packing, pack

RECOMPUTE, LOW = Machine(checkpoint_activations=True), Machine(precision="bfloat16")
BOTH = Machine(checkpoint_activations=True, precision="bfloat16")


def batch_of(toy, rows: int = 3):
    made = [toy.row((1, 5, 9), (20 + i, 21, 22, 2), f"{i}") for i in range(rows)]
    return pack(made, Packing(row_tokens=64, micro_tokens=4096))[0]


def gradient(toy, model: nn.Module, machine: Machine) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    batch = batch_of(toy)
    with computing(model, machine):
        loss, _ = imitation(12)(batch, score(model, batch, Sampling()))
        loss.backward()
    return toy.gradient(model)


@contextmanager
def by_the_library(model: nn.Module):
    """Within it the blocks are called as the library calls them, as they are when something surrounds them."""
    for block in blocks(model):
        block.forward = block.forward
    yield
    for block in blocks(model):
        del block.forward


def other_decoder(config) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


SIZES = {"vocab_size": 60, "max_position_embeddings": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
OTHERS = {
    "gpt2": GPT2Config(vocab_size=60, n_positions=64, n_embd=16, n_layer=3, n_head=2),
    "neox": GPTNeoXConfig(hidden_size=16, intermediate_size=32, **SIZES),
    "opt": OPTConfig(hidden_size=16, ffn_dim=32, word_embed_proj_dim=16, **SIZES),
}


def test_recomputed_blocks_give_the_same_gradient_to_the_last_digit(toy):
    model = toy.model()
    with by_the_library(model):
        plain = gradient(toy, model, Machine())
    assert plain.norm() > 0
    assert torch.equal(gradient(toy, model, RECOMPUTE), plain)
    torch.testing.assert_close(gradient(toy, model, Machine()), plain)  # however it is computed where nothing surrounds the blocks


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_of_any_decoder_are_recomputed(toy, name, monkeypatch):
    model = other_decoder(OTHERS[name])
    found = blocks(model)
    assert len(found) == 3
    calls = []
    forward = type(found[0]).forward
    monkeypatch.setattr(type(found[0]), "forward", lambda self, *a, **k: calls.append(self) or forward(self, *a, **k))
    batch = pack([toy.row((1, 5), (20, 2), "a")], Packing(), share_prompts=False)[0]
    with computing(model, RECOMPUTE):
        score(model, batch, Sampling()).logp_BT.sum().backward()
    assert [calls.count(block) for block in found] == [2, 2, 2]  # forward, and again in the backward pass
    with computing(model, RECOMPUTE), torch.no_grad():
        score(model, batch, Sampling())
    assert [calls.count(block) for block in found] == [3, 3, 3]


def test_adapters_and_critics_have_the_blocks_of_their_model(toy):
    model = toy.model()
    assert len(blocks(Critic.of(model))) == 2
    wrapped = add_lora(model, LoRA(rank=2), 0)
    assert blocks(wrapped) == list(model.model.layers)
    with by_the_library(wrapped):
        plain = gradient(toy, wrapped, Machine())
    assert torch.equal(gradient(toy, wrapped, RECOMPUTE), plain)


def test_a_model_without_blocks_is_refused_by_name(toy):
    model = toy.model()
    model.model.layers = model.model.layers[:1]
    with (
        pytest.raises(ConfigError, match=r"no list of 2 blocks was found in LlamaForCausalLM; use machine\.precision=float32"),
        computing(model, RECOMPUTE),
    ):
        pass


class Peak(TorchDispatchMode):
    """Bytes of tensors alive at the worst moment, of those made within."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen: dict[int, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.now += size
        self.most = max(self.most, self.now)
        self.seen[key] = weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.pop(key, None)


def test_recomputed_blocks_take_less_memory(toy):
    model = other_decoder(GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=8, n_head=2))
    rows = [toy.row((1, 5, 9), tuple(range(20, 50)), f"{i}") for i in range(8)]
    batch = pack(rows, Packing(), share_prompts=False)[0]

    def peak(machine: Machine) -> int:
        model.zero_grad(set_to_none=True)
        with Peak() as memory, computing(model, machine):
            score(model, batch, Sampling()).logp_BT.sum().backward()
        return memory.most

    assert peak(RECOMPUTE) < 0.45 * peak(Machine())


def test_bfloat16_is_inside_the_blocks_only(toy):
    model = toy.model()
    batch, seen = batch_of(toy), {}
    hooks = [
        module.register_forward_hook(lambda module, args, out, name=name: seen.setdefault(name, out[0] if isinstance(out, tuple) else out))
        for name, module in model.named_modules()
        if name.endswith(("embed_tokens", "q_proj", "down_proj", "layers.0", "layers.1", "model.norm"))
    ]
    with computing(model, LOW):
        states = hidden_states(model.model, batch)
        logp = score(model, batch, Sampling()).logp_BT
        logp.sum().backward()
    for hook in hooks:
        hook.remove()
    low = {name for name, out in seen.items() if out.dtype == torch.bfloat16}
    assert low == {name for name in seen if name.endswith(("q_proj", "down_proj"))}
    assert len(low) == 4
    assert states.dtype == logp.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_bfloat16_is_near_float32_and_not_equal(toy):
    model = toy.model(std=0.1)
    exact, low = gradient(toy, model, Machine()), gradient(toy, model, LOW)
    assert 1e-4 < ((low - exact).norm() / exact.norm()).item() < 3e-2
    assert torch.equal(gradient(toy, model, BOTH), low)


@pytest.mark.parametrize("machine", [LOW, RECOMPUTE, BOTH])
def test_nothing_is_left_in_the_model(toy, machine):
    model = toy.model()
    with computing(model, machine), computing(model, machine):
        pass
    with pytest.raises(ValueError, match="x"), computing(model, machine):
        raise ValueError("x")
    assert all("forward" not in block.__dict__ for block in blocks(model))
    trainer = LocalTrainer(model, Optim(), 2, Ranks(), machine=machine)
    trainer.step([batch_of(toy)], imitation(12))
    copied = copy.deepcopy(trainer.model)
    assert all("forward" not in block.__dict__ for block in blocks(copied))


@pytest.mark.parametrize("machine", [LOW, BOTH])
def test_a_reading_says_what_the_step_computes_with(toy, machine):
    seen = []
    model = toy.model()
    trainer = LocalTrainer(model, Optim(), 2, Ranks(), machine=machine)
    batch = batch_of(toy)
    with trainer.reading() as read:
        assert read is model
        before = score(model, batch, trainer.sampling).logp_BT
    assert not before.requires_grad
    trainer.step([batch], lambda batch, scores: (seen.append(scores.logp_BT.detach()) or scores.logp_BT.sum(), {}))
    assert torch.equal(seen[0], before)
    with torch.no_grad():
        assert not torch.equal(score(toy.model(), batch, trainer.sampling).logp_BT, before)


def test_a_critic_trains_in_bfloat16(toy):
    critic = Critic.of(toy.model())
    trainer = LocalTrainer(critic, Optim(lr=1e-2, warmup=0.0), 5, Ranks(), scorer=values, machine=BOTH)
    batch = batch_of(toy)
    losses = [trainer.step([batch], lambda b, v: ((v - 1).square()[b.mask_BT].mean(), {}))["loss"].read() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 fma\nmodel name\t: bf16\n", False),
        ("", False),
    ],
)
def test_missing_instructions_are_said_in_one_line(tmp_path, text, native):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    said = slow_precision(LOW, torch.device("cpu"), file)
    assert said is None if native else (said is not None and "\n" not in said and "use float32" in said)
    assert slow_precision(Machine(), torch.device("cpu"), file) is None
    assert slow_precision(LOW, torch.device("cpu"), Path(tmp_path / "absent")) is not None
