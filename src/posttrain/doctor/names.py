"""What other trainers call the metrics that the doctor knows, and where a like name means something else.

Names are compared in lower case and without the prefix under which a logger files them (train/, metrics/, ...). A name that is not listed
keeps its own: it is shown, and no entry of the catalog reads it. A wrong translation would be worse than none, so metrics that only sound
alike are in TRAPS, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunError
from posttrain.doctor.vocabulary import METRICS
from posttrain.runs.reading import load_mapping, load_yaml_mapping, plain


@dataclass(frozen=True, slots=True)
class Ours:
    """Our name of a metric, and ours = theirs * scale + shift.

    Example: Ours("seconds.peak_mib", 1024)  # theirs is in GiB
    """

    name: str
    scale: float = 1.0
    shift: float = 0.0

    def of(self, value: float) -> float:
        """Their figure in our unit."""
        return value * self.scale + self.shift


_GIB = 1024.0

EXACT: Mapping[str, Mapping[str, str | Ours]] = {
    "common": {
        "loss": "loss",
        "entropy": "entropy",
        "kl": "kl",
        "reward": "reward_mean",
        "reward_mean": "reward_mean",
        "mean_reward": "reward_mean",
        "reward/mean": "reward_mean",
        "rewards/mean": "reward_mean",
        "reward_std": "reward_std",
        "reward/std": "reward_std",
        "grad_norm": "grad_norm",
        "gradient_norm": "grad_norm",
        "learning_rate": "lr",
        "lr": "lr",
        "clip_fraction": "clip_fraction",
        "clipfrac": "clip_fraction",
        "clip_frac": "clip_fraction",
        "response_length": "length",
        "completion_length": "length",
        "mean_length": "length",
    },
    "trl": {
        "completions/mean_length": "length",
        "completions/clipped_ratio": "truncated",
        "clip_ratio/region_mean": "clip_fraction",
        "clip_ratio": "clip_fraction",
        "frac_reward_zero_std": "zero_variance",
        "sampling/sampling_logp_difference/mean": "mismatch_mean",
        "sampling/sampling_logp_difference/max": "mismatch_max",
        "step_time": "seconds.step",
        "mean_token_accuracy": "token_accuracy",
        "rewards/chosen": "chosen_reward",
        "rewards/rejected": "rejected_reward",
        "rewards/accuracies": "accuracy",
        "rewards/margins": "margin",
        "policy/entropy_avg": "entropy",
        "policy/clipfrac_avg": "clip_fraction",
        "objective/scores": "reward_mean",
        "val/ratio": "ratio_mean",
    },
    "verl": {
        "critic/score/mean": "reward_mean",
        "critic/rewards/mean": "reward_mean",
        "actor/entropy": "entropy",
        "actor/entropy_loss": "entropy",
        "actor/kl_loss": "kl",
        "actor/pg_clipfrac": "clip_fraction",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
        "actor/pg_loss": "loss",
        "response_length/mean": "length",
        "response_length/clip_ratio": "truncated",
        "num_turns/mean": "turns",
        "perf/max_memory_allocated_gb": Ours("seconds.peak_mib", _GIB),
        "perf/cpu_memory_used_gb": Ours("seconds.rss_mib", _GIB),
        "timing_s/gen": "seconds.sample",
        "timing_s/update_actor": "seconds.train",
        "timing_s/save_checkpoint": "seconds.checkpoint",
        "timing_s/step": "seconds.step",
    },
    "openrlhf": {
        "response_length": "length",
        "policy_loss": "loss",
        "actor_loss": "loss",
        "entropy_loss": "entropy",
        "ppo_clip_ratio": "clip_fraction",
        "actor_lr": "lr",
        "actor_grad_norm": "grad_norm",
        "truncated": "truncated",
        "chosen_reward": "chosen_reward",
        "reject_reward": "rejected_reward",
        "acc": "accuracy",
        "timing/generation": "seconds.sample",
        "timing/ppo_train": "seconds.train",
    },
    "prime-rl": {
        "reward/all/mean": "reward_mean",
        "reward/all/std": "reward_std",
        "completion_len/all/mean": "length",
        "decode_len/all/mean": "length",
        "is_truncated/all/mean": "truncated",
        "is_truncated/mean": "truncated",
        "num_turns/all/mean": "turns",
        "solve_all/all": "all_right",
        "solve_none/all": "all_wrong",
        "batch/solve_all": "all_right",
        "batch/solve_none": "all_wrong",
        "batch/effective_batch_size": "mixed",
        "effective_batch_size/all": "mixed",
        "loss/mean": "loss",
        "entropy/mean": "entropy",
        "entropy/all/mean": "entropy",
        "optim/lr": "lr",
        "optim/grad_norm": "grad_norm",
        "perf/peak_memory": Ours("seconds.peak_mib", _GIB),
        "time/generate_completions": "seconds.sample",
        "time/forward_backward": "seconds.train",
        "time/save_ckpt": "seconds.checkpoint",
        "time/step": "seconds.step",
        "teacher_kl/mean": "reverse_kl",
    },
    "slime": {
        "rollout/raw_reward": "reward_mean",
        "rollout/rewards": "reward_mean",
        "rollout/response_len/mean": "length",
        "rollout/response_lengths": "length",
        "rollout/truncated_ratio": "truncated",
        "rollout/truncated": "truncated",
        "rollout/repetition_frac": "repetition",
        "entropy_loss": "entropy",
        "kl_loss": "kl",
        "pg_clipfrac": "clip_fraction",
        "train_rollout_logprob_abs_diff": "mismatch_mean",
        "lr-pg_0": "lr",
        "perf/rollout_time": "seconds.sample",
        "perf/actor_train_time": "seconds.train",
        "perf/step_time": "seconds.step",
    },
    "nemo-rl": {
        "approx_entropy": "entropy",
        "kl_penalty": "kl",
        "mean_gen_tokens_per_sample": "length",
        "gen_tokens_lengths/mean": "length",
        "probs_ratio": "ratio_mean",
        "probs_ratio_max": "ratio_max",
        "avg_trajectory_age": "version_lag",
        "truncation_rate": "truncated",
        "validation/accuracy": "heldout_mean",
        "validation/avg_length": "heldout_length",
        "timing/train/generation": "seconds.sample",
        "timing/train/policy_training": "seconds.train",
        "timing/train/checkpointing": "seconds.checkpoint",
        "timing/train/total_step_time": "seconds.step",
    },
}
"""Trainer to its names, each after taking off PREFIXES. Of several names for one metric in a log the first of this table is used."""

PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"val-core/.+/(?:acc|reward|score)/mean@\d+", "heldout_mean"),
        (r"val-core/.+/mean@\d+", "heldout_mean"),
        (r"val/(?:test_)?score/.+", "heldout_mean"),
        (r"eval/(?:reward|score|accuracy|acc)(?:/mean)?", "heldout_mean"),
        (r"eval/.+/(?:avg@\d+|pass@1)", "heldout_mean"),
        (r"eval/.+_pass1", "heldout_mean"),
        (r"eval/completions/clipped_ratio", "heldout_truncated"),
        (r"eval/completions/mean_length", "heldout_length"),
        (r"eval/.+/truncated_ratio", "heldout_truncated"),
        (r"eval/(?P<name>loss|entropy|mean_token_accuracy|kl|reward_std)", "heldout_{name}"),
        (r"eval/rewards/accuracies", "heldout_accuracy"),
        (r"rewards/(?P<name>[^/]+)/(?P<stat>mean|std)", "channel_{name}_{stat}"),
        (r"rewards/(?P<name>[^/]+)", "channel_{name}_mean"),
    )
)
"""Names with parts of their own, tried in order on the name in lower case (eval_ counts as eval/)."""

TRAPS: Mapping[str, str] = {
    "actor/ppo_kl": "drift from the step's own first update, with sign; no KL to a reference",
    "ppo_kl": "drift from the step's own first update, with sign; no KL to a reference",
    "policy/approxkl_avg": "drift from the step's own first update; no KL to a reference",
    "objective/kl": "summed over a response; kl is per token",
    "objective/entropy": "summed over a response; entropy is per token",
    "logps/chosen": "summed over a response; chosen_logp is per token",
    "logps/rejected": "summed over a response",
    "num_tokens": "all tokens since the run began; tokens is of one step",
    "prompt_length/clip_ratio": "prompts that reach the cap; truncated is of completions",
    "training/rollout_probs_diff_max": "a difference of probabilities; mismatch_max is of log-probabilities",
    "training/rollout_probs_diff_mean": "a difference of probabilities; mismatch_mean is of log-probabilities",
    "token_mult_prob_error": "a ratio around 1; mismatch_mean is in nats",
    "mismatch_kl/mean": "a KL; mismatch_mean is the mean absolute difference",
    "mismatch_kl/all/mean": "a KL; mismatch_mean is the mean absolute difference",
    "seq_len/mean": "prompt and completion together; length is of the completion",
    "seq_len/all/mean": "prompt and completion together; length is of the completion",
    "critic/advantages/mean": "signed; advantage_abs is of magnitudes",
    "train_loss": "mean over the whole run, written at its end",
    "critic/grad_norm": "of the value function",
    "critic/lr": "of the value function",
}
"""Names that sound like one of ours and mean something else; they keep their own."""
PREFIXES = ("train/", "training/", "metrics/", "global/")
STEP_NAMES = (
    "step",
    "global_step",
    "train/global_step",
    "training/global_step",
    "trainer/global_step",
    "train/step",
    "rollout/step",
    "iteration",
    "steps",
    "Step",
    "_step",
)
"""Where a row says which step it is of, best first; "_step" is a logger's own counter."""
_ALL: Mapping[str, tuple[int, Ours]] = {
    theirs: (rank, ours if isinstance(ours, Ours) else Ours(ours))
    for rank, (theirs, ours) in reversed(list(enumerate(pair for table in EXACT.values() for pair in table.items())))
}


def translated(columns: Iterable[str], user: Mapping[str, str] | None = None) -> dict[str, Ours]:
    """Their names to ours. Of two that mean the same metric, the user's choice or else the first of the tables has it.

    Example: translated(["completions/clipped_ratio", "foo"])  # {"completions/clipped_ratio": Ours("truncated"), "foo": Ours("foo")}
    """
    columns = list(dict.fromkeys(columns))
    user = {name.lower(): ours for name, ours in (user or {}).items()}
    wanted = {column: _one(column, user) for column in columns}
    found: dict[str, Ours] = {}
    taken: set[str] = set()
    for column in sorted(columns, key=lambda column: wanted[column][0]):
        ours = wanted[column][1]
        if ours.name in taken:
            ours = Ours(column)
        while ours.name in taken:  # their own name is one of ours, and another column has it
            ours = Ours(f"their {ours.name}")
        taken.add(ours.name)
        found[column] = ours
    return {column: found[column] for column in columns}


_USER, _SAME, _PATTERN, _OWN = -2, -1, 10_000, 1_000_000
"""Who has a name that several want: the user's choice, a column called so itself, the tables, the patterns; last what keeps its own."""


def _one(column: str, user: Mapping[str, str]) -> tuple[int, Ours]:
    """Rank (lower goes first) and translation of one name."""
    name, bare = _forms(column)
    for form in (name, bare):
        if form in user:
            return _USER, Ours(user[form])
    if column in METRICS:
        return _SAME, Ours(column)
    for form in (name, bare):
        if form in _ALL:
            return _ALL[form]
    spelled = re.sub(r"^(?:eval|test|valid|validation)_(?!pass)", "eval/", bare)
    for rank, (pattern, ours) in enumerate(PATTERNS):
        if match := pattern.fullmatch(spelled):
            return _PATTERN + rank, Ours(ours.format(**match.groupdict()))
    return _OWN, Ours(column)


def _forms(column: str) -> tuple[str, str]:
    """A name as it is compared, with and without a logger's prefix."""
    name = column.lower().rpartition(" - ")[2]  # a chart's export says RUN - METRIC
    return name, next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


def look_alike(column: str) -> str | None:
    """Why a column is not the metric of ours that it sounds like; None when it sounds like none.

    Example: look_alike("actor/ppo_kl")  # "drift from the step's own first update, with sign; no KL to a reference"
    """
    return next((TRAPS[form] for form in _forms(column) if form in TRAPS), None)


def load_names(path: str | Path) -> dict[str, str]:
    """A user's own mapping from a YAML or JSON file: their name to ours. Raises RunError naming file and entry.

    Example file: {"my/acc": "heldout_mean"}
    """
    path = Path(path)
    value, problem = load_mapping(path) if path.suffix == ".json" else load_yaml_mapping(path)
    if problem is None:
        problem = next((f"'{plain(theirs, 60)}' is mapped to {plain(ours, 60)}, which is no name" for theirs, ours in _odd(value)), None)
    if problem is not None:
        raise RunError(f"{plain(path)}: {problem}; write one line per metric: THEIR_NAME: our_name")
    return value


def _odd(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(theirs, ours) for theirs, ours in value.items() if not isinstance(ours, str) or not ours or not ours.isprintable()]
