"""A DPO step of the tiny model against TRL's with precomputed references: 32 pairs, prompts of 37 tokens, responses of 10 to 40."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from typing import Any

import shared
import torch
from harness import Bench, Side, same
from sides import Turns

from posttrain.core.seeds import numpy_rng
from posttrain.core.trajectory import Owner, Tokens
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import Optim
from posttrain.loops.preference import DPO, dpo
from posttrain.models.loading import save
from posttrain.rollout.samples import Pair

LR, PAIRS, BETA = 1e-4, 32, 0.1


def triples() -> list[tuple[str, str, str]]:
    """Prompt, chosen and rejected as texts; a letter is a token."""
    rng = numpy_rng(0, "bench", "pairs")

    def text(size: int) -> str:
        return "".join(chr(97 + int(letter)) for letter in rng.integers(0, 26, size=size))

    return [(text(37), text(int(rng.integers(9, 40))), text(int(rng.integers(9, 40)))) for _ in range(PAIRS)]


def model() -> Any:
    """The tiny model as it is initialised."""
    return shared.build_tiny(shared.SHAPE, shared.tokenizer(), 0).eval()


def ours(turns: Turns, options: Mapping[str, Any]) -> None:
    """Our loop; the reference pass is before the first step, as the peer's is."""
    torch.set_num_threads(1)
    encode = shared.tokenizer().encode

    def tokens(text: str, owner: Owner, end: bool) -> Tokens:
        ids = (*encode(text, add_special_tokens=False), *((shared.STOP,) if end else ()))
        return Tokens(ids, (owner,) * len(ids))

    pairs = [
        Pair(f"{place}", tokens(prompt, Owner.USER, False), tokens(chosen, Owner.SAMPLED, True), tokens(rejected, Owner.SAMPLED, True))
        for place, (prompt, chosen, rejected) in enumerate(triples())
    ]
    settings = DPO(beta=BETA, epochs=options["steps"], batch_size=PAIRS, optim=Optim(lr=LR, schedule="constant", warmup=0.0))
    with shared.session(turns, Ranks(), options["steps"], lambda run: {"loss": run.metrics("dpo")[-1]["loss"]}) as session:
        dpo(session, model(), pairs, settings)


def trl(turns: Turns, options: Mapping[str, Any]) -> None:
    """TRL's trainer; it loads its model from a folder."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl_peer import TakesTurns, common

    torch.set_num_threads(options["threads"])
    config = DPOConfig(**common(options, LR), per_device_train_batch_size=PAIRS, beta=BETA, precompute_ref_log_probs=True, max_length=None)
    columns = dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*triples(), strict=True)), strict=True))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        from pathlib import Path

        save(model(), shared.tokenizer(), Path(folder))
        trainer = DPOTrainer(
            model=folder, args=config, train_dataset=Dataset.from_dict(columns), processing_class=shared.tokenizer(),
            callbacks=[TakesTurns(turns, lambda logs: {})],
        )  # fmt: skip
        trainer.train()


def run(bench: Bench) -> None:
    """Seconds per step. The losses agree step by step, which they only do for the same pairs, reference and updates."""
    options = {"steps": 2 + bench.repeats}
    started: dict[str, Mapping[str, Any]] = {}
    found = bench.rounds({name: Side("dpo", name, options) for name in ("ours", "trl")}, started=started)
    same("loss of the first step", started["ours"]["loss"], started["trl"]["loss"], tolerance=1e-4)
    for a, b in zip(found["ours"], found["trl"], strict=True):
        same("loss of a later step", a.facts["loss"], b.facts["loss"], tolerance=1e-3)
    assert statistics.mean(m.facts["loss"] for m in found["ours"]) < started["ours"]["loss"]
    conditions = f"1.4M parameters, {PAIRS} pairs, prompts of 37 tokens, responses of 10 to 40, float32"
    peer = "TRL, precomputed references"
    bench.compare("DPO step", found["ours"], found["trl"], bar=1.3, conditions=conditions, peer_name=peer)
    bench.memory("DPO: peak memory", found["ours"], found["trl"], conditions=conditions, peer_name=peer)
