"""Reinforcement learning with verifiable rewards: sample groups, judge, compare siblings, take a clipped step.

    prompts -> sibling completions -> verifier -> advantages within the group -> clipped policy gradient -> next policy samples

Groups whose rewards are all equal carry no signal and take no part: they leave before the update, and a step without signal takes no
optimizer step at all, so neither momentum nor the KL term moves weights on their account. Rows of one group are computed with one copy
of their prompt. Sources: spec/ladder-at-100m.md 1.4, B1-B15; spec/faults.md 11-16, 30-38.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.metrics import Max, Mean, Metric, merge
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Group, Sample
from posttrain.engine.batch import Batch
from posttrain.engine.local import LocalSampler
from posttrain.engine.scoring import Scores, score, shares_prompts
from posttrain.engine.trainer import LocalTrainer, LossFunction, Optim
from posttrain.loops.session import Session, Stage, Stopwatch
from posttrain.objectives.advantages import Advantage
from posttrain.objectives.aggregate import Aggregation, aggregate, denominator_of
from posttrain.objectives.kl import DESCENDS, KLEstimator, kl_loss
from posttrain.objectives.policy import clipped_surrogate
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.types import Grader
from posttrain.rollout.collect import Collector, describe
from posttrain.rollout.dynamic import Filled, fill
from posttrain.rollout.health import health
from posttrain.rollout.pack import Packing, pack, shard
from posttrain.rollout.samples import policy_samples

MISMATCH = 1e-3
"""Largest difference in nats between sampler and trainer on one token that float32 explains; beyond it the two compute different things."""


class Objective(Config):
    """Which policy gradient: advantage, clip bounds, aggregation, KL."""

    advantage: Advantage = "mean_std"
    ddof: Literal[0, 1] = 0
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    aggregation: Aggregation = "token_mean"
    kl: KLEstimator = "k2"
    kl_coef: float = Field(default=0.005, ge=0)
    """Weight of the KL term in the loss; 0 leaves the reference model unused."""


class GRPO(Config):
    """Settings of group-relative policy optimisation."""

    steps: int = Field(default=100, ge=1)
    prompts: int = Field(default=16, ge=1)
    """Groups per step."""
    siblings: int = Field(default=8, ge=2)
    """Completions per prompt."""
    tries: float = Field(default=2.0, ge=1)
    """Dynamic sampling: at most tries * prompts groups are generated to fill a step; 1 turns it off."""
    minibatches: int = Field(default=1, ge=1)
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's rollouts; minibatches * epochs optimizer steps follow each sampling phase."""
    objective: Objective = Objective()
    optim: Optim = Optim(lr=1e-4, schedule="constant", warmup=0.1)
    packing: Packing = Packing()
    keep_rollouts: int = Field(default=1, ge=0)
    """Groups per step written to the run's records in full."""
    patience: int = Field(default=10, ge=1)
    """End early after this many steps in a row without any signal."""

    @model_validator(mode="after")
    def _divides(self) -> GRPO:
        if self.prompts % self.minibatches:
            raise ValueError(
                f"{self.prompts} prompts do not divide into {self.minibatches} minibatches; make prompts a multiple of minibatches, "
                f"e.g. {self.prompts - self.prompts % self.minibatches + self.minibatches}"
            )
        return self

    @property
    def updates(self) -> int:
        """Optimizer steps per sampling phase."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True)
class World:
    """What the policy practises on: `draw(n, seed)` gives n training tasks, `grader` judges, `renderer` speaks the model's language,
    `sampling` says how completions are drawn."""

    draw: Callable[[int, int], Sequence[Task]]
    grader: Grader
    renderer: ChatRenderer
    sampling: Sampling

    def __post_init__(self) -> None:
        if self.sampling.greedy:
            raise ConfigError("sampling.temperature = 0 draws identical siblings; training needs a temperature above 0, e.g. 1.0")


def equation(settings: GRPO, ranks: int) -> str:
    """The batch arithmetic in words, with the divergence that the KL term really descends."""
    kl = f"KL {settings.objective.kl} x {settings.objective.kl_coef:g}, descends {DESCENDS[settings.objective.kl]}"
    return (
        f"{settings.prompts} prompts x {settings.siblings} completions = {settings.prompts * settings.siblings} rollouts per step "
        f"(up to {settings.tries:g}x with dynamic sampling), {settings.minibatches} minibatch(es) x {settings.epochs} epoch(s) = "
        f"{settings.updates} optimizer step(s) each, {settings.steps} steps, {ranks} process(es); "
        f"{kl if settings.objective.kl_coef else 'no KL term'}"
    )


def grpo(session: Session, model: nn.Module, world: World, settings: GRPO, name: str = "grpo") -> nn.Module:
    """Train a copy of `model` and return it; `model` stays as it was and is the KL reference."""
    policy = copy.deepcopy(model)
    reference = model if settings.objective.kl_coef else None
    trainer = LocalTrainer(policy, settings.optim, settings.steps * settings.updates, session.ranks, world.sampling)
    sampler = LocalSampler(policy, world.renderer.stop_ids, world.renderer.special_ids)
    collector = Collector(sampler, world.renderer, world.grader, world.sampling, settings.siblings, session.ranks)
    stage = Stage(session, name, trainer, settings.steps)
    for step in stage.steps():
        watch = Stopwatch()
        sampler.version = trainer.version  # the sampler reads the trainer's own weights: delivery is the new version number
        with watch("sample"):
            filled = fill(
                collector, task_stream(session.seed, name, step, world), settings.prompts, settings.tries, derive(session.seed, name, step)
            )
        with watch("train"):
            metrics = learn(trainer, reference, filled.kept, settings)
        report(stage, step, filled, metrics, watch, settings)
        if stage.state["silent"] >= settings.patience:
            give_up(stage, step, filled, settings)
            break
    return policy


def task_stream(seed: int, name: str, step: int, world: World) -> Callable[[int], Sequence[Task]]:
    """Tasks for one step: each call within the step continues its own stream."""
    calls = iter(range(1 << 30))
    return lambda n: world.draw(n, derive(seed, name, "tasks", step, next(calls)))


def learn(trainer: LocalTrainer, reference: nn.Module | None, groups: Sequence[Group], settings: GRPO) -> dict[str, Metric]:
    """All optimizer steps of one sampling phase; none when no group carries signal."""
    keyed = list(enumerate(groups))  # a task drawn twice is two groups: keyed by place, never by content
    parts = [
        keyed[i * len(keyed) // settings.minibatches : (i + 1) * len(keyed) // settings.minibatches] for i in range(settings.minibatches)
    ]
    prepared = [prepare(trainer, reference, part, settings) for part in parts if part]
    taken = [
        trainer.step(batches, policy_gradient(settings.objective, denominator))
        for _ in range(settings.epochs)
        for batches, denominator in prepared
    ]
    return merge(taken)


def prepare(
    trainer: LocalTrainer, reference: nn.Module | None, part: Sequence[tuple[int, Group]], settings: GRPO
) -> tuple[list[Batch], float]:
    """This rank's micro-batches of one minibatch, and the denominator of the whole minibatch.

    With several updates per phase the policy as it is now is scored first, in the same precision and packing that the update will use, so
    that every ratio starts at exactly 1. A single update needs no such pass: its old policy is its current one.
    """
    objective = settings.objective
    rows = [row for place, group in part for row in policy_samples(group, f"{place}", objective.advantage, objective.ddof)]
    constant = float(len(rows) * trainer.sampling.max_tokens)
    denominator = denominator_of([row.tokens.trained for row in rows], objective.aggregation, constant)
    mine: list[Sample] = shard(rows, trainer.ranks.rank, trainer.ranks.size)
    batches = pack(mine, settings.packing, share_prompts=shares_prompts(trainer.model))
    with torch.no_grad():
        if settings.updates > 1:
            batches = [replace(batch, old_BT=score(trainer.model, batch, trainer.sampling).logp_BT) for batch in batches]
        if reference is not None:
            batches = [replace(batch, reference_BT=score(reference, batch, trainer.sampling).logp_BT) for batch in batches]
    return batches, denominator


def policy_gradient(objective: Objective, denominator: float) -> LossFunction:
    """Clipped surrogate plus KL term, reduced once with the denominator of the whole minibatch."""

    def loss(batch: Batch, scores: Scores) -> tuple[Tensor, dict[str, Metric]]:
        mask_BT = batch.mask_BT
        logp_BT = scores.logp_BT
        old_BT = logp_BT.detach() if batch.old_BT is None else batch.old_BT
        out = clipped_surrogate(logp_BT, old_BT, batch.advantage_BT, mask_BT, objective.clip_low, objective.clip_high)
        per_token_BT = out.loss_BT
        count = int(mask_BT.sum())
        drift_BT = torch.where(mask_BT, old_BT - batch.behaviour_BT, 0.0).abs()
        metrics: dict[str, Metric] = {
            "entropy": Mean(scores.entropy_BT.sum().item(), count),
            "clip_fraction": Mean(out.clipped_BT.sum().item(), count),
            "ratio_max": Max(out.ratio_BT.masked_fill(~mask_BT, 0.0).max().item()),
            "mismatch_mean": Mean(drift_BT.sum().item(), count),
            "mismatch_max": Max(drift_BT.max().item()),
        }
        if batch.reference_BT is not None:
            per_token_BT = per_token_BT + objective.kl_coef * kl_loss(logp_BT, batch.reference_BT, mask_BT, objective.kl)
            metrics["kl"] = Mean(kl_loss(logp_BT.detach(), batch.reference_BT, mask_BT, "k3").sum().item(), count)
        return aggregate(per_token_BT, mask_BT, objective.aggregation, denominator), metrics

    return loss


def report(stage: Stage, step: int, filled: Filled, metrics: dict[str, Metric], watch: Stopwatch, settings: GRPO) -> None:
    """Record the step, keep some rollouts in full, raise what a person should see."""
    counts = {
        "groups_generated": len(filled.generated),
        "groups_kept": len(filled.kept),
        "rollouts_generated": len(filled.generated) * settings.siblings,
        "rollouts_kept": len(filled.kept) * settings.siblings,
        "tries_per_kept": filled.tries_per_kept,
    }
    stage.record(
        step, metrics, {**health(filled.generated), **counts}, watch.seconds, show=("reward_mean", "entropy", "length", "tries_per_kept")
    )
    for group in filled.generated[: settings.keep_rollouts]:
        for rollout in group.rollouts:
            stage.session.run.rollout(stage.name, {"step": step, **describe(group, rollout)})
    mismatch = metrics["mismatch_max"].read() if "mismatch_max" in metrics else 0.0
    if mismatch is not None and mismatch > MISMATCH:
        detail = (
            f"sampler and trainer disagree by {mismatch:.2g} nats on a token; both must use the same weights, temperature, top-k and top-p"
        )
        stage.session.run.alarm(stage.name, step, "sampler_trainer_mismatch", detail, {"mismatch_max": mismatch, "bound": MISMATCH})
        stage.session.console.warn(f"{stage.name}: {detail}")
    stage.state["silent"] = 0 if filled.kept else stage.state.get("silent", 0) + 1


def give_up(stage: Stage, step: int, filled: Filled, settings: GRPO) -> None:
    """Say why training ends early: no signal is left, or there never was any. The policy so far is the result."""
    reward = health(filled.generated)["reward_mean"]
    verdict = (
        "mastered: choose harder tasks" if reward > 0.5 else "out of reach: choose easier tasks, more siblings, or teach the format first"
    )
    detail = f"{settings.patience} steps in a row without a group of mixed rewards (mean reward {reward:.2f}); the task is {verdict}"
    stage.session.run.alarm(stage.name, step, "no_signal", detail, {"reward_mean": reward, "steps": settings.patience})
    stage.session.console.warn(f"{stage.name} ends early: {detail}")
