"""The toy runs whose numbers are pinned: a from-scratch model through all three loops."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from posttrain.core.config import Config
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, Tokens
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import Optim
from posttrain.loops.preference import DPO, dpo
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, World
from posttrain.loops.session import Session
from posttrain.loops.sft import SFT, sft
from posttrain.models.tiny import TinyModel, build_tiny
from posttrain.models.tokenizer import build_tokenizer
from posttrain.objectives.objective import Objective
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.graders import ExactTextGrader
from posttrain.rollout.samples import Pair, supervised_sample
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal
from posttrain.runs.run import Run

QUESTIONS = {"x": "a", "y": "b"}


class Nothing(Config):
    """A run needs settings to record; these toy runs have none of their own."""


def draw(n: int, seed: int) -> Sequence[Task]:
    rng = python_rng(seed, "golden")
    return [Task(q, (Message("user", q),), QUESTIONS[q]) for q in rng.choices(sorted(QUESTIONS), k=n)]


def curves() -> dict[str, list[float]]:
    """Loss of SFT and DPO and mean reward of GRPO, per step, each stage starting from the one before."""
    tokenizer = build_tokenizer([], 265)
    renderer = ChatRenderer(tokenizer)
    with tempfile.TemporaryDirectory(prefix="posttrain-golden-") as folder:
        run = Run.create(Path(folder) / "run", config=Nothing(), command=["golden"], seeds={"seed": 0})
        session = Session(Ranks(), run, Console.quiet(), StopSignal(), 0)
        model = build_tiny(TinyModel(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, context=64), tokenizer, 0)
        chats = [(Message("user", q), Message("assistant", a)) for q in QUESTIONS for a in "ab"]
        rows = [supervised_sample(renderer.conversation(chat), f"{i}") for i, chat in enumerate(chats)]
        with session.timed("sft"):
            taught = sft(session, model, rows, SFT(epochs=60, batch_size=4, optim=Optim(lr=1e-2)))
        pairs = [_pair(renderer, question) for question in QUESTIONS]
        with session.timed("dpo"):
            tuned = dpo(session, taught, pairs, DPO(epochs=8, batch_size=2, optim=Optim(lr=1e-2)))
        world = World(draw, ExactTextGrader(), renderer, Sampling(max_tokens=4))
        settings = RL(steps=8, prompts=4, siblings=8, optim=Optim(lr=3e-3, schedule="constant", warmup=0.0))
        rl(session, tuned, world, settings, Objective(), name="grpo")
        shown = {"sft": "loss", "dpo": "loss", "grpo": "reward_mean"}
        found = {stage: [line[name] for line in run.metrics(stage)] for stage, name in shown.items()}
        run.close()
    return found


def _pair(renderer: ChatRenderer, question: str) -> Pair:
    prompt = renderer.prompt([Message("user", question)])
    right, wrong = (Tokens((letter, 6), (Owner.SAMPLED,) * 2) for letter in ((73, 74) if QUESTIONS[question] == "a" else (74, 73)))
    return Pair(question, prompt, right, wrong)
