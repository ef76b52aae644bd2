"""Runs as lines of text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.core.files import read_json
from posttrain.runs.console import duration
from posttrain.runs.listing import RunSummary
from posttrain.runs.run import Run
from posttrain.runs.summary import markdown_table


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
