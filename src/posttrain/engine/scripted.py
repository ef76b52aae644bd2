"""A sampler that answers from a script: no model, the same endings and bookkeeping as a real one. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.errors import ConfigError
from posttrain.engine.replies import completion
from posttrain.engine.types import Completion, Request


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole completion of a prompt, from its first token on, whatever part of it a call asks for.

    Example: Answer(ids=(40, 41, 2), logps=(-0.1, -0.3, -0.2))
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...] = ()
    """Nats; empty stands for 0.0 throughout."""
    candidates: tuple[tuple[int, ...], ...] = ()


Script = Callable[[tuple[int, ...], Request], Answer | Sequence[int]]


class ScriptedSampler:
    """Answers by a function of prompt and request, or from a list, one entry per completion, and counts what it was asked.

    Args:
        script: `script(prompt, request)`, or answers in the order of asking. An answer is ids or an `Answer`; it ends with a stop or
            control token, or is long enough to fill what a call asks for: a completion does not end without a reason.
        stop_ids: tokens that close a completion; one inside an answer ends it there.
        control_ids: further tokens that end it, as StopReason.CONTROL.
        version: stamped on every completion.

    Example: ScriptedSampler([(40, 2), (41, 2)]).generate([request])[0].ids == (40, 2)
    """

    def __init__(
        self,
        script: Script | Sequence[Answer | Sequence[int]],
        stop_ids: frozenset[int] = frozenset({2}),
        control_ids: frozenset[int] = frozenset(),
        version: int = 0,
    ):
        self.script, self.stop_ids, self.control_ids, self.version = script, stop_ids, control_ids, version
        self.asked: list[Request] = []
        """Every request so far, in order."""
        self.calls = 0
        """How often `generate` was called."""

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """See Sampler."""
        self.calls += 1
        done = []
        for request in requests:
            done.append(self._one(request))
            if progress:
                progress(1)
        return done

    def _one(self, request: Request) -> Completion:
        answer = self._answer(request)
        logps = answer.logps or (0.0,) * len(answer.ids)
        start, end = len(request.drawn), len(request.drawn) + request.room
        if answer.ids[:start] != request.drawn:
            raise ConfigError(f"the script answers {answer.ids}, but {request.drawn} was drawn before; script whole completions")
        part = answer.ids[start:end]
        return completion(request, part, logps[start:end], answer.candidates[start:end], self.version, (self.stop_ids, self.control_ids))

    def _answer(self, request: Request) -> Answer:
        number = len(self.asked)
        self.asked.append(request)
        if callable(self.script):
            found = self.script(request.prompt, request)
        elif number < len(self.script):
            found = self.script[number]
        else:
            raise ConfigError(f"the script has {len(self.script)} answers and was asked for one more; add answers or pass a function")
        return found if isinstance(found, Answer) else Answer(tuple(found))
