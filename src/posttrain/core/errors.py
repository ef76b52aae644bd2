"""Errors a user can act on. Each message is one line: what is wrong, the value, the remedy."""

from __future__ import annotations

from pathlib import Path


class PosttrainError(Exception):
    """Base of every expected failure. The CLI prints it as one line and exits non-zero; anything else is a bug and keeps its traceback."""

    exit_code = 2


class ConfigError(PosttrainError):
    """A setting that cannot work: unknown key, wrong type, a batch that does not divide."""


class DataError(PosttrainError):
    """A data row that cannot be used. Carries file, line and field, so that the row can be found."""

    def __init__(self, problem: str, *, file: str | Path | None = None, line: int | None = None, field: str | None = None):
        where = ":".join(str(part) for part in (file, line) if part is not None)
        named = f" field '{field}':" if field else ""
        super().__init__(f"{where + ':' if where else ''}{named} {problem}".strip())
        self.file, self.line, self.field = file, line, field


class RenderError(PosttrainError):
    """Messages that cannot be turned into token ids safely: no chat template, forged control tokens, a template that rewrites content."""


class RunError(PosttrainError):
    """A run directory in the wrong state: it exists already, it is not a run, its config differs from the one resumed with."""


class StorageError(PosttrainError):
    """The disk refused a write. Nothing that was complete before is lost."""


class EvidenceError(PosttrainError):
    """A number that would mislead: too much truncation, unmatched conditions, too few items."""


class GraderError(PosttrainError):
    """A grader that failed its own proof before the run: gold did not score 1 or a wrong answer did."""


class GateFailed(PosttrainError):
    """A gate that did not pass: the pipeline stops before the stage that would build on it."""

    exit_code = 6


class Halted(PosttrainError):
    """An alarm paused or stopped the run. State is saved; the message says why and how to go on."""

    exit_code = 7


class Interrupted(PosttrainError):
    """The user asked to stop (Ctrl-C). State is saved; the message says how to resume."""

    exit_code = 130
