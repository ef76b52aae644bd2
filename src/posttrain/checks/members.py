"""What is certified, by name: every named algorithm, and every member of every axis with the variants that have code of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.surrogates import SURROGATES


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. `kind` decides which laws apply; `setting` is data for the class of that axis.

    Example: Member("limit", {"kind": "clip", "dual": 3.0}).
    """

    kind: str
    setting: Mapping[str, Any]


MEMBERS: dict[str, Member] = {
    **{name: Member("algorithm", {"kind": name}) for name in ALGORITHMS},
    "advantage:none": Member("advantage", {"kind": "none"}),
    "advantage:mean": Member("advantage", {"kind": "mean"}),
    "advantage:mean_std": Member("advantage", {"kind": "mean_std"}),
    "advantage:mean_std.sample": Member("advantage", {"kind": "mean_std", "ddof": 1}),
    "advantage:leave_one_out": Member("advantage", {"kind": "leave_one_out"}),
    "advantage:median_mad": Member("advantage", {"kind": "median_mad"}),
    "advantage:max_rl": Member("advantage", {"kind": "max_rl"}),
    "advantage:pass_at_k": Member("advantage", {"kind": "pass_at_k", "k": 2}),
    "advantage:batch": Member("advantage", {"kind": "batch"}),
    "advantage:channels": Member("advantage", {"kind": "channels"}),
    "advantage:critic": Member("advantage", {"kind": "critic"}),
    "advantage:critic.lam": Member("advantage", {"kind": "critic", "lam": 0.9}),
    "advantage:teacher": Member("advantage", {"kind": "teacher"}),
    "advantage:teacher.clip": Member("advantage", {"kind": "teacher", "clip": 1.0}),
    "ratio:none": Member("ratio", {"ratio": "none"}),
    "ratio:token": Member("ratio", {"ratio": "token"}),
    "ratio:token.behaviour": Member("ratio", {"ratio": "token", "against": "behaviour"}),
    "ratio:sentence": Member("ratio", {"ratio": "sentence"}),
    "ratio:sequence": Member("ratio", {"ratio": "sequence", "aggregation": "seq_mean_token_mean"}),
    "limit:none": Member("limit", {"kind": "none"}),
    "limit:clip": Member("limit", {"kind": "clip"}),
    "limit:clip.dual": Member("limit", {"kind": "clip", "dual": 3.0}),
    "limit:clip.cap": Member("limit", {"kind": "clip", "cap": 2.0}),
    "limit:clip.cap_weight": Member("limit", {"kind": "clip", "cap": 2.0, "outer": "weight"}),
    "limit:cispo": Member("limit", {"kind": "cispo", "high": 1.0}),
    "limit:cispo.low": Member("limit", {"kind": "cispo", "low": 0.5, "high": 1.0}),
    "limit:band": Member("limit", {"kind": "band"}),
    "limit:band.signed": Member("limit", {"kind": "band", "lower_negative": 0.5, "upper_negative": 2.0}),
    "limit:squared": Member("limit", {"kind": "squared"}),
    "limit:squared_sequence": Member("limit", {"kind": "squared_sequence"}),
    "limit:divergence": Member("limit", {"kind": "divergence", "threshold": 0.02}),
    "limit:divergence.kl": Member("limit", {"kind": "divergence", "measure": "kl", "threshold": 0.01}),
    "limit:clip_cov": Member("limit", {"kind": "clip_cov", "fraction": 0.3, "lower": 0.1}),
    "limit:kl_cov": Member("limit", {"kind": "kl_cov", "fraction": 0.3}),
    **{f"surrogate:{name}": Member("surrogate", {"surrogate": name}) for name in SURROGATES},
    "correction:none": Member("correction", {"kind": "none"}),
    "correction:truncate": Member("correction", {"kind": "truncate"}),
    "correction:truncate.sequence": Member("correction", {"kind": "truncate", "level": "sequence"}),
    "correction:mask": Member("correction", {"kind": "mask"}),
    "correction:mask.sequence": Member(
        "correction", {"kind": "mask", "lower": 0.5, "upper": 2.0, "sequence_lower": 0.996, "sequence_upper": 1.001, "weight": "one"}
    ),
    "correction:decoupled": Member("correction", {"kind": "decoupled"}),
    "correction:decoupled.cap": Member("correction", {"kind": "decoupled", "cap": 1.5}),
    "correction:binary_kl": Member("correction", {"kind": "binary_kl"}),
    "kl:k1": Member("kl", {"estimator": "k1"}),
    "kl:k2": Member("kl", {"estimator": "k2"}),
    "kl:k3": Member("kl", {"estimator": "k3"}),
    "kl:rho_k3": Member("kl", {"estimator": "rho_k3"}),
    "kl:full": Member("kl", {"estimator": "full"}),
    "kl:top_k": Member("kl", {"estimator": "top_k"}),
    "entropy:bonus": Member("entropy", {"coef": 0.1}),
    "aggregation:token_mean": Member("aggregation", {"how": "token_mean"}),
    "aggregation:seq_mean_token_mean": Member("aggregation", {"how": "seq_mean_token_mean"}),
    "aggregation:seq_mean_token_sum": Member("aggregation", {"how": "seq_mean_token_sum"}),
    "aggregation:constant": Member("aggregation", {"how": "constant"}),
    "aggregation:prompt_mean": Member("aggregation", {"how": "prompt_mean"}),
}
"""Everything that `posttrain certify` measures, in the order in which it is shown."""
