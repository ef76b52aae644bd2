"""Write the tables of docs/performance.md anew from benchmarks/latest.json: `python docs/update_performance.py`, or `--check`.

A table stands between `<!-- measured: NAME NAME -->` and `<!-- end -->`; the names are benchmarks. No figure on the page comes from
anywhere else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "performance.md"
LATEST = Path(__file__).parents[1] / "benchmarks" / "latest.json"
BLOCK = re.compile(r"(?P<head><!-- measured: (?P<names>[^\n]+?) -->\n)(?P<body>.*?)(?P<tail><!-- end -->)", re.DOTALL)
BARS = "▁▂▃▄▅▆▇█"
HEADS = ("what", "ours", "peer", "ratio (interval)", "in CPU seconds", "bar", "holds", "n")


def updated(text: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The page with every table as the records have it."""
    return BLOCK.sub(lambda found: found["head"] + body(found["names"].split(), records) + found["tail"], text)


def body(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """One table, the conditions of its rows, and the course of what was followed over a run."""
    rows = [record for record in records if record["benchmark"] in names]
    if not rows:
        return "Not measured.\n"
    lines = [f"| {' | '.join(HEADS)} |", "|" + " --- |" * len(HEADS), *map(line, rows), ""]
    conditions = dict.fromkeys(record["conditions"] for record in rows)
    lines += [f"Conditions: {'; '.join(conditions)}.", ""]
    machines = dict.fromkeys(record["machine"] for record in rows)
    lines += [f"Machine: {'; '.join(machines)}." + (" Quick run, few repeats." if any(r["quick"] for r in rows) else ""), ""]
    for record in rows:
        if record["series"]:
            course = " ".join(f"{value:.0f}" for value in record["series"])
            lines += [f"{record['name']}, medians of equal parts ({record['unit']}): {course}", "", f"    {spark(record['series'])}", ""]
    return "\n".join(lines)


def line(record: Mapping[str, Any]) -> str:
    """A record as a row of the table."""
    bar = "-" if record["bar"] is None else f"{'at most' if record['at_most'] else 'at least'} {record['bar']:g}"
    holds = {None: "-", True: "yes", False: "no"}[record["holds"]]
    if record["holds"] is not None and record["ratio_low"] < record["bar"] < record["ratio_high"]:
        holds += ", interval crosses the bar"
    peer = "-" if record["peer"] is None else f"{figure(record['peer'])} {record['unit']} ({record['peer_name']})"
    ratio = f"{figure(record['ratio'])} ({figure(record['ratio_low'])} to {figure(record['ratio_high'])})"
    cpu = "-" if record["cpu_ratio"] is None else figure(record["cpu_ratio"])
    cells = (record["name"], f"{figure(record['ours'])} {record['unit']}", peer, ratio, cpu, bar, holds, str(record["n"]))
    return f"| {' | '.join(cells)} |"


def figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spark(values: Sequence[float]) -> str:
    """A line of bars from 0 to the largest value."""
    return "".join(BARS[round(value / max(values) * (len(BARS) - 1))] for value in values)


def main(arguments: Sequence[str], page: Path = PAGE, latest: Path = LATEST) -> int:
    """Write the page, or with --check say whether it is out of date; the exit status is 1 when it is."""
    records = json.loads(latest.read_text(encoding="utf-8")) if latest.is_file() else []
    text = page.read_text(encoding="utf-8")
    new = updated(text, records)
    if "--check" in arguments:
        if new != text:
            sys.stdout.write(f"{page.name} is out of date; run python docs/update_performance.py\n")
        return int(new != text)
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
