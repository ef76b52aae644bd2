"""Named algorithms as diffs from GRPO. Data only: `objective.py` turns a diff into a checked setting, `explain.py` prints it.

`diff` is laid over GRPO_AXES axis by axis. `loop` names settings outside the objective that belong to the method. `source` says where the
numbers come from; "ours" marks a number that no source gives. The order is that of the family: baselines first, then limits, then
corrections.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.errors import ConfigError

GRPO_AXES: dict[str, Any] = {
    "advantage": {"kind": "mean_std", "ddof": 0, "eps": 1e-6},
    "ratio": "token",
    "against": "old",
    "limit": {"kind": "clip", "low": 0.2, "high": 0.2},
    "correction": {"kind": "none"},
    "aggregation": "seq_mean_token_mean",
    "kl": {"estimator": "k3", "placement": "loss", "coef": 0.04},
    "entropy": {"coef": 0.0},
    "overlong": {"kind": "none"},
    "repetition": {"coef": 0.0},
    "drawing": {"kind": "siblings"},
}
"""GRPO as published (Shao et al. 2024): everything else is a difference from this."""

NO_KL = {"estimator": "none"}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One named method.

    Example: Algorithm("dr_grpo", "Dr. GRPO", diff={"advantage": "mean", "aggregation": "constant", "kl": {"estimator": "none"}}, ...)
    """

    name: str
    title: str
    targets: str
    """The failure it was made for."""
    source: str
    """Where the axes and the numbers come from."""
    diff: Mapping[str, Any] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the loop that belong to the method, e.g. {"tries": 2.0} for dynamic sampling."""
    avoid: tuple[str, ...] = ()
    """What it must not be combined with, and why."""


_FAMILY = (
    Algorithm(
        "default",
        "our default",
        targets="a first run on a small dense model: no length bias in a batch, room for rare tokens, a KL that descends what it says",
        source="spec/ladder-at-100m.md section 3 for the bounds; aggregation, KL estimator and coefficient measured in README.md",
        diff={"limit": {"high": 0.28}, "aggregation": "token_mean", "kl": {"estimator": "k2", "coef": 0.005}},
        loop={"tries": 2.0},
        avoid=("mixtures of experts: token ratios compare two sub-networks when a route flips; use gspo",),
    ),
    Algorithm(
        "grpo",
        "GRPO",
        targets="the cost of a critic: siblings are the baseline",
        source="Shao et al. 2024 (DeepSeekMath); spec/recipes-of-the-labs.md G-24; population std as in its box",
        loop={"tries": 1.0},
        avoid=(
            "groups of 1: the advantage is always 0",
            "long answers of uneven length: 1/|y| dilutes the penalty of long wrong answers; use dr_grpo or dapo",
        ),
    ),
    Algorithm(
        "reinforce",
        "REINFORCE",
        targets="nothing: the unbiased reference that all others are measured against",
        source="Williams 1992; spec/recipes-of-the-labs.md G-21",
        diff={"advantage": "none", "ratio": "none", "limit": "none", "aggregation": "seq_mean_token_sum", "kl": NO_KL},
        avoid=("several updates per sampling phase: it has no ratio, so every update after the first is off-policy and uncorrected",),
    ),
    Algorithm(
        "rloo",
        "RLOO",
        targets="a baseline that contains the sample it judges: the gradient of the group mean is (G - 1) / G too small",
        source="Ahmadian et al. 2024; KL in the reward as there, coefficient 0.05 from its experiments' range",
        diff={
            "advantage": "leave_one_out",
            "ratio": "none",
            "limit": "none",
            "aggregation": "seq_mean_token_sum",
            "kl": {"estimator": "k1", "placement": "reward", "coef": 0.05},
        },
        avoid=("several updates per sampling phase: no ratio",),
    ),
    Algorithm(
        "reinforce++",
        "REINFORCE++",
        targets="baselines from few siblings: the whole step normalises, so one completion per prompt is enough",
        source="Hu et al. 2025; clip and KL-in-reward as there",
        diff={
            "advantage": "batch",
            "aggregation": "token_mean",
            "kl": {"estimator": "k1", "placement": "reward", "coef": 0.01},
        },
        avoid=("steps of mixed difficulty without within=group: easy prompts look good whatever the policy did",),
    ),
    Algorithm(
        "ppo",
        "PPO with a critic",
        targets="credit inside a response, and rollouts without siblings",
        source="Schulman et al. 2017; InstructGPT beta 0.02; lambda = gamma = 1 after spec/recipes-of-the-labs.md G-23, G-35",
        diff={
            "advantage": "critic",
            "aggregation": "token_mean",
            "kl": {"estimator": "k1", "placement": "reward", "coef": 0.02},
        },
        loop={"critic.warmup": 10},
        avoid=("lam = 0.95: considerably worse than GRPO on MATH", "little memory: the critic doubles networks and optimizer state"),
    ),
    Algorithm(
        "dr_grpo",
        "Dr. GRPO",
        targets="answers that grow longer while accuracy does not: 1/|y| and the std both tilt the gradient",
        source="Liu et al. 2025; spec/recipes-of-the-labs.md G-26",
        diff={"advantage": "mean", "aggregation": "constant", "kl": NO_KL},
        avoid=("clip_cov: without the std its covariance bound of 1.0 is out of reach (spec/book-2 item 62b)",),
    ),
    Algorithm(
        "dapo",
        "DAPO",
        targets="entropy collapse (clip-higher), wasted unanimous groups (dynamic sampling), diluted long answers, cut-off noise",
        source="Yu et al. 2025; bounds 0.2 / 0.28; ramp over the last 20% of the budget as 4,096 of 20,480",
        diff={"limit": {"high": 0.28}, "aggregation": "token_mean", "kl": NO_KL, "overlong": "ramp"},
        loop={"tries": 3.0},
        avoid=("a budget that most answers fill: the ramp then punishes length, not rambling",),
    ),
    Algorithm(
        "gspo",
        "GSPO",
        targets="noisy token ratios and expert flips: one ratio per response",
        source="Zheng et al. 2025; bounds 3e-4 / 4e-4; spec/book-3 C2-C5",
        diff={"ratio": "sequence", "limit": {"low": 3e-4, "high": 4e-4}, "kl": NO_KL},
        loop={"minibatches": 4},
        avoid=(
            "token-scale bounds: they never bind (refused)",
            "token_mean or constant aggregation: weights a response by its length (refused)",
            "one update per phase: the ratio is exactly 1 and the method is GRPO",
        ),
    ),
    Algorithm(
        "cispo",
        "CISPO",
        targets="rare tokens (reflection, turns of thought) that the clip silences after the first update",
        source="MiniMax-M1 2025; upper cap only; the cap of 5 is ours, of the order used by public implementations",
        diff={"limit": {"kind": "cispo"}, "aggregation": "token_mean", "kl": NO_KL},
        avoid=("a KL in the loss on top: the source has none, and the cap alone bounds the weight",),
    ),
    Algorithm(
        "lpo",
        "LPO",
        targets="token ratios too noisy, sequence ratios too coarse: one ratio per sentence",
        source="spec/recipes-of-the-labs.md G-29; aggregation not stated there; bounds ours: 0.2 / sqrt(20), sentences of about 20 tokens",
        diff={"ratio": "sentence", "limit": {"low": 0.045, "high": 0.06}, "kl": NO_KL},
        avoid=("text without sentence ends: the whole response is one sentence, and the method is GSPO with wide bounds",),
    ),
    Algorithm(
        "kimi_k1.5",
        "Kimi k1.5",
        targets="clips and ratios altogether: a squared penalty holds the policy near the one that sampled",
        source="spec/recipes-of-the-labs.md G-30; tau not given there, ours",
        diff={"advantage": "mean", "limit": {"kind": "squared_sequence"}, "aggregation": "seq_mean_token_sum", "kl": NO_KL},
        avoid=("a length penalty from the first step: it slows learning (G-41c)",),
    ),
    Algorithm(
        "kimi_k2.5",
        "Kimi K2.5 / K3",
        targets="tokens far from the old policy, whatever the sign of their advantage",
        source="spec/recipes-of-the-labs.md G-30, T46; band and omega not given there, ours",
        diff={"advantage": "mean", "limit": {"kind": "squared"}, "aggregation": "token_mean", "kl": NO_KL},
        avoid=("a narrow band with many updates per phase: whole responses fall silent; watch fate_out_of_band",),
    ),
    Algorithm(
        "dppo",
        "DPPO",
        targets="ratio clips that silence rare tokens and let common ones move far",
        source="Qi et al. 2026 (Rethinking the Trust Region in LLM RL), binary total variation; threshold ours",
        diff={"limit": {"kind": "divergence"}, "aggregation": "token_mean", "kl": NO_KL, "against": "behaviour"},
        avoid=("a correction for mismatch: the divergence is already measured against the sampler (refused)",),
    ),
    Algorithm(
        "maxrl",
        "max-RL",
        targets="prompts with low success: weighs them as the log-likelihood of success would",
        source="expected gradient derived in advantages.py: grad p * (1 - (1 - p)^(G - 1)) / p",
        diff={"advantage": "max_rl", "aggregation": "token_mean", "kl": NO_KL},
        avoid=("negative rewards: the mean must be a success rate",),
    ),
    Algorithm(
        "passk",
        "pass@k policy gradient",
        targets="sharpening: pass@1 rises while pass@k falls",
        source="Walder and Karkhanis 2025; unbiased for the best of k (objectives/advantages.py)",
        diff={"advantage": "pass_at_k", "aggregation": "token_mean", "kl": NO_KL},
        avoid=("k near the group size: few subsets, high variance",),
    ),
    Algorithm(
        "mc_grpo",
        "MC-GRPO",
        targets="noisy means of tiny groups (2 to 4 siblings)",
        source="MC-GRPO 2026 (arXiv 2601.22582): median and MAD, one more sibling than trained",
        diff={"advantage": "median_mad"},
        loop={"siblings": 5},
        avoid=("even group sizes: no sibling sits on the median, and none is dropped", "0/1 rewards in large groups: the MAD is 0 or 1"),
    ),
    Algorithm(
        "gdpo",
        "GDPO (trap)",
        targets="channels of different scale; kept as a negative control",
        source="spec/book-2 items 75-77: four variants, none beat the scalar reward",
        diff={"advantage": "channels"},
        avoid=("correlated channels: a cost of 0.05 cancels a success of 1 exactly (G = 2)",),
    ),
    Algorithm(
        "s_grpo",
        "S-GRPO",
        targets="overthinking: one chain cut at several places, an answer asked for at each, early correct ones rewarded most",
        source="S-GRPO 2025 (arXiv 2505.07686)",
        diff={"drawing": "early_exit"},
        avoid=("answers without reasoning before them: there is nothing to cut",),
    ),
    Algorithm(
        "grpo++",
        "GRPO++",
        targets="entropy that leaks through a few confident, rewarded tokens: Clip-Cov, clip-higher and a small KL",
        source="spec/book-2 items 57-61: 0.001 / 0.6 / 5.0 is the later recipe, 0.0002 / 1 / 5 the original run",
        diff={
            "limit": {"kind": "clip_cov", "low": 0.2, "high": 0.28, "fraction": 0.001, "lower": 0.6, "upper": 5.0},
            "aggregation": "token_mean",
            "kl": {"estimator": "k2", "coef": 0.001},
        },
        avoid=("low entropy with mean-only advantages: nothing is eligible, and the gate is inert (alarm clip_cov_inert)",),
    ),
    Algorithm(
        "mai",
        "MAI",
        targets="gradient spikes on the branch that the clip leaves open, and entropy that drifts",
        source="spec/recipes-of-the-labs.md G-32, T46; entropy target 0.3; cap 2 and the step size are ours",
        diff={
            "limit": {"low": 0.2, "high": 0.2, "cap": 2.0, "steer": {"entropy": 0.3}},
            "aggregation": "token_mean",
            "kl": NO_KL,
        },
        loop={"siblings": 128, "minibatches": 5},
        avoid=("an entropy bonus: two controllers of one quantity (refused)",),
    ),
    Algorithm(
        "mimo",
        "MiMo-V2.6",
        targets="asynchronous rollouts of very uneven length: one vote per token within a prompt, bounds by the sign of the advantage",
        source="spec/recipes-of-the-labs.md G-33; bounds are retuned in training there, ours are fixed",
        diff={
            "against": "behaviour",
            "limit": {"kind": "band", "lower": 0.8, "upper": 1.28, "lower_negative": 0.8, "upper_negative": 2.0},
            "aggregation": "prompt_mean",
            "kl": NO_KL,
        },
        avoid=("a correction for mismatch: the ratio is already against the sampler (refused)",),
    ),
    Algorithm(
        "icepop",
        "IcePop",
        targets="training-inference mismatch: tokens on which the two engines disagree",
        source="spec/recipes-of-the-labs.md G-55; band [0.5, 5]",
        diff={"correction": {"kind": "mask", "lower": 0.5, "upper": 5.0}},
        avoid=(
            "judging the mismatch by the masked share alone: a fixed band masks fewer tokens while the gap widens; watch mismatch_mean",
        ),
    ),
    Algorithm(
        "mis_po",
        "MIS-PO",
        targets="off-policy rollouts without ratio noise: what passes two bands counts as on-policy",
        source="spec/recipes-of-the-labs.md G-31: token band [0.5, 2], sequence band [0.996, 1.001], weight 1",
        diff={
            "advantage": "critic",
            "ratio": "none",
            "limit": "none",
            "correction": {"kind": "mask", "lower": 0.5, "upper": 2.0, "sequence_lower": 0.996, "sequence_upper": 1.001, "weight": "one"},
            "aggregation": "token_mean",
            "kl": NO_KL,
        },
        loop={"critic.warmup": 10},
        avoid=("stale rollouts: the sequence band then rejects nearly everything; watch fate_rejected",),
    ),
    Algorithm(
        "areal",
        "AReaL decoupled PPO",
        targets="rollouts several versions old: a fixed weight for what happened before the phase, a clip for what happens in it",
        source="spec/recipes-of-the-labs.md G-54, T16",
        diff={"correction": {"kind": "decoupled"}, "aggregation": "token_mean", "kl": NO_KL},
        avoid=("one update per phase on fresh rollouts: weight and ratio are both 1",),
    ),
    Algorithm(
        "sao",
        "SAO (GLM-5.2)",
        targets="rollouts that split into sub-traces, so that siblings no longer compare",
        source="spec/recipes-of-the-labs.md G-34: critic per rollout, ratio to the sampler, mask outside the band",
        diff={
            "advantage": "critic",
            "against": "behaviour",
            "limit": {"kind": "band", "lower": 0.8, "upper": 1.28},
            "aggregation": "token_mean",
            "kl": NO_KL,
        },
        loop={"critic.warmup": 10},
        avoid=("a correction for mismatch: the ratio is already against the sampler (refused)",),
    ),
)

ALGORITHMS: dict[str, Algorithm] = {entry.name: entry for entry in _FAMILY}


def algorithm(name: str) -> Algorithm:
    """The algorithm called `name`, in any spelling of case, spaces, dots and dashes; ConfigError with the nearest name."""
    spelled = {_plain(entry.name): entry for entry in _FAMILY} | {_plain(entry.title): entry for entry in _FAMILY}
    found = spelled.get(_plain(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(_plain(name), spelled, n=1, cutoff=0.5)
    hint = f"did you mean '{spelled[near[0]].name}'?" if near else f"known: {', '.join(ALGORITHMS)}"
    raise ConfigError(f"unknown algorithm '{name}'; {hint}")


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum() or character == "+")
