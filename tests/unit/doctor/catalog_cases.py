"""One sick frame per entry of the catalog that has signs: what is changed against a healthy one, and which entries it makes suspect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from catalog_frames import around, frame, ramp, seldom, step, wave

from posttrain.doctor.frame import Frame

FLAT: dict[str, Any] = {"reward_mean": around(0.4, 0.01), "heldout_mean": seldom(around(0.4, 0.004))}
"""A reward and a held-out score that do not move."""
ALL_WRONG: dict[str, Any] = {
    "reward_mean": 0.0,
    "reward_std": 0.0,
    "zero_variance": 1.0,
    "mixed": 0.0,
    "all_wrong": 1.0,
    "all_right": 0.0,
    "reward_mixed": None,
    "grad_norm": 1e-3,
    "heldout_mean": seldom(0.0),
}
"""Nothing is ever right."""
COLLAPSE: dict[str, Any] = {
    "entropy": ramp(0.42, 0.03, 5, 25, 0.002),
    "duplicates": ramp(0.1, 0.87, 5, 25),
    "zero_variance": ramp(0.2, 0.98, 10, 25),
    "mixed": ramp(0.8, 0.02, 10, 25),
    "all_right": ramp(0.1, 0.4, 10, 25),
    "all_wrong": ramp(0.1, 0.58, 10, 25),
    "reward_mean": ramp(0.4, 0.36, 10, 25, 0.005),
    "heldout_mean": seldom(around(0.36, 0.003)),
}
LATE: dict[str, Any] = {
    "entropy": ramp(0.42, 0.03, 50, 10, 0.002),
    "zero_variance": ramp(0.2, 0.98, 50, 8),
    "mixed": ramp(0.8, 0.02, 50, 8),
    "reward_mean": lambda t: (0.4 + 0.002 * t if t < 50 else max(0.15, 0.5 - 0.04 * (t - 50))) + wave(t, 0.005),
    "lr": 1e-5,
    "heldout_mean": seldom(around(0.42, 0.003)),
}
SPARSE: dict[str, Any] = {
    "zero_variance": around(0.85, 0.04),
    "mixed": around(0.15, 0.04),
    "all_wrong": around(0.85, 0.04),
    "all_right": 0.0,
    "reward_mean": ramp(0.05, 0.08, 0, 70, 0.005),
    "reward_std": around(0.25, 0.02),
    "heldout_mean": seldom(ramp(0.02, 0.06, 0, 70, 0.002)),
}
SOLVED: dict[str, Any] = {
    "reward_mean": ramp(0.5, 0.97, 0, 40, 0.003),
    "reward_std": ramp(0.5, 0.15, 0, 40, 0.005),
    "all_right": ramp(0.1, 0.8, 0, 40, 0.02),
    "all_wrong": ramp(0.1, 0.0, 0, 20),
    "zero_variance": ramp(0.2, 0.8, 0, 40, 0.02),
    "mixed": ramp(0.8, 0.2, 0, 40, 0.02),
    "heldout_mean": seldom(ramp(0.5, 0.95, 0, 40, 0.003)),
}
SHARPENS: dict[str, Any] = {
    "entropy": ramp(0.2, 0.03, 0, 40, 0.003),
    "reward_mean": ramp(0.4, 0.85, 0, 70, 0.01),
    "heldout_mean": seldom(ramp(0.4, 0.8, 0, 70, 0.004)),
}
EXPLODES: dict[str, Any] = {
    "entropy": ramp(0.5, 5.0, 20, 30, 0.02),
    "reward_mean": ramp(0.45, 0.2, 22, 30, 0.005),
    "heldout_mean": seldom(ramp(0.4, 0.3, 22, 30, 0.004)),
}
HACKED: dict[str, Any] = {
    "reward_mean": ramp(0.3, 0.8, 0, 70, 0.01),
    "heldout_mean": seldom(ramp(0.5, 0.1, 10, 50, 0.004), 4),
    "heldout_n": seldom(400.0, 4),
}
CUT_ALL: dict[str, Any] = {
    **ALL_WRONG,
    "truncated": 0.99,
    "parsed": 0.0,
    "unparseable": 0.01,
    "length": 256.0,
    "length_p50": 256.0,
    "length_p95": 256.0,
}

Case = tuple[str, set[str], Callable[[], Frame]]
"""Id, the other ids above a note that may rightly be suspected too, and the frame."""


def case(id: str, also: str = "", /, **how: Any) -> Case:
    """A case from changes to a healthy frame."""
    return id, set(also.split()), lambda: frame(**how)


CASES: list[Case] = [
    case("F1", **COLLAPSE),
    case("F1", **{**COLLAPSE, "heldout_mean": None}),
    case("F1", only=("entropy", "reward_mean", "reward_std"), **{**COLLAPSE, "reward_std": ramp(0.47, 0.001, 10, 25)}),
    case("F1", **FLAT | {"entropy": ramp(0.42, 0.03, 2, 12, 0.002), "length": ramp(100, 4, 4, 12), "length_p50": ramp(95, 4, 4, 12)}),
    case("F2", **FLAT | {"zero_variance": ramp(0.2, 0.97, 10, 30), "mixed": ramp(0.8, 0.03, 10, 30), "all_right": 0.4, "all_wrong": 0.57}),
    case("F2", only=("entropy", "reward_mean", "reward_std"), **FLAT | {"reward_std": step(0.4, 0.0, 30)}),
    case("F13", "F1", **LATE),
    case("F13", "F1", settings={"optim.schedule": "constant"}, **{**LATE, "lr": None}),
    case("S2", **ALL_WRONG),
    case("S2", only=("reward_mean", "reward_std"), **ALL_WRONG),
    case("S3", **SPARSE),
    case("S4", **SOLVED),
    case("S4", only=("reward_mean", "reward_std"), **SOLVED),
    case("S5", **FLAT | {"reward_mean": ramp(0.2, 0.5, 0, 70, 0.01), "heldout_mean": seldom(around(0.02, 0.003))}),
    case("S6", **SHARPENS),
    case("S7", "S60", **EXPLODES),
    case("S8", **SHARPENS),
    case("S9", **FLAT | {"reward_mean": step(0.5, 0.02, 50, 0.005), "reward_std": step(0.5, 0.14, 50)}),
    case("P19", "S42", **CUT_ALL | {"repetition": 0.8, "duplicates": 0.5}),
    case("P20", "S2", **ALL_WRONG | {"loss": 0.0}),
    case("S10", **FLAT | {"turns": step(2.0, 3.6, 50, 0.05)}),
    case("S10", **FLAT | {"turns": ramp(2.1, 2.75, 50, 6, 0.03)}),  # below 1.5 times its beginning, and a jump all the same
    case("S40", **SOLVED | {"all_right": around(0.9, 0.02), "reward_mean": 0.98, "zero_variance": around(0.9, 0.02), "all_wrong": 0.0}),
    case("S41", "F2", **FLAT | {"zero_variance": 0.95, "mixed": 0.05, "all_right": 0.4, "all_wrong": 0.55}),
    case("S42", **CUT_ALL),
    case("S43", **FLAT | {"truncated": ramp(0.02, 0.5, 20, 40, 0.005)}),
    case("S44", **{"dropped": 0.6, "survivors_median": 2.0}),
    case("S44", events={"overlong_starves": 3}),
    case("S45", rows=100, **{"reward_mean": ramp(0.3, 0.9, 0, 100, 0.01), "heldout_mean": seldom(around(0.35, 0.004))}),
    case("S46", tries_per_kept=6.0),
    case("F4", **FLAT | {"repetition": ramp(0.02, 0.6, 20, 30, 0.01), "heldout_mean": None}),
    case(
        "P13", **{"reward_primary": 0.0, "channel_correct_mean": 0.0, "channel_format_mean": ramp(0.2, 0.98, 0, 40), "heldout_mean": None}
    ),
    case("P13", reward_primary=0.0, heldout_mean=None),
    case("P21", left_unscored=6.0),
    case("P22", reward_primary=0.3, channel_tests_mean=0.3, channel_tests_share=0.2, channel_style_mean=0.5, channel_style_share=0.8),
    case("S20", **HACKED),
    case("S23", "S2", **ALL_WRONG | {"reward_primary": 0.0, "channel_correct_mean": 0.0, "channel_effort_mean": 0.5}),
    case(
        "S24",
        **{"reward_primary": around(0.05, 0.004), "reward_mean": ramp(0.2, 0.7, 0, 70, 0.01), "heldout_mean": seldom(around(0.05, 0.002))},
    ),
    case("S25", **FLAT | {"calls": ramp(1.0, 1.45, 15, 40, 0.02), "turns": ramp(2.0, 2.3, 15, 40, 0.03), "repeated_calls": 0.4}),
    case("S26", **FLAT | {"calls": ramp(1.0, 0.05, 15, 30), "turns": ramp(2.0, 1.05, 15, 30)}),
    case("S26", **FLAT | {"calls": lambda t: 1.0 if t < 30 else None, "turns": ramp(2.0, 1.0, 15, 15)}),
    case("S27", turn_capped=0.5),
    case("S28", malformed_calls=0.4),
    case("S29", settings={"objective.advantage.kind": "channels"}),
    case("S30", **ALL_WRONG | {"unparseable": 0.99, "parsed": 0.0, "unanimous_unparseable": 0.97, "all_wrong": 0.03}),
    case("S31", errors=0.2),
    case(
        "S35",
        **{
            "reward_mean": 0.5,
            "reward_std": 0.0,
            "zero_variance": 1.0,
            "mixed": 0.0,
            "unanimous_partial": 1.0,
            "all_right": 0.0,
            "all_wrong": 0.0,
            "heldout_mean": None,
        },
    ),
    case(
        "S36",
        **{
            "length": step(100, 30, 40, 1),
            "length_p50": step(95, 28, 40, 1),
            "reward_mean": ramp(0.5, 0.3, 40, 6, 0.01),
            "heldout_mean": None,
        },
    ),
    case("F12", heldout_parse_rate=seldom(0.3), heldout_mean=seldom(around(0.1, 0.003)), reward_mean=around(0.5, 0.01)),
    case("F12", kind="sft", facts={"eval.parse_rate": 0.2, "train.parse_rate": 0.99, "eval.truncation_rate": 0.0}),
    case("S50", kind="sft", facts={"eval.pass_at_1": 0.1, "train.token_accuracy": 0.95}),
    case("S51", "F12", heldout_parse_rate=seldom(step(0.97, 0.2, 40)), heldout_mean=seldom(around(0.4, 0.003))),
    case("S52", truncated=lambda t: 0.95 if t % 10 == 5 else 0.02, all_wrong=lambda t: 0.95 if t % 10 == 5 else 0.1),
    case("S53", heldout_truncated=seldom(0.3)),
    case("S53", kind="sft", facts={"eval.truncation_rate": 0.4}),
    case("S54", facts={"eval.n": 36}),
    case("S55", facts={"eval.decoding_disagrees": True}),
    case("S56", facts={"eval.same_conditions": False}),
    case("S57", events={"forgetting": 0}),
    case("S58", kind="sft", facts={"eval.parse_rate": 0.2}),
    case("S59", facts={"eval.pass_at_k_falls": True}),
    case(
        "S60",
        **FLAT
        | {
            "reward_mean": ramp(0.5, 0.2, 15, 40, 0.01),
            "heldout_mean": seldom(ramp(0.5, 0.15, 15, 40, 0.003), 4),
            "heldout_n": seldom(400.0, 4),
        },
    ),
    case("F10", tokens=7300.0),
    case(
        "P1",
        "S30",
        **{
            "unparseable": step(0.02, 0.99, 1),
            "parsed": step(0.97, 0.0, 1),
            "mismatch_max": step(1e-5, 3.0, 1),
            "entropy": step(0.5, 5.0, 1),
        },
    ),
    case("P5", tokens=7300.0, tokens_forced=0.0),
    case("P12", **FLAT | {"mismatch_max": lambda t: 1e-5 + 0.01 * t, "mismatch_mean": lambda t: 1e-7 + 1e-4 * t}),
    case("S70", mismatch_max=around(0.05, 0.002), mismatch_mean=around(0.004, 0.0002)),
    case("S70", ess_mismatch=0.6, mismatch_max=None),
    case("S71", starved=0.7),
    case("S72", version_lag=ramp(0.0, 20.0, 0, 20)),
    case("S72", ess_staleness=0.1),
    case("S75", events={"non_finite": 12}),
    case("S76", grad_norm=0.0),
    case("S77", control=0.1),
    case("S80", **FLAT | {"kl": 0.0}),
    case("F7", seconds__sample=lambda t: 9.0 if t % 2 else 1.0),
    case("F7", gpu_util=0.05),
    case("F8", seconds__rss_mib=lambda t: 2000.0 + 12.0 * t),
    case("F8", seconds__peak_mib=lambda t: 2400.0 + 15.0 * t),
    case("F11", facts={"disk.full": True}),
    case("P3", events={"worker_lost": 20}),
    case("P16", facts={"out_of_memory": True}),
    case("P36", seconds__train=lambda t: 300.0 if t == 40 else 1.0 + wave(t, 0.05)),
    case("S90", facts={"last_line_cut": True}),
    case("S91", facts={"ended_silently": True}),
    case("S93", rows=120, seconds__sample=lambda t: 1.0 + 0.05 * t),
    case("S94", seconds__checkpoint=seldom(90.0, 10)),
    case("S95", facts={"draft.acceptance_fell": True}),
    case("F3", **FLAT | {"length_p50": lambda t: 95 + 3.0 * t, "length": lambda t: 100 + 3.0 * t, "length_p95": lambda t: 160 + 4.0 * t}),
    case("F3", only=("length", "reward_mean"), **FLAT | {"length": lambda t: 100 + 3.0 * t}),
    case("F5", "S102 S11", **FLAT | {"ratio_max": ramp(1.3, 5000.0, 20, 5), "clip_fraction": ramp(0.01, 0.8, 20, 5)}),
    case("F14", settings={"objective.ratio": "sequence", "objective.limit.high": 0.2}),
    case("P29", settings={"objective.kl.estimator": "k3", "objective.kl.placement": "loss", "objective.kl.coef": 0.01}),
    case("S11", kl=lambda t: 4.0 if t in (40, 41) else 0.03 + wave(t, 0.002)),
    case("S11", grad_norm=lambda t: 80.0 if t == 40 else 0.8 + wave(t, 0.1)),
    case("S100", settings={"optim.schedule": "constant", "steps": 1000}),
    case("S101", settings={"updates": 4}, clip_fraction=0.0),
    case("S102", clip_fraction=0.7),
    case("S103", cov_eligible=0.0),
    case("S104", lr=step(1e-5, 0.0, 40)),
    case("S105", "F2 S41", **FLAT | {"duplicates": 0.875, "zero_variance": 1.0, "mixed": 0.0, "all_right": 0.4, "all_wrong": 0.6}),
    case("S106", settings={"siblings": 1}),
    case("S107", truncated=around(0.35, 0.01)),
    case("S112", **FLAT | {"kl": 1e-5}, rows=120),
    case("F6", **{"kl": ramp(0.0, 3.0, 10, 60, 0.01), "heldout_mean": None}),
    case("F6", "S20", **HACKED | {"kl": ramp(0.0, 1.5, 10, 60, 0.01)}),
    case("S110", kl=around(0.7, 0.02)),
    case("S111", **FLAT | {"unparseable": ramp(0.01, 0.4, 20, 30, 0.004), "parsed": ramp(0.97, 0.6, 20, 30)}),
    case("F9", kind="distill", reverse_kl=around(6.0, 0.05), heldout_mean=seldom(around(0.3, 0.003))),
    case("F9", kind="distill", facts={"teacher.tokenizer_differs": True}, heldout_mean=seldom(around(0.3, 0.003))),
    case(
        "F15",
        kind="distill",
        rows=160,
        reverse_kl=ramp(1.0, 0.05, 0, 40, 0.002),
        duplicates=ramp(0.1, 0.8, 110, 40),
        heldout_mean=seldom(around(0.5, 0.004)),
    ),
    case("F17", kind="distill", reverse_kl=lambda t: 2.0 if t % 2 else 0.4, heldout_mean=seldom(around(0.3, 0.003))),
    case("S120", kind="distill", rows=160, reverse_kl=ramp(1.0, 0.2, 0, 30, 0.002), heldout_mean=seldom(around(0.5, 0.004))),
    case("S121", kind="distill", reverse_kl=0.001),
    case("S122", kind="distill", heldout_mean=seldom(ramp(0.5, 0.1, 0, 60, 0.003), 4), heldout_n=seldom(400.0, 4)),
    case("S140", kind="sft", loss=around(4.0, 0.03)),
    case("S141", kind="sft", loss=lambda t: 6.0 if t == 50 else 0.3 + 3.0 * 0.9**t + wave(t, 0.02)),
    case("S142", kind="sft", loss=0.0),
    case("S150", kind="preference", chosen_reward=ramp(0.0, -0.5, 0, 60), rejected_reward=ramp(0.0, -0.9, 0, 60)),
    case("S150", kind="preference", events={"both_falling": 20}),
    case("S151", kind="preference", accuracy=around(0.5, 0.03), loss=around(0.693, 0.003)),
    case("S152", kind="preference", accuracy=1.0, loss=0.01, rejected_reward=-9.0),
]
