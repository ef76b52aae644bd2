"""Direct preference optimisation on pairs of responses.

The reference is the model as it came in. Its log-probabilities are computed once and looked up by content, never by position, so no shuffle
or filter can pair a response with another's reference. Chosen and rejected rewards are reported apart: the loss also falls when both fall.
Sources: spec/ladder-at-100m.md 1.3, C7-C9, C13.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor, nn

from posttrain.core.config import Config
from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError
from posttrain.core.metrics import Mean, Metric
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import permutation
from posttrain.core.trajectory import Sample
from posttrain.engine.activation import computing
from posttrain.engine.batch import Batch
from posttrain.engine.machine import Packing
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import Scores, score, shares_prompts
from posttrain.engine.trainer import LocalTrainer, LossFunction, Optim
from posttrain.loops.session import Session, Stage, Stopwatch
from posttrain.objectives.preference import dpo as dpo_loss
from posttrain.objectives.preference import sequence_logps
from posttrain.rollout.pack import pack, shard
from posttrain.rollout.samples import Pair


class DPO(Config):
    """Settings of direct preference optimisation."""

    beta: float = Field(default=0.1, gt=0)
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=16, ge=1)
    """Pairs per optimizer step, over all ranks."""
    optim: Optim = Optim(lr=2e-5)


def equation(pairs: int, settings: DPO) -> str:
    """The batch arithmetic in words."""
    per_epoch = -(-pairs // settings.batch_size)
    total = per_epoch * settings.epochs
    return f"{pairs} pairs / {settings.batch_size} per step = {per_epoch} steps x {settings.epochs} epoch(s) = {total} optimizer steps"


def dpo(session: Session, model: nn.Module, pairs: Sequence[Pair], settings: DPO, name: str = "dpo") -> nn.Module:
    """Train a copy of `model` on `pairs` and return it; `model` stays as it was and is the reference."""
    if not pairs:
        raise ConfigError(
            f"{name}: no pairs to train on; mine from more prompts, or from a policy that is sometimes right and sometimes wrong"
        )
    with computing(model, session.machine):
        reference = reference_logps(model, pairs, session.machine.packing, session.ranks)
    trained = copy.deepcopy(model)
    per_epoch = -(-len(pairs) // settings.batch_size)
    trainer = LocalTrainer(trained, settings.optim, per_epoch * settings.epochs, session.ranks, machine=session.machine)
    stage = Stage(session, name, trainer, trainer.total)
    for step in stage.steps():
        watch = Stopwatch()
        with watch("step"):
            epoch, place = divmod(step, per_epoch)
            order = permutation(len(pairs), session.seed, name, "order", epoch)
            chosen = [pairs[i] for i in order[place * settings.batch_size : (place + 1) * settings.batch_size]]
            mine = shard(rows_of(chosen), session.ranks.rank, session.ranks.size)
            batches = pack(mine, session.machine.packing, share_prompts=shares_prompts(trained), whole_groups=True)
            metrics = trainer.step(batches, preference(mine, reference, settings.beta, len(chosen)))
        stage.record(
            step, metrics, {"pairs": len(chosen), "epoch": epoch + 1}, watch.seconds, show=("loss", "chosen_reward", "rejected_reward")
        )
    return trainer.plain()


def rows_of(pairs: Sequence[Pair]) -> list[Sample]:
    """Chosen and rejected rows, side by side: row 2i and row 2i + 1 belong together, grouped by place since ids may repeat."""
    return [replace(sample, group=f"{place}") for place, pair in enumerate(pairs) for sample in pair.samples()]


def content_key(sample: Sample) -> str:
    """Identity of a response in its context: the ids themselves."""
    return digest([list(sample.prompt.ids), list(sample.tokens.ids)])


def reference_logps(model: nn.Module, pairs: Sequence[Pair], packing: Packing, ranks: Ranks) -> dict[str, float]:
    """Summed log-probability of every response under the frozen model, by content; ranks share the work."""
    mine = shard(rows_of(pairs), ranks.rank, ranks.size)
    found: dict[str, float] = {}
    with torch.no_grad():
        for batch in pack(mine, packing, share_prompts=shares_prompts(model), whole_groups=True):
            sums_B = sequence_logps(score(model, batch, Sampling()).logp_BT, batch.mask_BT)
            found |= {content_key(mine[i]): value for i, value in zip(batch.sample_B, sums_B.tolist(), strict=True)}
    return {key: value for part in ranks.gather(found) for key, value in part.items()}


def preference(rows: Sequence[Sample], reference: Mapping[str, float], beta: float, pairs: int) -> LossFunction:
    """Mean DPO loss over the `pairs` pairs of the step. `rows` is the list that was packed."""

    def loss(batch: Batch, scores: Scores) -> tuple[Tensor, dict[str, Metric]]:
        logp_B = sequence_logps(scores.logp_BT, batch.mask_BT)
        ref_B = torch.tensor([reference[content_key(rows[i])] for i in batch.sample_B])
        place = {sample: row for row, sample in enumerate(batch.sample_B)}
        chosen = torch.tensor([place[i] for i in sorted(place) if i % 2 == 0])
        rejected = torch.tensor([place[i] for i in sorted(place) if i % 2 == 1])
        out = dpo_loss(logp_B[chosen], logp_B[rejected], ref_B[chosen], ref_B[rejected], beta)
        n = len(chosen)
        margin_P = out.chosen_reward_P - out.rejected_reward_P
        metrics: dict[str, Metric] = {
            "accuracy": Mean((margin_P > 0).sum().item(), n),
            "chosen_reward": Mean(out.chosen_reward_P.sum().item(), n),
            "rejected_reward": Mean(out.rejected_reward_P.sum().item(), n),
            "chosen_logp": Mean(logp_B[chosen].sum().item(), n),
        }
        return out.loss_P.sum() / pairs, metrics

    return loss
