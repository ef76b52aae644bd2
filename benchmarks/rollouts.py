"""Rollouts of two worker processes against one: the product's `collect`, 64 prompts x 8 siblings of the tiny model, mixed lengths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import shared
import torch
from grpo import MIXED_END, _Held
from harness import Bench, Side, same
from sides import Turns

from posttrain.core.sampling import Sampling
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks, launch
from posttrain.render.renderer import ChatRenderer
from posttrain.rollout.collect import Collector, collect

PROMPTS = 64


def ours(turns: Turns, options: Mapping[str, Any]) -> None:
    """Groups of all tasks, once per turn."""
    torch.set_num_threads(1)
    if options["processes"] == 1:
        work(Ranks(), _Held(turns), options)
    else:
        launch(work, options["processes"], _Held(turns), dict(options))


def work(ranks: Ranks, held: _Held, options: Mapping[str, Any]) -> None:
    """What each process does; the first asks the harness and tells the others."""
    renderer = ChatRenderer(shared.tokenizer())
    sampler = LocalSampler(shared.tiny_model(shared.MIXED, MIXED_END), renderer.stop_ids, renderer.special_ids)
    collector = Collector(sampler, renderer, shared.Parity(), Sampling(max_tokens=shared.MIXED), shared.SIBLINGS, ranks)
    tasks = shared.tasks_of(shared.questions(PROMPTS))
    tokens = 0
    while ranks.first_says(held.turns is not None and held.turns.boundary(tokens=tokens)):
        sampler.version += 1
        groups = collect(collector, tasks, sampler.version)
        tokens = sum(len(rollout.trajectory.ids) for group in groups for rollout in group.rollouts)


def run(bench: Bench) -> None:
    """Tokens per second; both draw the same completions."""
    sides = {f"{n}": Side("rollouts", "ours", {"processes": n}) for n in (2, 1)}
    found = bench.rounds(sides)
    same("tokens", *(statistics.mean(m.facts["tokens"] for m in found[name]) for name in ("2", "1")))
    bench.compare(
        "rollouts, two processes against one", found["2"], found["1"], bar=1.7, per="tokens", peer_name="one process",
        conditions=f"1.4M parameters, {PROMPTS} x {shared.SIBLINGS}, mixed lengths up to {shared.MIXED}, scored and collected, float32",
    )  # fmt: skip
