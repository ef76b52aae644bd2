"""Several methods side by side: the winner of every metric, all metrics for all methods, and where the rankings disagree.

Two kinds of metric are kept apart. *At the matched step* compares training logs at the last step that every run reached. *Over the
budget* compares what came out of the whole run: evaluations after it, the best reward, the cost; a run whose log is incomplete is listed
there and cannot win. With two or more seeds per arm a difference is tested over seeds (Welch), which speaks about the methods; with one
run per arm it is tested over the items of an evaluation, which speaks about two checkpoints only; a training metric of one run has no
interval at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from posttrain.core.errors import EvidenceError
from posttrain.evals.bakeoff_runs import Entrant
from posttrain.evals.compare import compare
from posttrain.runs.preregistration import Conduct, Prereg, differing
from posttrain.stats.intervals import Interval, cluster_t
from posttrain.stats.multiple import holm
from posttrain.stats.two_sample import welch

Kind = Literal["at the matched step", "over the budget"]
WINDOW = 10
"""Steps whose mean stands for the value at a step: one batch's reward is mostly noise."""
SUITE_METRIC = "pass@1"
REGISTERED = "pre-registered"
UNREGISTERED = "exploratory: nothing was registered before the runs"


@dataclass(frozen=True, slots=True)
class Score:
    """What one arm has of one metric.

    Example: Score("gspo", 0.62, Interval(0.58, 0.66, 0.95, "wilson"), n=500, of="items", barred="")
    """

    arm: str
    value: float | None
    interval: Interval | None
    n: int
    of: str
    """What n counts: items, or runs."""
    barred: str
    """Why the arm cannot win by this metric; empty when it can."""


@dataclass(frozen=True, slots=True)
class Duel:
    """The best arm against the second. Example: Duel(0.04, Interval(0.01, 0.07, ...), p_value=0.01, method="...", adjusted=0.03)"""

    delta: float
    interval: Interval
    p_value: float
    method: str
    adjusted: float = 1.0
    """Holm's p-value over the exploratory metrics; the plain one for the registered metric."""

    @property
    def resolved(self) -> bool:
        """Whether one arm is shown to be better."""
        return 0.0 not in self.interval and self.adjusted < 1 - self.interval.level


@dataclass(frozen=True, slots=True)
class Standing:
    """All arms by one metric, those that can win first and best first.

    Example: Standing("pass@1", "held_out", "over the budget", True, (Score("gspo", ...), ...), duel=None, label="pre-registered")
    """

    metric: str
    suite: str
    kind: Kind
    higher: bool
    scores: tuple[Score, ...]
    duel: Duel | None
    why_no_duel: str = ""
    label: str = UNREGISTERED

    @property
    def name(self) -> str:
        """The metric in words."""
        return f"{self.metric} on {self.suite}" if self.suite else self.metric

    @property
    def ranked(self) -> tuple[Score, ...]:
        """The arms that can win, best first."""
        return tuple(score for score in self.scores if not score.barred and score.value is not None)

    @property
    def leader(self) -> str | None:
        """The arm in front, shown to be better or not; None when the first two have the same value."""
        ranked = self.ranked
        tied = len(ranked) > 1 and ranked[0].value == ranked[1].value
        return ranked[0].arm if ranked and not tied else None

    @property
    def winner(self) -> str | None:
        """The arm that is shown to be better than the second."""
        return self.leader if self.duel is not None and self.duel.resolved else None


@dataclass(frozen=True, slots=True)
class Bakeoff:
    """The whole comparison. Example: Bakeoff(entrants, step=99, standings=(Standing(...), ...)).standings[0].winner"""

    entrants: tuple[Entrant, ...]
    step: int
    """The last step that every run reached."""
    standings: tuple[Standing, ...]
    """The registered metric first."""


def bakeoff(entrants: Sequence[Entrant], prereg: Prereg | None = None, target: float | None = None) -> Bakeoff:
    """Rank the runs by everything that two or more arms have. `target` adds the steps until the reward reached it.

    Raises EvidenceError when there is only one arm, or when the registered metric was not measured.
    """
    arms: dict[str, list[Entrant]] = {}
    for entrant in entrants:
        arms.setdefault(entrant.arm, []).append(entrant)
    if len(arms) < 2:
        raise EvidenceError(f"all runs belong to the arm '{next(iter(arms), '')}'; give each method a name: NAME=RUN")
    step = min(entrant.last for entrant in entrants)
    found = [_suite(arms, suite) for suite in dict.fromkeys(name for entrant in entrants for name in entrant.records)]
    found += _logs(arms, step, target)
    found = [standing for standing in found if sum(score.value is not None for score in standing.scores) >= 2]
    if prereg is not None:
        found = _labelled(found, arms, prereg)
    return Bakeoff(tuple(entrants), step, tuple(_adjusted(found)))


def disagreements(report: Bakeoff) -> list[str]:
    """In words: who leads by what, and whose rank depends most on the metric."""
    led: dict[str, list[str]] = {}
    ranks: dict[str, dict[str, int]] = {}
    for standing in report.standings:
        if len(standing.ranked) < 2 or standing.leader is None:
            continue
        led.setdefault(standing.leader, []).append(standing.name)
        for rank, score in enumerate(standing.ranked, start=1):
            ranks.setdefault(score.arm, {})[standing.name] = rank
    if len(led) < 2:
        return [f"every metric puts {next(iter(led))} in front"] if led else ["no metric ranks two arms"]
    lines = ["the ranking depends on the metric: " + "; ".join(f"{arm} leads by {', '.join(names)}" for arm, names in led.items())]
    for arm, of in ranks.items():
        best, worst = min(of, key=lambda name: of[name]), max(of, key=lambda name: of[name])
        if of[worst] > of[best]:
            lines.append(f"{arm} is number {of[best]} by {best} and number {of[worst]} by {worst}")
    return lines


def _suite(arms: Mapping[str, Sequence[Entrant]], suite: str) -> Standing:
    """One evaluation suite, measured after the budget was spent. Arms measured in other conditions than the first are barred."""
    reference = next(entrant.records[suite] for entrants in arms.values() for entrant in entrants if suite in entrant.records)
    several = min(len(entrants) for entrants in arms.values()) >= 2
    scores = []
    for arm, entrants in arms.items():
        records = [entrant.records[suite] for entrant in entrants if suite in entrant.records]
        barred = _incomplete(entrants)
        try:
            for record in records:
                compare(reference, record)
        except EvidenceError as error:
            barred = str(error)
        if len(records) < len(entrants):
            barred = f"{len(entrants) - len(records)} of {len(entrants)} run(s) have no evaluation on {suite}"
        values = [record.pass_at_1 for record in records]
        if several or len(records) != 1:
            scores.append(_over_runs(arm, values, barred))
        else:
            scores.append(Score(arm, values[0], records[0].interval(), len(records[0].item_means), "items", barred))
    standing = _ranked(Standing(SUITE_METRIC, suite, "over the budget", True, tuple(scores), None), arms, lambda e: _pass_at_1(e, suite))
    if several or len(standing.ranked) < 2 or {score.of for score in standing.ranked[:2]} != {"items"}:
        return standing
    first, second = (arms[score.arm][0].records[suite] for score in standing.ranked[:2])
    change = compare(second, first)
    return replace(standing, duel=Duel(change.delta, change.interval, change.p_value, change.method), why_no_duel="")


def _logs(arms: Mapping[str, Sequence[Entrant]], step: int, target: float | None) -> list[Standing]:
    """The training log at the matched step, and over the budget."""
    everyone = [entrant for entrants in arms.values() for entrant in entrants]
    main, higher = ("reward_mean", True) if any("reward_mean" in entrant.series for entrant in everyone) else ("loss", False)
    best = max if higher else min
    at: list[tuple[str, bool, Callable[[Entrant], float | None]]] = [
        (f"{main} at step {step}", higher, lambda e: _window(e, main, step)),
        (f"entropy at step {step}", True, lambda e: _window(e, "entropy", step)),
    ]
    over: list[tuple[str, bool, Callable[[Entrant], float | None]]] = [
        (f"{'max' if higher else 'min'} {main}", higher, lambda e: best(_smooth(e, main), default=None)),
        (f"mean {main}", higher, lambda e: _mean(e, main)),
        ("sustained entropy", True, lambda e: min(_smooth(e, "entropy"), default=None)),
        ("tokens", False, lambda e: e.spent.get("tokens")),
        ("seconds", False, lambda e: e.spent.get("seconds")),
    ]
    if target is not None and higher:
        over.append((f"steps to {main} {target:g}", False, lambda e: _reached(e, main, target)))
    return [_log(arms, name, "at the matched step", up, read) for name, up, read in at] + [
        _log(arms, name, "over the budget", up, read) for name, up, read in over
    ]


def _log(arms: Mapping[str, Sequence[Entrant]], name: str, kind: Kind, higher: bool, read: Callable[[Entrant], float | None]) -> Standing:
    scores = []
    for arm, entrants in arms.items():
        values = [value for entrant in entrants if (value := read(entrant)) is not None]
        barred = _incomplete(entrants) if kind == "over the budget" else ""
        if len(values) < len(entrants):
            barred = barred or f"{len(entrants) - len(values)} of {len(entrants)} run(s) have no value"
        scores.append(_over_runs(arm, values, barred))
    return _ranked(Standing(name, "", kind, higher, tuple(scores), None), arms, read)


def _ranked(standing: Standing, arms: Mapping[str, Sequence[Entrant]], read: Callable[[Entrant], float | None]) -> Standing:
    """Best first, those that cannot win last, with the test over seeds where both leading arms have several."""
    sign = -1.0 if standing.higher else 1.0
    order = sorted(standing.scores, key=lambda s: (bool(s.barred) or s.value is None, sign * s.value if s.value is not None else 0.0))
    standing = replace(standing, scores=tuple(order))
    if len(standing.ranked) < 2:
        return replace(standing, why_no_duel="fewer than two arms can win")
    first, second = ([value for entrant in arms[s.arm] if (value := read(entrant)) is not None] for s in standing.ranked[:2])
    if min(len(first), len(second)) < 2:
        return replace(standing, why_no_duel="one run per arm, so the spread between seeds is unknown")
    try:
        found = welch(second, first)
    except EvidenceError as error:
        return replace(standing, why_no_duel=str(error))
    return replace(standing, duel=Duel(found.delta, found.interval, found.p_value, f"{found.method} over seeds"))


def _over_runs(arm: str, values: Sequence[float], barred: str) -> Score:
    if not values:
        return Score(arm, None, None, 0, "runs", barred or "not measured")
    spread = len(values) >= 2 and max(values) - min(values) > 1e-9 * max(1.0, abs(values[0]))
    return Score(arm, fmean(values), cluster_t(values, bounds=None) if spread else None, len(values), "runs", barred)


def _incomplete(entrants: Sequence[Entrant]) -> str:
    return next((f"incomplete: {entrant.problems[0]}" for entrant in entrants if entrant.problems), "")


def _labelled(found: Sequence[Standing], arms: Mapping[str, Sequence[Entrant]], prereg: Prereg) -> list[Standing]:
    """The registered metric first; everything else is exploratory."""
    chosen = next((standing for standing in found if (standing.metric, standing.suite) == (prereg.metric, prereg.suite)), None)
    if chosen is None:
        known = ", ".join(standing.name for standing in found) or "nothing"
        raise EvidenceError(
            f"the registered metric '{prereg.metric}'{prereg.suite and ' on ' + prereg.suite} was not measured; measured: {known}"
        )
    spent = {
        arm: {kind: max(e.spent[kind] for e in runs if kind in e.spent) for e in runs for kind in e.spent} for arm, runs in arms.items()
    }
    started = [entrant.started for runs in arms.values() for entrant in runs]
    conduct = Conduct(
        metric=chosen.metric,
        suite=chosen.suite,
        spent=spent,
        seeds={arm: [entrant.seed for entrant in runs] for arm, runs in arms.items()},
        started=min(started) if all(started) else "",
    )
    departures = differing(prereg, conduct)
    if chosen.higher != prereg.higher:
        departures.append(f"direction: {'higher' if prereg.higher else 'lower'} registered as better")
    label = f"exploratory: {'; '.join(departures)}" if departures else REGISTERED
    rest = [replace(standing, label="exploratory: not the registered metric") for standing in found if standing is not chosen]
    return [replace(chosen, label=label), *rest]


def _adjusted(found: Sequence[Standing]) -> list[Standing]:
    """p-values adjusted by Holm over the exploratory metrics; one that was registered before the runs stands alone."""
    tested = {
        str(at): standing.duel.p_value for at, standing in enumerate(found) if standing.duel is not None and standing.label != REGISTERED
    }
    adjusted = holm(tested)
    return [
        standing
        if standing.duel is None
        else replace(standing, duel=replace(standing.duel, adjusted=adjusted.get(str(at), standing.duel.p_value)))
        for at, standing in enumerate(found)
    ]


def _pass_at_1(entrant: Entrant, suite: str) -> float | None:
    record = entrant.records.get(suite)
    return None if record is None else record.pass_at_1


def _window(entrant: Entrant, name: str, step: int) -> float | None:
    """Mean over the last steps up to `step`."""
    values = [value for at, value in entrant.series.get(name, {}).items() if step - WINDOW < at <= step]
    return fmean(values) if values else None


def _smooth(entrant: Entrant, name: str) -> list[float]:
    """Means over windows of consecutive logged steps; one mean when there are fewer."""
    series = entrant.series.get(name, {})
    values = [series[at] for at in sorted(series)]
    width = min(WINDOW, len(values))
    return [fmean(values[end - width : end]) for end in range(width, len(values) + 1)] if values else []


def _mean(entrant: Entrant, name: str) -> float | None:
    values = entrant.series.get(name, {}).values()
    return fmean(values) if values else None


def _reached(entrant: Entrant, name: str, target: float) -> float | None:
    """Steps taken until the window's mean was at the target; None when it never was."""
    smooth = _smooth(entrant, name)
    width = min(WINDOW, len(entrant.series.get(name, {})))
    return next((float(at + width) for at, value in enumerate(smooth) if value >= target), None)
