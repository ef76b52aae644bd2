"""Progress on the terminal: a bar where somebody is watching, a line now and then where the output goes to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TextIO

Mode = Literal["bar", "plain", "quiet"]


class Progress(Protocol):
    """One stage on its way to `total`."""

    def advance(self, n: int = 1, **numbers: float | int | str | None) -> None:
        """`n` more units are done; `numbers` replace the ones shown."""
        ...


class Console:
    """Where a run tells a person how it is going; always stderr, so that stdout stays for results.

    Example: with console.stage("sft", total=100, unit="step") as progress:
                 progress.advance(loss=2.31)  # sft  12% 12/100 steps  3.1 steps/s  0:00:28 left  loss 2.31
    """

    def __init__(
        self, stream: TextIO | None = None, *, mode: Mode | None = None, interval: float = 10.0, clock: Callable[[], float] = time.monotonic
    ):
        """`interval` is the least number of seconds between two plain lines of a stage, `clock` what measures them."""
        self._stream = stream if stream is not None else sys.stderr
        self._mode: Mode = mode or ("bar" if self._stream.isatty() else "plain")
        self._interval = interval
        self._clock = clock
        self._rich: Any = None

    @classmethod
    def quiet(cls) -> Console:
        """A console that shows nothing."""
        return cls(mode="quiet")

    @contextmanager
    def stage(self, title: str, total: int, unit: str, done: int = 0) -> Iterator[Progress]:
        """Show progress towards `total` units; a resumed stage starts at `done`."""
        if self._mode == "quiet":
            yield _Silent()
        elif self._mode == "bar":
            with _bar(self._rich_console(), title, total, unit, done) as bar:
                yield bar
        else:
            lines = _Lines(self.line, _Count(title, total, unit, done, self._clock), self._interval)
            yield lines
            lines.finish()

    def line(self, text: str) -> None:
        """Show one line of text."""
        if self._mode == "bar":
            self._rich_console().print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._mode == "plain":
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def warn(self, text: str) -> None:
        """Show one line that should not be missed."""
        if self._mode == "bar":
            self._rich_console().print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        else:
            self.line(f"warning: {text}")

    def _rich_console(self) -> Any:
        if self._rich is None:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._stream)
        return self._rich


def short(value: float | int | str | None) -> str:
    """A number in a few characters.

    >>> [short(value) for value in (0.123456, 12.0, 1234567.0, 3e-05, 7, None)]
    ['0.123', '12', '1.23e+06', '3e-05', '7', '-']
    """
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds.

    >>> duration(3723.4)
    '1:02:03'
    """
    if seconds is None:
        return "-:--:--"
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


class _Silent:
    def advance(self, n: int = 1, **numbers: float | int | str | None) -> None:
        """Show nothing."""


class _Count:
    """How far a stage is, and how fast since this process took it up."""

    def __init__(self, title: str, total: int, unit: str, done: int, clock: Callable[[], float]):
        self.title, self.total, self.unit = title, total, unit
        self.done = self._first = done
        self._clock = clock
        self._began = clock()
        self.numbers: dict[str, float | int | str | None] = {}

    def elapsed(self) -> float:
        return self._clock() - self._began

    def rate(self) -> float | None:
        elapsed = self.elapsed()
        return (self.done - self._first) / elapsed if elapsed > 0 and self.done > self._first else None

    def left(self) -> float | None:
        rate = self.rate()
        return max(0, self.total - self.done) / rate if rate else None

    def shown_numbers(self) -> str:
        return "  ".join(f"{name} {short(value)}" for name, value in self.numbers.items())


class _Lines:
    """Plain lines, at most one per interval and one at the end."""

    def __init__(self, write: Callable[[str], None], count: _Count, interval: float):
        self._write, self._count, self._interval = write, count, interval
        self._last = 0.0

    def advance(self, n: int = 1, **numbers: float | int | str | None) -> None:
        self._count.done += n
        self._count.numbers |= numbers
        elapsed = self._count.elapsed()
        if elapsed - self._last >= self._interval and self._count.done < self._count.total:
            self._last = elapsed
            self._write(self._text(f"{duration(self._count.left())} left"))

    def finish(self) -> None:
        self._write(self._text(f"took {duration(self._count.elapsed())}"))

    def _text(self, when: str) -> str:
        count = self._count
        rate = f"{short(count.rate())} {count.unit}s/s"
        parts = [f"{count.title} {count.done}/{count.total} {count.unit}s", rate, when, count.shown_numbers()]
        return "  ".join(part for part in parts if part)


class _Bar:
    def __init__(self, progress: Any, task: Any, count: _Count):
        self._progress, self._task, self._count = progress, task, count

    def advance(self, n: int = 1, **numbers: float | int | str | None) -> None:
        count = self._count
        count.done += n
        count.numbers |= numbers
        rate = f"{short(count.rate())} {count.unit}s/s"
        self._progress.update(self._task, advance=n, rate=rate, left=f"{duration(count.left())} left", numbers=count.shown_numbers())


@contextmanager
def _bar(console: Any, title: str, total: int, unit: str, done: int) -> Iterator[_Bar]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("unit", "rate", "left", "numbers")]
    columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(), *texts]
    with RichProgress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(title, total=total, completed=done, unit=f"{unit}s", rate="", left="", numbers="")
        yield _Bar(progress, task, _Count(title, total, unit, done, time.monotonic))
