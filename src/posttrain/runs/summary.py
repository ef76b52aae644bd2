"""The summary of a run, `summary.json`, and its rendering as a table.

Schema 1:
    {"schema": 1, "preset": str, "seed": int, "seconds_per_stage": {stage: seconds},
     "rungs": [{"rung": str, "suites": {suite: {
         "n_items": int, "samples_per_item": int, "pass_at_1": float, "interval": [low, high], "interval_method": str,
         "parse_rate": float, "truncation_rate": float, "error_rate": float, "mean_tokens": float,
         "paired_change": null | {"delta": float, "interval": [low, high], "p_value": float, "against": str}}}}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.core.errors import RunError

SCHEMA = 1
HEADER = ("Rung", "Suite", "pass@1 (95% interval)", "Paired change (95% interval)", "p", "Parsed", "Truncated", "Errors", "n")


def table_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of text per rung and suite, under `HEADER`; n reads items x samples, errors are the
    grader's own failures. Raises RunError on another schema."""
    if summary.get("schema") != SCHEMA:
        raise RunError(f"summary has schema {summary.get('schema')}, this version reads {SCHEMA}; run the evaluation again")
    return [_row(rung["rung"], name, figures) for rung in summary["rungs"] for name, figures in rung["suites"].items()]


def markdown_table(summary: Mapping[str, Any]) -> str:
    """The rung table in Markdown, also readable as plain text in a terminal: columns are padded to equal width."""
    rows = [HEADER, *(tuple(cell.replace("|", "\\|") for cell in row) for row in table_rows(summary))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def span(interval: list[float], sign: str = "") -> str:
    """An interval as text, e.g. [0.470, 0.780]; `sign` "+" writes the sign of both ends."""
    return f"[{interval[0]:{sign}.3f}, {interval[1]:{sign}.3f}]"


def p_text(p_value: float) -> str:
    """A p-value with as many digits as mean something."""
    return "<0.001" if p_value < 0.001 else f"{p_value:.3f}"


def percent(share: float) -> str:
    """A share in percent; anything above 0 shows as such."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _row(rung: str, suite: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    change = figures["paired_change"]
    moved = f"{change['delta']:+.3f} {span(change['interval'], '+')} vs {change['against']}" if change else "-"
    return (
        rung,
        suite,
        f"{figures['pass_at_1']:.3f} {span(figures['interval'])}",
        moved,
        p_text(change["p_value"]) if change else "-",
        percent(figures["parse_rate"]),
        percent(figures["truncation_rate"]),
        percent(figures["error_rate"]),
        f"{figures['n_items']} x {figures['samples_per_item']}",
    )
