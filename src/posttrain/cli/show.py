"""Records as lines of text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.core.errors import EvidenceError
from posttrain.core.files import read_json
from posttrain.evals.compare import Comparison
from posttrain.evals.record import EvalRecord
from posttrain.runs.console import duration
from posttrain.runs.listing import RunSummary
from posttrain.runs.run import Run
from posttrain.runs.summary import markdown_table, p_text, percent, span


def read_record(path: Path) -> EvalRecord:
    """An evaluation record from a file; EvidenceError names the file when it holds something else."""
    try:
        return EvalRecord.from_json(read_json(path))
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}") from None


def record_lines(record: EvalRecord) -> list[str]:
    """The score with n, interval and conditions."""
    interval = record.interval()
    c = record.conditions
    lines = [
        f"{c.suite}: pass@1 {record.pass_at_1:.3f}  95% {span([interval.low, interval.high])} ({interval.method})  "
        f"n = {c.n_items} items x {c.samples_per_item}",
        f"parsed {percent(record.parse_rate)}, truncated {percent(record.truncation_rate)}, grader errors {percent(record.error_rate)}, "
        f"{record.mean_tokens:.1f} tokens on average",
        f"conditions: {c.sampling}  grader {c.grader}  items {c.items_digest}  template {c.template_digest}  seed {c.seed}",
        f"model: {record.label} ({record.model_digest})",
    ]
    if c.samples_per_item > 1:
        k = c.samples_per_item
        wide = record.pass_at_interval(k)
        lines.insert(1, f"pass@{k} {record.pass_at(k):.3f}  95% {span([wide.low, wide.high])} ({wide.method})")
    return lines


def comparison_lines(found: Comparison) -> list[str]:
    """The paired effect with interval, p and what it is worth."""
    lines = [
        f"{found.suite}: {found.label_a} -> {found.label_b}",
        f"change in pass@1 {found.delta:+.3f}  95% {span([found.interval.low, found.interval.high], '+')}  p {p_text(found.p_value)} "
        f"({found.method})  n = {found.n} paired items  evidence: {found.evidence_grade}",
    ]
    if found.mcnemar is not None:
        lines.append(f"items lost {found.mcnemar.lost}, gained {found.mcnemar.gained}")
    return lines


def listing_lines(found: Sequence[RunSummary], root: Path) -> list[str]:
    """One line per run."""
    if not found:
        return [f"no runs in {root}"]
    return [f"{run.path}  {run.state}  {run.created or '-'}  {run.kind or '-'}  stages: {', '.join(run.stages) or 'none'}" for run in found]


def run_lines(path: Path) -> list[str]:
    """A run's table and timings, as far as it got."""
    run = Run.open(path)
    manifest = run.manifest
    lines = [f"{run.path}", f"started {manifest['created']} with: {' '.join(manifest['command'])}"]
    done = [(stage, run.finished(stage)) for stage in manifest["stages"]]
    lines += [f"  {stage:12} {duration(info['seconds']) if info else 'not finished'}" for stage, info in done]
    summary = run.path / "summary.json"
    if summary.is_file():
        lines += ["", markdown_table(read_json(summary)), f"report: {run.path / 'report.html'}"]
    alarms = run.alarms()
    return lines + [f"alarm: {alarm['stage']} step {alarm['step']}: {alarm['detail']}" for alarm in alarms]
