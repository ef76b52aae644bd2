"""Evaluations as lines of text for the terminal: the number, its conditions, and what may be said with it."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.evals.compare import SCOPE, Comparison, Table
from posttrain.evals.coverage import Change
from posttrain.evals.reconcile import Reconciliation
from posttrain.evals.record import MAX_TRUNCATION, EvalRecord, Role
from posttrain.evals.retention import Retention
from posttrain.evals.selection import Selection
from posttrain.runs.summary import p_text, percent, span
from posttrain.stats.grade import GRADE_MEANING
from posttrain.stats.intervals import Interval

ROLES = {
    Role.PULSE: "it shows a trend and decides nothing (500 items pick a checkpoint)",
    Role.SELECTION: "enough items to pick a checkpoint (1000 are for publication)",
    Role.PUBLICATION: "enough items for publication",
}


def record_lines(record: EvalRecord) -> list[str]:
    """The score with n, interval and conditions."""
    c, interval = record.conditions, record.interval()
    lines = [
        f"{c.suite}: pass@1 {record.pass_at_1:.3f}  {_span(interval)} ({interval.method})  n = {c.n_items} items x {c.samples_per_item}  "
        f"role: {record.role}, {ROLES[record.role]}",
        f"parsed {percent(record.parse_rate)}, truncated {percent(record.truncation_rate)}, grader errors {percent(record.error_rate)}, "
        f"{record.mean_tokens:.1f} tokens on average",
        f"conditions: {c.mode}, {c.sampling}, thinking {c.thinking}  extractor {c.extractor}  verifier {c.verifier}  seed {c.seed}",
        f"items: {c.split} of {c.dataset} ({c.split_digest})  items {c.items_digest}  template {c.template_digest}  "
        f"tokenizer {c.tokenizer_digest}",
        f"model: {record.label} ({record.model_digest})",
    ]
    if c.samples_per_item > 1 and record.binary:
        k = min(len(item.values) for item in record.items if item.values)
        reached, relied = record.pass_at_interval(k), record.pass_hat_interval(k)
        lines.insert(1, f"pass@{k} {record.pass_at(k):.3f}  {_span(reached)} ({reached.method})")
        lines.insert(2, f"pass^{k} {record.pass_hat(k):.3f}  {_span(relied)} ({relied.method})")
    if record.error_rate:
        low, high = record.bounds
        lines.insert(-3, f"the grader failed on some: pass@1 is {low:.3f} if they were all wrong, {high:.3f} if all right")
    if record.truncation_rate >= MAX_TRUNCATION:
        lines.insert(-3, f"{percent(record.truncation_rate)} of the answers were cut: raise max_tokens before the score is trusted")
    return lines


def set_lines(records: Sequence[EvalRecord]) -> list[str]:
    """Several suites of one model, a line each."""
    rows = [["suite", "pass@1", "95% interval", "method", "n", "parsed", "cut", "errors", "role"]]
    for record in records:
        interval, c = record.interval(), record.conditions
        rows.append(
            [
                c.suite,
                f"{record.pass_at_1:.3f}",
                span([interval.low, interval.high]),
                interval.method,
                f"{c.n_items} x {c.samples_per_item}",
                percent(record.parse_rate),
                percent(record.truncation_rate),
                percent(record.error_rate),
                str(record.role),
            ]
        )
    return _columns(rows)


def comparison_lines(found: Comparison) -> list[str]:
    """The paired effect with interval, p, grade, and what it may be used for."""
    lines = [
        f"{found.suite}: {found.label_a} -> {found.label_b}",
        f"change in pass@1 {found.delta:+.3f}  {_span(found.interval, '+')}  p {p_text(found.p_value)} "
        f"({found.method})  n = {found.n} paired items",
    ]
    if found.same_model:
        return [*lines, "both records measured the same weights: nothing was changed that could have an effect"]
    lines.append(f"evidence: {found.grade}, {GRADE_MEANING[found.grade]}")
    lines.append(f"scope: {SCOPE}")
    if not found.resolved:
        lines.append(f"detectable at this n: {found.detectable:.3f}; a smaller effect is missed more often than one time in five")
    if not found.picks:
        why = "the gap is inside the noise" if not found.resolved else f"{found.n} items are a pulse, take 500"
        lines.append(f"this cannot pick a checkpoint: {why}")
    if found.mcnemar is not None:
        lines.append(f"items lost {found.mcnemar.lost}, gained {found.mcnemar.gained}")
    return lines + _coverage_lines(found)


def _coverage_lines(found: Comparison) -> list[str]:
    lines = []
    if found.coverage is not None:
        c = found.coverage
        lines += [_change("pass@", c.at_1), _change("pass@", c.at_k), _change("pass^", c.hat_k)]
        crossing = f"; pass@k crosses at k = {c.crossover}" if c.crossover else ""
        lines.append(f"verdict: {c.verdict} ({c.why}){crossing}")
    if found.transitions is not None:
        t = found.transitions
        lines.append(f"solved before and after {t.kept}, gained {t.gained}, lost {t.lost}, never solved {t.unsolved}")
    return lines


def table_lines(table: Table, unpaired: Sequence[str] = ()) -> list[str]:
    """Several suites side by side, p-values adjusted for how many they are; `unpaired` names suites that one side lacks."""
    rows = [["suite", "from", "to", "change", "interval", "p", "Holm p", "n", "evidence"]]
    for row in table.rows:
        one = row.comparison
        rows.append(
            [
                one.suite,
                one.label_a,
                one.label_b,
                f"{one.delta:+.3f}",
                span([one.interval.low, one.interval.high], "+"),
                p_text(one.p_value),
                "-" if row.adjusted is None else p_text(row.adjusted),
                str(one.n),
                str(row.grade or "same model"),
            ]
        )
    lines = [*_columns(rows), f"intervals: {_method(table.method)}; evidence is about {SCOPE}"]
    return lines + ([f"measured on one side only: {', '.join(unpaired)}"] if unpaired else [])


def reconciliation_lines(found: Reconciliation) -> list[str]:
    """What differs, what the items say, and the verdict."""
    lines = [f"{found.label_a}: {found.score_a:.3f} against {found.score_b:.3f}"]
    lines += [f"differs: {difference}" for difference in found.differing] or ["every recorded condition is equal"]
    score = f"p {p_text(found.p_value)} ({found.test})" if found.p_value is not None else found.test
    shared = "" if found.p_shared is None else f", p {p_text(found.p_shared)} on these"
    lines.append(f"the two scores: {score}; items that both scored {found.shared}, of which {found.disagree} disagree{shared}")
    lines.append(f"verdict: {found.verdict}: {found.reason}")
    quote = "it may be quoted" if found.absolute == "resolved" else "quote neither until both are measured in equal conditions and agree"
    lines.append(f"absolute number: {found.absolute}; {quote}")
    return lines


def selection_lines(found: Selection) -> list[str]:
    """The candidates, the pick or the tie, and the score elsewhere."""
    lines = [f"{found.suite}: pass@1 on the items that pick"]
    lines += [f"  {label}  {score:.3f}" for label, score in found.scores.items()]
    if found.winner is None:
        tied = ", ".join([found.best, *found.tied])
        lines.append(f"no pick: the gap of {found.gap:+.3f} to the runner-up is inside the paired noise; tied: {tied}")
        return [*lines, "take any of them for another reason, or measure them on more items"]
    lines.append(f"picked: {found.winner}, {found.gap:+.3f} above the runner-up")
    if found.report is None or found.optimism is None:
        return [
            *lines,
            f"{found.pick:.3f} picked it and flatters it: report it on items that took no part (eval --set skip=500, then --report)",
        ]
    interval = found.report.interval()
    lines.append(
        f"report: pass@1 {found.report.pass_at_1:.3f}  {_span(interval)} ({interval.method})  "
        f"n = {found.report.conditions.n_items} items of '{found.report.conditions.split}' that took no part"
    )
    return [*lines, f"optimism of the pick: {found.optimism:+.3f} ({found.pick:.3f} where it was picked)"]


def retention_lines(found: Retention) -> list[str]:
    """Each task and mode with its verdict, then the tasks whose modes disagree."""
    rows = [["task", "decoding", "change", "interval", "Holm p", "n", "verdict"]]
    for kept in found.kept:
        one, adjusted = kept.comparison, kept.row.adjusted
        interval = span([one.interval.low, one.interval.high], "+")
        p = "-" if adjusted is None else p_text(adjusted)
        rows.append([kept.dataset, kept.decoding, f"{one.delta:+.3f}", interval, p, str(one.n), kept.verdict])
    lines = [*_columns(rows), f"intervals: {_method(found.method)}; kept means that a loss of more than {found.margin:.3g} is excluded"]
    for flip in found.flips:
        worth, signs = ("both beyond noise" if flip.resolved else "perhaps noise"), (f"{flip.delta_a:+.3f}", f"{flip.delta_b:+.3f}")
        lines.append(f"{flip.dataset}: the sign depends on the decoding: {signs[0]} {flip.mode_a}, {signs[1]} {flip.mode_b} ({worth})")
    return lines


def _method(name: str) -> str:
    return "wilson on items 95%, since every item moved alike" if name == "none" else name


def _change(name: str, change: Change) -> str:
    return f"{name}{change.k} {change.a:.3f} -> {change.b:.3f}  {change.delta:+.3f}  {_span(change.interval, '+')}"


def _span(interval: Interval, sign: str = "") -> str:
    return f"{100 * interval.level:g}% {span([interval.low, interval.high], sign)}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
