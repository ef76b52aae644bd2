"""A bake-off as lines for the terminal."""

from __future__ import annotations

from posttrain.evals.bakeoff import Bakeoff, Score, Standing, disagreements
from posttrain.runs.summary import p_text


def bakeoff_lines(report: Bakeoff) -> list[str]:
    """The runs, every metric with all arms, and what the rankings say together."""
    lines = [f"{len(report.entrants)} runs, stage {report.entrants[0].stage}; the last step that all reached is {report.step}"]
    for entrant in report.entrants:
        spent = ", ".join(f"{name} {value:g}" for name, value in entrant.spent.items())
        lines.append(f"  {entrant.arm}: {entrant.path}  seed {'-' if entrant.seed is None else entrant.seed}  {spent}")
        lines += [f"    incomplete: {problem}" for problem in entrant.problems] + [f"    {note}" for note in entrant.notes]
    for standing in report.standings:
        lines += ["", *standing_lines(standing)]
    return [*lines, "", *disagreements(report)]


def standing_lines(standing: Standing) -> list[str]:
    """One metric: its label, every arm, and the best against the second."""
    better = "higher" if standing.higher else "lower"
    lines = [f"{standing.name}, {standing.kind}, {better} is better  [{standing.label}]"]
    width = max(len(score.arm) for score in standing.scores)
    ranks = {score.arm: str(rank) for rank, score in enumerate(standing.ranked, start=1)}
    lines += [f"  {ranks.get(score.arm, '-'):>2} {score.arm:{width}}  {_score(score)}" for score in standing.scores]
    return [*lines, f"  {verdict(standing)}"]


def verdict(standing: Standing) -> str:
    """Who wins, or why nobody is shown to."""
    if standing.duel is None:
        if standing.leader is None and len(standing.ranked) > 1:
            return "a tie"
        return f"{standing.leader or 'nobody'} leads; not tested: {standing.why_no_duel or 'nothing to compare'}"
    first, second = (score.arm for score in standing.ranked[:2])
    duel = standing.duel
    moved = f"{duel.delta:+.4g} [{duel.interval.low:+.4g}, {duel.interval.high:+.4g}]"
    tested = f"{first} against {second}: {moved}, p {p_text(duel.p_value)}, adjusted {p_text(duel.adjusted)} ({duel.method})"
    return f"{tested}: {first} wins" if duel.resolved else f"{tested}: no winner shown"


def _score(score: Score) -> str:
    if score.value is None:
        return score.barred
    interval = f" [{score.interval.low:.4g}, {score.interval.high:.4g}]" if score.interval is not None else ""
    return f"{score.value:.4g}{interval}  n {score.n} {score.of}" + (f"  cannot win, {score.barred}" if score.barred else "")
