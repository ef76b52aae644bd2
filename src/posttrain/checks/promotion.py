"""Is this model better than the one it would replace, and is it sound? All checks together or not at all.

One bad number is not enough to reject a model that has sharpened: low entropy alone asks for an evaluation off target. One good number is
not enough to promote: a gain that comes with drift beyond the family's own, dead reward variance or broken form is refused.
Source: spec/book-5 1.O, spec/book-6 1.O.5. Torch-free: judges records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from posttrain.checks.calibration import LAST, End, Family
from posttrain.core.config import Config
from posttrain.core.errors import EvidenceError
from posttrain.core.verdicts import Check, GateVerdict
from posttrain.evals.compare import Comparison, compare
from posttrain.evals.record import EvalRecord
from posttrain.stats.power import SigmaEstimate, min_detectable_effect


class Thresholds(Config):
    """When a model is promoted. A run keeps them from its start on, so that nobody moves them afterwards."""

    items: int = Field(default=500, ge=2)
    """Held-out items both models answered."""
    min_effect: float = Field(default=0.01, ge=0, lt=1)
    """Least gain that is worth a change, in success rate."""
    level: float = Field(default=0.95, gt=0.5, lt=1)
    seed_sigma: float | None = Field(default=None, gt=0)
    """Standard deviation of the score between runs that differ in their seed; the gain has to be beyond it too."""
    sigma_runs: int = Field(default=3, ge=2)
    """Runs that `seed_sigma` was estimated from."""
    seeds: int = Field(default=1, ge=1)
    """Seeds behind each side of the comparison."""
    format_errors: float = Field(default=0.05, ge=0, le=1)
    """Largest share of answers that could not be parsed."""
    truncated: float = Field(default=0.02, ge=0, le=1)
    zero_variance: float = Field(default=0.9, gt=0, le=1)
    """Share of unanimous groups at the end of training from which reward variance is dead, unless they are mostly all right."""
    reward_std: float = Field(default=1e-3, ge=0)
    """Spread of rewards below which it is dead."""
    entropy_floor: float = Field(default=0.1, ge=0)
    """Nats per token; below it an evaluation off target is asked for. A calibrated family brings its own."""
    retention_loss: float = Field(default=0.05, ge=0, lt=1)
    """Largest loss off target that low entropy may come with."""
    last: int = Field(default=LAST, ge=1)
    """Steps at the end of training that are looked at."""


STRICTER = {
    "items": 1,
    "min_effect": 1,
    "level": 1,
    "seed_sigma": 1,
    "format_errors": -1,
    "truncated": -1,
    "zero_variance": -1,
    "reward_std": 1,
    "entropy_floor": 1,
    "retention_loss": -1,
}
"""Whether a larger (1) or a smaller (-1) value promotes less; any change of a threshold that is not listed counts as loosening."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is judged: a model's record, that of the model it would replace, and how its training ended.

    Example: Candidate(after, before, retention=(before_chat, after_chat), end=End(...), family=None)
    """

    record: EvalRecord
    base: EvalRecord | None
    retention: tuple[EvalRecord, EvalRecord] | None = None
    """Off-target records of the base and of the candidate."""
    end: End | None = None
    """Of reinforcement learning; None when the model was trained otherwise."""
    family: Family | None = None
    registered: Thresholds | None = None
    """Thresholds that the run was started with; None when it kept none."""


def promotion(candidate: Candidate, thresholds: Thresholds | None = None) -> GateVerdict:
    """Judge a candidate; `thresholds` are those that the run kept, unless others are given."""
    limits = thresholds or candidate.registered or Thresholds()
    control, change = base_check(candidate, limits)
    checks = [
        registered_check(candidate.registered, limits),
        control,
        delta_check(change, limits),
        size_check(candidate, change, limits),
        format_check(candidate, limits),
        truncation_check(candidate, limits),
    ]
    if candidate.end is not None:
        checks += [
            variance_check(candidate.end, limits),
            drift_check(candidate.end, candidate.family),
            entropy_check(candidate, candidate.end, limits),
            collapse_check(candidate, candidate.end, change, limits),
        ]
    against = candidate.base.label if candidate.base else "nothing"
    subject = f"{candidate.record.label} against {against} on '{candidate.record.conditions.suite}'"
    figures = {"thresholds": limits.model_dump(mode="json"), "model_digest": candidate.record.model_digest, **_gain(change)}
    return GateVerdict("promotion", subject, tuple(checks), figures)


def _gain(change: Comparison | None) -> dict[str, Any]:
    if change is None:
        return {}
    return {"delta": change.delta, "interval": [change.interval.low, change.interval.high], "p_value": change.p_value, "items": change.n}


def registered_check(registered: Thresholds | None, limits: Thresholds) -> Check:
    """The thresholds are those that the run was started with, or stricter."""
    remedy = "judge by the thresholds that the run kept, or start a run with those that you want"
    if registered is None:
        detail = "the run kept no thresholds: those used here were chosen after its numbers were known"
        return Check("thresholds", None, None, None, detail, remedy, ())
    looser = [name for name, value in limits.model_dump().items() if _looser(name, getattr(registered, name), value)]
    if looser:
        shown = ", ".join(f"{name} {getattr(registered, name)} -> {getattr(limits, name)}" for name in looser)
        return Check("thresholds", False, len(looser), 0, f"loosened after the run: {shown}", remedy, ())
    return Check("thresholds", True, 0, 0, "as kept since the run began, or stricter", remedy, ())


def _looser(name: str, before: Any, after: Any) -> bool:
    if before == after:
        return False
    if name not in STRICTER or after is None:
        return True
    return before is not None and (after - before) * STRICTER[name] < 0


def base_check(candidate: Candidate, limits: Thresholds) -> tuple[Check, Comparison | None]:
    """The model that would be replaced was measured by the same script; also returns the comparison."""
    remedy = "evaluate the model that this one would replace on the same suite, seed and decoding: posttrain eval, then --against FILE"
    if candidate.base is None:
        return Check("base", False, None, None, "there is no measurement of the model that it would replace", remedy, ("S56",)), None
    try:
        change = compare(candidate.base, candidate.record, limits.level)
    except EvidenceError as error:
        return Check("base", False, None, None, str(error), remedy, ("S56",)), None
    if candidate.base.model_digest == candidate.record.model_digest:
        detail = f"'{candidate.base.label}' and '{candidate.record.label}' are one model ({candidate.record.model_digest})"
        return Check("base", False, None, None, detail, remedy, ("S56",)), change
    return Check("base", True, change.n, None, f"'{candidate.base.label}' measured in the same conditions", remedy, ("S56",)), change


def delta_check(change: Comparison | None, limits: Thresholds) -> Check:
    """The gain is beyond the noise of the items, the least effect, and what another seed would have given."""
    remedy = "train further, or keep the model that is there; more seeds and items when the gain is real but small"
    ids = ("P37",)
    if change is None:
        return Check("held_out", False, None, limits.min_effect, "no gain can be shown without a comparison", remedy, ids)
    low, high, budget = change.interval.low, change.interval.high, limits.min_effect
    shown = f"{change.delta:+.3f}, {limits.level:.0%} [{low:+.3f}, {high:+.3f}], n {change.n} paired items"
    if limits.seed_sigma is not None:
        sigma = SigmaEstimate("seed_to_seed", limits.seed_sigma, limits.sigma_runs)
        budget = max(budget, min_detectable_effect(limits.seeds, sigma, limits.level))
        shown += f"; with {limits.seeds} seed(s) at sigma {limits.seed_sigma:g} a gain shows from {budget:.3f}"
    if low <= 0:
        return Check("held_out", False, change.delta, budget, f"no gain beyond the noise of the items: {shown}", remedy, ids)
    if change.delta < budget:
        return Check("held_out", False, change.delta, budget, f"the gain is within the variance budget: {shown}", remedy, ids)
    note = "" if limits.seed_sigma is not None else "; one seed, and the spread between seeds is unknown"
    return Check("held_out", True, change.delta, budget, f"{shown}{note}", remedy, ids)


def size_check(candidate: Candidate, change: Comparison | None, limits: Thresholds) -> Check:
    """Enough items."""
    n = change.n if change else len(candidate.record.item_means)
    remedy = f"evaluate both models again on at least {limits.items} items: posttrain eval --items {limits.items}"
    return Check("items", True if n >= limits.items else None, n, limits.items, f"{n} items, {limits.items} wanted", remedy, ("S54",))


def format_check(candidate: Candidate, limits: Thresholds) -> Check:
    """Answers can be parsed; errors that only the evaluation sees point to another template."""
    errors, end = round(1 - candidate.record.parse_rate, 12), candidate.end  # 1 - 0.95 is more than 0.05
    detail, ids = f"{errors:.1%} of the held-out answers could not be parsed", ("S111", "P33")
    remedy = "teach the form again, or gate the reward behind it"
    if errors > limits.format_errors and end is not None and end.unparseable is not None and end.unparseable <= limits.format_errors:
        detail += f", {end.unparseable:.1%} at the end of training: the two are not rendered alike"
        ids, remedy = ("F12", *ids), "compare the rendered template of training and evaluation: posttrain preflight"
    return Check("format", errors <= limits.format_errors, errors, limits.format_errors, detail, remedy, ids)


def truncation_check(candidate: Candidate, limits: Thresholds) -> Check:
    """Answers end by themselves."""
    rate = candidate.record.truncation_rate
    detail = f"{rate:.1%} of the held-out answers were cut at {candidate.record.conditions.sampling.max_tokens} tokens"
    return Check(
        "truncation", rate < limits.truncated or rate == 0, rate, limits.truncated, detail, "raise max_tokens and evaluate again", ("S53",)
    )


def variance_check(end: End, limits: Thresholds) -> Check:
    """Groups still disagree, or agree because everything is right."""
    share = end.zero_variance
    if share is None:
        return Check("variance", None, None, limits.zero_variance, "the run recorded no group variance", "train with this version", ("F2",))
    detail = f"over the last {end.steps} steps {share:.0%} of the groups were unanimous and {end.all_right or 0:.0%} all right"
    if end.reward_std is not None:
        detail += f", rewards spread by {end.reward_std:.3f}"
    remedy = "go back to a checkpoint before the variance died; dynamic sampling, more siblings or other data for the next run"
    dead = end.dead(limits.zero_variance, limits.reward_std)
    return Check("variance", not dead, share, limits.zero_variance, detail, remedy, ("F2", "P20"))


def drift_check(end: End, family: Family | None) -> Check:
    """The divergence from the reference is usual for the family."""
    remedy = "calibrate from at least three stable runs of this family: posttrain promote --calibrate RUN RUN RUN --family FILE"
    ceiling = family.kl_ceiling if family else None
    if end.kl is None:
        return Check(
            "drift", None, None, ceiling, "the run recorded no KL", "train with a KL term, or with its measurement", ("S110", "F6")
        )
    if family is None or ceiling is None:
        return Check("drift", None, end.kl, None, f"final KL {end.kl:.3g}: no family to hold it against", remedy, ("S110", "F6"))
    detail = f"final KL {end.kl:.3g}, usual up to {ceiling:.3g} among {len(family.runs)} runs of the family"
    remedy = "a gain that comes with unusual drift may be a hack: raise the KL coefficient, or evaluate widely before promoting"
    return Check("drift", end.kl <= ceiling, end.kl, ceiling, detail, remedy, ("S110", "F6"))


def entropy_low(end: End, family: Family | None, limits: Thresholds) -> tuple[bool, float]:
    """Whether entropy is below its floor, and the floor."""
    floor = limits.entropy_floor if family is None or family.entropy_floor is None else family.entropy_floor
    return end.entropy is not None and end.entropy < floor, floor


def entropy_check(candidate: Candidate, end: End, limits: Thresholds) -> Check:
    """Low entropy is no failure; it asks for an evaluation off target that shows no loss."""
    low, floor = entropy_low(end, candidate.family, limits)
    remedy = "evaluate both models off target (retention), and promote when nothing was lost there"
    if end.entropy is None:
        return Check("entropy", None, None, floor, "the run recorded no entropy", remedy, ("S8", "F1"))
    detail = f"final entropy {end.entropy:.3g} nats, floor {floor:.3g}"
    if not low:
        return Check("entropy", True, end.entropy, floor, detail, remedy, ("S8", "F1"))
    if candidate.retention is None:
        return Check("entropy", None, end.entropy, floor, f"{detail}: low, and nothing was measured off target", remedy, ("S8", "F1"))
    try:
        change = compare(*candidate.retention, limits.level)
    except EvidenceError as error:
        return Check("entropy", None, end.entropy, floor, f"{detail}: low, and off target: {error}", remedy, ("S8", "F1"))
    shown = f"{change.delta:+.3f} [{change.interval.low:+.3f}, {change.interval.high:+.3f}], n {change.n}"
    lost = change.interval.high < 0 and change.delta < -limits.retention_loss
    passed = False if lost else True if change.interval.low > -limits.retention_loss else None
    remedy = "measure more items off target: a loss beyond the margin is not excluded"
    if lost:
        remedy = "keep the model that is there, or an earlier checkpoint: the gain was paid for off target"
    return Check("entropy", passed, end.entropy, floor, f"{detail}: low; off target {shown}", remedy, ("S8", "F1"))


def collapse_check(candidate: Candidate, end: End, change: Comparison | None, limits: Thresholds) -> Check:
    """Low entropy, dead variance and no held-out gain together are a collapse; one of them alone is not."""
    low, _ = entropy_low(end, candidate.family, limits)
    signs = {
        "entropy is low": low,
        "reward variance is dead": end.dead(limits.zero_variance, limits.reward_std),
        "nothing moved on held-out items": change is None or change.interval.low <= 0,
    }
    found = [name for name, holds in signs.items() if holds]
    passed = len(found) < len(signs)
    detail = f"{len(found)} of {len(signs)} signs: {', '.join(found) or 'none'}"
    return Check("collapse", passed, len(found), len(signs), detail, "do not promote; see posttrain doctor RUN", ("S1", "F1", "F2"))
