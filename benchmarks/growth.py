"""Whether a rollout token gets dearer as a run goes on: 200 steps of GRPO with real records, CPU seconds per token at every step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import shared
import torch
from harness import Bench, Process, Record, Side, slope_interval
from sides import Turns

from posttrain.core.sampling import Sampling
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import Optim
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, World
from posttrain.objectives.objective import Objective
from posttrain.render.renderer import ChatRenderer

STEPS, QUICK_STEPS, WARMUP, BINS = 200, 40, 5, 20
MOST = 0.05
"""Growth over the run, as a share of the cost, that would go unnoticed."""


def ours(turns: Turns, options: Mapping[str, Any]) -> None:
    """Our loop on small groups."""
    torch.set_num_threads(1)
    world = World(
        shared.Fixed(shared.tasks_of(shared.questions(4))), shared.Parity(), ChatRenderer(shared.tokenizer()), Sampling(max_tokens=24)
    )
    optim = Optim(lr=1e-6, schedule="constant", warmup=0.0)
    settings = RL(steps=options["steps"], prompts=4, siblings=4, tries=1, optim=optim, keep_rollouts=4, patience=1000)
    with shared.session(turns, Ranks(), settings.steps) as session:
        rl(session, shared.tiny_model(), world, settings, Objective.load({"kind": "grpo", "kl": {"estimator": "none"}}))


def run(bench: Bench) -> None:
    """Every step draws 4 x 4 x 24 tokens. Its CPU seconds are divided by those of a fixed chain of products right before and after it,
    so that what grows is the run and not the load of the machine."""
    steps = QUICK_STEPS if bench.quick else STEPS
    process = Process(Side("growth", "ours", {"steps": steps + 1 + WARMUP}))
    reference = Process(Side("sampler", "chain", {"model": "tiny", "prompts": 16}))
    seconds, chain = [], [reference.turn().cpu]
    for _ in range(WARMUP + steps):
        seconds.append(process.turn().cpu)
        chain.append(reference.turn().cpu)
    process.close()
    reference.close()
    costs = [2 * s / (before + after) for s, before, after in zip(seconds, chain, chain[1:], strict=False)][WARMUP:]
    unit = 1e6 * statistics.median(chain) / (4 * 4 * 24)
    growth, low, high = slope_interval(costs)
    size = max(1, steps // BINS)
    series = tuple(round(unit * statistics.median(costs[i : i + size]), 2) for i in range(0, steps, size))
    name = f"growth of the cost of a rollout token over {steps} steps"
    conditions = "GRPO, 1.4M parameters, 4 x 4, 24 new tokens, all rollouts recorded; slope by Theil and Sen"
    bench.put(
        Record(
            name,
            unit * statistics.median(costs),
            None,
            "us CPU",
            growth,
            low,
            high,
            MOST,
            growth <= MOST,
            steps,
            conditions,
            bench.machine,
            at_most=True,
            ours_range=(unit * min(costs), unit * max(costs)),
            series=series,
        )  # fmt: skip
    )
