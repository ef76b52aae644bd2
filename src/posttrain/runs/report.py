"""`report.html` of a run: one self-contained page made only from what the run directory holds.

Everything that a model, a data set or a config wrote is escaped, and the page's content policy forbids scripts and network access.
Parts of the directory that do not exist yet are left out, so that a run can be looked at while it is going on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunError
from posttrain.core.files import read_json, read_jsonl, write_atomic
from posttrain.runs.charts import STYLE, Series, line_chart, number
from posttrain.runs.summary import HEADER, span, table_rows

SAMPLES = 8
"""Rollouts shown per file, spread evenly from first to last."""
LONGEST_TEXT = 4000
"""Characters of a prompt or completion that are shown."""

PANELS: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = (
    ("Reward of chosen and rejected", (frozenset({"chosen", "rejected"}), frozenset({"reward", "rewards"}))),
    ("Loss", (frozenset({"loss", "nll"}),)),
    ("Reward", (frozenset({"reward", "rewards"}),)),
    ("Groups without signal", (frozenset({"zero", "all", "degenerate", "unanimous"}),)),
    ("Entropy", (frozenset({"entropy"}),)),
    ("KL", (frozenset({"kl"}),)),
    ("Completion length", (frozenset({"length", "lengths"}),)),
    ("Unparseable, truncated, failed", (frozenset({"unparseable", "truncated", "truncation", "errors"}),)),
)
"""Chart title and, one of each set, the words of a metric's name that put it there. The first match wins; the rest is drawn under
"more metrics"."""

_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
"""Control characters to the symbols that stand for them: a page must show what a model wrote, not obey it."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into `run_dir` and return its path. Raises RunError if the directory is not a run, StorageError."""
    run_dir = Path(run_dir)
    if not (run_dir / "manifest.json").is_file():
        raise RunError(f"{run_dir} is not a run directory (no manifest.json); pass the directory a run was written to")
    manifest, summary = read_json(run_dir / "manifest.json"), _optional(run_dir / "summary.json")
    metrics = _by_stage(read_jsonl(run_dir / "metrics.jsonl"))
    stages = {path.stem: read_json(path) for path in sorted((run_dir / "stages").glob("*.json"))}
    alarms = read_jsonl(run_dir / "alarms.jsonl")
    order = _stage_order(manifest, summary, metrics, stages)
    sections = [
        _header(run_dir, summary, manifest),
        _headline(summary, stages, alarms),
        _rungs(summary),
        _curves(order, metrics, stages),
        _rollouts(order, run_dir),
        _timings(order, summary, metrics, stages),
        _alarms(alarms),
        _provenance(manifest, run_dir),
    ]
    page = _page(f"{run_dir.resolve().name} - run report", "".join(sections))
    path = run_dir / "report.html"
    write_atomic(path, page.encode("utf-8", "replace"))  # half a character, which byte-level sampling can produce, has no UTF-8 form
    return path


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _header(run_dir: Path, summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    facts = [f"{name} {summary[name]}" for name in ("preset", "seed") if name in summary]
    facts += [str(manifest[name]) for name in ("created",) if manifest.get(name)]
    return f'<header><h1>{_text(run_dir.resolve().name)}</h1><div class="soft">{_text(" · ".join(facts))}</div></header>'


def _headline(summary: Mapping[str, Any], stages: Mapping[str, Any], alarms: Sequence[Any]) -> str:
    cards = []
    rungs = summary.get("rungs", [])
    for suite, figures in (rungs[-1]["suites"] if rungs else {}).items():
        start = rungs[0]["suites"].get(suite) if len(rungs) > 1 else None
        note = f"{span(figures['interval'])}, {figures['n_items']} items"
        note += f"; {start['pass_at_1']:.1%} at {rungs[0]['rung']}" if start else ""
        cards.append((f"{suite}: pass@1 after {rungs[-1]['rung']}", f"{figures['pass_at_1']:.1%}", note))
    seconds = sum(_seconds(summary, stages).values())
    if seconds:
        cards.append(("wall time", _duration(seconds), f"{len(_seconds(summary, stages))} stages"))
    cards.append(("alarms", str(len(alarms)), "see below" if alarms else "none raised"))
    shown = "".join(f'<div class="card small soft">{_text(name)}<b>{_text(value)}</b>{_text(note)}</div>' for name, value, note in cards)
    return f'<section class="cards" aria-label="Headline figures">{shown}</section>'


def _rungs(summary: Mapping[str, Any]) -> str:
    if not summary.get("rungs"):
        return _section("Evaluation", '<p class="soft">No evaluation has been summarised yet.</p>')
    rungs = summary["rungs"]
    names = [rung["rung"] for rung in rungs]
    series = []
    for suite in dict.fromkeys(suite for rung in rungs for suite in rung["suites"]):
        found = [(i, rung["suites"][suite]) for i, rung in enumerate(rungs) if suite in rung["suites"]]
        points = tuple((float(i), figures["pass_at_1"]) for i, figures in found)
        series.append(Series(suite, points, tuple((f["interval"][0], f["interval"][1]) for _, f in found)))
    chart = line_chart("pass@1 per rung, with 95% intervals", series, "rung", categories=names, y_range=(0.0, 1.0))
    note = (
        '<p class="small soft">Intervals are Wilson for one sample per item and Student-t over items otherwise. The paired change '
        "compares the same items, under the same seeds, with the rung before. Truncated answers count as wrong.</p>"
    )
    return _section("Evaluation", _table(HEADER, table_rows(summary)) + note + f'<div class="charts">{chart}</div>')


def _curves(order: Sequence[str], metrics: Mapping[str, list[Any]], stages: Mapping[str, Any]) -> str:
    parts = []
    for stage in order:
        equation = stages.get(stage, {}).get("batch_equation")
        series = _stage_series(metrics.get(stage, []))
        if not series and not equation:
            continue
        parts.append(f"<h3>{_text(stage)}</h3>")
        if equation:
            parts.append(f"<pre>{_text(str(equation))}</pre>")
        grouped: dict[str, list[Series]] = {}
        for one in series:
            grouped.setdefault(panel_of(one.name) or "", []).append(one)
        others = [line_chart(one.name, [one], "step") for one in grouped.pop("", [])]
        titles = [title for title, _ in PANELS if title in grouped]
        parts.append(f'<div class="charts">{"".join(line_chart(title, grouped[title], "step") for title in titles)}</div>')
        if others:
            parts.append(f'<details><summary>More metrics ({len(others)})</summary><div class="charts">{"".join(others)}</div></details>')
    return _section("Training", "".join(parts)) if parts else ""


def panel_of(name: str) -> str | None:
    """Title of the chart a metric belongs to, by the words of its name; None for none.

    >>> panel_of("policy/kl_mean"), panel_of("lr")
    ('KL', None)
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((title for title, wanted in PANELS if all(words & one_of for one_of in wanted)), None)


def _stage_series(records: Iterable[Mapping[str, Any]]) -> list[Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("schema", "step", "optimizer_step") and isinstance(value, int | float) and not isinstance(value, bool):
                points.setdefault(name, []).append((float(record["step"]), float(value)))
    return [Series(name, tuple(values)) for name, values in points.items()]


def _rollouts(order: Sequence[str], run_dir: Path) -> str:
    files = {path.stem: path for path in sorted((run_dir / "rollouts").glob("*.jsonl"))}
    parts = []
    for stage in [*[name for name in order if name in files], *[name for name in files if name not in order]]:
        records = read_jsonl(files[stage])
        shown = [records[i * len(records) // SAMPLES] for i in range(SAMPLES)] if len(records) > SAMPLES else records
        if shown:
            parts.append(f'<h3>{_text(stage)} <span class="soft small">{len(shown)} of {len(records)}</span></h3>')
            parts += [_rollout(record, opened=i == 0) for i, record in enumerate(shown)]
    return _section("Sample rollouts", "".join(parts)) if parts else ""


def _rollout(record: Mapping[str, Any], opened: bool) -> str:
    value, status, stop = record.get("value"), str(record.get("status", "")), str(record.get("stop", ""))
    css = "warn" if value is None else "good" if value >= 1 else "bad"
    verdict = "not scored" if value is None else number(value)
    where = [str(record[name]) for name in ("suite", "task") if record.get(name) is not None]
    where += [f"step {record['step']}"] if record.get("step") is not None else []
    rows = [("Prompt", record.get("prompt")), ("Completion", record.get("completion"))]
    blocks = "".join(f'<div class="small soft">{name}</div><pre>{_clip(str(text or ""))}</pre>' for name, text in rows)
    judged = f"expected {record.get('gold')!s}, read {'nothing' if record.get('parsed') is None else record['parsed']}"
    judged += f"; {record['detail']}" if record.get("detail") else ""
    return (
        f'<details{" open" if opened else ""}><summary><span class="pill {css}">{_text(verdict)}</span>{_text(" · ".join(where))} '
        f'<span class="soft small">{_text(status)}, ended by {_text(stop)}</span></summary>'
        f'{blocks}<div class="small">{_text(judged)}</div></details>'
    )


def _timings(order: Sequence[str], summary: Mapping[str, Any], metrics: Mapping[str, list[Any]], stages: Mapping[str, Any]) -> str:
    seconds = _seconds(summary, stages)
    if not seconds:
        return ""
    longest, rows = max(seconds.values()) or 1.0, []
    for stage in [*[name for name in order if name in seconds], *[name for name in seconds if name not in order]]:
        shares = ", ".join(_phases(metrics.get(stage, [])))
        meter = f'<span class="track"><span class="meter" style="width:{100 * seconds[stage] / longest:.1f}%"></span></span>'
        cells = (_text(stage), _duration(seconds[stage]), meter, _text(shares))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return _section("Timings", _table_html(("Stage", "Wall time", "Share", "Of which"), "".join(rows), "long"))


def _phases(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a stage's steps took: seconds of each phase summed, longest first, then the most memory in MiB."""
    measured = [entry for record in records for entry in (record.get("seconds") or {}).items()]
    totals: dict[str, float] = {}
    for phase, value in measured:
        if not phase.endswith("_mib"):
            totals[phase] = totals.get(phase, 0.0) + (value or 0.0)
    peak = max((value or 0.0 for phase, value in measured if phase.endswith("_mib")), default=0.0)
    shares = [f"{phase} {_duration(value)}" for phase, value in sorted(totals.items(), key=lambda item: -item[1])]
    return [*shares, f"peak {peak:,.0f} MiB"] if peak else shares


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> str:
    if not alarms:
        return ""
    rows = []
    for alarm in alarms:
        evidence = ", ".join(f"{name} {value}" for name, value in (alarm.get("evidence") or {}).items())
        detail = str(alarm.get("detail", "")) + (f" ({evidence})" if evidence else "")
        rows.append((*(str(alarm.get(name, "")) for name in ("stage", "step", "name")), detail))
    return _section("Alarms", _table(("Stage", "Step", "Alarm", "Detail"), rows, "long"))


def _provenance(manifest: Mapping[str, Any], run_dir: Path) -> str:
    config = run_dir / "config.yaml"
    shown = [("Manifest", json.dumps(manifest, indent=2, ensure_ascii=False))]
    shown += [("Config", config.read_text(encoding="utf-8", errors="replace"))] if config.is_file() else []
    return _section("Provenance", "".join(f"<details><summary>{name}</summary><pre>{_text(text)}</pre></details>" for name, text in shown))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    return _table_html(header, "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows), css)


def _table_html(header: Sequence[str], body: str, css: str = "") -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in header)
    return f'<div class="scroll"><table class="{css}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _stage_order(
    manifest: Mapping[str, Any], summary: Mapping[str, Any], metrics: Mapping[str, Any], stages: Mapping[str, Any]
) -> list[str]:
    rungs = [rung["rung"] for rung in summary.get("rungs", [])]
    return list(dict.fromkeys([*rungs, *manifest.get("stages", []), *metrics, *summary.get("seconds_per_stage", {}), *stages]))


def _seconds(summary: Mapping[str, Any], stages: Mapping[str, Any]) -> dict[str, float]:
    timed = {stage: float(data["seconds"]) for stage, data in stages.items() if isinstance(data.get("seconds"), int | float)}
    return timed | {stage: float(value) for stage, value in summary.get("seconds_per_stage", {}).items()}


def _by_stage(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    grouped: dict[str, list[Any]] = {}
    for record in records:
        grouped.setdefault(str(record["stage"]), []).append(record)
    return grouped


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _clip(text: str) -> str:
    hidden = len(text) - LONGEST_TEXT
    return _text(text if hidden <= 0 else f"{text[:LONGEST_TEXT]} ... {hidden} more characters")


def _text(value: str) -> str:
    return escape(value.translate(_CONTROL), quote=True)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
