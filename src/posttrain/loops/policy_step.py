"""All optimizer steps that follow one sampling phase: who is trained, what they are credited with, and the update.

    prepare: rows -> packs -> frozen streams (old, reference, teacher, values) -> advantages       once per phase, without gradients
    learn:   epochs x minibatches of critic and policy steps on those packs

A stream is scored only when the objective needs it. Ratios start at exactly 1: the old policy is scored in the same precision and packing
that the update uses; a single update needs no such pass, its old policy is its current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.metrics import Mean, Metric, merge
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.trajectory import Group
from posttrain.engine.activation import computing
from posttrain.engine.batch import Batch
from posttrain.engine.scoring import Scores, score, shares_prompts
from posttrain.engine.trainer import LocalTrainer, LossFunction
from posttrain.objectives.aggregate import aggregate, denominator_of
from posttrain.objectives.axes import ClipCov, KLCov
from posttrain.objectives.covariance import Selection, select
from posttrain.objectives.kl import top_k_kl
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Fate, Streams
from posttrain.objectives.surrogates import Surrogate
from posttrain.objectives.value import explained_variance, value_loss
from posttrain.objectives.weight_report import weight_metrics
from posttrain.rollout.credit import PolicyRow, RowStreams, SentenceOf, assign, policy_rows
from posttrain.rollout.pack import Packing, pack, shard


@dataclass(frozen=True, slots=True)
class Actors:
    """Everyone who looks at a batch: the policy in training, and those it is compared with."""

    policy: LocalTrainer
    critic: LocalTrainer | None = None
    reference: nn.Module | None = None
    teacher: nn.Module | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Everyone computes as the policy's step does, without gradient."""
        with ExitStack() as stack:
            for trainer in (self.policy, self.critic):
                if trainer is not None:
                    stack.enter_context(trainer.reading())
            for frozen in (self.reference, self.teacher):
                if frozen is not None:
                    stack.enter_context(computing(frozen, self.policy.machine))
            yield


@dataclass(frozen=True, slots=True)
class Plan:
    """How a phase is cut into optimizer steps."""

    objective: Objective
    minibatches: int = 1
    epochs: int = 1
    packing: Packing = Packing()
    value_clip: float | None = None
    sentence_of: SentenceOf | None = None
    train_policy: bool = True
    """False while the critic warms up."""
    surrogate: Surrogate | None = None
    """The user's own loss per token, in place of ratio, limit and correction."""
    seed: int = 0
    """Of this phase; only the covariance rule draws from it."""

    @property
    def updates(self) -> int:
        """Policy updates per phase."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True)
class Part:
    """One minibatch as this rank computes it."""

    batches: list[Batch]
    denominator: float
    """Of the policy loss, over all ranks."""
    tokens: float
    """Trained tokens over all ranks: the denominator of the critic's loss."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)


def learn(actors: Actors, groups: Sequence[Group], plan: Plan) -> tuple[dict[str, Metric], dict[str, int]]:
    """All optimizer steps of one phase; none when no group carries signal. Returns metrics, and rollouts left out by reason."""
    keyed = list(enumerate(groups))  # a task drawn twice is two groups: keyed by place, never by content
    cuts = [i * len(keyed) // plan.minibatches for i in range(plan.minibatches + 1)]
    parts = [prepare(actors, keyed[a:b], plan) for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a]
    left = {reason: sum(part.left.get(reason, 0) for part in parts) for reason in (parts[0].left if parts else ())}
    parts = [part for part in parts if part.denominator > 0]
    taken = [part.metrics for part in parts]
    for epoch in range(plan.epochs):
        for place, part in enumerate(parts):
            if actors.critic is not None:
                taken.append(_named(actors.critic.step(part.batches, critic_loss(part.tokens, plan.value_clip))))
            if plan.train_policy:
                taken.append(_policy_update(actors.policy, part, plan, derive(plan.seed, epoch, place)))
    return merge(taken), left


def prepare(actors: Actors, keyed: Sequence[tuple[int, Group]], plan: Plan) -> Part:
    """This rank's micro-batches of one minibatch, ready for any number of updates."""
    objective, trainer = plan.objective, actors.policy
    chosen = policy_rows(keyed, objective, trainer.sampling.max_tokens, plan.sentence_of)
    lengths = [row.sample.tokens.trained for row in chosen.rows]
    constant = float(len(lengths) * trainer.sampling.max_tokens)
    denominator = denominator_of(lengths, objective.aggregation, constant, [row.sample.group for row in chosen.rows])
    place = {id(row.sample): number for number, row in enumerate(chosen.rows)}
    numbers = [place[id(s)] for s in shard([row.sample for row in chosen.rows], trainer.ranks.rank, trainer.ranks.size)]
    mine = [chosen.rows[number] for number in numbers]
    batches = pack([row.sample for row in mine], plan.packing, share_prompts=shares_prompts(trainer.model))
    batches = [replace(batch, row_B=tuple(numbers[i] for i in batch.sample_B)) for batch in batches]
    with actors.reading():
        batches = [_scored(actors, batch, plan) for batch in batches]
    advantages, returns = assign(mine, _streams_of(mine, batches), objective, trainer.ranks.gather)
    batches = [_credited(batch, advantages, returns) for batch in batches]
    everywhere = [report for part in trainer.ranks.gather(_report(mine, advantages)) for report in part]
    metrics = _credit_metrics(everywhere, objective, constant) if trainer.ranks.first else {}
    return Part(batches, denominator, float(sum(lengths)), metrics, chosen.left)


def _scored(actors: Actors, batch: Batch, plan: Plan) -> Batch:
    """The streams that stay fixed for the whole phase."""
    objective, sampling = plan.objective, actors.policy.sampling
    in_reward = objective.kl.used and objective.kl.placement == "reward"
    changes: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
    if plan.updates > 1 or in_reward or objective.needs_teacher or objective.needs_step_pass:
        changes["old_BT"] = score(actors.policy.model, batch, sampling).logp_BT
    if actors.reference is not None:
        wide = objective.kl.estimator in ("full", "top_k")
        size = _vocabulary(actors.reference) if objective.kl.estimator == "full" else objective.kl.k
        scores = score(actors.reference, batch, sampling, top_k=size if wide else 0)
        changes["reference_BT"] = scores.logp_BT
        if wide and scores.top is not None:
            changes["reference_top"] = scores.top
    if actors.teacher is not None:
        changes["teacher_BT"] = score(actors.teacher, batch, sampling).logp_BT
    if actors.critic is not None:
        changes["values_BT"] = actors.critic.scorer(actors.critic.model, batch)
    return replace(batch, **changes)


def _vocabulary(model: nn.Module) -> int:
    return model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]


def _streams_of(rows: Sequence[PolicyRow], batches: Sequence[Batch]) -> list[RowStreams]:
    """What was scored, row by row in the order of `rows`, as plain float64 arrays."""
    found = [RowStreams() for _ in rows]
    for batch in batches:
        gap_BT = None if batch.old_BT is None or batch.reference_BT is None else batch.old_BT.double() - batch.reference_BT.double()
        lead_BT = None if batch.old_BT is None or batch.teacher_BT is None else batch.teacher_BT.double() - batch.old_BT.double()
        for b, index in enumerate(batch.sample_B):
            size = len(rows[index].sample.tokens)
            pick = partial(_row_of, b=b, size=size)
            found[index] = RowStreams(pick(gap_BT), pick(batch.values_BT), pick(lead_BT))
    return found


def _row_of(values_BT: Tensor | None, b: int, size: int) -> np.ndarray | None:
    return None if values_BT is None else values_BT[b, :size].double().numpy()


def _credited(batch: Batch, advantages: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> Batch:
    filled = replace(batch, advantage_BT=_padded([advantages[i] for i in batch.sample_B], batch))
    return replace(filled, returns_BT=_padded([returns[i] for i in batch.sample_B], batch)) if returns else filled


def _padded(rows: Sequence[np.ndarray], batch: Batch) -> Tensor:
    out_BT = torch.zeros(batch.slot_BT.shape)
    for b, values_T in enumerate(rows):
        out_BT[b, : len(values_T)] = torch.from_numpy(values_T).float()
    return out_BT


class _Credit(NamedTuple):
    """One row as the weight report sees it."""

    tokens: int
    advantage: float
    group: str


def _report(rows: Sequence[PolicyRow], advantages: Sequence[np.ndarray]) -> list[_Credit]:
    """Trained tokens, mean advantage and group of each of this rank's rows."""
    trained = [np.array(row.trained_T) for row in rows]
    return [
        _Credit(int(t.sum()), float(a[t].mean()) if t.any() else 0.0, row.sample.group)
        for row, a, t in zip(rows, advantages, trained, strict=True)
    ]


def _credit_metrics(rows: Sequence[_Credit], objective: Objective, constant: float) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {"advantage_abs": Mean(sum(abs(row.advantage) for row in rows), len(rows))}
    weights = weight_metrics(
        [row.tokens for row in rows],
        [row.advantage for row in rows],
        [row.group for row in rows],
        objective.aggregation,
        constant=constant,
    )
    return metrics | {name: Mean(value, 1) for name, value in weights.items() if value is not None}


def _policy_update(trainer: LocalTrainer, part: Part, plan: Plan, seed: int) -> dict[str, Metric]:
    """One optimizer step of the policy, with the tokens that the covariance rule selects now."""
    batches, metrics = part.batches, {}
    if isinstance(plan.objective.limit, ClipCov | KLCov):
        batches, selection = gate(trainer, batches, plan.objective, seed)
        metrics = selection.metrics() if trainer.ranks.first else {}
    return merge([trainer.step(batches, policy_gradient(plan.objective, part.denominator, plan.surrogate)), metrics])


def gate(trainer: LocalTrainer, batches: Sequence[Batch], objective: Objective, seed: int) -> tuple[list[Batch], Selection]:
    """Select tokens over the whole optimizer step, all ranks together, and mark them in this rank's batches.

    Tokens are ordered by row and position, so that neither packing nor the number of ranks changes the draw.
    """
    limit = objective.limit
    assert isinstance(limit, ClipCov | KLCov)
    mine: list[tuple[int, int, float, float, bool]] = []  # row, position, log-probability, advantage, already left out
    with trainer.reading():
        for batch in batches:
            scores = score(trainer.model, batch, trainer.sampling)
            fate_BT = policy_terms(streams_of(batch, scores), objective).fate_BT
            for b, t in batch.mask_BT.nonzero().tolist():
                left_out = int(fate_BT[b, t]) != Fate.TRAINED
                mine.append((batch.row_B[b], t, float(scores.logp_BT[b, t]), float(batch.advantage_BT[b, t]), left_out))
    tokens = sorted(entry for part in trainer.ranks.gather(mine) for entry in part)
    logp_N, advantage_N, left_out_N = (np.array([entry[i] for entry in tokens]) for i in (2, 3, 4))
    selection = select(logp_N, advantage_N, left_out_N, limit, seed)
    chosen = {tokens[i][:2] for i in selection.chosen}
    gates = [
        torch.tensor([[(row, t) in chosen for t in range(batch.mask_BT.shape[1])] for row in batch.row_B], dtype=torch.bool)
        for batch in batches
    ]
    return [replace(batch, gate_BT=gate_BT) for batch, gate_BT in zip(batches, gates, strict=True)], selection


def streams_of(batch: Batch, scores: Scores) -> Streams:
    """The objective's view of a scored batch."""
    return Streams(
        logp_BT=scores.logp_BT,
        old_BT=scores.logp_BT.detach() if batch.old_BT is None else batch.old_BT,
        behaviour_BT=batch.behaviour_BT,
        advantage_BT=batch.advantage_BT,
        mask_BT=batch.mask_BT,
        reference_BT=batch.reference_BT,
        entropy_BT=scores.entropy_BT,
        sentence_BT=batch.sentence_BT,
        gate_BT=batch.gate_BT,
        divergence_BT=_divergence(batch, scores),
    )


def _divergence(batch: Batch, scores: Scores) -> Tensor | None:
    """KL to the reference over its most likely tokens, or over all of them."""
    if batch.reference_top is None or scores.at is None:
        return None
    return batch.unflatten(top_k_kl(scores.at, batch.reference_top[1]))


def policy_scorer(objective: Objective, sampling: Sampling) -> Callable[[nn.Module, Batch], Scores]:
    """What the policy's trainer scores: entropy with gradient for a bonus, log-probabilities at the reference's top ids for an exact KL."""

    def scorer(model: nn.Module, batch: Batch) -> Scores:
        at_NK = None if batch.reference_top is None else batch.reference_top[0]
        return score(model, batch, sampling, entropy_gradient=objective.entropy.used, at_NK=at_NK)

    return scorer


def policy_gradient(objective: Objective, denominator: float, surrogate: Surrogate | None = None) -> LossFunction:
    """The objective's unreduced loss, reduced once with the denominator of the whole minibatch."""

    def loss(batch: Batch, scores: Scores) -> tuple[Tensor, dict[str, Metric]]:
        terms = policy_terms(streams_of(batch, scores), objective, surrogate)
        return aggregate(terms.loss_BT, batch.mask_BT, objective.aggregation, denominator, batch.prompt_tokens_B), terms.metrics

    return loss


def critic_loss(tokens: float, clip: float | None) -> LossFunction:
    """Mean squared error to the returns over all trained tokens of the minibatch."""

    def loss(batch: Batch, values_BT: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        assert batch.returns_BT is not None
        assert batch.values_BT is not None
        terms = value_loss(values_BT, batch.returns_BT, batch.values_BT, batch.mask_BT, clip)
        count = int(batch.mask_BT.sum())
        metrics: dict[str, Metric] = {
            "explained_variance": explained_variance(batch.values_BT, batch.returns_BT, batch.mask_BT),
            "clipped": Mean(int(terms.clipped_BT.sum()), count),
        }
        return aggregate(terms.loss_BT, batch.mask_BT, "token_mean", tokens), metrics

    return loss


def _named(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    return {f"critic_{name}": metric for name, metric in metrics.items()}
