"""Steps of a trainer, by as many processes as torchrun starts, or by this one alone.

torchrun --nproc_per_node 2 torchrun_steps.py OUT     # OUT: the file that the first process writes its figures and weights to
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.machine import Machine
from posttrain.engine.processes import Ranks, launch
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.sft import imitation
from posttrain.models.lora import LoRA, add_lora
from posttrain.rollout.pack import Packing, pack, shard

ROWS = [(20, 21, 2), (2,), (30, 31, 32, 33, 34, 2), (40, 2)]


def small_model() -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, initializer_range=0.3, **shape)).float().eval()


def steps(ranks: Ranks, sharding: str, lora: bool) -> dict[str, Any]:
    """Figures of three steps and the weights after them."""
    model = add_lora(small_model(), LoRA(rank=2), seed=0) if lora else small_model()
    machine = Machine.load({"sharding": sharding})
    trainer = LocalTrainer(model, Optim(lr=1e-4, warmup=0.0), 5, ranks, machine=machine)
    rows = [Sample(Tokens((1, 5), (Owner.USER,) * 2), Tokens(ids, (Owner.SAMPLED,) * len(ids)), f"{i}") for i, ids in enumerate(ROWS)]
    batches = pack(shard(rows, ranks.rank, ranks.size), Packing(row_tokens=1, micro_tokens=1))
    found = [trainer.step(batches, imitation(12)) for _ in range(3)]
    figures = [[metrics["loss"].read(), metrics["grad_norm"].read()] for metrics in found]
    return {"figures": figures, "weights": trainer.full_weights(), "divided": trainer.together}


def everything(ranks: Ranks) -> dict[str, Any]:
    """All four kinds."""
    torch.set_num_threads(1)
    kinds = {(sharding, lora): steps(ranks, sharding, lora) for sharding in ("none", "fsdp2") for lora in (False, True)}
    return {"size": ranks.size, "first": ranks.first, "kinds": kinds}


if __name__ == "__main__":
    figures = launch(everything, 1)
    if figures["first"]:
        torch.save(figures, sys.argv[1])
