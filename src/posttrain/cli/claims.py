"""`posttrain claims`: enter, show, re-measure, retract. `posttrain prereg`: what is decided before a comparison. `posttrain bakeoff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Ledger = Annotated[Path, typer.Option("--ledger", help="The ledger; evidence paths are relative to its folder.")]
DEFAULT = Path("evidence/claims.jsonl")

claims_app = typer.Typer(no_args_is_help=True, help="Claims and their evidence: an append-only ledger that is measured again.")


@claims_app.command("add")
def claims_add(
    draft: Annotated[Path, typer.Argument(help="YAML or JSON: id, text with {figure}, metric, subject, digits, evidence.")],
    ledger: Ledger = DEFAULT,
) -> None:
    """Enter claims; every number is computed from the evidence that the draft names."""
    from posttrain.runs.claims_draft import add_drafts

    for held in add_drafts(ledger, draft):
        typer.echo(f"{held.claim.id}: {held.claim.text}  ({held.claim.grade}, {held.status})")


@claims_app.command("link")
def claims_link(
    name: Annotated[str, typer.Argument(help="Id of the claim.")],
    how: Annotated[str, typer.Option(help="pointer, mean, runs, wilson, score or compare.")],
    file: Annotated[list[str], typer.Option(metavar="ROLE=PATH", help="Record below the ledger's folder, e.g. file=b.json; repeatable.")],
    command: Annotated[str, typer.Option(help="The command that made the record.")],
    pointer: Annotated[list[str] | None, typer.Option(metavar="NAME=/PATH", help="JSON pointer into the record; repeatable.")] = None,
    ledger: Ledger = DEFAULT,
) -> None:
    """Add another record to a claim, such as a replication; one that disagrees makes the claim unresolved."""
    from posttrain.runs.claims import Claims
    from posttrain.runs.claims_text import claim_lines
    from posttrain.runs.evidence import link

    claims = Claims.read(_existing(ledger))
    evidence = link(claims.root, how, _pairs(file, "--file"), _pairs(pointer or [], "--pointer"), command)
    held = claims.link(name, evidence)
    typer.echo("\n".join(claim_lines(Claims.read(ledger), held)))


@claims_app.command("collect")
def claims_collect(
    run: Annotated[Path, typer.Argument(help="Run directory with a summary and evaluations.")],
    name: Annotated[str, typer.Option("--as", help="Name of the folder of its records, and first part of the claims' ids.")],
    command: Annotated[str, typer.Option(help="The command that made the run.")],
    ledger: Ledger = DEFAULT,
) -> None:
    """Copy a run's evaluations into the evidence and enter a claim per rung and suite, and per change."""
    from posttrain.runs.claims_collect import collect

    typer.echo(f"{len(collect(ledger, run, name, command))} claims entered; posttrain claims show --ledger {ledger}")


@claims_app.command("show")
def claims_show(
    name: Annotated[str | None, typer.Argument(help="One claim; all of them without.")] = None,
    status: Annotated[str | None, typer.Option(help="supported, weak, unresolved, retracted or superseded.")] = None,
    ledger: Ledger = DEFAULT,
) -> None:
    """Claims with number, grade, evidence and what became of them."""
    typer.echo("\n".join(show_lines(ledger, name, status)))


@claims_app.command("check")
def claims_check(ledger: Ledger = DEFAULT) -> None:
    """Read the raw evidence again and compute every number anew. Exit code 1 when one does not hold."""
    from posttrain.runs.claims import Claims
    from posttrain.runs.claims_check import check, verdict_lines

    claims = Claims.read(_existing(ledger))
    verdicts = check(claims)
    typer.echo("\n".join(verdict_lines(verdicts, claims)))
    if any(verdict.outcome == "broken" for verdict in verdicts):
        raise typer.Exit(1)


@claims_app.command("retract")
def claims_retract(
    name: Annotated[str, typer.Argument(help="Id of the claim.")],
    reason: Annotated[str, typer.Option(help="Why it does not hold; shown wherever the number stood.")],
    ledger: Ledger = DEFAULT,
) -> None:
    """Withdraw a claim. It stays readable, struck through, with the reason."""
    from posttrain.runs.claims import Claims
    from posttrain.runs.claims_text import history_lines

    typer.echo("\n".join(history_lines(Claims.read(_existing(ledger)).retract(name, reason))))


@claims_app.command("supersede")
def claims_supersede(
    name: Annotated[str, typer.Argument(help="Id of the old claim.")],
    by: Annotated[str, typer.Argument(metavar="NEW", help="Id of the claim that takes its place.")],
    reason: Annotated[str, typer.Option(help="What the new measurement did better.")],
    scope: Annotated[str, typer.Option(help="Where the new claim holds, if not everywhere.")] = "",
    ledger: Ledger = DEFAULT,
) -> None:
    """Put a newer claim in the place of an older one; both point at each other."""
    from posttrain.runs.claims import Claims
    from posttrain.runs.claims_text import history_lines

    typer.echo("\n".join(history_lines(Claims.read(_existing(ledger)).supersede(name, by, reason, scope))))


@claims_app.command("mark")
def claims_mark(
    name: Annotated[str, typer.Argument(help="Id of the claim.")],
    status: Annotated[str, typer.Argument(help="supported, weak or unresolved.")],
    reason: Annotated[str, typer.Option(help="Why.")],
    ledger: Ledger = DEFAULT,
) -> None:
    """Say where a live claim stands, with the reason."""
    from posttrain.runs.claims import Claims, status_named
    from posttrain.runs.claims_text import history_lines

    typer.echo("\n".join(history_lines(Claims.read(_existing(ledger)).mark(name, status_named(status), reason))))


@claims_app.command("history")
def claims_history(name: Annotated[str, typer.Argument(help="Id of the claim.")], ledger: Ledger = DEFAULT) -> None:
    """What happened to a claim, oldest first."""
    from posttrain.runs.claims import Claims
    from posttrain.runs.claims_text import history_lines

    typer.echo("\n".join(history_lines(Claims.read(_existing(ledger)).get(name))))


prereg_app = typer.Typer(no_args_is_help=True, help="What decides a comparison, written down before it runs.")


@prereg_app.command("new")
def prereg_new(
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist and is never written again.")],
    metric: Annotated[str, typer.Option(help="What decides, named as posttrain bakeoff names it, e.g. pass@1 or 'max reward_mean'.")],
    budget: Annotated[str, typer.Option(help="What every arm may spend, e.g. steps=100 or tokens=5e6.")],
    arms: Annotated[str, typer.Option(help="The methods, e.g. gspo,cispo.")],
    min_effect: Annotated[
        str,
        typer.Option(metavar="EFFECT[:SIGMA:RUNS]", help="Smallest difference that matters; with the spread over seeds of earlier runs."),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Runs per arm.")] = 1,
    suite: Annotated[str, typer.Option(help="Evaluation suite, for pass@1.")] = "",
    higher: Annotated[bool, typer.Option("--higher/--lower", help="Whether more is better.")] = True,
) -> None:
    """Write down metric, budget and arms before the runs, and say whether the budget can see the effect."""
    from posttrain.runs.preregistration import new_prereg, prereg_lines, register

    made = register(file, new_prereg(metric, higher, budget, arms, min_effect, seeds=seeds, suite=suite))
    typer.echo("\n".join([f"{file}:", *prereg_lines(made)]))


@prereg_app.command("show")
def prereg_show(file: Annotated[Path, typer.Argument(help="A registration.")]) -> None:
    """A registration, after checking that it is as it was written."""
    from posttrain.runs.preregistration import prereg_lines, read_prereg

    typer.echo("\n".join(prereg_lines(read_prereg(file))))


def bakeoff(
    runs: Annotated[list[str], typer.Argument(metavar="[ARM=]RUN...", help="Run directories; the same ARM several times are its seeds.")],
    prereg: Annotated[Path | None, typer.Option(help="Registration that the comparison follows, or departs from by name.")] = None,
    stage: Annotated[str | None, typer.Option(help="Training stage to compare; by default the last one.")] = None,
    target: Annotated[float | None, typer.Option(help="Reward whose first reaching counts as a metric of its own.")] = None,
) -> None:
    """All metrics for all methods: the winner of each with its test, incomplete runs, and where the rankings disagree."""
    from posttrain.evals.bakeoff import bakeoff as compare_all
    from posttrain.evals.bakeoff_runs import entrants
    from posttrain.evals.bakeoff_text import bakeoff_lines
    from posttrain.runs.preregistration import read_prereg

    registered = read_prereg(prereg) if prereg is not None else None
    typer.echo("\n".join(bakeoff_lines(compare_all(entrants(runs, stage), registered, target))))


def show_lines(ledger: Path, name: str | None, status: str | None) -> list[str]:
    """The lines of `posttrain claims show`."""
    from posttrain.runs.claims import Claims, status_named
    from posttrain.runs.claims_text import claim_lines

    claims = Claims.read(_existing(ledger))
    wanted = status_named(status) if status is not None else None
    chosen = [claims.get(name)] if name is not None else list(claims.held.values())
    shown = [held for held in chosen if wanted in (None, claims.status(held.claim.id))]
    return [line for held in shown for line in claim_lines(claims, held)] or [f"no claims{f' are {wanted}' if wanted else ''} in {ledger}"]


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    from posttrain.core.errors import ConfigError

    if wrong := [text for text in texts if "=" not in text]:
        raise ConfigError(f"{option} '{wrong[0]}' is not NAME=PATH")
    return {name: path for name, _, path in (text.partition("=") for text in texts)}


def _existing(ledger: Path) -> Path:
    from posttrain.core.errors import RunError

    if not ledger.is_file():
        raise RunError(f"{ledger}: no such ledger; name one with --ledger, or enter a first claim with posttrain claims add")
    return ledger
