"""`posttrain runs`: list, show, verify, report and diff. Whatever a directory holds, the answer is lines and never a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from posttrain.runs.diff import RunDiff
    from posttrain.runs.listing import RunSummary
    from posttrain.runs.verify import Problem

MOST_REASONS = 12
"""Differences shown per group."""
MOST_ALARMS = 20

runs_app = typer.Typer(no_args_is_help=True, help="List, show, verify and compare run directories.")


@runs_app.command("list")
def runs_list(root: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs")) -> None:
    """Runs below a folder, oldest first, with how far each got and what it was started from."""
    from posttrain.runs.listing import list_runs

    typer.echo("\n".join(list_lines(list_runs(root), root)))


@runs_app.command("show")
def runs_show(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """A run's origin, method, timings, table and alarms."""
    typer.echo("\n".join(show_lines(run)))


@runs_app.command("verify")
def runs_verify(run: Annotated[Path, typer.Argument(help="Run directory; it may be a copy from another machine.")]) -> None:
    """Read every record again, compute every digest again, compare counts. Exit code 1 when something differs."""
    from posttrain.runs.verify import verify

    problems = verify(run)
    typer.echo("\n".join(verify_lines(problems, run)))
    if problems:
        raise typer.Exit(1)


@runs_app.command("report")
def runs_report(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Write report.html again from the run's records."""
    from posttrain.core.errors import RunError
    from posttrain.runs.report import write_report
    from posttrain.runs.run import Run
    from posttrain.runs.verify import unreadable

    path = Run.open(run).path
    if problems := unreadable(path):
        raise RunError(f"{path} cannot be reported: {problems[0].file}: {problems[0].detail}")
    typer.echo(str(write_report(path)))


@runs_app.command("diff")
def runs_diff(
    a: Annotated[Path, typer.Argument(help="Run directory.")],
    b: Annotated[Path, typer.Argument(help="The one that should have been the same.")],
) -> None:
    """Explain why two runs differ: what is not the same, most telling first, and where their metrics part."""
    from posttrain.runs.diff import explain

    typer.echo("\n".join(diff_lines(explain(a, b), a, b)))


def list_lines(found: Sequence[RunSummary], root: Path) -> list[str]:
    """One line per run."""
    from posttrain.runs.reading import plain

    if not found:
        return [f"no runs in {plain(root)}"]
    lines = []
    for run in found:
        parts = [plain(run.path), run.id or "-", run.state, run.created or "-", run.kind or "-"]
        parts.append(f"stages: {', '.join(plain(stage, 40) for stage in run.stages) or 'none'}")
        parts += [part for part in (run.origin, run.note) if part]
        lines.append("  ".join(parts))
    return lines


def show_lines(path: Path) -> list[str]:
    """A run as far as it got, from whatever part of its records can be read."""
    from posttrain.core.errors import RunError
    from posttrain.runs.listing import summarise_run
    from posttrain.runs.manifest import MANIFEST
    from posttrain.runs.reading import is_file, load_mapping, mapping, plain, strings

    if not is_file(path / MANIFEST):
        raise RunError(f"{path} is not a run (it has no {MANIFEST}); give the directory that was --out")
    run = summarise_run(path)
    manifest = load_mapping(path / MANIFEST).value
    lines = [f"{plain(path.resolve())}  {run.id or ''}  {run.state}".rstrip()]
    lines += [run.note] if run.note else []
    command = " ".join(plain(part) for part in strings(manifest.get("command")))
    lines += [f"started {run.created or 'at an unknown time'} with: {command or 'an unknown command'}"]
    lines += [run.origin] if run.origin else []
    lines += list(_method(mapping(manifest.get("method"))))
    lines += list(_surroundings(manifest))
    for entry in manifest.get("history") if isinstance(manifest.get("history"), list) else ():
        changes = {
            **mapping(mapping(entry).get("settings")),
            **mapping(mapping(entry).get("inputs")),
            **mapping(mapping(entry).get("drift")),
        }
        named = [f"{plain(name, 60)} {_pair(pair)}" for name, pair in list(changes.items())[:4]]
        more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
        lines.append(f"changed {plain(mapping(entry).get('at'), 40)}: {', '.join(named)}{more}")
    lines += [_stage(path, stage) for stage in dict.fromkeys([*strings(manifest.get("stages")), *run.stages])]
    return [*lines, *_table(path), *_alarms(path)]


def verify_lines(problems: Sequence[Problem], run: Path) -> list[str]:
    """One line per problem, or one that says there is none."""
    if not problems:
        return [f"{run}: everything recorded is still there, unchanged"]
    return [f"{problem.file}: {problem.detail}" for problem in problems]


def diff_lines(found: RunDiff, a: Path, b: Path) -> list[str]:
    """The conclusion, then what it rests on."""
    from posttrain.runs.diff import ALL_GROUPS
    from posttrain.runs.reading import plain

    lines = [f"a: {plain(a)} ({found.ids[0]})    b: {plain(b)} ({found.ids[1]})", f"conclusion: {found.conclusion}"]
    lines += [f"could not be read: {plain(problem)}" for problem in found.problems]
    for group in ALL_GROUPS:
        reasons = [reason for reason in found.reasons if reason.group == group]
        if reasons:
            lines.append(f"{group}:")
            lines += [f"  {reason}" for reason in reasons[:MOST_REASONS]]
            lines += [f"  and {len(reasons) - MOST_REASONS} more"] if len(reasons) > MOST_REASONS else []
    lines.append(f"identical: {', '.join(found.same) or 'nothing'}")
    lines += [f"not recorded by both: {', '.join(found.unknown)}"] if found.unknown else []
    lines += list(_metrics(found))
    lines += [f"  {score}" for score in found.scores[:MOST_REASONS]]
    return lines


def _metrics(found: RunDiff) -> Iterator[str]:
    from posttrain.runs.reading import plain

    metrics, parting = found.metrics, found.metrics.parting
    yield f"metrics: {metrics.lines[0]} and {metrics.lines[1]} lines, {metrics.compared} compared, {metrics.differing} differ"
    if parting is not None:
        how = "within the last digits" if parting.rounding else "by more than the last digits"
        others = f"; so do {', '.join(plain(name, 40) for name in parting.others[:5])}" if parting.others else ""
        values = f"{plain(parting.metric, 60)} {plain(parting.a, 60)} -> {plain(parting.b, 60)}"
        yield f"  first at {plain(parting.stage, 40)} step {plain(parting.step, 20)}: {values}, {how}{others}"
    if found.scores:
        yield "scores that differ (pass@1):"


def _method(method: Mapping[str, Any]) -> Iterator[str]:
    from posttrain.runs.reading import mapping, plain

    if not method:
        return
    scale, kl = mapping(method.get("advantage_normalisation")), mapping(method.get("kl"))
    estimator, placement, coef, dtype = (plain(kl.get(name), 20) for name in ("estimator", "placement", "coef", "dtype"))
    held = "no KL term" if estimator in ("None", "none") else f"KL {estimator} in the {placement} x {coef} in {dtype}"
    yield (
        f"method: {plain(method.get('algorithm'), 40)}, aggregation {plain(method.get('aggregation'), 40)}, advantages from "
        f"{plain(scale.get('baseline'), 60)} in units of {plain(scale.get('scale'), 60)}, {held}"
    )


def _surroundings(manifest: Mapping[str, Any]) -> Iterator[str]:
    from posttrain.runs.reading import mapping, plain

    code, cpu = mapping(manifest.get("code")), mapping(manifest.get("cpu"))
    changes = f" with uncommitted changes ({plain(code.get('diff_digest'), 20)})" if code.get("dirty") else ""
    packages = mapping(manifest.get("packages"))
    yield (
        f"code: {plain(code.get('revision') or 'no checkout', 12)}{changes}, posttrain {plain(manifest.get('posttrain'), 20)}, "
        f"torch {plain(packages.get('torch'), 20)}; {plain(cpu.get('model'), 60)}, {plain(cpu.get('cores'), 10)} cores"
    )
    for role, facts in mapping(manifest.get("detected")).items():
        facts = mapping(facts)
        yield f"{plain(role, 20)} as loaded: {plain(facts.get('dtype'), 20)}, quantisation {plain(facts.get('quantisation'), 60)}"


def _stage(path: Path, stage: str) -> str:
    from posttrain.runs.console import duration
    from posttrain.runs.reading import load_mapping, number, plain, within

    place = within(path, f"stages/{stage}.json")
    record, problem = load_mapping(place) if place is not None else ({}, "missing")
    seconds = number(record.get("seconds"))
    how = duration(seconds) if seconds is not None and 0 <= seconds < 1e12 else "finished"
    return f"  {plain(stage, 40):12} {how if problem is None else 'not finished' if problem == 'missing' else problem}"


def _table(path: Path) -> list[str]:
    from posttrain.core.errors import RunError
    from posttrain.runs.reading import load_mapping, plain
    from posttrain.runs.summary import markdown_table

    summary, problem = load_mapping(path / "summary.json")
    if problem == "missing":
        return []
    try:
        if problem is not None:
            raise RunError(problem)
        table = markdown_table(summary).splitlines()
    except (
        RunError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:  # whatever it holds instead of the table's figures
        return [f"summary.json: {plain(error) if isinstance(error, RunError) else 'does not hold the table'}"]
    return ["", *(plain(line, 400) for line in table), "", f"report: {path / 'report.html'}"]


def _alarms(path: Path) -> list[str]:
    from posttrain.runs.reading import mapping, plain, scan_lines
    from posttrain.runs.recorder import ALARMS

    lines = []
    for line in scan_lines(path / ALARMS):
        alarm = mapping(line.value)
        if line.problem is None and alarm:
            word = "note" if mapping(alarm.get("evidence")).get("action") == "note" else "alarm"
            lines.append(f"{word}: {plain(alarm.get('stage'), 40)} step {plain(alarm.get('step'), 20)}: {plain(alarm.get('detail'), 300)}")
        else:
            lines.append(f"{ALARMS}:{line.number}: {line.problem or 'no alarm'}")
    hidden = len(lines) - MOST_ALARMS
    return lines if hidden <= 0 else [*lines[:MOST_ALARMS], f"and {hidden} more alarms"]


def _pair(pair: Any) -> str:
    from posttrain.runs.reading import plain

    old, new = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
    return f"{plain(old, 40)} -> {plain(new, 40)}"
