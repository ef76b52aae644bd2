"""The policy loss: one composition of the axes, unreduced.

    log ratio -> limit -> surrogate * correction -> - KL term - entropy bonus        per token, NaN-safe, no I/O

Every named algorithm is a setting of `Objective`; none has code of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.metrics import Effective, Max, Mean, Metric, Sum
from posttrain.objectives.corrections import correction
from posttrain.objectives.kl import kl_loss, kl_value
from posttrain.objectives.limits import limited
from posttrain.objectives.objective import Objective
from posttrain.objectives.ratios import log_ratio
from posttrain.objectives.streams import LEFT_OUT, Fate, Streams, Terms
from posttrain.objectives.surrogates import SURROGATES, Surrogate


def policy_terms(streams: Streams, objective: Objective, surrogate: Surrogate | None = None) -> Terms:
    """Loss, fate and metrics of every token under `objective`; 0 where untrained.

    The value of the loss says little: on the first update of an on-policy step it is minus the mean advantage, about 0, while its gradient
    is the policy gradient (spec/faults.md 11). Watch what carries the gradient: entropy, fates, ratio, KL.

    Args:
        surrogate: a loss per token that stands in for ratio, limit and correction; by default the one that the objective names.
    """
    clean = streams.masked()
    base_BT = clean.old_BT if objective.against == "old" else clean.behaviour_BT
    log_ratio_BT = log_ratio(clean.logp_BT, base_BT, clean.mask_BT, objective.ratio, clean.sentence_BT)
    surrogate_BT, limit_fate_BT = limited(log_ratio_BT, clean.advantage_BT, clean.mask_BT, objective.limit, base_BT, clean.gate_BT)
    weight_BT, fate_BT = correction(clean.old_BT, clean.behaviour_BT, clean.mask_BT, objective.correction)
    fate_BT = torch.where(fate_BT == Fate.TRAINED, limit_fate_BT, fate_BT)  # what the sampler got wrong outranks what the policy moved
    loss_BT = torch.where(weight_BT == 0, 0.0, -surrogate_BT * weight_BT)
    surrogate = surrogate or (SURROGATES[objective.surrogate] if objective.surrogate else None)
    if surrogate is not None:
        loss_BT, weight_BT = surrogate(clean), torch.ones_like(weight_BT)
        fate_BT = torch.where(clean.mask_BT, int(Fate.TRAINED), int(Fate.UNTRAINED))
    metrics = measures(clean, log_ratio_BT.detach(), weight_BT, fate_BT)
    if objective.kl.used and objective.kl.placement == "loss":
        loss_BT = loss_BT + objective.kl.coef * _divergence(clean, objective)
    if objective.entropy.used:
        if clean.entropy_BT is None:
            raise ValueError("an entropy bonus needs entropy_BT with gradient; score with entropy_gradient=True")
        loss_BT = loss_BT - objective.entropy.coef * clean.entropy_BT
    return Terms(torch.where(clean.mask_BT, loss_BT, 0.0), fate_BT, metrics)


def _divergence(clean: Streams, objective: Objective) -> Tensor:
    """The KL term that stands in the loss, per token, with gradient."""
    estimator = objective.kl.estimator
    if estimator in ("full", "top_k"):
        if clean.divergence_BT is None:
            raise ValueError(f"kl.estimator = {estimator} needs divergence_BT from the scorer")
        return clean.divergence_BT
    if clean.reference_BT is None:
        raise ValueError(f"kl.estimator = {estimator} needs reference_BT, the frozen model's log-probabilities")
    dtype = torch.float64 if objective.kl.dtype == "float64" else torch.float32
    wanted = dtype if clean.logp_BT.dtype != torch.float64 else torch.float64
    term_BT = kl_loss(clean.logp_BT, clean.reference_BT, clean.mask_BT, estimator, dtype=wanted)  # type: ignore[arg-type]
    if estimator == "rho_k3":  # tokens of the old policy, weighed to be tokens of this one
        term_BT = (clean.logp_BT - clean.old_BT).detach().exp().to(wanted) * term_BT
    return term_BT.to(clean.logp_BT.dtype)


def measures(clean: Streams, log_ratio_BT: Tensor, weight_BT: Tensor, fate_BT: Tensor) -> dict[str, Metric]:
    """What to watch, each figure with its own reduction, so that parts of a step merge to the figure of the step.

    staleness: |logp - old|, what training has changed since the step's first update.  mismatch: |old - behaviour|, what sampler and
    trainer compute differently.  ess_*: effective share of the tokens under the weights exp(logp - old) and exp(old - behaviour):
    (sum w)^2 / (n sum w^2), 1 when all weigh alike.  fate_*: share of trained slots left out, by reason.
    """
    mask_BT = clean.mask_BT
    count = int(mask_BT.sum())
    stale_BT = (clean.logp_BT.detach() - clean.old_BT).double()
    mismatch_BT = (clean.old_BT - clean.behaviour_BT).double()
    ratio_BT = log_ratio_BT.double().exp()

    def mean(values_BT: Tensor) -> Mean:
        return Mean(torch.where(mask_BT, values_BT, 0.0).double().sum().item(), count)

    def largest(values_BT: Tensor) -> Max:
        return Max(values_BT[mask_BT].max().item() if count else -torch.inf)

    metrics: dict[str, Metric] = {
        "ratio_mean": mean(ratio_BT),
        "ratio_max": largest(ratio_BT),
        "staleness_mean": mean(stale_BT.abs()),
        "mismatch_mean": mean(mismatch_BT.abs()),
        "mismatch_max": largest(mismatch_BT.abs()),
        "ess_staleness": _effective(stale_BT.exp()[mask_BT]),
        "ess_mismatch": _effective(mismatch_BT.exp()[mask_BT]),
        "correction_mean": mean(weight_BT),
        "tokens": Sum(count),
    }
    for fate in LEFT_OUT:
        metrics[f"fate_{fate.name.lower()}"] = Mean(int((fate_BT == fate).sum()), count)
    metrics["clip_fraction"] = Mean(int(((fate_BT == Fate.CLIPPED) | (fate_BT == Fate.OUT_OF_BAND)).sum()), count)
    if clean.entropy_BT is not None:
        metrics["entropy"] = mean(clean.entropy_BT.detach())
    if clean.divergence_BT is not None:  # exact, where the sampled tokens would only give an estimate
        metrics["kl"] = mean(clean.divergence_BT.detach())
    elif clean.reference_BT is not None:
        metrics["kl"] = mean(kl_value(clean.logp_BT.detach(), clean.reference_BT, mask_BT, "k3", dtype=torch.float64))
    return metrics


def _effective(weights_N: Tensor) -> Effective:
    return Effective(weights_N.sum().item(), weights_N.square().sum().item(), len(weights_N))
