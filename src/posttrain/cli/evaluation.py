"""`posttrain eval`, `compare`, `reconcile`, `select`, `retention`: numbers with their conditions, and only comparisons that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

WHERE = "A record (JSON), a folder of records, a run, or RUN:NAME for one model of a run."


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder, run directory (its last rung, or RUN:RUNG), .gguf file, hub id, or smollm2.")],
    task: Annotated[list[str] | None, typer.Option(help="Task source; repeatable.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Decoding: greedy (the default) or sampled; repeatable.")] = None,
    items: Annotated[
        int, typer.Option("--items", "-n", min=2, help="Held-out items; 500 pick a checkpoint, 1000 are for publication.")
    ] = 500,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 256,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File of the record (JSON); of several tasks or modes, a folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted evaluation left in --out.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Another setting: samples=8, skip=500, seed=2, allow_truncation=true ..."),
    ] = None,
) -> None:
    """Measure a model on held-out items: n, role, 95% interval, parse, truncation and error rate, and every condition."""
    from posttrain.cli.evaluation_lines import record_lines, set_lines
    from posttrain.core.errors import ConfigError
    from posttrain.recipes.evaluate import EvalRun, evaluate_set, in_mode
    from posttrain.recipes.evaluate import evaluate as run

    tasks, modes = task or ["arithmetic"], mode or []
    given: dict[str, Any] = {"model": model, "task": tasks[0], "items": items}
    settings = EvalRun.load(given | {"sampling": {"temperature": 0.0, "max_tokens": max_tokens}}).override(overrides or [])
    if len(tasks) == 1 and len(modes) <= 1 and (out is None or out.suffix == ".json"):
        settings = in_mode(settings, modes[0]) if modes else settings
        typer.echo("\n".join(record_lines(run(settings, out, resume=resume))))
        return
    if out is None:
        raise ConfigError("several records need a folder; add --out FOLDER")
    records = evaluate_set(settings, tasks, modes or ["greedy" if settings.sampling.greedy else "sampled"], out, resume=resume)
    typer.echo("\n".join(set_lines(list(records.values()))))


def compare(
    before: Annotated[str, typer.Argument(help=WHERE)],
    after: Annotated[str, typer.Argument(help="What to compare with it, in the same conditions.")],
) -> None:
    """Paired comparison of two models: effect, interval, p and evidence grade. Refuses unequal conditions and names each of them.

    Folders and runs are compared on every suite that both have, with p-values adjusted for how many they are.
    """
    from posttrain.cli.evaluation_lines import comparison_lines, table_lines
    from posttrain.evals.compare import compare as paired
    from posttrain.evals.compare import compare_all
    from posttrain.evals.shelf import labels_of, pair_up, read_records, tell_apart

    one, other = read_records(before), read_records(after)
    if len(labels_of(one)) == len(labels_of(other)) == 1:
        one, other = tell_apart([(before, one), (after, other)])
    if len(one) == len(other) == 1:
        typer.echo("\n".join(comparison_lines(paired(one[0], other[0]))))
        return
    pairs = pair_up(one, other)
    used = {id(record) for pair in pairs for record in pair}
    left = dict.fromkeys(record.conditions.suite for record in [*one, *other] if id(record) not in used)
    typer.echo("\n".join(table_lines(compare_all(pairs), list(left))))


def reconcile(
    one: Annotated[Path, typer.Argument(help="Evaluation record (JSON).")],
    other: Annotated[Path, typer.Argument(help="Another record of the same model.")],
) -> None:
    """Explain two records of one model that disagree: which condition, noise, or neither; the number is unresolved until they agree."""
    from posttrain.cli.evaluation_lines import reconciliation_lines
    from posttrain.evals.reconcile import reconcile as explain
    from posttrain.evals.shelf import read_record

    typer.echo("\n".join(reconciliation_lines(explain(read_record(one), read_record(other)))))


def select(
    candidates: Annotated[list[str], typer.Argument(help="Records of the checkpoints: files, folders or runs.")],
    suite: Annotated[str | None, typer.Option(help="Suite that picks; needed when there are several.")] = None,
    report: Annotated[list[str] | None, typer.Option(help="Records on items that took no part; repeatable.")] = None,
    report_suite: Annotated[str | None, typer.Option(help="Suite that reports; the one that picks by default.")] = None,
) -> None:
    """Pick the best checkpoint on at least 500 items and report it on others. Exit code 1 when noise does not let any win."""
    from posttrain.cli.evaluation_lines import selection_lines
    from posttrain.evals.selection import select as pick

    chosen = _of_suite(candidates, suite)
    reported = _of_suite(report, report_suite or chosen[0].conditions.suite) if report else []
    found = pick(chosen, reported)
    typer.echo("\n".join(selection_lines(found)))
    if found.winner is None:
        raise typer.Exit(1)


def retention(
    before: Annotated[str, typer.Argument(help=f"Before training. {WHERE}")],
    after: Annotated[str, typer.Argument(help="After training, measured on the same suites.")],
    margin: Annotated[float, typer.Option(help="Largest loss that still counts as kept.")] = 0.05,
) -> None:
    """What a training cost elsewhere, per task and decoding mode: kept, lost, gained or unclear. Exit code 1 when something was lost."""
    from posttrain.cli.evaluation_lines import retention_lines
    from posttrain.evals.retention import retention_report
    from posttrain.evals.shelf import pair_up, read_records

    found = retention_report(pair_up(read_records(before), read_records(after)), margin)
    typer.echo("\n".join(retention_lines(found)))
    if found.lost:
        raise typer.Exit(1)


def _of_suite(places: list[str], suite: str | None) -> list[Any]:
    """The records of one suite in all places."""
    from posttrain.core.errors import EvidenceError
    from posttrain.evals.shelf import read_records, tell_apart

    records = [record for found in tell_apart([(place, read_records(place)) for place in places]) for record in found]
    names = list(dict.fromkeys(record.conditions.suite for record in records))
    if suite is None and len(names) > 1:
        raise EvidenceError(f"several suites were measured: {', '.join(names)}; choose one with --suite")
    found = [record for record in records if suite in (None, record.conditions.suite)]
    if not found:
        raise EvidenceError(f"{', '.join(places)} holds no record of suite '{suite}'; measured are {', '.join(names)}")
    return found
