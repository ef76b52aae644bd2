"""Which algorithm for which trouble: a walk down a list of rules, first yes wins. Torch-free.

Adopt a method because you see the failure that it targets, and change one thing per run. So every rule names one method, why, where that
comes from, and the cheapest measurement that could show the diagnosis wrong. Later rules that fit as well are reported, not mixed in.

The order is that of the selector of spec/book-2 item 72 (length bias, mixtures of experts, clip-higher with dynamic sampling, the simplest,
otherwise plain GRPO) and of the card of spec/book-6 1.M.5. Two answers come first, because without a verifier or without any success there
is nothing to reinforce; the failures that other methods of ALGORITHMS target stand in between, causes before consequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from posttrain.core.config import Config
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.axes import MedianMAD, PassAtK
from posttrain.objectives.explain import setting
from posttrain.objectives.objective import Objective

Symptom = Literal[
    "length_creep",
    "mismatch",
    "stale_rollouts",
    "grad_spikes",
    "entropy_collapse",
    "entropy_explosion",
    "rare_tokens_clipped",
    "zero_variance",
    "pass_at_k_falls",
    "overthinking",
    "noisy_small_groups",
]

SYMPTOMS: dict[Symptom, str] = {
    "length_creep": "answers grow longer while accuracy does not",
    "mismatch": "sampler and trainer disagree on log-probabilities under the same weights",
    "stale_rollouts": "rollouts were sampled several updates ago",
    "grad_spikes": "the gradient norm jumps",
    "entropy_collapse": "entropy falls towards 0, siblings become copies of each other",
    "entropy_explosion": "entropy rises, text falls apart",
    "rare_tokens_clipped": "the clip hits rare but important tokens (doubt, reflection)",
    "zero_variance": "many groups have equal rewards and teach nothing",
    "pass_at_k_falls": "pass@1 rises while pass@k falls",
    "overthinking": "the answer is known long before the reasoning ends",
    "noisy_small_groups": "2 to 4 siblings, baselines jump around",
}


class Answers(Config):
    """What the choice depends on. The defaults are a dense model that learns without trouble."""

    model: Literal["dense", "moe"] = "dense"
    signal: Literal["verifier", "preferences"] = "verifier"
    """What judges an answer: a program (or a reward model), or only pairs of a better and a worse one."""
    success: Literal["never", "sometimes", "often"] = "sometimes"
    """How often the model is right before training."""
    siblings: int = Field(default=8, ge=1)
    """Completions per prompt that you can afford."""
    responses: Literal["short", "long", "subtraces"] = "short"
    """subtraces: one rollout is trained as several pieces, as after a compaction of the context."""
    memory: Literal["enough", "tight"] = "enough"
    """tight: no room for a critic."""
    symptoms: tuple[Symptom, ...] = ()

    @field_validator("symptoms", mode="before")
    @classmethod
    def _none_is_empty(cls, given: object) -> object:
        return tuple(name for name in given if name != "none") if isinstance(given, list | tuple) else given


@dataclass(frozen=True, slots=True)
class Rejected:
    """A method that was considered. Example: Rejected("gspo", "a dense model has no expert flips")."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One method, why, how to run it, and what to measure before.

    Example: Recommendation("gspo", ("mixture of experts: ... (spec/book-3 C7)",), ("objective=gspo", "rl.minibatches=4"), ...).
    """

    algorithm: str
    """A name of ALGORITHMS, or "dpo" or "sft", which are no policy gradient."""
    reasons: tuple[str, ...]
    changes: tuple[str, ...]
    """Assignments for --set."""
    check: str
    """The cheapest measurement that could show that the reason does not hold."""
    not_chosen: tuple[Rejected, ...]

    @property
    def command(self) -> str:
        """The command line to start from."""
        recipe = self.algorithm if self.algorithm in ("dpo", "sft") else "rl"
        return " ".join([f"posttrain train {recipe}", *(f"--set {change}" for change in self.changes)])


@dataclass(frozen=True, slots=True)
class Rule:
    """One branch: when it fits, what it answers, and what else was possible."""

    algorithm: str
    when: Callable[[Answers], bool]
    because: str
    source: str
    check: str
    instead: tuple[tuple[str, str], ...] = ()
    changes: tuple[str, ...] = ()
    """Settings of the loop."""


def has(symptom: Symptom) -> Callable[[Answers], bool]:
    """Whether the answers name a symptom."""
    return lambda answers: symptom in answers.symptoms


def recommend(answers: Answers) -> Recommendation:
    """The first rule that fits.

    Example: Answers(symptoms=("length_creep",)) -> dr_grpo, with the other rules that fit and the rule's own alternatives as not_chosen.
    """
    first, *others = [rule for rule in RULES if rule.when(answers)]
    others = others[:-1] if first.algorithm in ALGORITHMS else []  # the last rule fits always; without a signal no other one does
    changes, more = _changes(first, answers)
    reasons = [f"{first.because} ({first.source})", *more]
    if answers.success == "often" and first.algorithm in ALGORITHMS:
        reasons.append("often right: near 100 % nothing is left to learn, so harder tasks help more than any method (spec/book-6 1.M.6)")
    rejected = [Rejected(name, why) for name, why in first.instead]
    named = {first.algorithm, *(entry.name for entry in rejected)}
    for rule in others:
        if rule.algorithm not in named:
            why = f"fits as well: {rule.because} ({rule.source}); one change per run, next if the trouble stays"
            rejected.append(Rejected(rule.algorithm, why))
            named.add(rule.algorithm)
    return Recommendation(first.algorithm, tuple(reasons), changes, first.check, tuple(rejected))


def _changes(rule: Rule, answers: Answers) -> tuple[tuple[str, ...], list[str]]:
    """Assignments of a rule, fitted to the number of siblings, and a reason for each that the rule itself does not give."""
    if rule.algorithm not in ALGORITHMS:
        return rule.changes, []
    objective = Objective.load({"kind": rule.algorithm})
    advantage, siblings, why = objective.advantage, answers.siblings, []
    changes = [f"objective={rule.algorithm}"]
    loop = ALGORITHMS[rule.algorithm].loop
    changes += [f"{setting(key)}={value:g}" for key, value in loop.items() if key not in ("siblings", "minibatches")]
    if isinstance(advantage, MedianMAD):
        siblings = max(siblings + 1 - siblings % 2, 3)
        why.append("an odd number of siblings: the one on the median is the baseline and leaves the update")
    elif isinstance(advantage, PassAtK) and siblings <= advantage.k:
        siblings = 2 * advantage.k
        why.append(f"the best of k = {advantage.k} needs more than {advantage.k} siblings to choose from")
    elif objective.group_relative and siblings < 2:
        changes.append("objective.advantage=batch")
        why.append("one completion per prompt has no sibling to be compared with: the mean of the step is the baseline")
    if answers.model == "moe" and objective.ratio == "token":
        changes.append(f"{setting('minibatches')}=1")
        why.append("with one update per phase the token ratios of a mixture of experts stay at 1")
    return (*changes, *(setting(change) for change in rule.changes), f"{setting('siblings')}={siblings}"), why


RULES: tuple[Rule, ...] = (
    Rule(
        "dpo",
        lambda a: a.signal == "preferences",
        "only preference pairs: nothing can score a new sample, so there is no reward to climb",
        "spec/book-2 item 72",
        "read 50 pairs: could a program tell the better one? Then a verifier exists, and RL is open",
    ),
    Rule(
        "sft",
        lambda a: a.success == "never",
        "the model never succeeds: every group has equal rewards, and no advantage is anything but 0",
        "spec/book-6 1.M.5, 1.M.6",
        "pass@64 on 50 training prompts at temperature 1: is it really 0, or does the answer only miss the required form?",
        (
            ("easier tasks", "as good, when they exist: choose prompts that are solved 20 to 80 % of the time"),
            ("distillation", "objective.advantage=teacher and teacher=MODEL, when a stronger model with the same tokenizer is at hand"),
        ),
    ),
    Rule(
        "dr_grpo",
        has("length_creep"),
        "length_creep: 1/|y| spreads the blame of a long wrong answer thin, the std favours prompts that are nearly solved",
        "spec/book-2 items 72, 88 and 7.1; spec/recipes-of-the-labs.md G-26",
        "weight_token_long_negative of the run: below 1, tokens of long wrong answers are discouraged less than those of short ones",
        (("dapo", "its token mean has no 1/|y| either, but the std stays; for length from cut answers its ramp is the remedy"),),
    ),
    Rule(
        "gspo",
        lambda a: a.model == "moe",
        "mixture of experts: when a route flips, a token ratio compares two sub-networks; a geometric mean over the response bears it",
        "spec/book-2 item 72; spec/book-3 C1, C2, C7",
        "ratio_max over the updates of a phase: a jump after one small update means that routes flip",
        (
            ("lpo", "one ratio per sentence: finer credit, bounds that nobody has published"),
            ("default", "token ratios, the risk just named; with one update per phase they stay at 1"),
        ),
        ("minibatches=4",),
    ),
    Rule(
        "sao",
        lambda a: a.responses == "subtraces" and a.memory == "enough",
        "rollouts split into pieces that differ in number and length: siblings no longer compare, a critic judges each alone",
        "spec/recipes-of-the-labs.md G-34",
        "explained variance of the critic after its warm-up: at 0 or below it is no baseline",
        (("mimo", "keeps siblings and lets every prompt count once: right while the pieces of siblings are alike"),),
    ),
    Rule(
        "ppo",
        lambda a: a.siblings == 1 and a.memory == "enough",
        "one completion per prompt: a group-relative advantage would always be 0, a critic needs no siblings",
        "spec/faults.md 16; spec/recipes-of-the-labs.md G-22, G-23",
        "explained variance of the critic after its warm-up: at 0 or below, two siblings are worth more than a critic",
        (("reinforce++", "no critic, and a baseline that knows nothing about the prompt"),),
    ),
    Rule(
        "reinforce++",
        lambda a: (a.siblings == 1 or a.responses == "subtraces") and a.memory == "tight",
        "no siblings to compare and no room for a critic: the mean of the whole step is the baseline",
        "Hu et al. 2025; spec/faults.md 16",
        "reward by prompt over two steps: if prompts differ more than answers do, this baseline is mostly noise",
        (("ppo", "a better baseline, at the price of a second network and its optimizer state"),),
    ),
    Rule(
        "icepop",
        has("mismatch"),
        "mismatch: tokens on which the two disagree carry a weight that nobody chose; outside a band they leave the update",
        "spec/recipes-of-the-labs.md F11, G-55",
        "mismatch_mean of a run with rl.optim.lr=0: if it grows or starts large, look for temperature, top-p or stale weights first",
        (
            ("mis_po", "two bands and a critic: drops the ratio altogether, and can reject nearly every response"),
            ("areal", "keeps all tokens and reweighs them: for staleness, not for disagreement"),
        ),
    ),
    Rule(
        "mimo",
        lambda a: "stale_rollouts" in a.symptoms and a.responses != "short",
        "stale_rollouts of very uneven length: one ratio against the sampler, bounds by the sign of A, every prompt counts once",
        "spec/recipes-of-the-labs.md G-33",
        "staleness_mean against the age of the rollout: flat means that age is not the trouble",
        (("areal", "bounds only what happens within the phase: for rollouts of even length"),),
    ),
    Rule(
        "areal",
        has("stale_rollouts"),
        "stale_rollouts: a fixed weight for what happened before the phase, so that the clip acts on what happens in it",
        "spec/recipes-of-the-labs.md G-54, T16",
        "staleness_mean against the age of the rollout: flat means that age is not the trouble",
        (("kimi_k1.5", "no ratio to go stale: a squared penalty instead; tau has to be found"),),
    ),
    Rule(
        "mai",
        has("grad_spikes"),
        "grad_spikes: where A < 0 the clip leaves the gradient of a large ratio unbounded, 2.5 |A| at 2.5; a cap closes it",
        "spec/recipes-of-the-labs.md F9, T46",
        "ratio_max at the step of the spike: below 2 the open branch is not the cause; then look at mismatch and learning rate",
        (
            ("gspo", "the selector's answer to any instability: for token ratios that are noisy rather than few that are huge"),
            ("kimi_k2.5", "silences everything outside its band, also where the clip would keep a gradient that helps"),
        ),
    ),
    Rule(
        "mai",
        has("entropy_explosion"),
        "entropy_explosion: the upper bound narrows while entropy is above its target; no bonus pushes it up",
        "spec/recipes-of-the-labs.md G-32; spec/book-2 items 53, 54",
        "is objective.entropy.coef above 0? A bonus of 0.01 alone has driven entropy to its maximum; set it to 0 first",
        (("grpo", "a symmetric clip and a KL of 0.04 to the reference, without a controller"),),
    ),
    Rule(
        "dapo",
        lambda a: {"entropy_collapse", "zero_variance"} <= set(a.symptoms),
        "entropy_collapse and zero_variance, one failure on two instruments: room for rare tokens, and unanimous groups drawn again",
        "spec/book-2 items 49, 72; spec/recipes-of-the-labs.md F5, F6",
        "score the groups at a higher temperature: if rewards differ there, the policy is sharp, not finished",
        (("grpo++", "holds entropy more firmly, and does nothing about unanimous groups"),),
    ),
    Rule(
        "grpo++",
        has("entropy_collapse"),
        "entropy_collapse on a dense model: Clip-Cov takes the update from the few tokens through which entropy leaks",
        "spec/book-6 1.M.5; spec/book-2 items 57-62",
        "limit.high=0.28 alone, the smaller change: it has held entropy for a while, though not for good",
        (
            ("default", "clip-higher without Clip-Cov: try it first when the slide is slow"),
            ("cispo", "when the entropy goes with the rare tokens that the clip hits"),
        ),
    ),
    Rule(
        "dapo",
        has("zero_variance"),
        "zero_variance: groups with equal rewards are drawn again until the step is full",
        "spec/book-2 item 72; spec/recipes-of-the-labs.md F6",
        "are the unanimous groups all right or all wrong? All wrong asks for easier prompts, all right for harder ones",
        (("default", "draws again too, up to twice"), ("maxrl", "more pull on prompts that rarely succeed; unanimous ones stay silent")),
    ),
    Rule(
        "cispo",
        has("rare_tokens_clipped"),
        "rare_tokens_clipped: the clip silences a rare token once its ratio leaves the band; here its weight is bounded instead",
        "spec/recipes-of-the-labs.md F8, G-27",
        "fate_clipped per phase: with one update per phase it is 0, and the clip can be no cause",
        (("dppo", "measures the move in probability instead of ratio; its threshold is less tried"),),
    ),
    Rule(
        "passk",
        has("pass_at_k_falls"),
        "pass_at_k_falls: credit for the best of k samples pays for variety instead of one sure answer",
        "Walder and Karkhanis 2025",
        "pass@k with its interval before and after: a fall inside the interval is none",
        (("maxrl", "the likelihood of success instead: pulls hardest on prompts that rarely succeed, at k = 1"),),
    ),
    Rule(
        "s_grpo",
        has("overthinking"),
        "overthinking: one chain cut at several places; an answer that is already right early is rewarded most",
        "S-GRPO 2025; spec/book-2 item 71",
        "cut 50 finished chains in half and ask for the answer: if accuracy falls, the reasoning was needed",
        (("kimi_k1.5", "a bonus by length within the group goes with it there; switched on late, it slows learning"),),
    ),
    Rule(
        "mc_grpo",
        has("noisy_small_groups"),
        "noisy_small_groups: a median and its deviation move less than mean and std of 2 to 4 siblings",
        "MC-GRPO 2026; spec/book-2 item 71",
        "half the prompts with twice the siblings cost the same: if that learns as well, no estimator is needed",
        (
            ("rloo", "unbiased for any group size and without a std to divide by; its baseline is as noisy"),
            ("reinforce++", "borrows the baseline from the whole step"),
        ),
    ),
    Rule(
        "rloo",
        lambda a: a.siblings > 1 and (a.memory == "tight" or a.siblings <= 4),
        "the simplest baseline that is unbiased: no critic, no std, no clip, and with one update per phase nothing is lost by that",
        "spec/book-2 item 72; spec/ladder-at-100m.md section 3",
        "is the optimizer state the largest part of the memory? Then LoRA saves more than any choice here",
        (("dr_grpo", "the same advantage up to G / (G - 1), with a ratio and a clip for several updates per phase"),),
        ("minibatches=1",),
    ),
    Rule(
        "grpo++",
        lambda a: a.responses == "long" and a.success == "sometimes",
        "a long task that is sometimes solved: entropy has to last for the whole run, and the learning rate has to fall",
        "spec/book-6 1.M.5",
        "50 steps of the default: if entropy holds, the simpler method is enough",
        (("default", "as long as entropy holds"),),
        ("optim.schedule=cosine",),
    ),
    Rule(
        "default",
        lambda a: True,
        "no trouble named: plain group-relative policy optimisation, with the aggregation, bounds and KL that were measured here",
        "spec/book-2 item 72; spec/book-6 1.M.5; README.md",
        "pass rate on 50 training prompts: 20 to 80 % is where RL helps",
        (("grpo", "as published: 1/|y| in the loss, and a k3 whose gradient is that of KL(reference || policy)"),),
    ),
)
