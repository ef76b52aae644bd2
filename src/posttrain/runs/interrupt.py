"""Stopping on request: the first Ctrl-C lets the current step finish and be saved, the second stops at once."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Context manager that turns SIGINT and SIGTERM into `requested`; a loop asks for it between steps.

    `notify` gets one sentence for the user. Handlers are installed on the main thread only (elsewhere Python allows none) and the
    earlier ones come back at the end.
    """

    def __init__(self, notify: Callable[[str], object] | None = None):
        self.requested = False
        self._notify = notify or _to_stderr
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._earlier.items():
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._notify(f"{signal.Signals(number).name} received: finishing this step, then saving; once more stops at once, without saving")


def resume_hint(command: Sequence[str]) -> str:
    """The line that continues an interrupted run.

    >>> resume_hint(["posttrain", "ladder", "--out", "runs/a"])
    'to continue: posttrain ladder --out runs/a --resume'
    """
    if command and command[0].endswith(".py"):
        return f"to continue: call it again with resume=True ({shlex.join(command)})"
    resumed = command if "--resume" in command else [*command, "--resume"]
    return f"to continue: {shlex.join(resumed)}"


def _to_stderr(text: str) -> None:
    # A handler may interrupt a buffered write, which cannot be entered twice; the bare descriptor can.
    os.write(2, f"\n{text}\n".encode())
