"""Where TRL and this package differ, by how much, and what decides: an exact enumeration, or arithmetic on one line.

The enumerations list every completion of a tiny policy, softmax of Z at every position, weighted with its probability. What a loss does in
expectation is then a sum, and is compared with a gradient that is written down, not differentiated. Both sides get the same streams.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from our_side import objective, ours
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.utils import entropy_from_logits, selective_log_softmax
from trl_side import Batch, defaults, grpo, grpo_inputs, grpo_window, one_batch, rloo

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.objectives.advantages import channel_advantages, group_advantages
from posttrain.objectives.kl import kl_loss, kl_value
from posttrain.objectives.logprobs import logit_scores

EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
Z = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
Z_OLD = torch.tensor([0.9, 0.4, -0.6], dtype=torch.float64)
Z_REFERENCE = torch.tensor([-0.4, 0.2, 0.5], dtype=torch.float64)
P, P_OLD = Z.softmax(-1), Z_OLD.softmax(-1)
X = Z.log_softmax(-1) - Z_REFERENCE.log_softmax(-1)
REWARD = torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)
"""Of each token."""


class Enumerated:
    """Every completion of `length` tokens as one batch, with the policy Z and old, sampler and reference policies of their own logits."""

    def __init__(self, length: int, *, old: Tensor = Z, behaviour: Tensor | None = None):
        self.ids_BT = torch.tensor(list(product(range(len(Z)), repeat=length)))
        like = one_batch([[0.0] * length] * len(self.ids_BT), [0.0] * len(self.ids_BT))
        logits = {"logp_BT": Z, "old_BT": old, "behaviour_BT": old if behaviour is None else behaviour, "reference_BT": Z_REFERENCE}
        self.batch = replace(like, **{name: z.log_softmax(-1)[self.ids_BT] for name, z in logits.items()})
        self.scores_BTV = torch.eye(len(Z), dtype=torch.float64)[self.ids_BT] - P  # d log p(token) / d z
        self.reward_B = REWARD[self.ids_BT].sum(-1)
        self.none_B = torch.zeros_like(self.reward_B)

    def climbs(self, gradient_BT: Tensor, drawn_from_BT: Tensor) -> Tensor:
        """[T, V]: what descending the loss adds to the logits of each position, in expectation over completions of `drawn_from`.

        `gradient_BT` is of a mean over rows and their tokens, as `grpo` takes it; both divisions are undone.
        """
        weight_BT1 = drawn_from_BT.sum(-1, keepdim=True).exp()[..., None]
        return -(weight_BT1 * gradient_BT[..., None] * gradient_BT.numel() * self.scores_BTV).sum(0)


def rows(batch: Batch) -> list[Batch]:
    """Two rows as two batches."""
    names = ("logp_BT", "old_BT", "behaviour_BT", "reference_BT", "entropy_BT", "mask_BT", "lengths_B", "rewards_B")
    return [replace(batch, siblings=1, **{name: getattr(batch, name)[i : i + 1] for name in names}) for i in range(2)]


def score_sum(weight_V: Tensor, drawn_V: Tensor) -> Tensor:
    """Expectation of weight * d log p(token) / d z over tokens of `drawn_V`: drawn_j w_j - p_j E[w]."""
    return drawn_V * weight_V - P * (drawn_V @ weight_V)


CLIMB = score_sum(REWARD, P)
"""d E[R] / d z_j = p_j (R_j - E[R]), of one token."""
REVERSE = score_sum(X, P)
"""d KL(policy || reference) / d z_j = p_j (x_j - KL), x = log p - log q."""
FORWARD = P - Z_REFERENCE.softmax(-1)
"""d KL(reference || policy) / d z_j = p_j - q_j."""


# --- advantages ------------------------------------------------------------------------------------------------------------------------


def test_spread_is_the_sample_one_with_a_large_epsilon():
    # 1 0 0 1 0: mean 0.4, squares 2 * 0.36 + 3 * 0.16 = 1.2; sample std sqrt(1.2 / 4) = 0.5477, population std sqrt(1.2 / 5) = 0.4899.
    theirs = grpo_inputs(one_batch([[-1.0]] * 5, [1, 0, 0, 1, 0]))["advantages"].tolist()
    assert theirs[:2] == pytest.approx([1.0953, -0.7302], abs=1e-4)
    assert group_advantages([1, 0, 0, 1, 0], "mean_std")[:2] == pytest.approx([1.2247, -0.8165], abs=1e-4)
    # An advantage in units of the spread must not know the unit of the reward. 1e-4 times the rewards: 6e-5 / (5.477e-5 + 1e-4) = 0.388,
    # which is 0.354 of 1.095; here 6e-5 / (4.899e-5 + 1e-6) = 1.200, which is 0.980 of 1.225.
    small = [1e-4, 0, 0, 1e-4, 0]
    assert grpo_inputs(one_batch([[-1.0]] * 5, small))["advantages"][0].item() == pytest.approx(0.3877, abs=1e-4)
    assert group_advantages(small, "mean_std")[0] == pytest.approx(1.2002, abs=1e-4)


def test_equal_rewards_in_float32_leave_a_residue():
    # Near 100.1 float32 has steps of 2^-17 = 7.6e-6. Summing eight of them is one step off after division: 7.6e-6 / (8.2e-6 + 1e-4) = 0.07.
    theirs = grpo_inputs(one_batch([[-1.0]] * 8, [100.1] * 8), graded=True)["advantages"]
    assert theirs.tolist() == pytest.approx([0.0706] * 8, abs=1e-3)
    assert group_advantages([100.1] * 8, "mean_std") == [0.0] * 8


def test_batch_scale_depends_on_what_other_prompts_are_worth():
    # Adding a constant to all rewards of a prompt changes nothing about which of its completions are better.
    rows = [[-1.0]] * 4
    near, far = ([0, 1, 0, 1], [0, 1, 10, 11])
    # Sample std of all rewards: sqrt(4 * 0.25 / 3) = 0.5774; with 10 more in one group, sqrt(101 / 3) = 5.8023: 0.5 over each.
    for rewards, expected in ((near, 0.8659), (far, 0.0862)):
        theirs = grpo_inputs(one_batch(rows, rewards, siblings=2), scale_rewards="batch")["advantages"]
        assert theirs.abs().tolist() == pytest.approx([expected] * 4, abs=1e-4)
    # REINFORCE++ with within=group takes the spread of what is left after the group's mean, which is the same for both.
    for group in (near[:2], near[2:], far[:2], far[2:]):
        assert group_advantages(group, "mean") == [-0.5, 0.5]


def test_channels_are_normalised_a_second_time():
    # Two prompts, two siblings, one channel with weight 3. Its z-scores are +-0.7071 (sample std), times 3: +-2.1213. TRL divides by the
    # spread of the batch as well, sqrt(4 * 4.5 / 3) = 2.4495, so that a factor common to all weights is gone: +-0.8660.
    batch = one_batch([[-1.0]] * 4, [1, 0, 1, 0], siblings=2)
    settings: dict[str, Any] = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [3.0], "channels": [[1, 0, 1, 0]]}
    assert grpo_inputs(batch, **settings)["advantages"][:2].tolist() == pytest.approx([0.8660, -0.8660], abs=1e-3)
    assert channel_advantages({"f1": [1, 0]}, {"f1": 3.0}, ddof=1) == pytest.approx([2.1213, -2.1213], abs=1e-3)


def test_filtered_completions_stay_in_their_baseline():
    # Tokens: right (reward 1), wrong (0), and one that is cut off and filtered out. A filter is meant to say nothing about being cut off,
    # so what remains should climb E[R | not cut off]. TRL leaves the reward 0 of what it filtered in the baseline.
    rewards, size = (1.0, 0.0, 0.0), 3
    theirs, own = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for group in product(range(3), repeat=size):
        chance = math.prod(P[token].item() for token in group)
        cut = tuple(row for row, token in enumerate(group) if token == 2)
        batch = one_batch([[Z.log_softmax(-1)[token].item()] for token in group], [rewards[token] for token in group])
        found = grpo(batch, loss_type="grpo", scale_rewards="none", mask_truncated_completions=True, cut=cut)
        scores_BV = torch.eye(3, dtype=torch.float64)[list(group)] - P
        theirs -= chance * (found.gradient_BT * scores_BV).sum(0)
        kept = [None if token == 2 else rewards[token] for token in group]
        trained = size - len(cut)
        if trained:
            own += chance * (torch.tensor(group_advantages(kept, "mean"), dtype=torch.float64)[:, None] * scores_BV).sum(0) / trained
    right, wrong, lost = P.tolist()
    share = right / (right + wrong)
    conditional = torch.tensor([share * (1 - share), -share * (1 - share), 0.0], dtype=torch.float64)
    # Of n kept siblings the mean baseline gives (n - 1) / n of it: 3 (1 - lost)^2 lost groups with 1 / 2, (1 - lost)^3 with 2 / 3.
    expected = (3 * (1 - lost) ** 2 * lost / 2 + (1 - lost) ** 3 * 2 / 3) * conditional
    torch.testing.assert_close(own, expected, **EXACT)
    # TRL: (G - 1) / G times (grad E[R] - E[R] grad P(kept)) = P(kept) grad E[R | kept] + (E[R | kept] - E[R]) grad P(kept).
    kept_chance = torch.tensor([right * lost, wrong * lost, -lost * (1 - lost)], dtype=torch.float64)
    push = (1 - lost) * conditional + (share - right) * kept_chance
    torch.testing.assert_close(theirs, 2 / 3 * push, **EXACT)
    assert theirs[2] < -0.04
    assert abs(own[2]) < 1e-12


# --- limits and ratios -----------------------------------------------------------------------------------------------------------------


def test_cispo_bound_is_the_weight_itself():
    # MiniMax-M1 bounds the weight by 1 + high. TRL bounds it by epsilon_high, so its own default, 0.2, holds every weight at 0.2: on the
    # first update, where every ratio is 1, a fifth of the policy gradient.
    all_tokens = Enumerated(1)
    theirs = grpo(all_tokens.batch, loss_type="cispo", advantage_BT=all_tokens.reward_B)
    own = ours(all_tokens.batch, objective(limit={"kind": "cispo", "high": 0.2}), advantage_BT=all_tokens.reward_B)
    torch.testing.assert_close(all_tokens.climbs(theirs.gradient_BT, all_tokens.batch.logp_BT)[0], 0.2 * CLIMB, **EXACT)
    torch.testing.assert_close(all_tokens.climbs(own.gradient_BT, all_tokens.batch.logp_BT)[0], CLIMB, **EXACT)


def test_cispo_value_has_another_constant():
    # One token, log-probability -2, ratio 1, A = 1. TRL: -1 * 1 * (-2) = 2. Here -1 * 1 * (1 + log pi - sg(log pi)) = -1, the value of the
    # clipped loss. The gradient is -1 in both; nothing reads the value.
    batch = one_batch([[-2.0]], [0.0])
    theirs = grpo(batch, loss_type="cispo", epsilon_high=5.0, advantage_BT=torch.ones(1))
    own = ours(batch, objective(limit={"kind": "cispo", "high": 4.0}), advantage_BT=torch.ones(1))
    assert (theirs.loss.item(), own.loss.item()) == (2.0, -1.0)
    assert theirs.gradient_BT.item() == own.gradient_BT.item() == -1.0


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "dr_grpo", "luspo"])
def test_sequence_ratio_is_multiplied_by_the_length(loss_type: str):
    # GSPO is a mean over responses, each counted once. Lengths 1 and 3: summed over tokens the second counts three times the first.
    batch = one_batch([[-1.0], [-1.0, -1.0, -1.0]], [0.0, 0.0])
    settings: dict[str, Any] = {"importance_sampling_level": "sequence", "advantage_BT": torch.ones(2), "max_completion_length": 3}
    per_row = grpo(batch, loss_type=loss_type, **settings).gradient_BT.sum(-1)
    assert (per_row[1] / per_row[0]).item() == pytest.approx(3.0)
    torch.testing.assert_close(grpo(batch, loss_type="grpo", **settings).gradient_BT.sum(-1), torch.tensor([-0.5, -0.5]).double(), **EXACT)
    for aggregation in ("token_mean", "constant", "seq_mean_token_sum"):
        with pytest.raises(ConfigError, match="multiply it by the response's length"):
            objective(ratio="sequence", limit={"low": 3e-4, "high": 4e-4}, aggregation=aggregation)


def test_sequence_ratio_averages_the_advantages_of_its_tokens():
    # TRL lets subclasses give an advantage per token, which a sequence ratio then shares among all tokens of the response. Two tokens, each
    # earning REWARD, advantage = reward to go: (r1 + r2, r2). Exact: both positions climb alike. The average pushes position 1 with
    # E[(r1 + 2 r2) / 2 | y1] and position 2 with E[.. | y2]: half and all of what is right.
    pairs = Enumerated(2)
    reward_BT = REWARD[pairs.ids_BT]
    to_go_BT = torch.stack([reward_BT.sum(-1), reward_BT[:, 1]], dim=-1)
    theirs = grpo(pairs.batch, loss_type="grpo", importance_sampling_level="sequence", advantage_BT=to_go_BT)
    own = ours(pairs.batch, objective(ratio="sequence", limit={"low": 3e-4, "high": 4e-4}), advantage_BT=to_go_BT)
    exact = torch.stack([CLIMB, CLIMB])
    torch.testing.assert_close(pairs.climbs(own.gradient_BT, pairs.batch.logp_BT), exact, **EXACT)
    half = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(pairs.climbs(theirs.gradient_BT, pairs.batch.logp_BT), half * exact, **EXACT)


def test_delta_is_not_counted_and_may_lie_inside_the_band():
    # A = -1, ratio 3, delta = 2: the token has no gradient. TRL's clip ratio looks at the sign and reads 0; here it reads 1.
    batch = one_batch([[-1.0]], [0.0], drift=math.log(3))
    theirs = grpo(batch, loss_type="grpo", delta=2.0, advantage_BT=-torch.ones(1))
    own = ours(batch, objective(limit={"cap": 2.0}), advantage_BT=-torch.ones(1))
    assert theirs.gradient_BT.item() == own.gradient_BT.item() == 0.0
    assert (theirs.metrics["clip_ratio/region_mean"], own.metrics["clip_fraction"]) == (0.0, 1.0)
    # delta = 1.1 below 1 + high = 1.2: ratio 1.15 with A = 1 is inside the band, yet has no gradient. TRL recommends against it.
    inside = one_batch([[-1.0]], [0.0], drift=math.log(1.15))
    assert grpo(inside, loss_type="grpo", delta=1.1, advantage_BT=torch.ones(1)).gradient_BT.item() == 0.0
    with pytest.raises(ConfigError, match="lies inside the band"):
        objective(limit={"cap": 1.1})


def test_rloo_off_policy():
    # TRL: the ratio of whole responses, exact for any old policy while unclipped. `rloo` here has no ratio and is meant for one update per
    # phase: off-policy it climbs as if the old policy's samples were its own.
    pairs = Enumerated(2, old=Z_OLD)
    batch = pairs.batch
    theirs = rloo(batch, advantage_B=pairs.reward_B, beta=0.0, epsilon=0.999, epsilon_high=1e9)
    own = ours(batch, objective(kind="rloo", advantage="leave_one_out"), advantage_BT=pairs.reward_B)
    exact = torch.stack([CLIMB, CLIMB])  # a sum over tokens, where `climbs` undoes a mean over two
    torch.testing.assert_close(pairs.climbs(theirs.gradient_BT, batch.old_BT) / 2, exact, **EXACT)
    # What the old policy's samples say: its own tokens, and a score whose mean is no longer 0 times what the other token is worth.
    wrong = score_sum(REWARD + P_OLD @ REWARD, P_OLD)
    torch.testing.assert_close(pairs.climbs(own.gradient_BT, batch.old_BT) / 2, torch.stack([wrong, wrong]), **EXACT)
    assert (wrong - CLIMB).abs().max() > 0.05


# --- KL --------------------------------------------------------------------------------------------------------------------------------


def test_kl_of_an_old_policy_needs_its_ratio():
    # Tokens come from the old policy. With the ratio, TRL's default and rho_k3 here, the term descends KL(policy || reference). Without it,
    # as in TRL's k3 and in k2 here, it descends the slope on whatever was drawn.
    tokens = Enumerated(1, old=Z_OLD)
    descents = {}
    for name, bias_correction in (("ratio", True), ("none", False)):
        found = grpo(tokens.batch, loss_type="grpo", beta=1.0, use_bias_correction_kl=bias_correction, advantage_BT=tokens.none_B)
        descents[name] = -tokens.climbs(found.gradient_BT, tokens.batch.old_BT)[0]
    for estimator in ("rho_k3", "k2"):
        own = ours(tokens.batch, objective(kl={"estimator": estimator, "coef": 1.0}), advantage_BT=tokens.none_B)
        descents[estimator] = -tokens.climbs(own.gradient_BT, tokens.batch.old_BT)[0]
    logp_BT = tokens.batch.logp_BT.clone().requires_grad_()
    ratio_BT = (logp_BT - tokens.batch.old_BT).exp()
    term_BT = kl_loss(logp_BT, tokens.batch.reference_BT, tokens.batch.mask_BT, "rho_k3", ratio_BT, dtype=torch.float64)
    (gradient_BT,) = torch.autograd.grad(term_BT.mean(), logp_BT)
    descents["ours, given"] = -tokens.climbs(gradient_BT, tokens.batch.old_BT)[0]
    torch.testing.assert_close(descents["ratio"], REVERSE, **EXACT)
    torch.testing.assert_close(descents["ours, given"], REVERSE, **EXACT)
    torch.testing.assert_close(descents["rho_k3"], REVERSE, **EXACT)
    torch.testing.assert_close(descents["k2"], score_sum(X, P_OLD), **EXACT)
    torch.testing.assert_close(descents["none"], score_sum(1 - (-X).exp(), P_OLD), **EXACT)
    assert (descents["k2"] - REVERSE).abs().max() > 0.05
    assert (descents["none"] - FORWARD).abs().max() > 0.05


def test_kl_on_policy_descends_what_its_name_says():
    # The first update: with TRL's default the reverse KL, as rho_k3 and k2 here; without it the forward one, as k3 here.
    tokens = Enumerated(1)
    for bias_correction, estimator, expected in ((True, "rho_k3", REVERSE), (True, "k2", REVERSE), (False, "k3", FORWARD)):
        theirs = grpo(tokens.batch, loss_type="grpo", beta=1.0, use_bias_correction_kl=bias_correction, advantage_BT=tokens.none_B)
        own = ours(tokens.batch, objective(kl={"estimator": estimator, "coef": 1.0}), advantage_BT=tokens.none_B)
        for found in (theirs, own):
            torch.testing.assert_close(-tokens.climbs(found.gradient_BT, tokens.batch.logp_BT)[0], expected, **EXACT)


def test_kl_times_a_sequence_ratio_is_a_mixture():
    # TRL's default with importance_sampling_level="sequence": the geometric mean of L ratios carries 1 / L of the score that the reverse KL
    # needs. On the first update the term descends reverse / L + forward (1 - 1 / L), for L = 2 half of each.
    pairs = Enumerated(2)
    theirs = grpo(pairs.batch, loss_type="grpo", importance_sampling_level="sequence", beta=1.0, advantage_BT=pairs.none_B)
    own = ours(
        pairs.batch,
        objective(ratio="sequence", limit={"low": 3e-4, "high": 4e-4}, kl={"estimator": "rho_k3", "coef": 1.0}),
        advantage_BT=pairs.none_B,
    )
    for position in range(2):
        descent = -pairs.climbs(theirs.gradient_BT, pairs.batch.logp_BT)[position]
        torch.testing.assert_close(descent, REVERSE / 2 + FORWARD / 2, **EXACT)
        torch.testing.assert_close(-pairs.climbs(own.gradient_BT, pairs.batch.logp_BT)[position], REVERSE, **EXACT)


def test_k3_in_float32_near_the_reference():
    # x = -2e-4: k3 = x^2 / 2 (1 - x / 3 + ..) = 2.0001e-8. TRL adds exp(2e-4), whose float32 neighbours are 1.2e-7 apart.
    logp = torch.tensor([[-1.0]])
    reference = logp + 2e-4
    batch = replace(one_batch([[-1.0]], [0.0]), logp_BT=logp, old_BT=logp, behaviour_BT=logp, reference_BT=reference, entropy_BT=logp)
    x = float(logp.double() - reference.double())
    exact = math.expm1(-x) + x
    theirs = grpo(batch, loss_type="grpo", beta=1.0, use_bias_correction_kl=False, advantage_BT=torch.zeros(1)).loss.item()
    own = kl_value(logp, reference, batch.mask_BT, "k3").item()
    assert abs(own / exact - 1) < 1e-3
    assert abs(theirs / exact - 1) > 0.5


# --- sampler and trainer ---------------------------------------------------------------------------------------------------------------


def test_sequence_mask_weighs_by_the_product():
    # TRL's default mode. With a band that excludes nothing, the product of token weights is the exact importance weight; one weight per
    # token is not. Here the product is Truncate(level="sequence"); a mask weighs tokens, and tests the geometric mean of a response.
    # R = r1 r2, so that what a token is worth depends on the other one: d E[R] / d z of each position is E[r] d E[r] / d z.
    pairs = Enumerated(2, behaviour=Z_OLD)
    reward_B, drawn_BT = REWARD[pairs.ids_BT].prod(-1), pairs.batch.behaviour_BT
    # A weight per token leaves the other token's worth at E_old[r].
    exact, biased = ((drawn_V @ REWARD) * torch.stack([CLIMB, CLIMB]) for drawn_V in (P, P_OLD))
    assert (exact - biased).abs().max() > 0.02
    for mode, expected in (("sequence_mask", exact), ("token_mask", biased)):
        settings: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": None}
        theirs = grpo(pairs.batch, loss_type="grpo", advantage_BT=reward_B, **settings)
        # TRL keeps what the sampler recorded in float32.
        torch.testing.assert_close(pairs.climbs(theirs.gradient_BT, drawn_BT), expected, rtol=0, atol=1e-6)
    for correction, expected in (
        ({"kind": "truncate", "cap": 1e9, "level": "sequence"}, exact),
        ({"kind": "mask", "lower": 0.0, "upper": 1e9}, biased),
    ):
        own = ours(pairs.batch, objective(correction=correction), advantage_BT=reward_B)
        torch.testing.assert_close(pairs.climbs(own.gradient_BT, drawn_BT), expected, **EXACT)


def test_sequence_mask_tightens_with_length():
    # Trainer and sampler differ by 1% per token. The product over n tokens is e^(0.01 n): inside TRL's band up to 3 for 100 tokens (2.72),
    # outside for 120 (3.32), where the whole response is dropped. The geometric mean is 1.01 for both.
    for tokens, weight in ((100, math.e), (120, 0.0)):
        batch = one_batch([[-1.0] * tokens], [0.0])
        batch = replace(batch, behaviour_BT=batch.old_BT - 0.01)
        assert grpo_inputs(batch, use_vllm=True)["importance_sampling_ratio"].item() == pytest.approx(weight, rel=1e-4)
        band = {"kind": "mask", "sequence_lower": 0.98, "sequence_upper": 1.02}
        assert ours(batch, objective(correction=band)).metrics["fate_rejected"] == 0.0


# --- reduction -------------------------------------------------------------------------------------------------------------------------


def test_bnpo_depends_on_the_split():
    # Rows of 1 and 3 tokens, A = 1. One batch: 1 / 4 for every token. Two micro-batches: 1 / 2 for the first row's, 1 / 6 for the others.
    batch = one_batch([[-1.0], [-1.0, -1.0, -1.0]], [0.0, 0.0])
    whole, split = (grpo(batch, parts=parts, loss_type="bnpo", advantage_BT=torch.ones(2)).gradient_BT for parts in (1, 2))
    assert [-whole[0, 0].item(), -whole[1, 0].item()] == pytest.approx([1 / 4, 1 / 4])
    assert [-split[0, 0].item(), -split[1, 0].item()] == pytest.approx([1 / 2, 1 / 6])
    step = [ours(part, objective(aggregation="token_mean"), denominator=4.0, advantage_BT=torch.ones(1)) for part in rows(batch)]
    assert [-step[0].gradient_BT[0, 0].item(), -step[1].gradient_BT[0, 0].item()] == [1 / 4, 1 / 4]


def test_dapo_shares_one_denominator_among_the_steps_of_a_generation():
    # Two optimizer steps, of 2 and 6 tokens. TRL divides both by the mean, 4: the first counts 2 / 4, the second 6 / 4. Here a step is a
    # token mean of its own: 2 / 2 and 6 / 6. Over the generation TRL weighs all its tokens alike, here all its steps.
    batch = one_batch([[-1.0] * 2, [-1.0] * 6], [0.0, 0.0])
    for step, part in enumerate(rows(batch)):
        found = grpo_window(batch, slice(step, step + 1), windows=2, loss_type="dapo", advantage_BT=torch.ones(2))
        assert -found.gradient_BT.sum().item() == pytest.approx((2 / 4, 6 / 4)[step])
        own = ours(part, objective(aggregation="token_mean"), advantage_BT=torch.ones(1))
        assert -own.gradient_BT.sum().item() == pytest.approx(1.0)


def test_entropy_bonus_is_a_token_mean_whatever_the_loss():
    # Rows of 1 and 3 tokens, coefficient 1. TRL with `grpo`: 1 / 4 for every token. Here the bonus is one of the terms of a token and is
    # reduced with it: 1 / 2 and 1 / 6. With token_mean both are 1 / 4.
    batch = one_batch([[-1.0], [-1.0, -1.0, -1.0]], [0.0, 0.0])
    theirs = grpo(batch, loss_type="grpo", entropy_coef=1.0, advantage_BT=torch.zeros(2)).entropy_gradient_BT
    own = ours(batch, objective(entropy={"coef": 1.0}), advantage_BT=torch.zeros(2)).entropy_gradient_BT
    assert [-theirs[0, 0].item(), -theirs[1, 0].item()] == pytest.approx([1 / 4, 1 / 4])
    assert [-own[0, 0].item(), -own[1, 0].item()] == pytest.approx([1 / 2, 1 / 6])
    # And per micro-batch: split in two, TRL gives 1 / 2 and 1 / 6 itself.
    split = grpo(batch, parts=2, loss_type="dapo", entropy_coef=1.0, advantage_BT=torch.zeros(2)).entropy_gradient_BT
    assert [-split[0, 0].item(), -split[1, 0].item()] == pytest.approx([1 / 2, 1 / 6])


def test_empty_rows_count_as_sequences():
    # Two rows, one filtered out whole. TRL's mean over sequences divides by 2, so that filtering half of a batch halves the step; here a
    # mean is over the sequences that are trained, and the step is that of the other half alone.
    batch = one_batch([[-1.0, -1.0], [-1.0, -1.0]], [0.0, 0.0])
    theirs = grpo(batch, loss_type="grpo", mask_truncated_completions=True, cut=(1,), advantage_BT=torch.ones(2)).gradient_BT
    filtered = replace(batch, mask_BT=torch.tensor([[True, True], [False, False]]))
    own = ours(filtered, objective(), advantage_BT=torch.ones(2)).gradient_BT
    assert theirs.sum().item() == pytest.approx(-0.5)
    assert own.sum().item() == pytest.approx(-1.0)


def test_nan_in_padding_reaches_the_loss():
    # NaN * 0 = NaN: TRL multiplies by the mask. Padding holds finite numbers in its own trainer; here nothing is assumed of it.
    batch = one_batch([[-1.0], [-1.0, -2.0]], [0.0, 0.0])
    poisoned = replace(batch, logp_BT=torch.where(batch.mask_BT, batch.logp_BT, torch.nan))
    assert grpo(poisoned, loss_type="dapo", advantage_BT=torch.ones(2)).loss.isnan()
    clean = grpo(batch, loss_type="dapo", advantage_BT=torch.ones(2))
    own = ours(poisoned, objective(aggregation="token_mean"), advantage_BT=torch.ones(2))
    torch.testing.assert_close(own.loss, clean.loss, **EXACT)
    torch.testing.assert_close(own.gradient_BT, clean.gradient_BT, **EXACT)


# --- log-probabilities -----------------------------------------------------------------------------------------------------------------


def test_entropy_of_a_cut_distribution():
    # Logits 0, 0, -inf: entropy log 2. TRL: 0 * -inf = NaN; it never cuts the distribution that it scores, whatever the sampler cut.
    logits_NV = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert entropy_from_logits(logits_NV).isnan().all()
    own = logit_scores(torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([0]), Sampling(top_k=2))
    assert own.entropy_N.item() == pytest.approx(math.log(2))
    assert own.logp_N.item() == pytest.approx(-math.log(2))


def test_log_probabilities_of_bfloat16_logits():
    # Logits 4, 0 x 7: log p = 4 - log(e^4 + 7) = -0.12063. bfloat16 has 8 significant bits: near it numbers are 2^-11 = 5e-4 apart, and
    # log-softmax in it is off by 0.003, six of them. TRL's helper answers in the type of the logits, here in float32.
    logits_NV = torch.tensor([[4.0] + [0.0] * 7]).bfloat16()
    exact = 4 - math.log(math.exp(4) + 7)
    theirs = selective_log_softmax(logits_NV, torch.tensor([0]))
    own = logit_scores(logits_NV, torch.tensor([0]), Sampling()).logp_N
    assert (theirs.dtype, own.dtype) == (torch.bfloat16, torch.float32)
    assert abs(theirs.item() - exact) > 2e-4
    assert abs(own.item() - exact) < 1e-6


def test_defaults_of_trl():
    # The table of the documentation names them; a new release may not.
    found = defaults(GRPOConfig)
    assert (found["loss_type"], found["beta"], found["epsilon"], found["epsilon_high"]) == ("dapo", 0.0, 0.2, None)
    assert (found["use_bias_correction_kl"], found["scale_rewards"], found["mask_truncated_completions"]) == (True, "group", False)
    assert (found["vllm_importance_sampling_mode"], found["vllm_importance_sampling_clip_max"]) == ("sequence_mask", 3.0)
