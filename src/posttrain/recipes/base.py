"""The embedded base model: a tiny Llama trained from nothing on plain text, then cached, as if it had been downloaded.

Its text holds sums, small facts and word games as prose. It has never seen a chat turn or a '####', and no operand pair that is held out
for evaluation (`Arithmetic.is_held_out`), so what later rungs show on those pairs was not read here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerFast

import posttrain
from posttrain.core.cache import cache_dir
from posttrain.core.config import Config
from posttrain.core.digest import digest
from posttrain.core.files import atomic_dir, read_jsonl
from posttrain.core.seeds import python_rng
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.machine import Packing
from posttrain.engine.trainer import Optim
from posttrain.envs.arithmetic import Arithmetic
from posttrain.envs.instruct import CAPITALS, OPPOSITES, WORDS
from posttrain.loops.session import Session
from posttrain.loops.sft import SFT, sft
from posttrain.models.loading import load, save
from posttrain.models.tiny import TinyModel, build_tiny
from posttrain.models.tokenizer import build_tokenizer
from posttrain.rollout.samples import text_sample

BASE_SEED = 0
"""The base is the same for every run, as a downloaded one would be."""
SUMS = 0.85
"""Share of the base's lines that are sums."""


class TinyBase(Config):
    """How the embedded base is made."""

    shape: TinyModel = TinyModel()
    vocab: int = Field(default=400, ge=265)
    lines: int = Field(default=200_000, ge=100)
    """Lines of text, each seen once."""
    batch: int = Field(default=128, ge=1)
    """Lines per optimizer step."""
    lr: float = Field(default=3e-3, gt=0)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the corpus. Only `said` is trained: the operands of a sum are random, and predicting noise drowns the signal.

    Example: Line(read="Compute 12 + 7. The answer is", said=" 19.")
    """

    read: str
    said: str


def corpus(settings: TinyBase, arithmetic: Arithmetic) -> Iterator[Line]:
    """Lines of plain text. Sums use trainable pairs only."""
    rng = python_rng(BASE_SEED, "base", "corpus")
    for _ in range(settings.lines):
        yield _sum(rng, arithmetic) if rng.random() < SUMS else Line("", _prose(rng))


def _sum(rng: Random, arithmetic: Arithmetic) -> Line:
    task = arithmetic.tasks("train", 1, rng.getrandbits(48))[0]
    question = f"{task.meta['a']} {task.meta['op']} {task.meta['b']}"
    if rng.random() < 0.5:
        return Line(f"{question} =", f" {task.answer}")
    # words in between, so that the answer is found by what was asked and not by a fixed distance
    between = " ".join(rng.choices(WORDS, k=rng.randrange(4)))
    return Line(f"Compute {question}. {between} The answer is", f" {task.answer}.")


def _prose(rng: Random) -> str:
    word, other, third = rng.sample(WORDS, 3)
    one, opposite = rng.choice(OPPOSITES)
    country, capital = rng.choice(CAPITALS)
    return rng.choice(
        (
            f"The opposite of {one} is {opposite}.",
            f"The capital of {country} is {capital}.",
            f"One {word}, two {word}s.",
            f"{word} in upper case is {word.upper()}.",
            f"In the list {word}, {other}, {third} the first word is {word} and the last word is {third}.",
            f"The word is {word}, again {word}.",
        )
    )


def line_sample(tokenizer: PreTrainedTokenizerFast, line: Line, key: str) -> Sample:
    """A line as a row, the end of the text included."""
    said = text_sample(tokenizer, line.said, key)
    read = tuple(tokenizer.encode(line.read, add_special_tokens=False))
    return Sample(said.prompt + Tokens(read, (Owner.TEMPLATE,) * len(read)), said.tokens, key)


def base_key(settings: TinyBase, arithmetic: Arithmetic) -> str:
    """Identity of the base: every setting, the tasks it may read and the prompt its tokenizer has seen, the text's beginning, the code."""
    shape = settings.shape
    model = [shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.mlp, shape.context, settings.vocab]
    training = [settings.lines, SUMS, settings.batch, settings.lr]
    tasks = [arithmetic.ops, arithmetic.low, arithmetic.high, arithmetic.held_out_percent, arithmetic.prompt]
    opening = [(line.read, line.said) for line in islice(corpus(settings, arithmetic), 500)]
    return digest([posttrain.__version__, model, training, tasks, opening])


def tiny_base(
    session: Session, settings: TinyBase, arithmetic: Arithmetic, name: str = "base"
) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """The embedded base and its tokenizer: from the cache, or trained now (about two minutes on two cores) and cached.

    Either way the run's records hold the same training curve.
    """
    folder = cache_dir("base") / f"{base_key(settings, arithmetic)}-x{session.ranks.size}"
    if session.ranks.first_says((folder / "config.json").is_file()):
        session.rewind()
        for line in read_jsonl(folder / "metrics.jsonl"):
            values = {key: value for key, value in line.items() if key not in ("schema", "stage", "step", "seconds")}
            session.run.metric(name, line["step"], values, line["seconds"])
        session.console.line(f"{name}: taken from the cache ({folder})")
        return load(str(folder))
    lines = list(corpus(settings, arithmetic))
    tokenizer = build_tokenizer([line.read + line.said for line in lines[:20_000]] + chat_words(arithmetic), settings.vocab)
    model = build_tiny(settings.shape, tokenizer, BASE_SEED)
    samples = [line_sample(tokenizer, line, f"{index}") for index, line in enumerate(lines)]
    optim = Optim(lr=settings.lr, schedule="cosine", warmup=0.05, end=0.05)
    recipe = SFT(batch_size=settings.batch, optim=optim)
    machine = session.machine.model_copy(update={"packing": Packing(row_tokens=128, micro_tokens=4096)})
    trained = sft(replace(session, seed=BASE_SEED, tokenizer=tokenizer, machine=machine), model, samples, recipe, name)
    if session.ranks.first:
        with atomic_dir(folder) as target:
            save(trained, tokenizer, target)
            shutil.copy(session.run.path / "metrics.jsonl", target / "metrics.jsonl")
    session.ranks.first_says(None)  # nobody reads the cache before it is complete
    return trained, tokenizer


def chat_words(arithmetic: Arithmetic) -> list[str]:
    """Text of the prompts to come, for the tokenizer only: their words become few tokens. No model is trained on it."""
    return [message.content for task in arithmetic.tasks("train", 300, 1) for message in task.prompt]
