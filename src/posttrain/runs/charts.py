"""Line charts as inline SVG text, and the style sheet of the report. No scripts, no fonts, no network; light and dark by media query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 38
COLOURS = 6
MAX_POINTS = 300
SMOOTH_FROM = 40
"""Series at least this long are drawn faint, with their moving average on top."""
FLAT = 1e-12
"""Values that differ by less than this share of themselves differ by rounding: no axis can tell them apart."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A named line. Example: Series("held out", ((0, .05), (1, .47)), intervals=((.03, .09), (.40, .54)))"""

    name: str
    points: tuple[Point, ...]
    """(x, y) in the order of x."""
    intervals: tuple[Point, ...] = ()
    """(low, high) of each point, drawn as error bars over categories and as a band otherwise; empty for none."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The mapping from data to picture coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    *,
    categories: Sequence[str] = (),
    y_range: tuple[float, float] | None = None,
) -> str:
    """A `<figure>` with one line per series, or "" when there is nothing to draw.

    With `categories`, x values are indices into them and every point gets a marker; otherwise x is a number such as a step. The
    accessible label states first and last value of every series.
    """
    drawn = [thinned for one in series if one.points and (thinned := _thin(one)).points]
    if not drawn:
        return ""
    frame, ticks = _frame(drawn, len(categories), y_range)
    parts = [_grid(frame, ticks), _x_axis(frame, categories, x_label)]
    for index, one in enumerate(drawn):
        # Over categories the series stand side by side, or their error bars would hide one another.
        beside = _shifted(one, (index - (len(drawn) - 1) / 2) * 0.08) if categories else one
        parts.append(f'<g class="s{index % COLOURS}">{_marks(beside, frame, bool(categories))}</g>')
    label = escape(f"{title}. " + "; ".join(_describe(one, categories, x_label) for one in drawn), quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="chart"><figcaption>{escape(title)}{_legend(title, drawn)}</figcaption>{svg}</figure>'


def ticks_between(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]: steps of 1, 2 or 5 times a power of ten.

    >>> ticks_between(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / about
    digits = -math.floor(math.log10(rough))
    power = 10.0**-digits
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, digits) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A number with at most four significant digits, without an exponent where one can be avoided."""
    if value != 0 and (abs(value) >= 1e6 or abs(value) < 1e-4):
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _frame(series: Sequence[Series], categories: int, y_range: tuple[float, float] | None) -> tuple[_Frame, list[float]]:
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + [end for one in series for pair in one.intervals for end in pair]
    low, high = y_range or (min(ys), max(ys))
    if high - low <= max(FLAT * max(abs(low), abs(high)), 1e-300):
        low, high = low - (abs(low) * 0.1 or 0.1), high + (abs(high) * 0.1 or 0.1)
    ticks = ticks_between(low, high)
    x0, x1 = (-0.5, categories - 0.5) if categories else (min(xs), max(xs))
    if x0 == x1:
        x0, x1 = x0 - 1, x1 + 1
    return _Frame(x0, x1, ticks[0], ticks[-1]), ticks


def _thin(series: Series) -> Series:
    """Finite points only, averaged in equal bins when there are more than can be seen; intervals are dropped by binning."""
    finite = [i for i, point in enumerate(series.points) if all(map(math.isfinite, point))]
    points = [series.points[i] for i in finite]
    if len(points) <= MAX_POINTS:
        return Series(series.name, tuple(points), tuple(series.intervals[i] for i in finite) if series.intervals else ())
    size = math.ceil(len(points) / MAX_POINTS)
    return Series(series.name, tuple(_mean_point(points[i : i + size]) for i in range(0, len(points), size)))


def _shifted(series: Series, by: float) -> Series:
    return Series(series.name, tuple((x + by, y) for x, y in series.points), series.intervals)


def _mean_point(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _moving_average(points: Sequence[Point]) -> list[Point]:
    reach = max(1, len(points) // 25)
    return [(x, _mean_point(points[max(0, i - reach) : i + reach + 1])[1]) for i, (x, _) in enumerate(points)]


def _marks(series: Series, frame: _Frame, categorical: bool) -> str:
    smooth = len(series.points) >= SMOOTH_FROM and not series.intervals
    parts = [_error_bars(series, frame) if categorical else _band(series, frame)]
    parts.append(_path(series.points, frame, "faint" if smooth else "line"))
    if smooth:
        parts.append(_path(_moving_average(series.points), frame, "line"))
    if categorical or len(series.points) < 12:
        parts += [
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5"><title>{escape(series.name)}: {number(y)}</title></circle>'
            for x, y in series.points
        ]
    return "".join(parts)


def _path(points: Sequence[Point], frame: _Frame, css: str) -> str:
    return f'<polyline class="{css}" points="{" ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)}"/>'


def _error_bars(series: Series, frame: _Frame) -> str:
    bars = []
    for (x, _), (low, high) in zip(series.points, series.intervals, strict=False):
        at, bottom, top = frame.x(x), frame.y(low), frame.y(high)
        bars.append(f'<path class="bar" d="M{at - 5:.1f} {bottom:.1f}h10M{at:.1f} {bottom:.1f}V{top:.1f}M{at - 5:.1f} {top:.1f}h10"/>')
    return "".join(bars)


def _band(series: Series, frame: _Frame) -> str:
    if not series.intervals:
        return ""
    xs = [x for x, _ in series.points]
    upper = [(x, high) for x, (_, high) in zip(xs, series.intervals, strict=True)]
    lower = [(x, low) for x, (low, _) in zip(xs, series.intervals, strict=True)]
    corners = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in upper + lower[::-1])
    return f'<polygon class="band" points="{corners}"/>'


def _grid(frame: _Frame, ticks: Sequence[float]) -> str:
    lines = []
    for tick in ticks:
        y = frame.y(tick)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    return "".join(lines)


def _x_axis(frame: _Frame, categories: Sequence[str], label: str) -> str:
    base = HEIGHT - BOTTOM
    marks: list[tuple[float, str]] = [(float(i), name) for i, name in enumerate(categories)]
    if not categories:
        marks = [(tick, number(tick)) for tick in ticks_between(frame.x0, frame.x1) if frame.x0 <= tick <= frame.x1]
    parts = [f'<text x="{frame.x(x):.1f}" y="{base + 16}" text-anchor="middle">{escape(text)}</text>' for x, text in marks]
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(label)}</text>')
    return "".join(parts)


def _legend(title: str, series: Sequence[Series]) -> str:
    if [one.name.lower() for one in series] == [title.lower()]:
        return ""
    keys = "".join(f'<span class="key s{i % COLOURS}">{escape(one.name)}</span>' for i, one in enumerate(series))
    return f'<span class="legend">{keys}</span>'


def _describe(series: Series, categories: Sequence[str], x_label: str) -> str:
    (x_first, y_first), (x_last, y_last) = series.points[0], series.points[-1]
    if categories:
        first, last = categories[int(x_first)], categories[int(x_last)]
    else:
        first, last = f"{x_label} {number(x_first)}", f"{x_label} {number(x_last)}"
    return f"{series.name}: {number(y_first)} at {first} to {number(y_last)} at {last}"


STYLE = """
:root{color-scheme:light dark;--bg:#f7f8fa;--card:#fff;--ink:#171a21;--soft:#5b6472;--rule:#e2e6ec;
--good:#0b7a4b;--bad:#b42318;--warn:#92580a;
--c0:#2563eb;--c1:#c2560c;--c2:#0b7a5a;--c3:#b4236f;--c4:#6d3fd1;--c5:#5b6472}
@media (prefers-color-scheme:dark){:root{--bg:#0f1217;--card:#171b22;--ink:#e8ebf0;--soft:#9aa4b2;--rule:#2a303a;
--good:#4ade9b;--bad:#ff8a7a;--warn:#f5bd5c;--c0:#7aa7ff;--c1:#ff9f5a;--c2:#45d6a4;--c3:#ff85bd;--c4:#b79cff;--c5:#9aa4b2}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;margin:0;letter-spacing:-.02em}h2{font-size:18px;margin:40px 0 12px}h3{font-size:15px;margin:24px 0 8px}
.soft{color:var(--soft)}.small{font-size:13px}
.cards,.charts{display:grid;gap:14px}.cards{grid-template-columns:repeat(auto-fit,minmax(190px,1fr));margin-top:24px}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}
.card,figure,.scroll,details{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.card{padding:14px 16px}.card b{display:block;color:var(--ink);font-size:26px;line-height:1.25;
letter-spacing:-.02em;font-variant-numeric:tabular-nums}
figure{margin:0;padding:12px 14px 6px}figcaption{font-weight:600;font-size:14px;margin-bottom:6px}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}svg .axis{font-size:12px}
.s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}.s5{--c:var(--c5)}
.line,.faint,.bar{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}.faint{stroke-width:1;opacity:.35}.bar{stroke-width:1.5}
.band{fill:var(--c);opacity:.15}circle{fill:var(--c)}.grid{stroke:var(--rule)}
.legend{display:block;font-weight:400;font-size:12px;color:var(--soft)}.key{margin-right:14px}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--c);margin-right:5px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:8px 12px;border-bottom:1px solid var(--rule);white-space:nowrap}tr:last-child td{border-bottom:0}
th{font-weight:600;color:var(--soft);font-size:13px}.long td:last-child{white-space:normal;min-width:260px}
.meter{display:block;height:8px;border-radius:4px;background:var(--c0);min-width:2px}.track{display:block;min-width:160px}
details{margin:8px 0;padding:8px 14px}summary{cursor:pointer}details figure,details .scroll{border:0}
pre{margin:6px 0 10px;padding:10px 12px;background:var(--bg);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.5 ui-monospace,monospace}
.pill{display:inline-block;border:1px solid currentColor;border-radius:999px;padding:0 8px;font-size:12px;margin-right:8px}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
@media print{details{break-inside:avoid}body{background:#fff}}
"""
