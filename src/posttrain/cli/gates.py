"""`posttrain probe`, `preflight` and `promote`: the gates by hand. Exit code 0 when the gate passed or is open, 1 when it failed; promotion
has to pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from posttrain.checks.calibration import Family
    from posttrain.core.verdicts import GateVerdict

Set = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one setting by its dotted name; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")]
Model = Annotated[str, typer.Argument(help="Folder, run directory (its last rung, or RUN:RUNG), .gguf file, hub id, or smollm2.")]


def probe(
    model: Model,
    task: Annotated[str | None, typer.Option(help="Task source.")] = None,
    data: Annotated[str | None, typer.Option(help="JSONL or parquet file, or hub id, with prompts and answers.")] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Training prompts to draw.")] = 64,
    siblings: Annotated[int, typer.Option(min=2, help="Completions per prompt.")] = 8,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for the verdict (JSON).")] = None,
    as_json: AsJson = False,
    overrides: Set = None,
) -> None:
    """Does this data teach this model? Groups by kind, group sizes, the cheapest next step. Exit code 1 when there is nothing to learn.

    Draw as the training run will: --set sampling.max_tokens=64, sampling.temperature=0.7; --set reward_range=[-1,1] for another reward.
    """
    from posttrain.checks.probe_gate import probe_lines
    from posttrain.recipes.probe import ProbeRun
    from posttrain.recipes.probe import probe as run

    given: dict[str, Any] = {"model": model, "task": task, "data": data, "prompts": prompts, "siblings": siblings}
    found = run(ProbeRun.load(given).override(overrides or []), out)
    _show(found, as_json, probe_lines)
    raise typer.Exit(1 if found.passed is False else 0)


def preflight(
    model: Model,
    task: Annotated[str | None, typer.Option(help="Task source, whose conversations, answers and grader are tried too.")] = None,
    lora: Annotated[bool, typer.Option(help="With adapters, as in the training run to come.")] = False,
    place: Annotated[Path, typer.Option("--place", help="Where the run would be written: is there room?")] = Path("runs"),
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for the verdict (JSON).")] = None,
    as_json: AsJson = False,
    overrides: Set = None,
) -> None:
    """Template, masks, one real step, saving, and the seam between sampler and trainer, in seconds. Exit code 1 when something is wrong."""
    from posttrain.recipes.preflight import PreflightRun
    from posttrain.recipes.preflight import preflight as run

    settings = PreflightRun.load({"model": model, "task": task, **({"lora": {}} if lora else {})}).override(overrides or [])
    found = run(settings, place, out)
    _show(found, as_json)
    raise typer.Exit(1 if found.passed is False else 0)


def promote(
    run: Annotated[list[Path], typer.Argument(help="Run directory; with --calibrate three or more.")],
    against: Annotated[str | None, typer.Option(help="Record, folder or RUN:RUNG of the model it would replace.")] = None,
    rung: Annotated[str | None, typer.Option(help="Which model of the run; the last one measured by default.")] = None,
    suite: Annotated[str | None, typer.Option(help="What it is judged by.")] = None,
    family: Annotated[Path | None, typer.Option(help="Calibration of the run's family (JSON).")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Make --family from these stable runs instead.")] = False,
    as_json: AsJson = False,
    overrides: Set = None,
) -> None:
    """Judge a trained model by thresholds kept since its run began. Exit code 1 unless every check passes. Reads records only."""
    from posttrain.core.errors import ConfigError

    if calibrate:
        if family is None:
            raise ConfigError("where to? posttrain promote --calibrate RUN RUN RUN --family FILE")
        typer.echo("\n".join(family_lines(calibrated(run, family), family)))
        return
    if len(run) > 1:
        raise ConfigError(f"one run is promoted at a time, {len(run)} were given; --calibrate takes several")
    found = judge(run[0], against=against, rung=rung, suite=suite, family=family, overrides=overrides or [])
    _show(found, as_json)
    raise typer.Exit(0 if found.passed is True else 1)


def judge(
    run: Path, *, against: str | None, rung: str | None, suite: str | None, family: Path | None, overrides: Sequence[str]
) -> GateVerdict:
    """Promotion of a run; the verdict stays in the run as gates/promotion.json."""
    from posttrain.checks.calibration import Family
    from posttrain.checks.candidate import candidate_of, registered
    from posttrain.checks.promotion import Thresholds, promotion
    from posttrain.core.files import write_json

    limits = (registered(run) or Thresholds()).override(overrides)
    usual = Family.read(family) if family else None
    candidate = candidate_of(run, rung=rung, suite=suite, against=against, family=usual, last=limits.last)
    found = promotion(candidate, limits)
    write_json(run / "gates" / "promotion.json", found.as_record())
    return found


def calibrated(runs: Sequence[Path], out: Path) -> Family:
    """Bounds of a family, written to `out`."""
    from posttrain.checks.calibration import calibrate

    found = calibrate(runs)
    found.save(out)
    return found


def family_lines(found: Family, out: Path) -> list[str]:
    """What a calibration found."""
    figures = {"final KL up to": found.kl_ceiling, "final entropy from": found.entropy_floor}
    shown = [f"{name} {value:.3g}" if value is not None else f"{name} unknown: not recorded by all runs" for name, value in figures.items()]
    return [f"{len(found.runs)} runs of one family, mean and {found.sigmas:g} standard deviations: {', '.join(shown)}", f"kept in {out}"]


def _show(found: GateVerdict, as_json: bool, more: Callable[[GateVerdict], list[str]] | None = None) -> None:
    from posttrain.core.verdicts import verdict_lines

    if as_json:
        typer.echo(json.dumps(found.as_record(), indent=2))
    else:
        typer.echo("\n".join(verdict_lines(found) + (more(found) if more else [])))
