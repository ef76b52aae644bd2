"""Ranks: shares, real processes over gloo, and what happens when one is lost."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.core.errors import ConfigError
from posttrain.core.metrics import read
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.processes import Ranks, WorkerLost, launch
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.sft import imitation
from posttrain.rollout.pack import Packing, pack, shard


def test_shares_partition_and_interleave_restores():
    items = list("abcdefg")
    parts = [Ranks(rank, 3).share(items) for rank in range(3)]
    assert parts == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert Ranks().interleave(Ranks().share(items)) == items


def small_model() -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, initializer_range=0.3, **shape)).float().eval()


def rows() -> list[Sample]:
    """Three rows of 3, 1 and 9 trained tokens."""
    answers = [(20, 21, 2), (2,), (30, 31, 32, 33, 34, 35, 36, 37, 2)]
    return [Sample(Tokens((1, 5), (Owner.USER,) * 2), Tokens(ids, (Owner.SAMPLED,) * len(ids)), f"{i}") for i, ids in enumerate(answers)]


def two_steps(ranks: Ranks, lr: float) -> tuple[torch.Tensor, dict[str, float | None], list[str], object]:
    torch.set_num_threads(1)
    model = small_model()
    trainer = LocalTrainer(model, Optim(lr=lr, schedule="constant", warmup=0.0), 2, ranks)
    mine = shard(rows(), ranks.rank, ranks.size)
    for _ in range(2):
        metrics = trainer.step(pack(mine, Packing(row_tokens=4, micro_tokens=4)), imitation(13))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    agree = ranks.gather(weights)
    assert all(torch.equal(part, agree[0]) for part in agree)
    order = ranks.interleave(ranks.share(list("abcde")))
    return weights, read(metrics), order, ranks.first_says(ranks.rank)


def test_two_processes_take_the_step_of_one():
    one = launch(two_steps, 1, 1e-3)
    two = launch(two_steps, 2, 1e-3)
    assert two[0].shape == one[0].shape
    torch.testing.assert_close(two[0], one[0], atol=1e-5, rtol=0)
    assert two[1] == {name: pytest.approx(value, rel=1e-4) for name, value in one[1].items()}
    assert two[2] == list("abcde")
    assert two[3] == 0


def lose_a_worker(ranks: Ranks) -> int:
    if not ranks.first:
        os._exit(9)
    return len(ranks.gather(0))


def test_a_lost_worker_is_named():
    with pytest.raises(WorkerLost, match=r"exit code 9; repeat the command with --resume"):
        launch(lose_a_worker, 2)


def same_mistake(ranks: Ranks) -> None:
    raise ConfigError("no rows")


def test_a_user_error_stays_one_line():
    with pytest.raises(ConfigError, match="no rows"):
        launch(same_mistake, 2)
