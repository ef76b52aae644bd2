"""`posttrain`: the command line. Help and parsing never import torch; each command imports what it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain import __version__
from posttrain.cli import claims, doctor, evaluation, gates, lint, runs
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.engine.runtime import prepare_environment

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Post-training for language models: climb the ladder, train one stage, measure, compare, chat.",
)

Set = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one setting by its dotted name; repeatable.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Run directory to write; must not exist, or use --resume.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out with the settings it was started with.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of every random stream.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core, at most 4.")]


def main() -> None:
    """Entry point: expected failures are one line on stderr and a non-zero exit; anything else keeps its traceback."""
    prepare_environment()
    try:
        app()
    except PosttrainError as error:
        if _leads():
            typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 130:
            typer.secho("stopped at once, without saving; what was saved before is intact", fg="red", err=True)
        raise


def _leads() -> bool:
    """Whether this process talks to the user: of those that torchrun starts, the first does."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    """Options of the command itself."""


@app.command()
def ladder(
    out: Out = Path("runs/ladder"),
    preset: Annotated[str | None, typer.Option(help="tiny (embedded, minutes; the default) or smollm2 (a real pretrained model).")] = None,
    seed: Seed = None,
    processes: Processes = None,
    overrides: Set = None,
    resume: Resume = False,
) -> None:
    """Take a base model up five rungs (base, SFT, mined pairs, DPO, GRPO) and measure it on each."""
    from posttrain.recipes.ladder import Ladder
    from posttrain.recipes.ladder import ladder as climb
    from posttrain.recipes.presets import preset_named

    named = {"preset": preset if resume else None, "seed": seed, "processes": processes}
    given = [f"{key}={value}" for key, value in named.items() if value is not None]
    start = Ladder.load(_stored(out)) if resume else preset_named(preset or "tiny")
    settings = start.override([*(overrides or []), *given])
    _show(climb(settings, out, resume=resume), out)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="sft, dpo or rl; `posttrain recipes NAME` shows its settings.")],
    model: Annotated[str | None, typer.Option(help="Folder, run directory or RUN:RUNG, .gguf file, hub id, or smollm2.")] = None,
    data: Annotated[str | None, typer.Option(help="JSONL or parquet file, or hub id name[@config][:split].")] = None,
    task: Annotated[str | None, typer.Option(help="Task source to train on (rl) and to measure on.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, e.g. a run's config.yaml.")] = None,
    out: Out = Path("runs/train"),
    overrides: Set = None,
    resume: Resume = False,
) -> None:
    """Train one stage on your own model, data or task."""
    from posttrain.recipes.presets import single_named
    from posttrain.recipes.single import train as run

    kind = single_named(recipe)
    given = _stored(out) if resume else lint.settings_file(config) if config else {}
    given |= {key: value for key, value in {"model": model, "data": data, "task": task}.items() if value is not None}
    missing = [key for key, field in kind.model_fields.items() if field.is_required() and key not in given]
    if missing:
        raise ConfigError(f"train {recipe} needs {' and '.join(f'--{key}' for key in missing)}; its settings: posttrain recipes {recipe}")
    summary = run(kind.load(given).override(overrides or []), out, resume=resume)
    _show(summary, out)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory of a ladder or of a single stage.")],
    processes: Annotated[int | None, typer.Option(min=1, help="Go on with another number of processes.")] = None,
    accept_changed: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Inputs that may differ by now, e.g. data,tokenizer. The change is recorded.")
    ] = None,
    overrides: Set = None,
) -> None:
    """Continue a run that was stopped or killed, as it was started."""
    from posttrain.recipes.resume import resume as go_on

    given = [*(overrides or []), *([f"processes={processes}"] if processes else [])]
    accepted = [name for part in (accept_changed or "").split(",") if (name := part.strip())]
    _show(go_on(run, given, accept_changed=accepted), run)


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(help="An algorithm, e.g. gspo; all of them without.")] = None,
    compare: Annotated[tuple[str, str] | None, typer.Option("--compare", metavar="A B", help="Two algorithms, side by side.")] = None,
    siblings: Annotated[int | None, typer.Option(min=1, help="Group size to work the numbers out for.")] = None,
) -> None:
    """What an algorithm is: its axes, its difference from GRPO, what it is for, its defaults with source, what to keep it away from."""
    from posttrain.cli.methods import show_comparison, show_explanation

    if compare is not None:
        show_comparison(*compare)
    else:
        show_explanation(name, siblings)


@app.command()
def recommend(
    model: Annotated[str | None, typer.Option(help="dense or moe.")] = None,
    signal: Annotated[str | None, typer.Option(help="verifier or preferences.")] = None,
    success: Annotated[str | None, typer.Option(help="How often the model is right before training: never, sometimes, often.")] = None,
    siblings: Annotated[int | None, typer.Option(min=1, help="Completions per prompt.")] = None,
    responses: Annotated[str | None, typer.Option(help="short, long or subtraces.")] = None,
    memory: Annotated[str | None, typer.Option(help="enough or tight.")] = None,
    symptom: Annotated[list[str] | None, typer.Option(help="What you see; repeatable. Without flags the questions are listed.")] = None,
) -> None:
    """Name one algorithm for the model and the symptoms at hand, with reasons. Asks when no flag is given."""
    from posttrain.cli.methods import show_recommendation

    symptoms = None if symptom is None else [value for value in symptom if value != "none"]
    answers = {"model": model, "signal": signal, "success": success, "siblings": siblings, "responses": responses, "memory": memory}
    show_recommendation({key: value for key, value in {**answers, "symptoms": symptoms}.items() if value is not None})


@app.command()
def certify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME | FILE.py:FUNCTION]", help="A member, or your own function.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Run six laws on an objective, advantage, KL estimator or aggregation, and print the measured deviations. Exit code 1 on failure."""
    from posttrain.cli.certify import run

    raise typer.Exit(run(name, as_json))


@app.command()
def contract(
    name: Annotated[str | None, typer.Argument(help="An acceleration; without one they are listed.")] = None,
    model: Annotated[str | None, typer.Argument(help="Folder, run directory or RUN:RUNG, .gguf file, hub id, or smollm2.")] = None,
    listed: Annotated[str | None, typer.Option("--model", help="With the list: show what is recorded for this model.")] = None,
    gates: Annotated[str | None, typer.Option(help="Letters of the gates to run, e.g. AB; by default those of its class.")] = None,
    draft: Annotated[str | None, typer.Option(help="Model that proposes in speculative decoding.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the records; the user's cache by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    overrides: Set = None,
) -> None:
    """Prove a faster sampling path on a model before training with it. Exit code 1 unless every gate that ran passed."""
    from posttrain.cli.contract import run

    given = {"gates": gates, "draft": draft}
    raise typer.Exit(run(name, model or listed, given, overrides or [], store, as_json))


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="A recipe or preset, to list its settings.")] = None) -> None:
    """List recipes, presets and task sources, or the settings of one with their defaults."""
    from posttrain.recipes.presets import describe

    typer.echo(describe(name))


@app.command()
def chat(
    where: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, RUN:RUNG, or any model.")],
    rung: Annotated[str | None, typer.Option(help="base, sft, dpo, grpo; the last finished by default.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 200,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    seed: Seed = None,
) -> None:
    """Talk to any rung of a run. An empty line or Ctrl-D ends; /new starts over."""
    from posttrain.cli.talk import talk
    from posttrain.core.sampling import Sampling
    from posttrain.recipes.chat import Chat

    sampling = Sampling.load({"temperature": temperature, "max_tokens": max_tokens})
    talk(Chat(where, rung, system=system, sampling=sampling, seed=seed or 0))


# What is judged, before and after: plain functions of other files.
_EVIDENCE = {"eval": evaluation.evaluate, "compare": evaluation.compare, "reconcile": evaluation.reconcile, "select": evaluation.select}
_GATES = {"probe": gates.probe, "preflight": gates.preflight, "promote": gates.promote, "lint": lint.lint}
for _name, _command in {**_EVIDENCE, "retention": evaluation.retention, **_GATES, "bakeoff": claims.bakeoff}.items():
    app.command(_name)(_command)
for _name, _group in {"runs": runs.runs_app, "doctor": doctor.app, "claims": claims.claims_app, "prereg": claims.prereg_app}.items():
    app.add_typer(_group, name=_name)


def _stored(out: Path) -> dict[str, Any]:
    from posttrain.runs.run import Run

    return Run.open(out).config()


def _show(summary: dict[str, Any], out: Path) -> None:
    from posttrain.runs.summary import markdown_table

    if not _leads():
        return
    if summary["rungs"]:
        typer.echo(markdown_table(summary))
    typer.echo(f"report: {out / 'report.html'}    talk to it: posttrain chat {out}")


if __name__ == "__main__":
    main()
