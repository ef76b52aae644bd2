"""Another trainer's log as rows of figures, whatever file it came in; and those rows as a frame under our names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.doctor.derived import derived
from posttrain.doctor.frame import Frame, kind_of
from posttrain.doctor.lines import Limits, Names, Problems, step_of
from posttrain.doctor.names import STEP_NAMES, translated
from posttrain.doctor.vocabulary import METRICS
from posttrain.runs.reading import number

STAGE = "train"
"""What the one stage of a foreign log is called."""
_NO_METRICS = frozenset({*STEP_NAMES, "schema", "_timestamp", "_runtime", "timestamp"})


@dataclass(slots=True)
class Table:
    """Rows by step. Rows of one step (a training and an evaluation row, several files) are one row; of two values the later holds.

    Example: t = Table("csv", Names(99)); t.add(3, {"loss": 1.0}); t.add(3, {"eval_loss": 1.2}); t.rows[3]
             # {"loss": 1.0, "eval_loss": 1.2}
    """

    source: str
    names: Names
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    key: str | None = None
    """The column that says the step; a row without it belongs to the step of the row before."""
    last: int = -1
    """Step of the last row."""
    broken: int | None = None
    """First step with a value that is no finite number."""
    settings: dict[str, Any] = field(default_factory=dict)
    finished: Mapping[str, Any] | None = None
    rollouts: Sequence[Mapping[str, Any]] = ()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add figures of a step."""
        self.rows.setdefault(step, {}).update(values)

    def spoilt(self, step: int) -> None:
        """Note that a value of this step was not finite."""
        self.broken = step if self.broken is None else min(self.broken, step)


def text_figure(text: Any) -> float | None:
    """A number that may be written as text; NaN and infinities come as they are, anything else is None.

    Example: text_figure("1e-5"), text_figure("")  # 1e-05, None
    """
    if isinstance(text, str):
        try:
            return float(text) if len(text) < 400 else None
        except ValueError:
            return None
    return None if isinstance(text, bool) or not isinstance(text, int | float) else text


def add_row(table: Table, row: Mapping[str, Any], where: str, line: int, problems: Problems, limits: Limits) -> None:
    """Add one row of a log that names its columns; its step is under one of STEP_NAMES, or else it is one more than the last."""
    step = _step(table, row)
    if step is None:
        problems.add(where, "has no usable step; skipped", line)
        return
    if step not in table.rows and len(table.rows) >= limits.rows:
        problems.add(where, f"more than {limits.rows} steps; the others are left out")
        return
    values: dict[str, float] = {}
    for name, value in row.items():
        if name is None or name in _NO_METRICS:
            continue
        figure = text_figure(value)
        if figure is None or (clean := table.names.of(name)) is None:
            continue
        if (finite := number(figure)) is None:
            problems.add(where, "holds NaN, Infinity or a number that no float can hold; it counts as not known", line, name)
            table.spoilt(step)
        else:
            values[clean] = finite
    table.add(step, values)


def _step(table: Table, row: Mapping[str, Any]) -> int | None:
    """The step of a row: as its column says, else that of the row before; rows are counted where no column says it."""
    if table.key is None:
        table.key = next((key for key in STEP_NAMES if row.get(key) not in (None, "")), None)
        if table.key is None:
            table.last += 1
            return table.last
    if row.get(table.key) in (None, ""):
        return max(0, table.last)
    step = step_of(text_figure(row[table.key]))
    table.last = table.last if step is None else step
    return step


def frame_from(table: Table, user: Mapping[str, str]) -> tuple[Frame, dict[str, str], list[str]]:
    """The rows as a frame, our names to theirs, and the names that kept their own."""
    columns = list(dict.fromkeys(name for row in table.rows.values() for name in row))
    ours = translated(columns, user)
    frame = Frame(STAGE, "other", settings=table.settings)
    for step in sorted(table.rows):
        values = {ours[name].name: ours[name].of(value) for name, value in table.rows[step].items()}
        frame.append(step, {**values, **derived(values)})
    frame.kind = kind_of(frame.columns)
    if table.broken is not None:
        frame.events["non_finite"] = frame.steps.index(table.broken) if table.broken in table.rows else 0
    renamed = {ours[name].name: name for name in columns if ours[name].name != name}
    return frame, renamed, [name for name in columns if ours[name].name == name and name not in METRICS]
