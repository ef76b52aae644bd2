"""A GRPO step of SmolLM2-135M with LoRA on every linear layer against TRL's: 4 prompts x 8 siblings, up to 24 new tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import shared
import torch
from grpo import OBJECTIVE
from harness import Bench, Side, same
from sides import Turns

from posttrain.core.sampling import Sampling
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import Optim
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, World
from posttrain.models.loading import load
from posttrain.models.lora import LoRA, add_lora
from posttrain.objectives.objective import Objective
from posttrain.render.renderer import ChatRenderer

LR, NEW, PROMPTS = 1e-7, 24, 4
QUESTIONS = ("Name an animal. One word only.", "Name a colour. One word only.", "Say a random word.", "Name a city. One word only.")
"""Short answers of many kinds: completions end before they are cut, and a group rarely has one reward only."""


def ours(turns: Turns, options: Mapping[str, Any]) -> None:
    """Our loop."""
    torch.set_num_threads(1)
    model, tokenizer = load("smollm2")
    world = World(shared.Fixed(shared.tasks_of(QUESTIONS)), shared.Parity(), ChatRenderer(tokenizer), Sampling(max_tokens=NEW))
    settings = RL(
        steps=options["steps"], prompts=PROMPTS, siblings=shared.SIBLINGS, tries=1, optim=Optim(lr=LR, schedule="constant", warmup=0.0),
        patience=1000,
    )  # fmt: skip
    with shared.session(turns, Ranks(), settings.steps, last_step) as session:
        rl(session, add_lora(model, LoRA(), 0), world, settings, Objective.load(OBJECTIVE))


def last_step(run: Any) -> dict[str, Any]:
    """Tokens drawn, and the share of rows that were trained."""
    line = run.metrics("rl")[-1]
    return {"tokens": round(line["length"] * line["rollouts_generated"]), "trained": line["rollouts_trained"] / line["rollouts_generated"]}


def trl(turns: Turns, options: Mapping[str, Any]) -> None:
    """TRL's trainer with the same base, adapters, prompts, reward and settings."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trl_peer import TakesTurns, common

    torch.set_num_threads(options["threads"])
    model, tokenizer = load("smollm2")
    rows = PROMPTS * shared.SIBLINGS
    config = GRPOConfig(
        **common(options, LR), per_device_train_batch_size=rows, num_generations=shared.SIBLINGS, max_completion_length=NEW, beta=0.0,
        temperature=1.0, loss_type="dapo",
    )  # fmt: skip
    lora = LoRA()
    adapters = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target, lora_dropout=0.0, bias="none")
    trainer = GRPOTrainer(
        model=model, args=config, train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in QUESTIONS]}),
        reward_funcs=shared.parity_rewards, processing_class=tokenizer, peft_config=adapters,
        callbacks=[TakesTurns(turns, lambda logs: facts_of(logs, rows))],
    )  # fmt: skip
    trainer.train()


def facts_of(logs: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Tokens drawn, and the share of groups with a signal."""
    return {"tokens": round(logs["completions/mean_length"] * rows), "trained": 1 - logs["frac_reward_zero_std"]}


def run(bench: Bench) -> None:
    """Seconds per step; lengths are drawn, from the same model, so steps are compared by the token."""
    options = {"steps": 2 + bench.repeats}
    found = bench.rounds({"ours": Side("grpo_smollm2", "ours", options), "TRL": Side("grpo_smollm2", "trl", options)})
    counts = [statistics.mean(m.facts["tokens"] for m in found[name]) for name in ("ours", "TRL")]
    same("tokens per step", *counts, tolerance=0.25 * counts[1])
    trained = [statistics.mean(m.facts["trained"] for m in found[name]) for name in ("ours", "TRL")]
    same("rows with a signal", *trained, tolerance=0.2)
    size = f"{PROMPTS} x {shared.SIBLINGS}, up to {NEW} new tokens"
    conditions = f"SmolLM2-135M, LoRA rank 16 on all linear layers, {size}, {trained[0]:.0%} of rows with a signal, float32"
    bench.compare("GRPO step, SmolLM2-135M with LoRA", found["ours"], found["TRL"], bar=1.8, per="tokens", conditions=conditions)
    bench.memory("GRPO, SmolLM2-135M with LoRA: peak memory", found["ours"], found["TRL"], conditions=conditions)
