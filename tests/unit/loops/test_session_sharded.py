"""A checkpoint of a model that is divided over two processes: whole, exported whole, and taken up by one process or by two."""

from __future__ import annotations

import shutil
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from posttrain.core.errors import Interrupted
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.machine import Machine
from posttrain.engine.processes import Ranks, launch
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.weights import weights_digest
from posttrain.loops.session import Session, Stage
from posttrain.loops.sft import imitation
from posttrain.models.lora import LoRA, add_lora, merged
from posttrain.models.tokenizer import build_tokenizer
from posttrain.rollout.pack import Packing, pack, shard
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal
from posttrain.runs.run import Run

STEPS = 4


def model_of(adapters: bool) -> torch.nn.Module:
    shape: dict[str, Any] = {
        "hidden_size": 14,
        "intermediate_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=265, tie_word_embeddings=True, initializer_range=0.3, **shape)).float().eval()
    return add_lora(model, LoRA(rank=2, alpha=4), seed=1) if adapters else model


def rows() -> list[Sample]:
    answers = [(20, 21, 2), (2,), (30, 31, 32, 2), (40, 2)]
    return [Sample(Tokens((1, 5), (Owner.USER,) * 2), Tokens(ids, (Owner.SAMPLED,) * len(ids)), f"{i}") for i, ids in enumerate(answers)]


class Stopping(StopSignal):
    """Asks to stop at once, or never."""

    def __init__(self, now: bool):
        super().__init__(lambda text: None)
        self.now = now

    @property
    def requested(self) -> bool:
        return self.now

    @requested.setter
    def requested(self, value: bool) -> None:
        """Nobody presses Ctrl-C here."""


def attempt(ranks: Ranks, folder: str, sharding: str, stop: bool, adapters: bool) -> str:
    """Train until a stop after the next step, or to the end; returns the digest of the weights, adapters folded in."""
    run = Run.resume(folder, config=Machine()) if ranks.first else Run.silent(folder)
    machine = Machine.load({"sharding": sharding})
    session = Session(ranks, run, Console.quiet(), Stopping(stop), 0, 100, machine=machine, tokenizer=build_tokenizer([], 265))
    trainer = LocalTrainer(model_of(adapters), Optim(lr=1e-2), STEPS, ranks, machine=machine)
    stage = Stage(session, "sft", trainer, STEPS)
    batches = pack(shard(rows(), ranks.rank, ranks.size), Packing())
    with closing(run) if isinstance(run, Run) else nullcontext(), suppress(Interrupted):
        for step in stage.steps():
            metrics = trainer.step(batches, imitation(10))
            stage.record(step, {"loss": metrics["loss"]}, {}, {}, show=())
    return weights_digest(merged(trainer.plain()))


def start(folder: Path) -> Path:
    Run.create(folder, config=Machine(), command=["x"], seeds={})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_divided_over_two_processes_then_one_and_the_other_way_round(tmp_path, adapters):
    straight, run = start(tmp_path / "straight"), start(tmp_path / "run")
    attempt(Ranks(), str(straight), "none", False, adapters)
    for size, sharding in ((2, "fsdp2"), (1, "none")):
        digest = launch(attempt, size, str(run), sharding, True, adapters)
        newest = max((run / "checkpoints" / "sft").iterdir(), key=lambda path: int(path.name[5:]))
        shown = AutoModelForCausalLM.from_pretrained(newest / "model")
        assert weights_digest(shown) == digest
        assert (newest / "adapter").is_dir() == adapters
    shutil.rmtree(newest / "model")  # for people: nothing of it is needed to go on
    launch(attempt, 2, str(run), "fsdp2", False, adapters)
    lines, expected = Run.open(run).metrics(), Run.open(straight).metrics()
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], abs=1e-5)
