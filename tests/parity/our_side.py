"""The package on the same batches as `trl_side`: rewards to advantages to loss and gradient, by the public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl_side import Batch, Found

from posttrain.core.metrics import read
from posttrain.objectives.advantages import group_advantages
from posttrain.objectives.aggregate import aggregate, denominator_of
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Streams

TRL_SCALE: dict[str, Any] = {"kind": "grpo", "advantage": {"ddof": 1, "eps": 1e-4}, "kl": {"estimator": "none"}}
"""GRPO with the spread of TRL: sample standard deviation, 1e-4 added to it."""


def objective(**settings: Any) -> Objective:
    """TRL_SCALE with some axes replaced."""
    return Objective.load({**TRL_SCALE, **settings})


def advantages(batch: Batch, how: Objective) -> Tensor:
    """One advantage per row, by the objective's advantage axis."""
    spread = how.advantage.model_dump(exclude={"kind"})
    groups = [batch.rewards_B[start : start + batch.siblings] for start in range(0, len(batch.rewards_B), batch.siblings)]
    found = [group_advantages(group, how.advantage.kind, **spread) for group in groups]  # type: ignore[arg-type]
    return torch.tensor(found, dtype=torch.float64).flatten()


def ours(
    batch: Batch, how: Objective, *, constant: float = 0.0, denominator: float | None = None, advantage_BT: Tensor | None = None
) -> Found:
    """Loss and gradient of one batch. Untrained slots hold NaN, so nothing can come from them.

    Args:
        constant: denominator of the aggregation "constant".
        denominator: replaces the one that belongs to the aggregation.
        advantage_BT: replaces what the objective makes of the rewards; [B], or [B, T].
    """

    def poisoned(values_BT: Tensor) -> Tensor:
        return torch.where(batch.mask_BT, values_BT, torch.nan)

    given = advantages(batch, how) if advantage_BT is None else advantage_BT
    logp_BT, entropy_BT = (poisoned(values).requires_grad_() for values in (batch.logp_BT, batch.entropy_BT))
    streams = Streams(
        logp_BT=logp_BT,
        old_BT=poisoned(batch.old_BT),
        behaviour_BT=poisoned(batch.behaviour_BT),
        advantage_BT=poisoned((given if given.ndim == 2 else given[:, None]).expand_as(batch.logp_BT).to(batch.logp_BT.dtype)),
        mask_BT=batch.mask_BT,
        reference_BT=poisoned(batch.reference_BT),
        entropy_BT=entropy_BT,
    )
    terms = policy_terms(streams, how)
    if denominator is None:
        denominator = denominator_of(batch.mask_BT.sum(-1).tolist(), how.aggregation, constant)
    loss = aggregate(terms.loss_BT, batch.mask_BT, how.aggregation, denominator)
    slopes = torch.autograd.grad(loss, (logp_BT, entropy_BT), allow_unused=True, materialize_grads=True)
    return Found(loss.detach(), slopes[0], slopes[1], read(terms.metrics), {})


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of an entry, relative to the largest entry of theirs."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def deviation(ours: Found, theirs: Found, *, value: bool = True) -> float:
    """Largest disagreement: of the loss, absolute, and of both gradients, relative."""
    found = [abs(ours.loss.item() - theirs.loss.item())] if value else []
    found += [relative(ours.gradient_BT, theirs.gradient_BT), relative(ours.entropy_gradient_BT, theirs.entropy_gradient_BT)]
    return max(found)
