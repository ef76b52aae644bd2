"""Settings that work against each other, or against what they are for: more of what the linter says."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from posttrain.doctor.catalog.launch_form import GROUP_BASELINES, RL, TRAINED, advise, rule
from posttrain.doctor.combined import AllOf, OneOf, Setting
from posttrain.doctor.entries import Action, Layer, Status, Verdict
from posttrain.doctor.rules import Missing


def _many(seeds: Any) -> int:
    """How many seeds are meant: a list of them, or their number."""
    return len(seeds) if isinstance(seeds, Sized) and not isinstance(seeds, str) else int(seeds)


def _kl(placement: str, *estimators: str) -> AllOf:
    return AllOf((Setting("objective.kl.placement", "==", placement), Setting("objective.kl.estimator", "in", estimators)))


ENTRIES = (
    advise(
        "C20",
        "no seed",
        (
            "the run cannot be repeated, and whether a difference is one of method or of luck cannot be told",
            "the settings name no seed, so that whatever the program draws decides",
            "seed=0, and other seeds for repetitions",
            "posttrain runs diff of two runs with equal settings: equal to the last bit, or not",
        ),
        Missing(("seed", "seeds"), beside="optim.lr"),
        kinds=TRAINED,
        action=Action.NOTE,
        status=Status.EXTERNAL,
        source="reports of runs that differ with equal settings (verl #3126, open-instruct #648)",
    ),
    advise(
        "C21",
        "fewer than three seeds",
        (
            "a difference of 2 points between methods that is gone with the next seed",
            "one seed may lie 2 points off the mean of many, by luck; two show that they differ and not by how much",
            "three seeds at the least, and the spread between them beside every mean",
            "posttrain bakeoff of the runs: a lead is tested over seeds",
        ),
        rule("fewer than 3 seeds", "seeds", test=lambda s: 0 < _many(s["seeds"]) < 3),
        kinds=TRAINED,
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 125 and appendix F (P37)",
        same_as="P37",
        layer=Layer.EVALUATION,
    ),
    advise(
        "C22",
        "rollouts from a cut distribution",
        (
            "ratios differ from 1 with identical weights (0.8 in a worked case), where the trainer does not cut what the sampler cut",
            "top-p, top-k and min-p renormalise what is left; a trainer that scores under the full distribution judges another policy",
            "sampling.top_p=1, top_k=0 and min_p=0, unless what every cut left is recorded and replayed, as it is here",
            "posttrain preflight MODEL with the same sampling settings: agreement",
        ),
        OneOf(
            (
                rule("top-p below 1", "sampling.top_p", test=lambda s: s["sampling.top_p"] < 1),
                rule("top-k is on", "sampling.top_k", test=lambda s: s["sampling.top_k"] > 0),
                rule("min-p is on", "sampling.min_p", test=lambda s: s["sampling.min_p"] > 0),
            )
        ),
        action=Action.NOTE,
        status=Status.EXTERNAL,
        source="labs, on the replay of sampling masks; verl #6240, ms-swift #8442",
    ),
    advise(
        "C23",
        "a rejection band that starves",
        (
            "most rollouts are rejected as soon as they are older than the policy, and the loss does not show it",
            "a band of 0.5 % around a response's mean ratio, on rollouts of older policies: worse than a test per token in one report",
            "objective.correction.sequence_lower=0.9 and sequence_upper=1.1, or asynchronous.bound=0",
            "starved and ess_mismatch in the first ten steps; above one half the update is starved (S71)",
        ),
        Setting("objective.correction.kind", "==", "mask"),
        rule(
            "a band of less than 0.02 on whole responses",
            "objective.correction.sequence_lower",
            "objective.correction.sequence_upper",
            test=lambda s: s["objective.correction.sequence_upper"] - s["objective.correction.sequence_lower"] < 0.02,
        ),
        rule("drawn ahead", "asynchronous.bound", test=lambda s: s["asynchronous.bound"] > 0),
        status=Status.EXTERNAL,
        source="labs, failure 11b: one setting, of low reliability",
    ),
    advise(
        "C24",
        "a step that does not divide into its minibatches",
        (
            "the last minibatch is smaller than the others, and its answers weigh more",
            "prompts is no multiple of minibatches",
            "prompts as a multiple of minibatches; anything else is refused here",
            "the batch equation that is printed at the start",
        ),
        rule("no multiple", "prompts", "minibatches", test=lambda s: s["prompts"] % s["minibatches"] != 0),
        status=Status.EXTERNAL,
        source="open-instruct #1796, unsloth #3149",
    ),
    advise(
        "C25",
        "processes without work",
        (
            "some processes wait in every step",
            "groups stay whole, so that a step of fewer groups, or rows, than processes leaves some without any",
            "at least as many prompts (or rows per batch) as processes, best a multiple",
            "seconds.train with half as many processes",
        ),
        OneOf(
            (
                rule("fewer groups than processes", "prompts", "processes", test=lambda s: s["prompts"] < s["processes"]),
                rule("fewer rows than processes", "batch_size", "processes", test=lambda s: s["batch_size"] < s["processes"]),
            )
        ),
        kinds=TRAINED,
        action=Action.NOTE,
        status=Status.PROVISIONAL,
        source="ours",
    ),
    advise(
        "C26",
        "a KL term too weak to hold",
        (
            "KL to the reference climbs as if there were no term",
            "a coefficient below 0.001 is under the floor of every account",
            "objective.kl.coef=0.001 to 0.005, or estimator=none, which saves the pass of the reference",
            "kl over the run with and without the term",
        ),
        rule("below 0.001", "objective.kl.coef", test=lambda s: 0 < s["objective.kl.coef"] < 1e-3),
        Setting("objective.kl.estimator", "!=", "none"),
        against=(rule("steered", "objective.kl.target", test=lambda s: s["objective.kl.target"] > 0),),
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 118 (F6) and appendix L",
    ),
    advise(
        "C27",
        "a KL term that descends no divergence",
        (
            "the term is paid for and holds nothing, or pulls somewhere else",
            "k1 in the loss has an expected gradient of zero; k2 and k3 in the reward punish tokens that became rarer as well",
            "objective.kl.estimator=k2 in the loss, or k1 with placement=reward; the others are refused here",
            "posttrain certify kl:k2; docs/algorithms.md has what each pair descends, by enumeration",
        ),
        OneOf((_kl("loss", "k1"), _kl("reward", "k2", "k3", "rho_k3"))),
        rule("a coefficient above 0", "objective.kl.coef", test=lambda s: s["objective.kl.coef"] > 0),
        status=Status.MEASURED,
        source="enumerated (objectives/placements.py); NeMo #2506, TRL #4967",
    ),
    advise(
        "C28",
        "many passes over the same pairs",
        (
            "every pair is ranked rightly, margins grow on, and the text gets worse",
            "more than 3 epochs of preference training: the objective has no optimum to stop at",
            "dpo.epochs=1, or more pairs",
            "held-out score after each epoch; accuracy at 1 with growing margins is S152",
        ),
        rule("more than 3 epochs", "epochs", test=lambda s: s["epochs"] > 3),
        kinds=("preference",),
        status=Status.EXTERNAL,
        source="labs, on preference training that binds what comes after it",
    ),
    advise(
        "C29",
        "preference training that cannot move",
        (
            "accuracy stays near one half although the pairs are sound",
            "a beta of 0.5 or more punishes every step away from the reference",
            "dpo.beta=0.1",
            "chosen_reward - rejected_reward after 50 steps",
        ),
        rule("beta at 0.5 or more", "beta", test=lambda s: s["beta"] >= 0.5),
        kinds=("preference",),
        action=Action.NOTE,
        status=Status.EXTERNAL,
        source="labs: 0.1 is the usual beta",
    ),
    advise(
        "C30",
        "a warm-up of a third of the run",
        (
            "the rate that was meant is reached when the run is nearly over",
            "optim.warmup is a share of all steps, not their number",
            "optim.warmup=0.1",
            "lr in the metrics",
        ),
        rule("a third of the steps or more", "optim.warmup", test=lambda s: s["optim.warmup"] >= 1 / 3),
        kinds=TRAINED,
        action=Action.NOTE,
        status=Status.PROVISIONAL,
        source="ours",
    ),
    advise(
        "C31",
        "no gate before the run",
        (
            "hours of training on tasks of which the model solves none, or all",
            "guard.gates=off: whether any group disagrees is not asked before the first step",
            "guard.gates=stop, or posttrain probe by hand",
            "posttrain probe MODEL --task NAME",
        ),
        Setting("guard.gates", "==", "off"),
        kinds=TRAINED,
        action=Action.NOTE,
        status=Status.LIVED,
        source="book, ch. 13: step 5 had told what step 156 confirmed",
    ),
    advise(
        "C32",
        "rollouts too far ahead",
        (
            "corrections throw away, or shrink, most of what the oldest rollouts say",
            "asynchronous.bound above 8 updates; labs keep 1 to 8",
            "asynchronous.bound=4 or less",
            "version_lag and ess_staleness",
        ),
        rule("more than 8 updates", "asynchronous.bound", test=lambda s: s["asynchronous.bound"] > 8),
        status=Status.EXTERNAL,
        source="labs, on staleness: at most 1, 4 and 8 updates",
    ),
    advise(
        "C33",
        "a rate beyond any account",
        (
            "entropy is gone within tens of steps, with a warm-up or without",
            "above 2e-3, reinforcement learning collapses even the smallest models (3e-3 is how collapse is provoked in the tests)",
            "optim.lr=1e-4",
            "entropy of the first 30 steps",
        ),
        rule("above 2e-3", "optim.lr", test=lambda s: s["optim.lr"] > 2e-3),
        kinds=("rl", "distill", "preference"),
        status=Status.PROVISIONAL,
        source="ours, on the embedded model",
    ),
    advise(
        "C34",
        "a pulse of a few items",
        (
            "the held-out score on the way jumps by 15 points between measurements",
            "fewer than 32 items: at p = 0.5 the interval is 33 points wide or more",
            "guard.pulse_items=64 or more",
            "heldout_low and heldout_high beside heldout_mean",
        ),
        rule("fewer than 32 items", "guard.pulse_items", test=lambda s: s["guard.pulse_items"] < 32),
        against=(Setting("guard.pulse_every", "==", 0),),
        kinds=RL,
        action=Action.NOTE,
        status=Status.MEASURED,
        source="width of a Wilson interval: 0.33 at 16 of 32",
    ),
    advise(
        "C35",
        "imitation that has hardly begun",
        (
            "the form is not learned, and what follows starts from a model that cannot answer",
            "fewer than 20 optimizer steps of supervised fine-tuning",
            "more rows or epochs, or a smaller sft.batch_size",
            "the parse rate of the evaluation after it (S58)",
        ),
        rule("fewer than 20 steps", "steps", test=lambda s: s["steps"] < 20),
        kinds=("sft",),
        action=Action.NOTE,
        status=Status.PROVISIONAL,
        source="ours",
    ),
    advise(
        "C36",
        "one sibling and a baseline of siblings",
        (
            "every advantage is 0: training runs and learns nothing",
            "the advantage compares an answer with its siblings, and there are none",
            "siblings=8 or more, or advantage=batch, critic or none; here it is refused",
            "siblings and advantage in the resolved settings",
        ),
        Setting("objective.advantage.kind", "in", GROUP_BASELINES),
        Setting("siblings", "==", 1),
        status=Status.EXTERNAL,
        source="OpenRLHF #1250",
        same_as="S106",
        verdict=Verdict.DEAD,
    ),
    advise(
        "C37",
        "several samples at temperature 0",
        (
            "all siblings are one text, and every group is unanimous",
            "greedy decoding gives the same answer however often it is asked",
            "sampling.temperature=1; here 0 is refused for training",
            "duplicates of the first step",
        ),
        Setting("sampling.temperature", "==", 0),
        Setting("siblings", ">", 1),
        status=Status.EXTERNAL,
        source="book, appendix I, operational cousins",
        same_as="S105",
        verdict=Verdict.DEAD,
    ),
    advise(
        "C38",
        "an average that nobody named",
        (
            "long and short answers weigh other than was thought, and another program gives other numbers for the same recipe",
            "the settings leave the aggregation of the loss to a default, which differs between trainers and versions",
            "objective.aggregation=token_mean, constant or seq_mean_token_mean, written down",
            "posttrain runs diff A B compares the resolved methods; weight_long_negative says which length is favoured",
        ),
        Missing(("objective.aggregation",), beside="objective.advantage.kind"),
        action=Action.NOTE,
        status=Status.EXTERNAL,
        source="book, ch. 122 and 124 (P10, P30)",
    ),
    advise(
        "C39",
        "a sampler that takes most of a shared device",
        (
            "out of memory at the first step with long answers",
            "vLLM and the trainer share a device, vLLM keeps more than 0.6 of it, and does not sleep while the trainer works",
            "vllm_gpu_memory_utilization=0.6 or less, or vllm_enable_sleep_mode=true",
            "seconds.peak_mib of the first ten steps",
        ),
        Setting("vllm_mode", "==", "colocate"),
        Setting("vllm_gpu_memory_utilization", ">", 0.6),
        against=(Setting("vllm_enable_sleep_mode", "==", True),),
        status=Status.EXTERNAL,
        source="book, ch. 122 (P16)",
        layer=Layer.INFRASTRUCTURE,
        verdict=Verdict.INFRASTRUCTURE,
    ),
)
