"""What a probe means: its checks, one word for the data, and the cheapest thing to do next.

The bounds are prompts to look, not laws. Only what leaves nothing to learn from, or spoils what is learnt, fails: no group that disagrees,
in enough groups to tell; a parser that loses right answers; answers that are mostly cut or unreadable; one text for everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.checks.group_sizes import recommended
from posttrain.checks.probe import Bucket, Probe
from posttrain.core.errors import ConfigError
from posttrain.core.verdicts import Check, GateVerdict, bounded
from posttrain.stats.intervals import Interval
from posttrain.stats.power import p_mixed


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """When a probe's figure is worth a look, and when it fails: (look, fail)."""

    unanimous: float = 0.8
    """Share of groups that are all right, or all wrong, from which difficulty is worth a look."""
    truncated: tuple[float, float] = (0.02, 0.25)
    unparseable: tuple[float, float] = (0.2, 0.5)
    unread: float = 0.05
    """Share of completions that hold the right answer and were not understood, from which the parser is at fault."""
    errors: tuple[float, float] = (1e-9, 0.05)
    teaching: float = 0.1
    """When no group disagrees: the share of disagreeing groups that must be ruled out (95 %) before the probe fails."""
    few_texts: float = 0.05
    """Different texts per prompt below which the model says one thing to everything."""


DEFAULT = ProbeLimits()

READINGS: dict[str, str] = {
    "grader fails": "repair the grader: run it on the completions that it failed on",
    "wrong range": "say what the worst and the best reward are (reward_range), and probe again",
    "truncated": "raise sampling.max_tokens and probe again; nothing else can be judged while answers are cut",
    "parser bug": "fix the extraction of answers first: right answers are scored as unreadable; then probe again",
    "form not taught": "teach the form with a short SFT pass (a few hundred demonstrations), then probe again",
    "collapsed": "go back to an earlier checkpoint or another starting model: this one says the same to every prompt",
    "duplicates": "raise the temperature (sampling.temperature, sampling.top_p) and probe again",
    "too hard": "choose easier tasks or a curriculum, or teach solutions with SFT first; more siblings only help when some group disagrees",
    "too easy": "choose harder tasks, or stop: there is little left to learn here",
    "no signal": "no group disagrees: filter the data to prompts that are sometimes solved, or choose other data",
    "too few prompts": "no group disagreed, in too few prompts to say that none would: probe 64",
    "form only": "groups disagree about form alone: a short SFT pass is cheaper than RL for that",
    "learnable": "train",
}
"""What the data is to this model, in the order in which it is looked for, and the cheapest next step."""


def probe_gate(probe: Probe, subject: str, limits: ProbeLimits = DEFAULT, gate: str = "launch") -> GateVerdict:
    """Judge a probe."""
    checks = tuple(make(probe, limits) for make in (_grader, _range, _truncation, _parser, _collapse, _duplicates, _difficulty, _signal))
    reading = read(probe, limits, {check.name: check.passed for check in checks})
    return GateVerdict(gate, subject, checks, figures_of(probe) | {"reading": reading, "next": READINGS[reading]})


def read(probe: Probe, limits: ProbeLimits, outcome: dict[str, bool | None]) -> str:
    """The first of READINGS that holds."""
    lost = probe.unread >= limits.unread
    hard, easy = probe.share(Bucket.ALL_WRONG) >= limits.unanimous, probe.share(Bucket.ALL_RIGHT) >= limits.unanimous
    holds = {
        "grader fails": outcome["grader"] is not True,
        "wrong range": outcome["range"] is not True,
        "truncated": outcome["truncation"] is not True,
        "parser bug": lost,
        "form not taught": outcome["parser"] is not True,
        "collapsed": outcome["collapse"] is not True,
        "duplicates": outcome["duplicates"] is not True,
        "too hard": hard,
        "too easy": easy,
        "no signal": outcome["signal"] is False,
        "too few prompts": outcome["signal"] is None and not probe.teaching,
        "form only": not probe.buckets.get(Bucket.MIXED, 0),
    }
    return next((name for name, found in holds.items() if found), "learnable")


def figures_of(probe: Probe) -> dict[str, Any]:
    """A probe as JSON values."""
    success, mixed = probe.success_interval(), probe.mixed_interval()
    expected = None if probe.success is None else p_mixed(probe.success, probe.siblings)
    return {
        "prompts": probe.prompts,
        "siblings": probe.siblings,
        "sampling": probe.sampling.model_dump(mode="json"),
        "reward_range": [probe.scale.low, probe.scale.high],
        "buckets": {bucket.value: probe.buckets.get(bucket, 0) for bucket in Bucket},
        "success": probe.success,
        "success_interval": _span(success),
        "reward": probe.reward,
        "mixed": probe.teaching / probe.prompts,
        "mixed_interval": _span(mixed),
        "mixed_if_alike": expected,
        "statuses": dict(probe.statuses),
        "unread": probe.unread,
        "lengths": dict(probe.lengths),
        "identical": probe.identical,
        "distinct": probe.distinct,
        "sizes": [{"siblings": r.siblings, "mixed": r.mixed, "cost": r.cost, "measured": r.measured} for r in probe.table],
        "recommended_siblings": recommended(probe.table),
    }


def _span(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _grader(probe: Probe, limits: ProbeLimits) -> Check:
    share = probe.statuses["error"]
    detail = f"the grader failed on {share:.1%} of the completions"
    return bounded("grader", share, limits.errors, detail, READINGS["grader fails"], ("S31", "P21"))


def _range(probe: Probe, _: ProbeLimits) -> Check:
    outside, scale = probe.outside, probe.scale
    detail = f"rewards lie within {scale.low:g} to {scale.high:g}"
    if outside:
        detail = f"rewards reach {min(outside):g} to {max(outside):g}, outside of {scale.low:g} to {scale.high:g}"
    return Check("range", not outside, len(outside), 0, detail, READINGS["wrong range"], ("F2",))


def _truncation(probe: Probe, limits: ProbeLimits) -> Check:
    share, cap = probe.statuses["truncated"], probe.sampling.max_tokens
    finished = ", ".join(f"{name} {value:.0f}" for name, value in probe.lengths.items()) or "none"
    detail = f"{share:.1%} of the completions were cut at {cap} tokens; lengths of finished ones: {finished}"
    return bounded("truncation", share, limits.truncated, detail, READINGS["truncated"], ("S107", "S42", "P19"))


def _parser(probe: Probe, limits: ProbeLimits) -> Check:
    share = probe.statuses["unparseable"]
    detail = f"{share:.1%} of the completions could not be parsed"
    if probe.unread >= limits.unread:
        detail += f", and {probe.unread:.1%} hold the right answer all the same"
        return Check("parser", False, share, limits.unparseable[0], detail, READINGS["parser bug"], ("S30", "P33"))
    return bounded("parser", share, limits.unparseable, detail, READINGS["form not taught"], ("S58", "P13"))


def _collapse(probe: Probe, limits: ProbeLimits) -> Check:
    few = max(1, int(limits.few_texts * probe.prompts))
    passed = not (probe.distinct <= few < probe.answers)
    detail = f"{probe.distinct} different texts for {probe.prompts} prompts with {probe.answers} different answers"
    return Check("collapse", passed, probe.distinct, few, detail, READINGS["collapsed"], ("F1", "P19"))


def _duplicates(probe: Probe, limits: ProbeLimits) -> Check:
    """Siblings that are all right may well be the same text; those of other groups may not."""
    detail = f"{probe.identical:.1%} of the groups are one text {probe.siblings} times, at temperature {probe.sampling.temperature:g}"
    spare = max(0.0, probe.identical - probe.share(Bucket.ALL_RIGHT))
    passed = None if spare >= limits.unanimous else True
    if probe.siblings > 1 and (probe.sampling.greedy or spare == 1.0):
        passed = False
    return Check("duplicates", passed, probe.identical, limits.unanimous, detail, READINGS["duplicates"], ("S105", "F1", "F2"))


def _difficulty(probe: Probe, limits: ProbeLimits) -> Check:
    wrong, right = probe.share(Bucket.ALL_WRONG), probe.share(Bucket.ALL_RIGHT)
    interval = probe.success_interval()
    rate = "nothing was scored"
    if probe.success is not None and interval is not None:
        rate = f"{probe.success:.1%} right, 95% [{interval.low:.1%}, {interval.high:.1%}] ({interval.method} over prompts)"
    detail = f"{rate}; {right:.0%} of the groups all right, {wrong:.0%} all wrong"
    passed = None if max(wrong, right) >= limits.unanimous else True
    remedy = READINGS["too hard" if wrong >= right else "too easy"]
    ids = ("S2", "S41") if wrong >= right else ("S40", "S4")
    return Check("difficulty", passed, max(wrong, right), limits.unanimous, detail, remedy, ids)


def _signal(probe: Probe, limits: ProbeLimits) -> Check:
    interval, share = probe.mixed_interval(), probe.teaching / probe.prompts
    detail = f"{probe.teaching} of {probe.prompts} groups disagree ({share:.0%}, 95% [{interval.low:.0%}, {interval.high:.0%}])"
    by_form = probe.buckets.get(Bucket.MIXED_BY_FORM, 0)
    if by_form:
        detail += f", {by_form} of them about form alone"
    passed, remedy = True, READINGS["form only"]
    if not probe.teaching:
        passed = False if interval.high < limits.teaching else None
        remedy = READINGS["no signal" if passed is False else "too few prompts"]
    elif not probe.buckets.get(Bucket.MIXED, 0):
        passed = None
    return Check("signal", passed, share, limits.teaching, detail, remedy, ("F2", "P20", "S41"))


def probe_lines(found: GateVerdict) -> list[str]:
    """The buckets, the table of group sizes, and the verdict in words."""
    figures = found.figures
    lines = [f"{figures['prompts']} prompts x {figures['siblings']} siblings at temperature {figures['sampling']['temperature']:g}"]
    lines += [f"  {name:18}{count:5}  {count / figures['prompts']:6.1%}" for name, count in figures["buckets"].items() if count]
    lines.append("group size     mixed   completions per mixed group")
    for row in figures["sizes"]:
        cost = "-" if row["cost"] is None else f"{row['cost']:.0f}"
        how = "" if row["measured"] else "   (extrapolated)"
        lines.append(f"{row['siblings']:10}{row['mixed']:10.1%}{cost:>14}{how}")
    advice = figures["recommended_siblings"]
    lines.append(f"recommended: {advice} siblings" if advice else "recommended: no size of the table makes half of the groups disagree")
    if spread := _spread(figures):
        lines.append(spread)
    return [*lines, f"the data is to this model: {figures['reading']}; next: {figures['next']}"]


def _spread(figures: Any) -> str | None:
    """Prompts of very unequal difficulty: far fewer groups disagree than the mean success rate alone would give."""
    expected, interval = figures["mixed_if_alike"], figures["mixed_interval"]
    if expected is None or expected <= interval[1] + 0.1:
        return None
    return (
        f"difficulty is uneven: prompts that were all alike would give {expected:.0%} mixed groups, measured {figures['mixed']:.0%}; "
        "filter to prompts that are solved sometimes"
    )


def sequential(first: int, most: int) -> list[int]:
    """How many prompts to probe in turn while no group disagrees: few when the answer is clear, all of them before giving up.

    >>> sequential(16, 64)
    [16, 48]
    """
    if not 2 <= first <= most:
        raise ConfigError(f"a launch gate of {first} to {most} prompts cannot be; give at least 2 and no fewer at most than at first")
    return [first] if first == most else [first, most - first]
