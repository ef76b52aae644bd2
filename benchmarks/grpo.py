"""A GRPO step of the tiny model against TRL's: 16 prompts of 37 tokens x 8 siblings, 24 new tokens each, or of mixed lengths up to 64."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import shared
import torch
from harness import Bench, Measure, Side, rates, same
from sides import Turns

from posttrain.core.sampling import Sampling
from posttrain.engine.processes import Ranks, launch
from posttrain.engine.trainer import Optim
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, World
from posttrain.objectives.objective import Objective
from posttrain.render.renderer import ChatRenderer

LR = 1e-9
"""So small that lengths stay what the model was built for; a step costs the same at any rate."""
OBJECTIVE = {"kind": "grpo", "aggregation": "token_mean", "kl": {"estimator": "none"}}
WARMUP = 2
MIXED_END = 0.03


def lengths(options: Mapping[str, Any]) -> tuple[int, float]:
    """Longest completion, and the chance of an early end at each token."""
    return (shared.MIXED, MIXED_END) if options["mixed"] else (shared.EQUAL, 0.0)


def ours(turns: Turns, options: Mapping[str, Any]) -> None:
    """Our loop, on one process or several."""
    torch.set_num_threads(1)
    if options["processes"] == 1:
        _train(Ranks(), turns, options)
    else:
        launch(_follow, options["processes"], _Held(turns), dict(options))


class _Held:
    """The conversation with the harness stays with the first process."""

    def __init__(self, turns: Turns | None):
        self.turns = turns

    def __reduce__(self) -> Any:
        return _Held, (None,)


def _follow(ranks: Ranks, held: _Held, options: Mapping[str, Any]) -> None:
    _train(ranks, held.turns or Turns(silent=True), options)


def _train(ranks: Ranks, turns: Turns, options: Mapping[str, Any]) -> None:
    longest, ends = lengths(options)
    world = World(
        shared.Fixed(shared.tasks_of(shared.questions())), shared.Parity(), ChatRenderer(shared.tokenizer()), Sampling(max_tokens=longest)
    )
    optim = Optim(lr=LR, schedule="constant", warmup=0.0)
    settings = RL(steps=options["steps"], prompts=shared.PROMPTS, siblings=shared.SIBLINGS, tries=1, optim=optim)
    spent = [0.0]
    for module, name in INSIDE:
        watch(spent, importlib.import_module(module), name)
    with shared.session(turns, ranks, settings.steps, lambda run: last_step(run, spent)) as session:
        rl(session, shared.tiny_model(longest, ends), world, settings, Objective.load(OBJECTIVE))


INSIDE = (
    ("posttrain.engine.delivery", "Delivery.send"),
    ("posttrain.engine.delivery", "check_versions"),
    ("posttrain.engine.trainer", "merge"),
    ("posttrain.engine.trainer", "peak_mib"),
    ("posttrain.loops.policy_step", "merge"),
    ("posttrain.loops.policy_step", "_report"),
    ("posttrain.loops.policy_step", "_credit_metrics"),
)
"""Bookkeeping within sampling and training: proof of delivery, digests, metrics."""


def watch(spent: list[float], owner: Any, name: str) -> None:
    """Add the seconds of every call of a function or method to `spent[0]`."""
    *path, leaf = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    inner = getattr(owner, leaf)

    def outer(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - started

    setattr(owner, leaf, outer)


def last_step(run: Any, spent: list[float]) -> dict[str, Any]:
    """What the records say about the step that has just ended."""
    line = run.metrics("rl")[-1]
    inside, spent[0] = spent[0], 0.0
    rows = shared.PROMPTS * shared.SIBLINGS
    return {
        "tokens": round(line["length"] * line["rollouts_generated"]),
        "loss": line["loss"],
        "trained": line["rollouts_trained"] / rows,
        "inside": inside,
        "phases": sum(line["seconds"][name] for name in ("sample", "train")),
    }


def trl(turns: Turns, options: Mapping[str, Any]) -> None:
    """TRL's trainer with the same model, prompts, reward and settings."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl_peer import TakesTurns, common, end, join

    second = join("trl", "grpo", options)
    longest, ends = lengths(options)
    rows = shared.PROMPTS * shared.SIBLINGS
    config = GRPOConfig(
        **common(options, LR),
        per_device_train_batch_size=rows // options.get("processes", 1),
        num_generations=shared.SIBLINGS,
        max_completion_length=longest,
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",
    )
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in shared.questions()]})
    callback = TakesTurns(
        turns,
        lambda logs: {"tokens": round(logs["completions/mean_length"] * rows), "trained": 1 - logs["frac_reward_zero_std"]},
    )
    trainer = GRPOTrainer(
        model=shared.tiny_model(longest, ends), args=config, train_dataset=data, reward_funcs=shared.parity_rewards,
        processing_class=shared.tokenizer(), callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    end(second)


def check(ours: Sequence[Measure], peer: Sequence[Measure], mixed: bool) -> None:
    """Both sides trained as many tokens, from groups that nearly all carried a signal, and their losses are what they must be.

    With equal lengths the loss of a first on-policy step is the mean advantage, 0. Mixed lengths are drawn, by either side from the same
    distribution.
    """
    counts = [statistics.mean(m.facts["tokens"] for m in side) for side in (ours, peer)]
    rows = shared.PROMPTS * shared.SIBLINGS
    same("tokens per step", *counts, tolerance=0.12 * rows * counts[1] / rows if mixed else 0.0)
    same("groups with a signal", *(statistics.mean(m.facts["trained"] for m in side) for side in (ours, peer)), tolerance=0.1)
    if not mixed:
        same("loss", ours[0].facts["loss"], peer[0].facts["loss"], tolerance=1e-4)


def run(bench: Bench) -> None:
    """Records for both kinds of lengths, on one process and on two, with memory and bookkeeping."""
    for mixed in (False, True):
        base = {"mixed": mixed, "steps": 1 + WARMUP + bench.repeats}
        measures = bench.rounds(
            {
                "ours": Side("grpo", "ours", {**base, "processes": 1}),
                "ours, 2 processes": Side("grpo", "ours", {**base, "processes": 2}),
                "TRL": Side("grpo", "trl", base),
                "TRL, 2 processes": Side("grpo", "trl", {**base, "processes": 2}),
                "TRL, 2 threads": Side("grpo", "trl", base, threads=2),
            },
            warmup=WARMUP,
        )
        for peer in ("TRL", "TRL, 2 processes", "TRL, 2 threads"):
            check(measures["ours"], measures[peer], mixed)
        what = f"mixed lengths up to {shared.MIXED}" if mixed else f"{shared.EQUAL} new tokens"
        conditions = f"1.4M parameters, {shared.PROMPTS} x {shared.SIBLINGS}, prompts of 37 tokens, {what}, float32"
        per = "tokens" if mixed else None  # a step draws what it draws
        bench.compare(f"GRPO step, {what}", measures["ours"], measures["TRL"], bar=2.0, conditions=conditions, per=per)
        peers = {name: found for name, found in measures.items() if name.startswith("TRL")}
        best = min(peers, key=lambda name: statistics.median(rates(peers[name], None)))
        bench.compare(
            f"GRPO step, {what}, both cores",
            measures["ours, 2 processes"],
            peers[best],
            bar=3.5,
            conditions=conditions,
            peer_name=best,
            per=per,
        )
        bench.memory(f"GRPO, {what}: peak memory", measures["ours"], measures["TRL"], conditions=conditions)
        if not mixed:
            bookkeeping(bench, measures["ours"], conditions)


def bookkeeping(bench: Bench, measures: Sequence[Measure], conditions: str) -> None:
    """Share of a step that is neither sampling nor training: records, rollouts kept, health, alarms, the question whether to stop, and
    within the two phases what INSIDE names."""
    from harness import Record, median_interval

    shares = [1 - (m.facts["phases"] - m.facts["inside"]) / m.wall for m in measures]
    low, high = median_interval(shares)
    share = statistics.median(shares)
    bench.put(
        Record(
            "Bookkeeping, share of a GRPO step",
            share,
            None,
            "share",
            share,
            low,
            high,
            0.03,
            share <= 0.03,
            len(shares),
            conditions,
            bench.machine,
            at_most=True,
            ours_range=(min(shares), max(shares)),
        )  # fmt: skip
    )
