"""`posttrain contract`: the accelerations, the gates that each has to pass on a model, and running them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from posttrain.checks.acceleration import ACCELERATIONS, acceleration
from posttrain.checks.gates import Gate, GateResult, Store, Verdict
from posttrain.core.errors import ConfigError
from posttrain.recipes.contract import Bench, ContractRun, default_store, listing, measure

MARKS = {Verdict.PASSED: "pass", Verdict.FAILED: "FAIL", Verdict.NOT_SHOWN: "not shown"}


def run(
    name: str | None, model: str | None, given: Mapping[str, Any], overrides: Sequence[str], store: Path | None, as_json: bool = False
) -> int:
    """List (no name) or measure one acceleration on a model; write to stdout and return the exit code.

    Args:
        given: settings of ContractRun that the command line has options for; None means not given.

    Returns:
        0 when every gate that ran passed or nothing was run, else 1.
    """
    where = Store(store) if store else default_store()
    chosen = {key: value for key, value in given.items() if value is not None}
    if name is None:
        return _list(model, where, {key: value for key, value in chosen.items() if key.startswith("draft")}, as_json)
    if model is None:
        acceleration(name)
        raise ConfigError(f"which model? posttrain contract {name} MODEL, a folder, run directory, .gguf file or hub id")
    settings = ContractRun.load({"model": model, "acceleration": name, **chosen}).override(overrides)
    bench = Bench(settings)
    results: list[GateResult] = []
    if not as_json:
        member = bench.member
        typer.echo(f"{name} ({member.kind}): {member.about}; required gates: {', '.join(gate.value for gate in member.gates)}")
    for result in measure(bench, where):
        results.append(result)
        if not as_json:  # as each is done: a gate takes a while
            typer.echo("\n".join(result_lines(result)))
    if as_json:
        typer.echo(json.dumps([as_record(result) for result in results], indent=2))
    else:
        typer.echo(closing_line(bench, where))
    return 0 if all(result.verdict is Verdict.PASSED for result in results) else 1


def _list(model: str | None, where: Store, draft: Mapping[str, Any], as_json: bool) -> int:
    found = listing(model, list(ACCELERATIONS), where, **draft)
    if as_json:
        rows = [
            {"name": name, "class": ACCELERATIONS[name].kind.value, "verdicts": {gate.value: text for gate, text in verdicts.items()}}
            for name, verdicts in found.items()
        ]
        typer.echo(json.dumps(rows, indent=2))
    else:
        typer.echo("\n".join(listing_lines(found, model)))
    return 0


def listing_lines(found: Mapping[str, Mapping[Gate, str]], model: str | None) -> Iterator[str]:
    """A table: name, class, what each required gate found, what it is and needs."""
    yield f"{'':16}{'class':8}{'gates':34}what it is"
    for name, verdicts in found.items():
        member = ACCELERATIONS[name]
        gates = ", ".join(f"{gate.value} {text}" for gate, text in verdicts.items())
        needs = f" (needs {member.needs})" if member.needs else ""
        yield f"{name:16}{member.kind.value:8}{gates:34}{member.about}{needs}"
    shown = f"posttrain contract NAME {model}" if model else "posttrain contract --model MODEL shows what is recorded"
    yield f"A distribution, B step time, C held-out items, I identical output; - not measured. Measure: {shown}"


def result_lines(result: GateResult) -> Iterator[str]:
    """The verdict, its figures, and tables where a gate has one."""
    yield f"{result.gate.value}  {MARKS[result.verdict]:10}{result.summary}"
    if result.gate is Gate.DISTRIBUTION:
        yield from _distribution_lines(result.measured)
    if rows := result.measured.get("acceptance"):
        yield f"{'':13}{'temperature':>12}{'batch':>7}{'acceptance':>12}{'of':>6}{'accepted per pass':>19}{'CPU time ratio':>16}"
        for row in rows:
            rate, length = (f"{row[key]:.3f}" if row[key] is not None else "-" for key in ("rate", "mean_length"))
            yield f"{'':13}{row['temperature']:>12g}{row['batch']:>7}{rate:>12}{row['judged']:>6}{length:>19}{row['time_ratio']:>16.2f}"
    yield from (f"{'':13}warning: {warning}" for warning in result.warnings)


def _distribution_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    parted = measured["divergence"]
    gap = "not finite" if measured["max_gap"] is None else f"{measured['max_gap']:.4g}"
    first = f", first at {parted['first']}, on average at {parted['mean']:.1f}" if parted["parted"] else ""
    yield f"{'':13}largest log-prob gap {gap}, greedy outputs part in {parted['parted']} of {parted['of']}{first}"
    buckets = ", ".join(
        f"from {row['from']}: {row['kl']:.3g} (n {row['n']})" for row in measured["kl_by_position"] if row["kl"] is not None
    )
    own = "" if measured["self_kl"] is None else f"; against another pass of itself {measured['self_kl']:.3g}"
    both = ", ".join(f"{name} {_number(measured[key])}" for name, key in (("float64", "kl"), ("float32", "kl_float32")))
    yield f"{'':13}KL in {both}; by position {buckets}{own}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def as_record(result: GateResult) -> dict[str, Any]:
    """A result as JSON values."""
    return {
        "gate": result.gate.value,
        "verdict": result.verdict.value,
        "summary": result.summary,
        "measured": dict(result.measured),
        "warnings": list(result.warnings),
    }


def closing_line(bench: Bench, store: Store) -> str:
    """Whether training may use it now, and where the records lie."""
    name = bench.member.name
    missing = [gate.value for gate in bench.member.gates if store.verdict(bench.key, gate) is not Verdict.PASSED]
    place = store.folder / bench.key.digest
    if missing:
        return f"{name} may not be used for training on this model: no recorded pass of {', '.join(missing)}   ({place})"
    return f"{name} may be used for training on this model   ({place})"
