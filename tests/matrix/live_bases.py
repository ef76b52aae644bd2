"""What the small runs start from: random transformers of about 24,000 parameters that a second of imitation taught to talk in some way.

A task is a key letter with two digits behind it, "b47", and the right answer is the key's letter of `ANSWERS`. Training draws first digits
0 to 6, held-out items 7 to 9, so that what was learnt of a key carries over and no prompt is on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import Optim
from posttrain.loops.session import Session
from posttrain.loops.sft import SFT, sft
from posttrain.models.tiny import TinyModel, build_tiny
from posttrain.models.tokenizer import build_tokenizer
from posttrain.render.renderer import ChatRenderer
from posttrain.rollout.samples import supervised_sample
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal
from posttrain.runs.run import Run

ANSWERS = {"a": "w", "b": "x", "c": "y", "d": "z"}
LETTERS = "mnop"
"""What ramblers write."""
LOOK = '<tool_call>{"name":"a"}</tool_call>'
BAD = '<tool_call>{"name":a}</tool_call>'
CORPUS = [LOOK, BAD] * 40
Chat = tuple[Message, ...]


@cache
def speech() -> tuple[PreTrainedTokenizerFast, ChatRenderer]:
    """A tokenizer in which a tool call is a handful of tokens, and its renderer."""
    tokenizer = build_tokenizer(CORPUS, 300)
    return tokenizer, ChatRenderer(tokenizer)


def prompt_of(rng: Random, split: str = "train") -> str:
    """A key and two digits."""
    return rng.choice("abcd") + rng.choice("0123456" if split == "train" else "789") + rng.choice("0123456789")


def task_of(prompt: str, answer: str | None = None) -> Task:
    """The task of a prompt."""
    return Task(prompt, (Message("user", prompt),), ANSWERS[prompt[0]] if answer is None else answer)


def draw(n: int, seed: int) -> list[Task]:
    """`n` training tasks."""
    rng = python_rng(seed, "matrix", "tasks")
    return [task_of(prompt_of(rng)) for _ in range(n)]


def held_out(n: int) -> list[Task]:
    """The first `n` of 120 held-out tasks, in an order in which every key comes up alike."""
    every = [f"{key}{first}{second}" for second in "0123456789" for first in "789" for key in "abcd"]
    return [task_of(prompt) for prompt in every[:n]]


def _said(answer: Callable[[Random, str], Sequence[str]], rng: Random) -> Chat:
    """A conversation: assistant's turns with "seen" from the world between them."""
    prompt = prompt_of(rng)
    chat = [Message("user", prompt)]
    for turn in answer(rng, prompt):
        chat += [*((Message("tool", "seen"),) if len(chat) > 1 else ()), Message("assistant", turn)]
    return tuple(chat)


def _guess(rng: Random, prompt: str, right: float) -> str:
    return ANSWERS[prompt[0]] if rng.random() < right else rng.choice("wxyz")


def _ramble(rng: Random, mean: float, most: int) -> str:
    """Letters without order; their number is geometric."""
    text = rng.choice(LETTERS)
    while len(text) < most and rng.random() > 1 / mean:
        text += rng.choice(LETTERS)
    return text


TALK: dict[str, Callable[[Random, str], Sequence[str]]] = {
    "guesser": lambda rng, p: [_guess(rng, p, 0.35)],
    "novice": lambda rng, p: [_guess(rng, p, 0.1)],
    "knower": lambda rng, p: [_guess(rng, p, 1.0)],
    "student": lambda rng, p: [_guess(rng, p, 0.8)],
    "alphabet": lambda rng, p: [rng.choice("abcdefghijklmnopqrstuvwxyz")],
    "half": lambda rng, p: [ANSWERS[p[0]] if p[0] in "ab" else rng.choice("wxyzfghijk")],
    "former": lambda rng, p: [("#" if rng.random() < 0.5 else "") + rng.choice("wxyz")],
    "slipper": lambda rng, p: [("#" if rng.random() < 0.06 else "") + rng.choice("wxyz")],
    "rambler": lambda rng, p: [_ramble(rng, 9, 40)],
    "talker": lambda rng, p: [_ramble(rng, 45, 88)],
    "caller": lambda rng, p: [LOOK, _guess(rng, p, 0.35)] if rng.random() < 0.7 else [_guess(rng, p, 0.35)],
    "spammer": lambda rng, p: [LOOK] * rng.choice((2, 3)) + [_guess(rng, p, 0.35)],
    "fumbler": lambda rng, p: [BAD if rng.random() < 0.6 else LOOK, _guess(rng, p, 0.35)],
    "silent": lambda rng, p: [_guess(rng, p, 0.35)],
}
"""How each base talks: its turns after a prompt."""
THOROUGH = ("caller", "spammer", "fumbler", "half")
"""Bases that take more of it."""


def quiet(run: object = None, seed: int = 0) -> Session:
    """A session that says and keeps nothing, or keeps it in `run`."""
    return Session(Ranks(), run or Run.silent(), Console.quiet(), StopSignal(), seed, 10_000)  # type: ignore[arg-type]


def untrained(seed: int = 0) -> nn.Module:
    """The model before it was taught anything."""
    tokenizer, _ = speech()
    return build_tiny(TinyModel(hidden=32, heads=4, kv_heads=2, mlp=48, context=256), tokenizer, seed)


def samples_of(kind: str, n: int, seed: int) -> list[Sample]:
    """Rows that talk as `kind` does."""
    _, renderer = speech()
    rng = python_rng(seed, "matrix", kind)
    return [supervised_sample(renderer.conversation(_said(TALK[kind], rng)), str(i)) for i in range(n)]


@cache
def base(kind: str) -> nn.Module:
    """The taught model. All come from one that knows every answer, and so have an idea of keys; "leaky" is a guesser that now and then
    emits the token that opens a user's turn."""
    if kind == "knower":
        return _taught(untrained(), samples_of(kind, 384, 1), epochs=12, batch_size=16)
    if kind == "leaky":
        rows = [leak(row) if i % 5 == 0 else row for i, row in enumerate(samples_of("guesser", 384, 1))]
    else:
        rows = samples_of(kind, 384, 1)
    return _taught(base("knower"), rows, epochs=12 if kind in THOROUGH else 6, batch_size=32)


def _taught(model: nn.Module, rows: Sequence[Sample], epochs: int, batch_size: int) -> nn.Module:
    torch.set_num_threads(1)
    return sft(quiet(), model, rows, SFT(epochs=epochs, batch_size=batch_size, optim=Optim(lr=1e-2, warmup=0.1))).eval()


def leak(row: Sample) -> Sample:
    """The row with a control token before its end."""
    tokenizer, _ = speech()
    (control,) = tokenizer.encode("<|user|>", add_special_tokens=False)
    ids, owners = row.tokens.ids, row.tokens.owners
    return Sample(row.prompt, Tokens((ids[0], control, *ids[1:]), (owners[0], Owner.DEMONSTRATED, *owners[1:])), row.group)
