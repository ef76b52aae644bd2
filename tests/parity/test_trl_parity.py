"""Where TRL and this package define the same thing, loss and gradient are equal on random batches.

Both sides start from the same rewards and per-token streams and go all the way to the loss and its derivative; TRL's side is TRL's code
(trl_side.py). Streams are float64, so that nothing but a different formula can differ by more than rounding. Where the definitions differ:
test_trl_disagreements.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from our_side import advantages, deviation, objective, ours, relative
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import entropy_from_logits, selective_log_softmax
from trl_side import Batch, dpo_loss, grpo, grpo_inputs, random_batch, rloo

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import numpy_rng
from posttrain.objectives.advantages import channel_advantages, group_advantages
from posttrain.objectives.kernel import linear_scores
from posttrain.objectives.kl import kl_loss, kl_value
from posttrain.objectives.logprobs import logit_scores
from posttrain.objectives.preference import dpo, sequence_logps

SEEDS = range(20)
PROMISED = 1e-6
"""What is claimed about production arithmetic, float32."""
ROUNDING = 1e-11
"""What equal formulas may differ by in float64; a wrong epsilon of 1e-6 is far outside."""
BUDGET = 16


@dataclass(frozen=True)
class Case:
    """One shared definition: TRL's settings, ours, and what the batches have to look like for it to matter."""

    name: str
    trl: dict[str, Any]
    own: dict[str, Any]
    value: bool = True
    """False where only the gradient is defined: the value is that of another constant."""
    drift: float = 0.3
    binds: str = "clip_fraction"
    """The metric that must be above 0 and below 1 over the seeds, so that both sides of the rule are met; empty for none."""
    batch: dict[str, Any] = field(default_factory=dict)
    exact: float = ROUNDING
    """Largest deviation in float64."""


CLIP: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
OUR_CLIP = {"low": 0.2, "high": 0.28}
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
OUR_SEQUENCE = {"ratio": "sequence", "limit": {"low": 3e-4, "high": 4e-4}}
SAMPLER = {"loss_type": "dapo", "use_vllm": True}
ANY_CLIP = {"limit": {"low": 0.2, "high": 0.2}, "aggregation": "token_mean"}

CASES = (
    Case("grpo", {"loss_type": "grpo", **CLIP}, {"limit": OUR_CLIP}),
    Case("bnpo", {"loss_type": "bnpo", **CLIP}, {"limit": OUR_CLIP, "aggregation": "token_mean"}),
    Case("dapo", {"loss_type": "dapo", **CLIP}, {"limit": OUR_CLIP, "aggregation": "token_mean"}),
    Case(
        "dr_grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": BUDGET},
        {"advantage": "mean", "aggregation": "constant"},
    ),
    Case("luspo with a token ratio", {"loss_type": "luspo"}, {"aggregation": "seq_mean_token_sum"}),
    Case(
        "cispo",
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"limit": {"kind": "cispo", "high": 0.3}, "aggregation": "token_mean"},
        value=False,
        binds="",
    ),
    # TRL picks the temperature with torch.where on two plain floats, which makes float32 of 1.05 in float64 too
    Case("sapo", {"loss_type": "sapo"}, {"surrogate": "sapo"}, drift=0.6, binds="", exact=1e-6),
    Case("delta", {"loss_type": "grpo", **CLIP, "delta": 1.5}, {"limit": {**OUR_CLIP, "cap": 1.5}}, drift=0.6),
    Case("gspo", SEQUENCE, OUR_SEQUENCE, drift=1e-3),
    Case("k3", {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}, {"kl": {"estimator": "k3", "coef": 0.04}}),
    Case(
        "gspo and k3",
        {**SEQUENCE, "beta": 0.04, "use_bias_correction_kl": False},
        {**OUR_SEQUENCE, "kl": {"estimator": "k3", "coef": 0.04}},
        drift=1e-3,
    ),
    Case(
        "rho k3, first update",
        {"loss_type": "grpo", "beta": 0.04, "num_iterations": 1},
        {"kl": {"estimator": "rho_k3", "coef": 0.04}},
        drift=0.0,
        binds="",
    ),
    Case(
        "token truncate",
        {**SAMPLER, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
        {**ANY_CLIP, "correction": {"kind": "truncate", "cap": 1.2}},
    ),
    Case(
        "sequence truncate",
        {**SAMPLER, "vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.2},
        {**ANY_CLIP, "correction": {"kind": "truncate", "cap": 1.2, "level": "sequence"}},
    ),
    Case(
        "token mask",
        {
            **SAMPLER,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.8,
            "vllm_importance_sampling_clip_max": 1.25,
        },
        {**ANY_CLIP, "correction": {"kind": "mask", "lower": 0.8, "upper": 1.25}},
        binds="fate_mismatched",
    ),
    Case("dapo and entropy", {"loss_type": "dapo", "entropy_coef": 0.01}, {"aggregation": "token_mean", "entropy": {"coef": 0.01}}),
    Case(
        "all at once",
        {
            **SAMPLER,
            **CLIP,
            "delta": 1.5,
            "beta": 0.04,
            "use_bias_correction_kl": False,
            "entropy_coef": 0.01,
            "vllm_importance_sampling_mode": "token_mask",
        },
        {
            "limit": {**OUR_CLIP, "cap": 1.5},
            "aggregation": "token_mean",
            "kl": {"estimator": "k3", "coef": 0.04},
            "entropy": {"coef": 0.01},
            "correction": {"kind": "mask", "lower": 0.0, "upper": 3.0},
        },
        drift=0.6,
        batch={"mismatch": 0.6},
        binds="fate_mismatched",
    ),
)


def constant(batch: Batch) -> float:
    """Dr. GRPO's denominator: rows times the token budget."""
    return float(len(batch.lengths_B) * BUDGET)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rewards_to_gradient(case: Case):
    how, worst, met = objective(**case.own), 0.0, []
    for seed in SEEDS:
        batch = random_batch(seed, drift=case.drift, **case.batch)
        found = ours(batch, how, constant=constant(batch))
        worst = max(worst, deviation(found, grpo(batch, **case.trl), value=case.value))
        met.append(found.metrics.get(case.binds))
    assert worst < case.exact
    assert not case.binds or 0 < sum(met) < len(met)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32(case: Case):
    def single(batch: Batch) -> Batch:
        names = ("logp_BT", "old_BT", "behaviour_BT", "reference_BT", "entropy_BT")
        return replace(batch, **{name: getattr(batch, name).float() for name in names})

    how, worst = objective(**case.own), 0.0
    for seed in SEEDS:
        batch = single(random_batch(seed, drift=case.drift, **case.batch))
        worst = max(worst, deviation(ours(batch, how, constant=constant(batch)), grpo(batch, **case.trl), value=case.value))
    assert worst < PROMISED


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_micro_batches_add_up_to_the_batch(name: str, parts: int):
    case = next(case for case in CASES if case.name == name)
    for seed in SEEDS:
        batch = random_batch(seed)
        whole = ours(batch, objective(**case.own), constant=constant(batch))
        assert deviation(whole, grpo(batch, parts=parts, **case.trl), value=case.value) < ROUNDING


@pytest.mark.parametrize(
    ("scale", "advantage"), [("group", {"kind": "mean_std", "ddof": 1, "eps": 1e-4}), ("none", "mean")], ids=["group", "none"]
)
def test_group_advantages_with_unscored_siblings(scale: str, advantage: Any):
    # TRL forms n / (n - 1) in float32: 4 / 3, of four scored siblings, is 2e-8 off.
    how = objective(advantage=advantage)
    for seed in SEEDS:
        batch = random_batch(seed)
        missing = set(numpy_rng(seed, "missing").choice(10, size=seed % 10, replace=False).tolist())
        batch = replace(batch, rewards_B=tuple(None if row in missing else value for row, value in enumerate(batch.rewards_B)))
        theirs = grpo_inputs(batch, scale_rewards=scale)["advantages"]
        torch.testing.assert_close(advantages(batch, how), theirs, rtol=0, atol=1e-7)


def test_channels_before_the_second_normalisation():
    # TRL divides the sum of z-scores once more, by its spread over the batch: one number for all rows.
    for seed in SEEDS:
        rng = numpy_rng(seed, "channels")
        channels = {name: rng.standard_normal(10).tolist() for name in ("correct", "cost")}
        weights = {"correct": 1.0, "cost": 0.5}
        halves = [{name: values[i : i + 5] for name, values in channels.items()} for i in (0, 5)]
        own = torch.tensor([value for half in halves for value in channel_advantages(half, weights, ddof=1, eps=1e-4)])
        settings: dict[str, Any] = {"channels": list(channels.values()), "reward_weights": [1.0, 0.5]}
        theirs = grpo_inputs(random_batch(seed), multi_objective_aggregation="normalize_then_sum", **settings)["advantages"]
        torch.testing.assert_close(own.double() / (own.double().std() + 1e-4), theirs, rtol=0, atol=1e-6)


def test_rloo_on_policy():
    how = objective(kind="rloo", advantage="leave_one_out")
    assert (how.ratio, how.limit.kind, how.aggregation) == ("none", "none", "seq_mean_token_sum")
    for seed in SEEDS:
        batch = random_batch(seed, drift=0.0, holes=0.0)  # RLOOTrainer has no tool mask
        k1_B = kl_value(batch.old_BT, batch.reference_BT, batch.mask_BT, "k1", dtype=torch.float64).sum(-1)
        rewards = [reward - 0.05 * kl for reward, kl in zip(batch.rewards_B, k1_B.tolist(), strict=True)]
        found = ours(replace(batch, rewards_B=tuple(rewards)), how)
        assert deviation(found, rloo(batch, beta=0.05), value=False) < ROUNDING


@pytest.mark.parametrize("product", [True, False], ids=["ratio in the product", "ratio as a weight"])
def test_rho_k3_off_policy(product: bool):
    # TRL's KL term alone is the difference of two losses; ours is kl_loss itself, since policy_terms gives rho_k3 no ratio. The derivative
    # of rho k3 is rho x, so a constant weight rho on the term without ratio is the same.
    for seed in SEEDS:
        batch = random_batch(seed)
        with_kl, without = (grpo(batch, loss_type="bnpo", beta=beta) for beta in (0.04, 0.0))
        logp_BT = batch.logp_BT.clone().requires_grad_()
        ratio_BT = (logp_BT - batch.old_BT).exp()
        given, weight_BT = (ratio_BT, 1.0) if product else (None, ratio_BT.detach())
        term_BT = weight_BT * kl_loss(logp_BT, batch.reference_BT, batch.mask_BT, "rho_k3", given, dtype=torch.float64)
        loss = 0.04 * term_BT.sum() / batch.tokens
        (gradient_BT,) = torch.autograd.grad(loss, logp_BT)
        torch.testing.assert_close(loss.detach(), with_kl.loss - without.loss, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(gradient_BT, with_kl.gradient_BT - without.gradient_BT, rtol=0, atol=ROUNDING)


def test_metrics():
    how = objective(limit=OUR_CLIP, kl={"estimator": "k3", "coef": 0.04})
    for seed in SEEDS:
        batch = random_batch(seed)
        own = ours(batch, how).metrics
        theirs = grpo(batch, loss_type="grpo", beta=0.04, use_bias_correction_kl=False, **CLIP).metrics
        for name, their_name in {"clip_fraction": "clip_ratio/region_mean", "kl": "kl", "entropy": "entropy"}.items():
            assert own[name] == pytest.approx(theirs[their_name], abs=1e-6)  # TRL counts in float32


def test_dpo():
    for seed in SEEDS:
        batch = random_batch(seed)
        theirs = dpo_loss(batch, beta=0.3)
        logp_BT = torch.where(batch.mask_BT, batch.logp_BT, torch.nan).requires_grad_()
        sums, references = (sequence_logps(values_BT, batch.mask_BT).chunk(2) for values_BT in (logp_BT, batch.reference_BT))
        found = dpo(sums[0], sums[1], references[0], references[1], beta=0.3)
        (gradient_BT,) = torch.autograd.grad(found.loss_P.mean(), logp_BT)
        torch.testing.assert_close(found.loss_P.mean().detach(), theirs.loss, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(gradient_BT, theirs.gradient_BT, rtol=0, atol=ROUNDING)
        assert found.chosen_reward_P.mean().item() == pytest.approx(theirs.metrics["rewards/chosen"], abs=1e-9)
        assert found.rejected_reward_P.mean().item() == pytest.approx(theirs.metrics["rewards/rejected"], abs=1e-9)


def test_scores_from_logits():
    for seed in SEEDS:
        rng = numpy_rng(seed, "logits")
        logits_NV = torch.from_numpy(rng.normal(0, 3, (6, 50))).requires_grad_()
        targets_N = torch.from_numpy(rng.integers(0, 50, 6))
        own = logit_scores(logits_NV, targets_N, Sampling(temperature=0.7), entropy_gradient=True)
        theirs = selective_log_softmax(logits_NV, targets_N, temperature=0.7), entropy_from_logits(logits_NV / 0.7)
        for a, b in zip((own.logp_N, own.entropy_N), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=ROUNDING)
            gradients = [torch.autograd.grad(x.sum(), logits_NV, retain_graph=True)[0] for x in (a, b)]
            torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=ROUNDING)


def test_scores_from_hidden_states():
    # The head that GRPOTrainer scores with, which never holds all logits, in float32 as in training; so does ours.
    for seed in SEEDS:
        rng = numpy_rng(seed, "hidden")
        hidden_NH, weight_VH = (torch.from_numpy(rng.normal(0, 0.5, shape)).float().requires_grad_() for shape in ((6, 16), (50, 16)))
        targets_N = torch.from_numpy(rng.integers(0, 50, 6))
        own = linear_scores(hidden_NH, weight_VH, targets_N, Sampling(temperature=0.7), entropy_gradient=True)
        theirs = ChunkedLogProbFunction.apply(hidden_NH, weight_VH, None, targets_N, 0.7, 8, None, 1.0, ("entropy",))
        pairs = [torch.autograd.grad(x.sum() + 0.1 * h.sum(), (hidden_NH, weight_VH)) for x, h in ((own.logp_N, own.entropy_N), theirs[:2])]
        for a, b in zip((own.logp_N, own.entropy_N, *pairs[0]), (*theirs[:2], *pairs[1]), strict=True):
            assert relative(a, b) < PROMISED


def test_leave_one_out_by_itself():
    for seed in SEEDS:
        batch = random_batch(seed, holes=0.0)
        own = [a for i in (0, 5) for a in group_advantages(batch.rewards_B[i : i + 5], "leave_one_out")]
        theirs = rloo(batch, beta=0.0).inputs["advantages"]
        torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), theirs, rtol=0, atol=ROUNDING)
