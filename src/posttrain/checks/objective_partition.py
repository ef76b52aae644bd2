"""The partition law: one rollout phase, several optimizer steps, any split of each step into parts.

A tabular policy takes two epochs of two minibatches of plain SGD from one set of rollouts; `old` stays that of the phase's start. Each
minibatch is cut into parts (micro-batches, ranks, packs of another width), whose gradients and metrics are added up. The weights after the
phase and the merged metrics of every step have to be those of the uncut steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posttrain.checks.findings import Finding, distance, largest, measured
from posttrain.checks.subjects import Subject
from posttrain.checks.tabular import World, softmax, world
from posttrain.core.metrics import Metric, Sum, merge, read
from posttrain.objectives.aggregate import aggregate, denominator_of
from posttrain.objectives.covariance import select
from posttrain.objectives.streams import Fate, Streams

MINIBATCHES = ((0, 1, 2, 3), (4, 5, 6))
EPOCHS = 2
RATE = 0.2
PROMPTS = ("a", "a", "b", "b", "a", "c", "b")

Parts = list[tuple[list[int], int]]
"""Rows of each part, and by how many slots the part is padded beyond the longest sequence."""
Split = Callable[[Sequence[int]], Parts]

SPLITS: dict[str, Split] = {
    "one row at a time, last first, wider": lambda rows: [([row], 2) for row in reversed(rows)],
    "1 and the rest, and a part of nothing but padding": lambda rows: [([], 1), (list(rows[:1]), 0), (list(rows[1:]), 1)],
    "two ranks of micro-batches": lambda rows: [(list(part), 0) for rank in (rows[0::2], rows[1::2]) for part in (rank[:1], rank[1:])],
}


class Phase(NamedTuple):
    """Where a phase ended: the logits, and each step's metrics."""

    logits_SV: np.ndarray
    metrics: list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Seven sampled sequences on a tabular policy: one without trained tokens, one with a hole, the others 1 to 3 tokens long."""

    on: World
    rows: np.ndarray
    """Index of each in the tree of all sequences."""
    mask_BT: np.ndarray
    advantage_BT: np.ndarray

    def streams(self, logits: Tensor, rows: Sequence[int], padding: int) -> Streams:
        """The given rows under the current logits, with gradient; at least one slot wide, garbage in untrained slots."""
        index = np.array(rows, dtype=np.int64)
        where, picked = self.on.where, self.rows[index]
        mask = torch.tensor(self.mask_BT[index])
        states, tokens = torch.tensor(where.states_BT[picked]), torch.tensor(where.tokens_BT[picked])
        width = (len(picked), padding)

        def widen(values: Tensor) -> Tensor:
            filled = torch.where(mask, values, torch.nan) if values.is_floating_point() else values
            junk = torch.nan if values.is_floating_point() else 0
            return torch.cat([filled, torch.full(width, junk, dtype=values.dtype)], dim=-1)

        def of(table_SV: np.ndarray) -> Tensor:
            return widen(torch.tensor(np.log(softmax(table_SV)))[states, tokens])

        logp_SV = logits.log_softmax(-1)
        entropy_S = -(logp_SV.exp() * logp_SV).sum(-1)
        reference_SV = torch.tensor(np.log(softmax(self.on.reference_SV)))
        divergence_S = (logp_SV.exp() * (logp_SV - reference_SV)).sum(-1)
        return Streams(
            logp_BT=widen(logp_SV[states, tokens]),
            old_BT=of(self.on.old_SV),
            behaviour_BT=of(self.on.behaviour_SV),
            advantage_BT=widen(torch.tensor(self.advantage_BT[index])),
            mask_BT=torch.cat([mask, torch.zeros(width, dtype=torch.bool)], dim=-1),
            reference_BT=of(self.on.reference_SV),
            entropy_BT=widen(entropy_S[states]),
            sentence_BT=widen(torch.arange(mask.shape[1]).expand(mask.shape) // 2),
            divergence_BT=widen(divergence_S[states]),
        )


def rollouts() -> Rollouts:
    """The rollouts of the phase; the sampler agrees with the trainer on some of them, so that narrow bands keep something."""
    on = world(4, 3, ends=True, spread=0.3)
    lengths = on.where.lengths_B
    rows = np.concatenate(
        [np.flatnonzero(lengths == 3)[[0, 7, 20, 33]], np.flatnonzero(lengths == 2)[[1, 2]], np.flatnonzero(lengths == 1)[:1]]
    )
    mask_BT = on.where.mask_BT[rows].copy()
    mask_BT[3] = False  # dropped
    mask_BT[2, 1] = False  # a token of the environment
    agreed = np.unique(on.where.states_BT[rows[[0, 4, 6]]])
    behaviour_SV = on.behaviour_SV.copy()
    behaviour_SV[agreed] = on.old_SV[agreed]
    on = replace(on, behaviour_SV=behaviour_SV)
    return Rollouts(on, rows, mask_BT, 2.0 * on.draw(len(rows), 3, name="phase advantage"))


def partition_law(tested: Subject) -> list[Finding]:
    """Compare a phase in whole steps with the same phase under every split."""
    drawn = rollouts()
    splits = SPLITS
    if tested.setting is None:  # a rank that got no rows does not call a user's function
        splits = {name: _without_empty(split) for name, split in SPLITS.items()}
    whole = run(tested, drawn, lambda rows: [(list(rows), 0)])
    start = drawn.on.logits_SV
    if distance(whole.logits_SV, start) == 0.0:
        return [measured("partition", np.inf, "the phase did not change the policy: the objective has no gradient")]
    found = []
    for name, split in splits.items():
        cut = run(tested, drawn, split)
        found.append((distance(cut.logits_SV, whole.logits_SV), f"weights after {EPOCHS} x {len(MINIBATCHES)} steps, {name}"))
        found += [
            (_apart(*pair), f"metrics of step {step}, {name}") for step, pair in enumerate(zip(cut.metrics, whole.metrics, strict=True))
        ]
    deviation, detail = largest(found)
    return [measured("partition", deviation, f"{len(splits)} splits of 4 optimizer steps on one rollout phase; worst: {detail}")]


def run(tested: Subject, drawn: Rollouts, split: Split) -> Phase:
    """SGD over the phase, every minibatch in the parts that `split` makes of it."""
    logits = torch.tensor(drawn.on.logits_SV, dtype=torch.float64, requires_grad=True)
    history = []
    for _ in range(EPOCHS):
        for rows in MINIBATCHES:
            gradient, metrics = step(tested, drawn, logits, rows, split(rows))
            with torch.no_grad():
                logits -= RATE * gradient
            history.append({name: np.nan if value is None else value for name, value in read(metrics).items()})
    return Phase(logits.detach().numpy(), history)


def step(tested: Subject, drawn: Rollouts, logits: Tensor, rows: Sequence[int], parts: Parts) -> tuple[Tensor, dict[str, Metric]]:
    """Gradient and merged metrics of one optimizer step; the denominator is that of all its rows."""
    lengths = {row: int(drawn.mask_BT[row].sum()) for row in rows}
    prompt_tokens = {prompt: sum(lengths[row] for row in rows if PROMPTS[row] == prompt) for prompt in PROMPTS}
    denominator = denominator_of(list(lengths.values()), tested.aggregation, 12.0, [PROMPTS[row] for row in rows])
    gate = _gate(tested, drawn, logits, rows)
    gradient, merged = torch.zeros_like(logits), []
    for part, padding in parts:
        streams = drawn.streams(logits, part, padding)
        if gate is not None:
            streams = replace(
                streams, gate_BT=torch.nn.functional.pad(gate[[list(rows).index(row) for row in part]], (0, padding), value=True)
            )
        terms = tested.terms(streams)
        prompt_B = torch.tensor([float(prompt_tokens[PROMPTS[row]]) for row in part], dtype=torch.float64)
        loss = aggregate(terms.loss_BT, streams.mask_BT, tested.aggregation, denominator, prompt_B)
        if loss.requires_grad:
            gradient = gradient + torch.autograd.grad(loss, logits)[0]
        merged.append({**terms.metrics, "loss": Sum(loss.item())})
    return gradient, merge(merged)


def _gate(tested: Subject, drawn: Rollouts, logits: Tensor, rows: Sequence[int]) -> Tensor | None:
    """Tokens selected by the covariance rule over the whole step, as a scoring pass before it finds them."""
    if tested.setting is None or not tested.setting.needs_step_pass:
        return None
    with torch.no_grad():
        streams = drawn.streams(logits, rows, 0)
        clipped_BT = tested.terms(streams).fate_BT == Fate.CLIPPED
    mask_BT = streams.mask_BT
    flat = [stream[mask_BT].numpy() for stream in (streams.logp_BT, streams.advantage_BT, clipped_BT)]
    chosen = select(*flat, tested.setting.limit, seed=0).chosen  # type: ignore[arg-type]
    gate_BT = torch.zeros_like(mask_BT)
    places = mask_BT.nonzero()[list(chosen)]
    gate_BT[places[:, 0], places[:, 1]] = True
    return gate_BT


def _apart(cut: dict[str, float], whole: dict[str, float]) -> float:
    """Distance between two readings of the same metrics; a metric that only one of them has is infinitely far."""
    if cut.keys() != whole.keys():
        return np.inf
    names = [name for name in whole if not (np.isnan(cut[name]) and np.isnan(whole[name]))]
    return max((distance(cut[name], whole[name]) for name in names), default=0.0)


def _without_empty(split: Split) -> Split:
    return lambda rows: [part for part in split(rows) if part[0]]
