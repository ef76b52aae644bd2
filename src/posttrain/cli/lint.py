"""`posttrain lint`: what settings already say about how a run will end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.core.errors import ConfigError


def lint(
    target: Annotated[str, typer.Argument(help="A preset or recipe name, a YAML file of settings, or a run directory.")] = "tiny",
    overrides: Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one setting.")] = None,
    probe: Annotated[Path | None, typer.Option(help="Record of posttrain probe --out, for rules about lengths.")] = None,
    explain: Annotated[str | None, typer.Option(metavar="ID", help="Explain a rule instead, e.g. C1 or F14.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Judge settings before a run: each rule that they break, with its id and remedy. Exit code 1 when one is more than a note."""
    if explain is not None:
        from posttrain.cli.doctor import explain as explain_entry

        explain_entry([explain])
        return
    import json

    from posttrain.doctor.catalog import CATALOG
    from posttrain.doctor.entries import Action
    from posttrain.doctor.lint import lint as judge

    found = judge(config_of(target, overrides or []), CATALOG.values(), facts_near(target, probe))
    if as_json:
        rows = [{"id": a.id, "stage": a.stage, "name": a.name, "found": a.found, "remedy": a.remedy, "action": a.action} for a in found]
        typer.echo(json.dumps(rows, indent=2))
    else:
        typer.echo("\n".join(lint_lines(target, found)))
    if any(advice.action is not Action.NOTE for advice in found):
        raise typer.Exit(1)


def lint_lines(target: str, found: list[Any]) -> list[str]:
    """The findings as text."""
    if not found:
        return [f"{target}: no rule is broken"]
    return [f"{advice.action.value:5} {advice.stage}: {advice.sentence}" for advice in found]


def config_of(target: str, overrides: list[str]) -> dict[str, Any]:
    """The resolved settings that `target` names. Raises ConfigError."""
    from posttrain.doctor.foreign_settings import translated
    from posttrain.doctor.lint import stages_of

    path = Path(target)
    if path.is_dir():
        if overrides:
            raise ConfigError("a run's settings are what they were; leave out --set, or give its config.yaml")
        from posttrain.runs.run import Run

        return Run.open(path).config()
    if path.suffix in (".yaml", ".yml"):
        given = settings_file(path)
        if translated(given) is not None and not stages_of(given):  # another trainer's
            return given
        return _resolved(given, overrides)
    from posttrain.recipes.presets import PRESETS, preset_named, single_named

    if target in PRESETS:
        return preset_named(target).override(overrides).model_dump(mode="json")
    kind = single_named(target)
    needed = {name: "(not given)" for name, field in kind.model_fields.items() if field.is_required()}
    return kind.load(needed).override(overrides).model_dump(mode="json")


def facts_near(target: str, probe: Path | None) -> dict[str, Any]:
    """What a probe, or a run directory's gates, have measured, for the rules that compare settings with it."""
    from posttrain.core.files import read_json
    from posttrain.doctor.facts import facts_of
    from posttrain.doctor.lint import probe_facts
    from posttrain.doctor.reading import read_evidence

    facts: dict[str, Any] = {}
    if Path(target).is_dir():
        evidence = read_evidence(Path(target))
        facts = facts_of(evidence)
        for record in evidence.gates.values():
            facts |= probe_facts(record)
    return facts | (probe_facts(read_json(probe)) if probe is not None else {})


def settings_file(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file of settings. Raises ConfigError."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"settings file '{path}' cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"settings file '{path}' must hold a mapping of settings, not {type(data).__name__}")
    return data


def _resolved(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A file that was dumped by a run is complete; one written by hand gets the defaults of its recipe."""
    from posttrain.recipes.ladder import Ladder
    from posttrain.recipes.single import DPORun, RLRun, SFTRun

    kinds = {"rl": RLRun, "dpo": DPORun, "sft": SFTRun}
    kind = Ladder if "grpo" in data or "preset" in data else next((kinds[name] for name in kinds if name in data), None)
    if kind is None:
        raise ConfigError("the settings name no recipe: they have none of the sections grpo (ladder), rl, dpo, sft")
    needed = {name: "(not given)" for name, field in kind.model_fields.items() if field.is_required() and name not in data}
    return kind.load({**needed, **data}).override(overrides).model_dump(mode="json")
