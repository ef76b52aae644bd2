"""The metrics the doctor knows: what each means and when it moves. What other trainers call them is in names.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.doctor.entries import Tier


@dataclass(frozen=True, slots=True)
class Metric:
    """One column. Example: Metric("nats per token", Tier.LEADING, "entropy of the policy over trained tokens")"""

    unit: str
    tier: Tier
    meaning: str


_LEADING, _MIDDLE, _LAGGING = Tier.LEADING, Tier.MIDDLE, Tier.LAGGING
METRICS: Mapping[str, Metric] = {
    "entropy": Metric("nats/token", _LEADING, "entropy of the policy over trained tokens"),
    "turns": Metric("per episode", _LEADING, "assistant turns"),
    "calls": Metric("per episode", _LEADING, "tool calls"),
    "repeated_calls": Metric("share", _LEADING, "tool calls that repeat an earlier call of their episode word for word"),
    "malformed_calls": Metric("share", _LEADING, "tool calls that could not be parsed"),
    "turn_capped": Metric("share", _LEADING, "episodes ended by the most turns"),
    "duplicates": Metric("share", _LEADING, "completions equal to an earlier sibling of their group, token for token"),
    "repetition": Metric("share", _LEADING, "tokens of a completion inside a 4-gram that it has used before, mean over completions"),
    "zero_variance": Metric("share", _LEADING, "groups whose rewards are all equal, before any filter"),
    "all_right": Metric("share", _LEADING, "groups in which every reward is at the top"),
    "all_wrong": Metric("share", _LEADING, "groups in which every reward is 0 or below, at least one answer parsed"),
    "unanimous_partial": Metric("share", _LEADING, "groups whose rewards are all equal, neither at the top nor at 0"),
    "unanimous_unparseable": Metric("share", _LEADING, "groups in which no answer could be parsed"),
    "mixed": Metric("share", _LEADING, "groups whose rewards differ"),
    "reward_std": Metric("reward", _LEADING, "standard deviation over all rewards"),
    "survivors_median": Metric("per group", _LEADING, "rollouts of a group that are left after over-long and other masking"),
    "survivors_min": Metric("per group", _LEADING, "fewest rollouts left in a group"),
    "dropped": Metric("share", _LEADING, "rollouts left out of training by a masking flag (over-long, pivot, unscored, too few siblings)"),
    "kl": Metric("nats/token", _MIDDLE, "k3 estimate of KL to the reference"),
    "clip_fraction": Metric("share", _MIDDLE, "trained tokens beyond the ratio's bound"),
    "ratio_max": Metric("ratio", _MIDDLE, "largest probability ratio of a token, or of a response for sequence ratios"),
    "ratio_mean": Metric("ratio", _MIDDLE, "mean probability ratio"),
    "grad_norm": Metric("norm", _MIDDLE, "gradient norm before clipping"),
    "lr": Metric("rate", _MIDDLE, "learning rate of the step"),
    "loss": Metric("loss", _MIDDLE, "loss of the step, all terms"),
    "advantage_abs": Metric("advantage", _MIDDLE, "mean absolute advantage of the trained rollouts"),
    "mismatch_max": Metric("nats", _MIDDLE, "largest difference between sampler and trainer on one token before the update"),
    "mismatch_mean": Metric("nats", _MIDDLE, "mean difference between sampler and trainer"),
    "ess_mismatch": Metric("share", _MIDDLE, "effective share of tokens under exp(trainer - sampler)"),
    "ess_staleness": Metric("share", _MIDDLE, "effective share of tokens under exp(new - old)"),
    "staleness_mean": Metric("nats", _MIDDLE, "mean change of log-probability since the step's first update"),
    "version_lag": Metric("steps", _MIDDLE, "mean policy updates between drawing and training a rollout"),
    "left_out": Metric("share", _MIDDLE, "trained slots without gradient: clipped, out of band, mismatched, rejected or gated"),
    "starved": Metric("share", _MIDDLE, "trained slots left out by the mismatch correction: mismatched or rejected"),
    "cov_eligible": Metric("tokens", _MIDDLE, "tokens eligible for the covariance rule"),
    "length": Metric("tokens", _MIDDLE, "mean sampled tokens of a completion"),
    "length_p50": Metric("tokens", _MIDDLE, "median sampled tokens"),
    "length_p95": Metric("tokens", _MIDDLE, "95th percentile of sampled tokens"),
    "length_right": Metric("tokens", _MIDDLE, "mean sampled tokens of completions at the top reward"),
    "length_wrong": Metric("tokens", _MIDDLE, "mean sampled tokens of completions at reward 0 or below"),
    "tokens_per_correct": Metric("tokens", _MIDDLE, "sampled tokens per completion at the top reward"),
    "unparseable": Metric("share", _MIDDLE, "rollouts without an answer in the required form"),
    "parsed": Metric("share", _MIDDLE, "rollouts whose answer could be parsed"),
    "truncated": Metric("share", _MIDDLE, "rollouts cut by the token budget"),
    "left_unscored": Metric("rollouts", _LEADING, "rollouts of the step without a reward, which do not train"),
    "reward_none": Metric("rollouts", _LEADING, "rewards that were missing and counted as 0, in other trainers' logs"),
    "control": Metric("share", _MIDDLE, "rollouts that emitted a control token only the harness may write"),
    "errors": Metric("share", _MIDDLE, "rollouts on which the verifier itself failed"),
    "tokens": Metric("tokens", _MIDDLE, "trained tokens of the step"),
    "tokens_sampled": Metric("tokens", _MIDDLE, "sampled tokens of the rollouts that were trained, before any mask"),
    "tokens_forced": Metric("tokens", _MIDDLE, "tokens of trained rollouts written by tools or harness, which must not train"),
    "groups_kept": Metric("groups", _MIDDLE, "groups that carried signal"),
    "tries_per_kept": Metric("groups", _MIDDLE, "groups generated per group kept"),
    "weight_long_negative": Metric(
        "ratio", _MIDDLE, "loss weight of a response longer than the median against a shorter one, advantage below 0"
    ),
    "chosen_logp": Metric("nats/token", _MIDDLE, "log-probability of chosen responses (preference training)"),
    "chosen_reward": Metric("nats", _MIDDLE, "implicit reward of chosen responses"),
    "rejected_reward": Metric("nats", _MIDDLE, "implicit reward of rejected responses"),
    "accuracy": Metric("share", _LAGGING, "pairs ranked rightly (preference training)"),
    "token_accuracy": Metric("share", _MIDDLE, "demonstrated tokens that were the most likely one (SFT)"),
    "reverse_kl": Metric("nats/token", _MIDDLE, "sampled-token KL from student to teacher"),
    "reward_mean": Metric("reward", _LAGGING, "mean over scored rollouts, before any filter"),
    "reward_mixed": Metric("reward", _LAGGING, "mean reward over mixed groups only"),
    "reward_primary": Metric("reward", _LAGGING, "mean of the correctness channel, where the reward has several"),
    "heldout_mean": Metric("score", _LAGGING, "score on fixed held-out items, measured every few steps"),
    "heldout_n": Metric("items", _LAGGING, "items behind heldout_mean"),
    "heldout_parse_rate": Metric("share", _LAGGING, "held-out answers that could be parsed"),
    "heldout_truncated": Metric("share", _LAGGING, "held-out answers cut by the token budget"),
    "heldout_length": Metric("tokens", _LAGGING, "mean tokens of held-out answers"),
    "seconds.sample": Metric("s", _MIDDLE, "time of drawing and scoring"),
    "seconds.train": Metric("s", _MIDDLE, "time of the update"),
    "seconds.step": Metric("s", _MIDDLE, "time of a step of supervised or preference training"),
    "gpu_util": Metric("share", _MIDDLE, "busy share of the trainer's accelerator"),
    "seconds.checkpoint": Metric("s", _MIDDLE, "time of saving"),
    "seconds.peak_mib": Metric("MiB", _MIDDLE, "most memory that any process has taken so far"),
    "seconds.rss_mib": Metric("MiB", _MIDDLE, "memory held now by the first process"),
}
"""By the name under which a run of this package records it. Channels of a reward add channel_NAME_mean, channel_NAME_std and
channel_NAME_share, the part of the reward's variance that the channel brings (its covariance with the total)."""
