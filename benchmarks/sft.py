"""Supervised fine-tuning of the tiny model on texts of 10 to 120 tokens: ours, TRL's packing trainer, and a bare loop.

A step is one pass over all texts, so all sides compute the same tokens whatever the order. TRL and the bare loop fill rows of a fixed
width with texts one after another; attention crosses from one text into the next there, which is less work per token than keeping them
apart, and another loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import shared
import torch
import torch.nn.functional as F
from harness import Bench, Side, same
from sides import Turns

from posttrain.core.seeds import numpy_rng
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import Optim
from posttrain.loops.sft import SFT, sft

LR, TEXTS, WIDTH = 1e-4, 128, 512
CLOSE = 0.02
"""Of the losses at step 0, in nats: what crosses from text to text, and the first token of a text, which only a filled row predicts."""


def texts() -> list[list[int]]:
    """Token ids of every text, with its beginning and its end; together a multiple of the row width."""
    rng = numpy_rng(0, "bench", "texts")
    found = [[1, *rng.integers(shared.FIRST, shared.LAST + 1, size=int(rng.integers(8, 119))).tolist(), 2] for _ in range(TEXTS)]
    spare = -sum(map(len, found)) % WIDTH
    found[-1][1:1] = rng.integers(shared.FIRST, shared.LAST + 1, size=spare).tolist()
    return found


def model() -> Any:
    """The tiny model as it is initialised."""
    return shared.build_tiny(shared.SHAPE, shared.tokenizer(), 0).eval()


def ours(turns: Turns, options: Mapping[str, Any]) -> None:
    """Our loop."""
    torch.set_num_threads(1)
    rows = [
        Sample(Tokens((ids[0],), (Owner.TEMPLATE,)), Tokens(tuple(ids[1:]), (Owner.DEMONSTRATED,) * (len(ids) - 1)), f"{place}")
        for place, ids in enumerate(texts())
    ]
    tokens = sum(map(len, texts()))
    settings = SFT(epochs=options["steps"], batch_size=len(rows), optim=Optim(lr=LR, schedule="constant", warmup=0.0))
    with shared.session(
        turns, Ranks(), options["steps"], lambda run: {"tokens": tokens, "loss": run.metrics("sft")[-1]["loss"]}
    ) as session:
        sft(session, model(), rows, settings)


def packed() -> torch.Tensor:
    """All texts one after another, in rows of WIDTH."""
    return torch.tensor([token for ids in texts() for token in ids]).view(-1, WIDTH)


def bare(turns: Turns, options: Mapping[str, Any]) -> None:
    """Forward, loss, backward, clip, AdamW on filled rows, with the library's model and nothing else."""
    torch.set_num_threads(1)
    policy, ids_RW = model(), packed()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(options["steps"]):
        logits = policy(input_ids=ids_RW, use_cache=False).logits[:, :-1]
        found = F.cross_entropy(logits.flatten(0, 1), ids_RW[:, 1:].flatten())
        found.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.boundary(tokens=ids_RW.numel(), loss=found.item())


def trl(turns: Turns, options: Mapping[str, Any]) -> None:
    """TRL's trainer, packing on."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl_peer import TakesTurns, common

    torch.set_num_threads(options["threads"])
    rows = len(packed())
    config = SFTConfig(
        **common(options, LR),
        per_device_train_batch_size=rows,
        packing=True,
        packing_strategy="wrapped",
        max_length=WIDTH,
        dataset_num_proc=None,
    )
    trainer = SFTTrainer(
        model=model(), args=config, train_dataset=Dataset.from_dict({"input_ids": texts()}), processing_class=shared.tokenizer(),
        callbacks=[TakesTurns(turns, lambda logs: {"tokens": rows * WIDTH})],
    )  # fmt: skip
    assert len(trainer.train_dataset) == rows, (len(trainer.train_dataset), rows)
    trainer.train()


def run(bench: Bench) -> None:
    """Tokens per second of all three."""
    options = {"steps": 2 + bench.repeats}
    started: dict[str, Mapping[str, Any]] = {}
    found = bench.rounds({name: Side("sft", name, options) for name in ("ours", "bare", "trl")}, started=started)
    for name in ("bare", "trl"):
        same(f"tokens per step of {name}", *(statistics.mean(m.facts["tokens"] for m in found[side]) for side in ("ours", name)))
    losses: Sequence[float] = [started["ours"]["loss"], started["trl"]["loss"], started["bare"]["loss"]]
    same("loss of the first step, ours and TRL", losses[0], losses[1], tolerance=CLOSE)
    same("loss of the first step, TRL and the bare loop", losses[1], losses[2], tolerance=1e-4)
    tokens = sum(map(len, texts()))
    conditions = f"1.4M parameters, {TEXTS} texts of 10 to 120 tokens, {tokens} tokens per step, float32"
    bench.compare("SFT, packed", found["ours"], found["trl"], bar=1.2, per="tokens", conditions=conditions, peer_name="TRL, packing")
    bench.compare(
        "SFT against a bare loop", found["ours"], found["bare"], bar=0.9, per="tokens", conditions=conditions, peer_name="bare loop"
    )
    bench.memory("SFT: peak memory", found["ours"], found["trl"], conditions=conditions)
