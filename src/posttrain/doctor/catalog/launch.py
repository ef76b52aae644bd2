"""Settings that are wrong before the run begins: what the linter says besides the numbered failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.doctor.combined import Setting
from posttrain.doctor.entries import Action, Entry, Layer, Status, Tier, Verdict
from posttrain.doctor.frame import Kind
from posttrain.doctor.rules import Rule
from posttrain.doctor.signals import Signal

GROUP_BASELINES = ("mean", "mean_std", "leave_one_out", "median_mad", "max_rl", "pass_at_k", "channels")
"""Advantages whose baseline is the other siblings."""
RL: tuple[Kind, ...] = ("rl", "distill")


def _rule(said: str, *reads: str, test: Callable[[Mapping[str, Any]], bool]) -> Rule:
    return Rule(reads, test, said)


def _entry(
    id: str,
    name: str,
    texts: tuple[str, str, str, str],
    *signs: Signal,
    against: tuple[Signal, ...] = (),
    kinds: tuple[Kind, ...] = RL,
    action: Action = Action.WARN,
    status: Status = Status.MEASURED,
    source: str = "measured on the embedded ladder",
) -> Entry:
    """An entry of this file; `texts` are symptom, cause, fix and check."""
    symptom, cause, fix, check = texts
    return Entry(
        id,
        name,
        status,
        Layer.CONFIGURATION,
        Verdict.DRIFTING,
        symptom,
        "before the first step",
        cause,
        fix,
        check,
        source,
        Tier.STATIC,
        "settings",
        kinds,
        tuple(signs),
        against,
        action=action,
    )


ENTRIES = (
    _entry(
        "C1",
        "too few siblings to compare",
        (
            "most groups agree, or their baseline is one other answer",
            "with G siblings and a success rate p only 1 - p^G - (1-p)^G of the groups disagree: at p = 0.1, 34 % for G = 4, 57 % for 8",
            "siblings=8 or more; 16 where most groups are unanimous",
            "posttrain probe MODEL --task NAME prints the share for the group sizes in question",
        ),
        Setting("objective.advantage.kind", "in", GROUP_BASELINES),
        _rule("fewer than 4 siblings", "siblings", test=lambda s: 1 < s["siblings"] < 4),
        status=Status.EXTERNAL,
        source="book, ch. 17; arithmetic of unanimous groups",
    ),
    _entry(
        "C2",
        "hardly any updates",
        (
            "the run ends before the policy has moved",
            "fewer than 20 optimizer steps of reinforcement learning, of which the warm-up takes the first",
            "steps=50 or more, or a smaller batch",
            "the batch equation that is printed at the start",
        ),
        _rule("fewer than 20 updates in all", "steps", "updates", test=lambda s: s["steps"] * s["updates"] < 20),
        action=Action.NOTE,
    ),
    _entry(
        "C3",
        "a high rate from the first step",
        (
            "the policy breaks in its first updates and does not come back",
            "5e-4 without a warm-up broke a small model at the first step; full fine-tuning has no adapter to soften it",
            "optim.warmup=0.1, or optim.lr=1e-4",
            "KL to the reference after the first five steps",
        ),
        Setting("lora", "==", False),
        _rule(
            "5e-4 or more without warm-up", "optim.lr", "optim.warmup", test=lambda s: s["optim.lr"] >= 5e-4 and s["optim.warmup"] < 0.02
        ),
        kinds=("rl", "distill", "preference"),
    ),
    _entry(
        "C4",
        "a rate that teaches nothing",
        (
            "loss and reward stay where they were",
            "rates of 1e-6 belong to models of many billion parameters; on small ones they move nothing within hundreds of steps",
            "optim.lr between 5e-5 and 1e-4 for models below a billion parameters, with a warm-up",
            "the change of the reward, or of the loss, over the first 50 steps",
        ),
        _rule("5e-6 or less on all weights", "optim.lr", "lora", test=lambda s: s["optim.lr"] <= 5e-6 and s["lora"] is False),
        kinds=("rl", "distill", "preference", "sft"),
        action=Action.NOTE,
    ),
    _entry(
        "C5",
        "a length cap below what answers need",
        (
            "answers are cut before they are complete, and count as wrong",
            "sampling.max_tokens is not above the 95th percentile of the lengths that the probe has seen",
            "sampling.max_tokens=1.5 times the probe's 95th percentile",
            "posttrain probe MODEL --task NAME shows the quantiles",
        ),
        _rule(
            "the cap is within the probe's lengths",
            "sampling.max_tokens",
            "probe.length_p95",
            test=lambda s: s["sampling.max_tokens"] <= s["probe.length_p95"],
        ),
        status=Status.LIVED,
        source="book, ch. 8: the first run on Countdown, cap 256, 100 % cut",
    ),
    _entry(
        "C6",
        "a long run without a leash",
        (
            "the policy drifts from its reference as long as the reward pays for it",
            "no KL term over 500 steps or more; short verifiable runs do without, long ones rarely",
            "objective.kl.estimator=k2 with kl.coef=0.001 to 0.005, or end earlier",
            "KL to the reference over the run (needs the reference; a KL term with a tiny coefficient records it)",
        ),
        Setting("objective.kl.estimator", "==", "none"),
        _rule("500 steps or more", "steps", test=lambda s: s["steps"] >= 500),
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 118 (F6) and appendix L; its floors of the coefficient differ, 0.001 and 0.005",
    ),
    _entry(
        "C7",
        "a constant entropy bonus",
        (
            "entropy slides on, or climbs to noise",
            "a constant push has no stable setting: 0.001 was too weak to stop a slide, 0.01 drove entropy to that of noise",
            "objective.entropy.target=0.3, which steers the coefficient, or limit=clip_cov",
            "the slope of the entropy over 100 steps",
        ),
        _rule("a bonus is paid", "objective.entropy.coef", test=lambda s: s["objective.entropy.coef"] > 0),
        against=(Setting("objective.entropy.target", ">", 0),),
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 41, two coefficients only",
    ),
    _entry(
        "C8",
        "nothing held out is measured on the way",
        (
            "a reward that is farmed looks like learning until the run is over",
            "guard.pulse_every=0: the reward is the only score while training",
            "guard.pulse_every=10 (64 items cost about 1 % of a step of 512 rollouts)",
            "the columns heldout_mean and reward_mean side by side",
        ),
        Setting("guard.pulse_every", "==", 0),
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 31 and 88",
    ),
    _entry(
        "C9",
        "nothing is watched",
        (
            "a sick run goes on to its last step",
            "guard.alarms=off",
            "guard.alarms=act, or warn where nothing may end the run",
            "posttrain doctor replay RUN shows afterwards what would have fired",
        ),
        Setting("guard.alarms", "==", "off"),
        kinds=("rl", "distill", "preference", "sft"),
        action=Action.NOTE,
        status=Status.EXTERNAL,
        source="reports of runs whose metrics were not finite and that went on",
    ),
    _entry(
        "C10",
        "no checkpoint before the end",
        (
            "a run that dies has to begin again",
            "save_every is not below the number of steps",
            "save_every=a tenth of the steps",
            "the folder checkpoints/STAGE while it trains",
        ),
        _rule("100 steps or more, none saved", "save_every", "steps", test=lambda s: s["steps"] >= 100 and s["save_every"] >= s["steps"]),
        status=Status.EXTERNAL,
        source="reports of lost runs",
        kinds=("rl", "distill", "sft"),
    ),
    _entry(
        "C11",
        "rollouts of older policies, uncorrected",
        (
            "learning slows and turns unstable as the workers run ahead",
            "asynchronous.bound > 0 and correction=none weigh old rollouts as if this policy had drawn them",
            "objective.correction=truncate, or objective.against=behaviour",
            "ess_mismatch and version_lag",
        ),
        _rule("drawn ahead", "asynchronous.bound", test=lambda s: s["asynchronous.bound"] > 0),
        Setting("objective.correction.kind", "==", "none"),
        Setting("objective.against", "==", "old"),
        status=Status.EXTERNAL,
        source="recipes of the labs, ch. 6",
    ),
    _entry(
        "C12",
        "cut answers are dropped",
        (
            "two siblings are left of eight and hardly disagree; the loss does not show it",
            "objective.overlong=drop takes every cut rollout out of its group",
            "a longer sampling.max_tokens with overlong=none, or overlong=ramp",
            "survivors_median and dropped in the first ten steps",
        ),
        Setting("objective.overlong.kind", "==", "drop"),
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 23: 6 of 8 rollouts masked",
    ),
    _entry(
        "C13",
        "too many updates on one set of rollouts",
        (
            "ratios leave the clip's range, most of the later updates do nothing or harm",
            "more than 8 optimizer steps follow each sampling phase",
            "minibatches * epochs <= 4",
            "clip_fraction and ess_staleness",
        ),
        _rule("more than 8 updates per phase", "updates", test=lambda s: s["updates"] > 8),
        status=Status.PROVISIONAL,
        source="ours",
    ),
    _entry(
        "C14",
        "a temperature that trains another policy",
        (
            "what is learned at one temperature is not what greedy decoding shows, or siblings hardly differ",
            "rollouts are drawn outside of 0.6 to 1.2",
            "sampling.temperature=1.0, or 0.7 at the least",
            "duplicates in the first steps; held-out score greedy and sampled",
        ),
        _rule(
            "outside of 0.6 to 1.2",
            "sampling.temperature",
            test=lambda s: 0 < s["sampling.temperature"] < 0.6 or s["sampling.temperature"] > 1.2,
        ),
        status=Status.EXTERNAL,
        source="book, appendix L: 0.7 to 1.0",
    ),
    _entry(
        "C15",
        "adapters at the rate of full fine-tuning",
        (
            "LoRA learns far slower than it could",
            "adapters want about ten times the rate of full fine-tuning",
            "optim.lr=1e-4 to 5e-4 with LoRA",
            "the loss over the first 50 steps at two rates",
        ),
        _rule("LoRA at 2e-5 or less", "lora", "optim.lr", test=lambda s: s["lora"] is True and s["optim.lr"] <= 2e-5),
        kinds=("rl", "distill", "preference", "sft"),
        action=Action.NOTE,
        status=Status.EXTERNAL,
        source="common finding of LoRA studies",
    ),
    _entry(
        "C16",
        "a handful of rollouts per step",
        (
            "the gradient is mostly noise, the reward walks at random",
            "fewer than 32 rollouts per step",
            "prompts * siblings >= 64",
            "the spread of reward_mean between neighbouring steps",
        ),
        _rule("fewer than 32 rollouts per step", "prompts", "siblings", test=lambda s: s["prompts"] * s["siblings"] < 32),
        action=Action.NOTE,
        status=Status.PROVISIONAL,
        source="ours",
    ),
    _entry(
        "C17",
        "too few items to conclude from",
        (
            "before and after differ by less than their intervals",
            "fewer than 500 held-out items; 200 resolve about 7 points at p = 0.5, 500 about 4.4",
            "held_out=500",
            "the interval that is printed beside the score",
        ),
        _rule("fewer than 500 held-out items", "held_out", test=lambda s: s["held_out"] < 500),
        kinds=("rl", "distill", "preference", "sft"),
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 37 and 89: peaks on 36 samples that were gone at 500",
    ),
    _entry(
        "C18",
        "many passes over the same demonstrations",
        (
            "the loss falls while free generation gets worse",
            "more than 4 epochs of supervised fine-tuning",
            "sft.epochs=1 to 3, or more rows",
            "held-out score after each epoch",
        ),
        _rule("more than 4 epochs", "epochs", test=lambda s: s["epochs"] > 4),
        kinds=("sft",),
        status=Status.EXTERNAL,
        source="book, ch. 18",
    ),
    _entry(
        "C19",
        "preference training almost without a reference",
        (
            "chosen and rejected responses both lose probability",
            "a beta of 0.02 or less lets the margin grow by making everything less likely",
            "dpo.beta=0.1",
            "chosen_reward and rejected_reward over the first 50 steps",
        ),
        _rule("beta at 0.02 or less", "beta", test=lambda s: s["beta"] <= 0.02),
        kinds=("preference",),
        status=Status.EXTERNAL,
        source="reports on likelihood displacement in DPO",
    ),
)
