"""Supervised fine-tuning: imitate the trained tokens of demonstrations (or, with plain texts, all of them).

loss of a step = - sum of log p(token) over all trained tokens of the step / their number

The denominator counts the whole optimizer step, over micro-batches and ranks, so a short row weighs what its tokens weigh. Every row is
seen once per epoch, the last partial step included. Sources: spec/ladder-at-100m.md 1.2, B6; spec/faults.md 2-6.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.metrics import Mean, Metric
from posttrain.core.seeds import permutation
from posttrain.core.trajectory import Sample
from posttrain.engine.batch import Batch
from posttrain.engine.scoring import Scores, shares_prompts
from posttrain.engine.trainer import LocalTrainer, LossFunction, Optim
from posttrain.loops.session import Session, Stage, Stopwatch
from posttrain.objectives.aggregate import aggregate
from posttrain.rollout.pack import pack, shard


class SFT(Config):
    """Settings of supervised fine-tuning."""

    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)
    """Rows per optimizer step, over all ranks."""
    optim: Optim = Optim(lr=2e-4)


def steps_of(rows: int, settings: SFT) -> int:
    """Optimizer steps of a run over `rows` rows: the last, smaller step of each epoch is taken too."""
    return settings.epochs * -(-rows // settings.batch_size)


def equation(rows: int, settings: SFT) -> str:
    """The batch arithmetic in words."""
    last = rows % settings.batch_size or min(rows, settings.batch_size)
    per_epoch = -(-rows // settings.batch_size)
    return (
        f"{rows} rows / {settings.batch_size} rows per step = {per_epoch} steps per epoch (the last has {last}) "
        f"x {settings.epochs} epoch(s) = {steps_of(rows, settings)} optimizer steps"
    )


def sft(session: Session, model: nn.Module, samples: Sequence[Sample], settings: SFT, name: str = "sft") -> nn.Module:
    """Train a copy of `model` on `samples` and return it; `model` itself stays as it was."""
    if not samples:
        raise ConfigError(f"{name}: no rows to train on")
    trained = copy.deepcopy(model)
    trainer = LocalTrainer(trained, settings.optim, steps_of(len(samples), settings), session.ranks, machine=session.machine)
    stage = Stage(session, name, trainer, trainer.total)
    per_epoch = trainer.total // settings.epochs
    for step in stage.steps():
        watch = Stopwatch()
        with watch("step"):
            epoch, place = divmod(step, per_epoch)
            order = permutation(len(samples), session.seed, name, "order", epoch)
            rows = [samples[i] for i in order[place * settings.batch_size : (place + 1) * settings.batch_size]]
            mine = shard([unshared(row, i) for i, row in enumerate(rows)], session.ranks.rank, session.ranks.size)
            batches = pack(mine, session.machine.packing, share_prompts=shares_prompts(trained))
            tokens = sum(row.tokens.trained for row in rows)
            metrics = trainer.step(batches, imitation(tokens))
        plain = {"rows": len(rows), "tokens": tokens, "epoch": epoch + 1}
        stage.record(step, metrics, plain, watch.seconds, show=("loss", "lr"))
    return trainer.plain()


def unshared(row: Sample, place: int) -> Sample:
    """The row as a group of its own: two rows of one step may carry the same id."""
    return Sample(row.prompt, row.tokens, f"{place}", row.advantages, row.logps)


def imitation(tokens: int) -> LossFunction:
    """Mean negative log-likelihood over the `tokens` trained tokens of the step."""

    def loss(batch: Batch, scores: Scores) -> tuple[Tensor, dict[str, Metric]]:
        count = int(batch.mask_BT.sum())
        metrics: dict[str, Metric] = {"entropy": Mean(scores.entropy_BT.sum().item(), count)}
        return aggregate(-scores.logp_BT, batch.mask_BT, "token_mean", tokens), metrics

    return loss
