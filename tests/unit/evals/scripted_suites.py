"""Four sums, a renderer with one token per character, and a sampler that answers from a function: an evaluation without a model."""

from collections.abc import Callable, Sequence

from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, RewardStatus, Score, StopReason, Tokens
from posttrain.engine.types import Completion, Request
from posttrain.evals.suite import Suite

STOP = 0


class CharRenderer:
    """One token per character; 0 ends the turn."""

    digest = "chars"

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        ids = tuple(ord(letter) for message in messages for letter in message.content)
        return Tokens(ids, (Owner.USER,) * len(ids))

    def reply(self, before: Sequence[Message], messages: Sequence[Message]) -> Tokens:
        return self.prompt(messages)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != STOP)


class CharSampler:
    """Answers every prompt by a function of its text and seed; an answer without the stop token is cut."""

    def __init__(self, answer: Callable[[str, int], str], stops: bool = True):
        self.version, self.answer, self.stops = 3, answer, stops
        self.calls: list[list[Request]] = []

    @property
    def seeds(self) -> list[int]:
        """Of all requests, in order."""
        return [request.seed for call in self.calls for request in call]

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        self.calls.append(list(requests))
        done = []
        for request in requests:
            text = self.answer("".join(map(chr, request.prompt)), request.seed)
            ids = tuple(map(ord, text)) + ((STOP,) if self.stops else ())
            done.append(Completion(ids, (-0.5,) * len(ids), StopReason.END if self.stops else StopReason.LENGTH, self.version))
            if progress is not None:
                progress(1)
        return done


class EqualityGrader:
    """Right when the text is the answer; "crash" crashes it."""

    name = "equal/1"

    def __call__(self, task: Task, text: str) -> Score:
        if text == "crash":
            raise ZeroDivisionError("boom")
        return Score(float(text == task.answer), RewardStatus.SCORED, parsed=text, grader=self.name)


def suite(name: str = "sums", samples: int = 1, temperature: float = 1.0, n: int = 4, **more) -> Suite:
    """Items "0+1", "1+1" and so on."""
    tasks = tuple(Task(f"{name}-{i}", (Message("user", f"{i}+1"),), str(i + 1)) for i in range(n))
    return Suite(name, tasks, EqualityGrader(), Sampling(temperature=temperature, max_tokens=8), samples, **more)
