"""`posttrain certify`: certificates as lines of text, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import typer

from posttrain.checks.certificate import certify, certify_file, members
from posttrain.checks.findings import LAWS, Certificate, Finding
from posttrain.checks.user_function import names_a_file

WIDTH = 32


def run(name: str | None, as_json: bool = False) -> int:
    """Certify one member, an axis, a user's "path.py:function", or everything; write to stdout and return the exit code.

    Returns:
        0 when every law holds, 1 when any fails.

    Raises:
        ConfigError: nothing has this name, or the file has no such function.
    """
    several = name is None
    found: list[Certificate] = []
    if several and not as_json:
        typer.echo(header())
    for certificate in _certificates(name):
        found.append(certificate)
        if several and not as_json:  # as each is done: all of them take a while
            typer.echo(summary_line(certificate))
    failed = [certificate.name for certificate in found if not certificate.passed]
    if as_json:
        typer.echo(json.dumps([certificate.as_record() for certificate in found], indent=2))
    elif several:
        typer.echo("\n".join(closing_lines(found, failed)))
    else:
        typer.echo("\n\n".join("\n".join(table_lines(certificate)) for certificate in found))
    return 1 if failed else 0


def _certificates(name: str | None) -> Iterator[Certificate]:
    if name is None:
        yield from (certificate for member in members() for certificate in certify(member))
    elif names_a_file(name):
        yield certify_file(name)
    else:
        yield from certify(name)


def header() -> str:
    """Names of the columns of `summary_line`."""
    return f"{'':{WIDTH}}" + "".join(f"{law:>13}" for law in LAWS)


def summary_line(certificate: Certificate) -> str:
    """One line: the name and, per law, the deviation closest to its bound, FAIL, or - where the law does not apply."""
    return f"{certificate.name:{WIDTH}}" + "".join(f"{shown(certificate.worst(law)):>13}" for law in LAWS)


def shown(finding: Finding) -> str:
    """Example: "3e-16", "0", "FAIL", "-"."""
    if not finding.passed:
        return "FAIL"
    return "-" if finding.deviation is None else number(finding.deviation)


def number(value: float) -> str:
    """One digit and an exponent; 0 is 0. Example: 2.6e-16 -> "3e-16"."""
    return "0" if value == 0 else f"{value:.0e}"


def closing_lines(found: Sequence[Certificate], failed: Sequence[str]) -> list[str]:
    """What the numbers are, and which members failed."""
    lines = ["", "largest deviation per law, relative; - does not apply, see posttrain certify NAME"]
    if failed:
        return [*lines, f"{len(failed)} of {len(found)} members fail: {', '.join(failed)}"]
    return [*lines, f"all {len(found)} members keep every law that applies to them"]


def table_lines(certificate: Certificate) -> list[str]:
    """One certificate in full: law, deviation, bound, verdict, detail; and what its expected gradient climbs."""
    lines = [f"{certificate.name} ({certificate.kind}): {'all laws hold' if certificate.passed else 'NOT CERTIFIED'}"]
    lines.append(f"target: {certificate.target}")
    lines.append(f"{'law':13}{'deviation':>10}{'bound':>8}  {'verdict':8}detail")
    for finding in certificate.findings:
        verdict = "-" if not finding.applies else "pass" if finding.passed else "FAIL"
        deviation = "" if finding.deviation is None else number(finding.deviation)
        bound = number(finding.bound) if finding.deviation is not None else ""
        lines.append(f"{finding.law:13}{deviation:>10}{bound:>8}  {verdict:8}{finding.detail}")
    return lines
