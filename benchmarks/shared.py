"""What both sides of a benchmark are given: a model, prompts, a reward, and a run for our loops to write to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sides import Turns
from torch import nn

from posttrain.core.config import Config
from posttrain.core.seeds import numpy_rng
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import RewardStatus, Score
from posttrain.engine.processes import Ranks
from posttrain.loops.session import Session
from posttrain.models.tiny import TinyModel, build_tiny
from posttrain.models.tokenizer import build_tokenizer
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal
from posttrain.runs.run import Run

VOCAB, FIRST, LAST, STOP, CUE = 265, 9, 264, 2, 5
"""Of the byte tokenizer: size, first and last byte, the token that ends a text, and the last token of every prompt."""
SHAPE = TinyModel(hidden=160, layers=4, heads=5, kv_heads=5, mlp=480)
PROMPTS, SIBLINGS, EQUAL, MIXED = 16, 8, 24, 64


class Nothing(Config):
    """A run needs settings to record; a benchmark's are in its code."""


def tokenizer() -> Any:
    """The byte tokenizer of the tiny model."""
    return build_tokenizer([], VOCAB)


def tiny_model(length: int = EQUAL, ends: float = 0.0) -> nn.Module:
    """A Llama of 1.4 million parameters whose completions have a length that is set: `length` tokens, or an early end at any with
    probability `ends`.

    Its next token depends on its last through the embedding and the head: token classes 1 to length - 1 follow each other, each class some
    bytes that are equally likely, and then comes the end. Its blocks are random and small, and cost what any block of that size costs.
    """
    model = build_tiny(SHAPE, tokenizer(), 0)
    table_VH = model.get_input_embeddings().weight.detach()
    head = nn.Linear(SHAPE.hidden, VOCAB, bias=False)
    steps = length - 1
    with torch.no_grad():
        for block in model.model.layers:  # what they add must not disturb what the embedding says
            block.self_attn.o_proj.weight.mul_(0.01)
            block.mlp.down_proj.weight.mul_(0.01)
        table_VH[:, : steps + 1] = 0.0
        table_VH[CUE, 0] = 1.0
        head.weight.zero_()
        by_class = [[token for token in range(FIRST, LAST + 1) if (token - FIRST) % steps == step] for step in range(steps)]
        for step, tokens in enumerate(by_class, start=1):
            table_VH[tokens, step] = 1.0
            head.weight[tokens, step - 1] = 3.0
            if ends and step > 1:  # the logit of the end beside those of the class; a coordinate is about 12 after the norm
                odds = ends / (1 - ends) * len(tokens)
                head.weight[STOP, step - 1] = 3.0 + float(torch.tensor(odds).log()) / scale(
                    model, table_VH[by_class[step - 2][0]], step - 1
                )
        head.weight[STOP, steps] = 3.0
    model.config.tie_word_embeddings = False
    model.lm_head = head
    return model.eval()


@torch.no_grad()
def scale(model: Any, embedding_H: torch.Tensor, place: int) -> float:
    """What the last norm makes of the coordinate `place` of an embedding."""
    return float(model.model.norm(embedding_H)[place])


def questions(n: int = PROMPTS, seed: int = 0) -> list[str]:
    """Texts of 33 letters: prompts of 37 tokens."""
    rng = numpy_rng(seed, "bench", "prompts")
    return ["".join(chr(97 + int(letter)) for letter in rng.integers(0, 26, size=33)) for _ in range(n)]


def tasks_of(texts: Sequence[str]) -> list[Task]:
    """A task per text."""
    return [Task(f"bench-{place}", (Message("user", text),), "") for place, text in enumerate(texts)]


@dataclass(frozen=True, slots=True)
class Fixed:
    """Draws the same tasks at every step."""

    tasks: Sequence[Task]

    def __call__(self, n: int, seed: int) -> Sequence[Task]:
        return self.tasks[:n]


@dataclass(frozen=True, slots=True)
class Parity:
    """1 for about half of all texts, whatever they say: nearly every group has mixed rewards."""

    name: str = "parity/1"

    def __call__(self, task: Task, text: str) -> Score:
        return Score(float(sum(map(ord, text)) % 2), RewardStatus.SCORED, grader=self.name)


def parity_rewards(completions: Sequence[Any], **_: Any) -> list[float]:
    """The same as a reward function of the peer, whose completions are chats."""
    return [float(sum(map(ord, completion[0]["content"])) % 2) for completion in completions]


class Waiting(StopSignal):
    """Never asks to stop; a loop that asks has finished a step, which is where a turn ends. `facts` says what the step did."""

    def __init__(self, turns: Turns, facts: Callable[[], Mapping[str, Any]]):
        self._turns, self._facts = turns, facts
        super().__init__(lambda text: None)

    @property
    def requested(self) -> bool:  # type: ignore[override]
        """Always False, once the harness lets this side go on."""
        self._turns.boundary(self._facts)
        return False

    @requested.setter
    def requested(self, value: bool) -> None:
        """Nobody asks."""


@contextmanager
def session(turns: Turns, ranks: Ranks, steps: int, facts: Callable[[Any], Mapping[str, Any]] | None = None):
    """A session that writes a real run directory and takes a turn per step; `facts(run)` says what the last step did."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if not ranks.first:
            yield Session(ranks, Run.silent(), Console.quiet(), StopSignal(), 0, save_every=steps + 1)
            return
        run = Run.create(Path(folder) / "run", config=Nothing(), command=["bench"], seeds={"seed": 0})
        waiting = Waiting(turns, lambda: facts(run) if facts else {})
        yield Session(ranks, run, Console.quiet(), waiting, 0, save_every=steps + 1)
        run.close()
