"""What several test files share: run-time shape checks of the objectives, a tiny random model, rows, and a recorder in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# Must stand before anything imports the objectives. An int is a float here, as it is to a static type checker.
typecheck = beartype(conf=BeartypeConf(is_pep484_tower=True))
install_import_hook("posttrain.objectives", "conftest.typecheck")

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from posttrain.core.tasks import Message, Task  # noqa: E402
from posttrain.core.trajectory import (  # noqa: E402
    Group,
    Owner,
    RewardStatus,
    Rollout,
    Sample,
    Score,
    StopReason,
    Tokens,
    Trajectory,
)
from posttrain.engine.processes import Ranks  # noqa: E402
from posttrain.loops.session import Session  # noqa: E402
from posttrain.models.tokenizer import build_tokenizer  # noqa: E402
from posttrain.render.renderer import ChatRenderer  # noqa: E402
from posttrain.runs.console import Console  # noqa: E402
from posttrain.runs.interrupt import StopSignal  # noqa: E402
from posttrain.runs.recorder import NO_SECONDS, RunFiles  # noqa: E402

torch.set_num_threads(1)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Together(Ranks):
    """A rank among several in one process, each in a thread of its own."""

    board: list[Any] = field(default_factory=list)
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def gather(self, value: T) -> list[T]:
        self.board[self.rank] = value
        self.meeting.wait(timeout=60)
        values = list(self.board)
        self.meeting.wait(timeout=60)
        return values

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))


def together(size: int, body: Callable[[Ranks], T]) -> list[T]:
    """What `body(ranks)` returns on each of `size` ranks that meet in this process; the first failure is raised."""
    board, meeting = [None] * size, threading.Barrier(size)

    def one(rank: int) -> T:
        try:
            return body(Together(rank, size, board, meeting))
        except BaseException:
            meeting.abort()  # the others wait for this rank
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in done) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in done]


class Memory(RunFiles):
    """A recorder that keeps its lines in lists; positions are numbers of lines. Checkpoints go to `path`."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.lines: dict[str, list[dict[str, Any]]] = {"metrics": [], "rollouts": [], "alarms": []}
        self.stages: dict[str, dict[str, Any]] = {}

    def metric(
        self, stage: str, step: int, values: Mapping[str, float | int | str | None], seconds: Mapping[str, float | None] = NO_SECONDS
    ) -> None:
        self.lines["metrics"].append({"stage": stage, "step": step, **values})

    def metrics(self, stage: str | None = None) -> list[dict[str, Any]]:
        return [line for line in self.lines["metrics"] if stage in (None, line["stage"])]

    def rollout(self, stage: str, record: Mapping[str, Any]) -> None:
        self.lines["rollouts"].append({"stage": stage, **record})

    def schedule(self, stage: str, line: Mapping[str, Any]) -> None:
        self.lines.setdefault("schedule", []).append(dict(line))

    def alarm(self, stage: str, step: int, name: str, detail: str, evidence: Mapping[str, Any]) -> None:
        self.lines["alarms"].append({"stage": stage, "step": step, "name": name})

    def note(self, section: str, facts: Mapping[str, Any]) -> None:
        self.noted = {**getattr(self, "noted", {}), section: dict(facts)}

    def position(self) -> dict[str, int]:
        return {name: len(lines) for name, lines in self.lines.items()}

    def rewind(self, position: Mapping[str, int]) -> None:
        for name, lines in self.lines.items():
            del lines[position.get(name, 0) :]

    def finish_stage(self, stage: str, info: Mapping[str, Any]) -> None:
        self.stages[stage] = dict(info)

    def finished(self, stage: str) -> dict[str, Any] | None:
        return self.stages.get(stage)

    def save_eval(self, name: str, record: Mapping[str, Any]) -> None:
        self.lines.setdefault("evals", []).append({"name": name, **record})


class StopAfter(StopSignal):
    """Asks to stop once `checks` steps have been asked about."""

    def __init__(self, checks: int):
        super().__init__(lambda text: None)
        self._left = checks

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left <= 0

    @requested.setter
    def requested(self, value: bool) -> None:
        self._left = 1 if value else 1 << 30


@dataclass
class Toy:
    """Small things to test with. `renderer` speaks the 265-token byte vocabulary of `tokenizer`."""

    folder: Path
    tokenizer: Any
    renderer: ChatRenderer
    recorders: list[Memory] = field(default_factory=list)

    def brief(self) -> LlamaForCausalLM:
        """A random model that closes its turn with a chance of about one third at every token, so that hardly any completion is cut."""
        model = self.model(265)
        tied = model.get_output_embeddings().weight.detach().clone()
        model.lm_head = torch.nn.Linear(tied.shape[1], tied.shape[0])
        with torch.no_grad():
            model.lm_head.weight.copy_(tied)
            model.lm_head.bias.fill_(1.0)
            model.lm_head.bias[6] = 7.0
        return model

    def model(self, vocab: int = 60, *, seed: int = 0, std: float = 0.3) -> LlamaForCausalLM:
        """Random Llama with weights large enough that every token and position matters."""
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
        with torch.random.fork_rng(devices=[]):
            model = LlamaForCausalLM(config).float().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, std, generator=generator)
        return model

    def row(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        group: str = "g",
        *,
        owners: Sequence[Owner] | None = None,
        advantage: float | None = None,
        logps: Sequence[float] = (),
    ) -> Sample:
        """A trained row; `owners` default to all SAMPLED."""
        tokens = Tokens(tuple(ids), tuple(owners or (Owner.SAMPLED,) * len(ids)))
        advantages = () if advantage is None else (advantage,) * len(ids)
        return Sample(Tokens(tuple(prompt), (Owner.USER,) * len(prompt)), tokens, group, advantages, tuple(logps))

    def group(
        self,
        rewards: Sequence[float | None],
        *,
        task: str = "t",
        stops: Sequence[StopReason] | None = None,
        ids: Sequence[Sequence[int]] = (),
        owners: Sequence[Sequence[Owner]] = (),
        parts: Sequence[Mapping[str, float]] = (),
    ) -> Group:
        """A scored group: sibling i sampled `ids[i]` (default (20 + i, 2)) after the prompt (1, 5, 9); `parts[i]` are its channels."""
        rollouts = []
        for index, reward in enumerate(rewards):
            drawn = tuple(ids[index]) if ids else (20 + index, 2)
            stop = stops[index] if stops else StopReason.END
            prompt = Tokens((1, 5, 9), (Owner.TEMPLATE, Owner.USER, Owner.TEMPLATE))
            by = tuple(owners[index]) if owners else ()
            trajectory = Trajectory(task, index, prompt, drawn, (-1.0,) * len(drawn), stop, f"{index}", 0, by)
            status = RewardStatus.ERROR if reward is None else RewardStatus.SCORED
            channels = tuple(parts[index].items()) if parts else ()
            rollouts.append(Rollout(trajectory, Score(reward, status, grader="scripted", parts=channels)))
        return Group(Task(task, (Message("user", "?"),), "x"), tuple(rollouts))

    def recorder(self) -> Memory:
        self.recorders.append(Memory(self.folder / f"run{len(self.recorders)}"))
        return self.recorders[-1]

    def session(self, run: Memory | None = None, *, stop: StopSignal | None = None, seed: int = 0, save_every: int = 20) -> Session:
        return Session(Ranks(), run or self.recorder(), Console.quiet(), stop or StopSignal(), seed, save_every)

    def together(self, size: int, body: Callable[[Ranks], T]) -> list[T]:
        """Run `body` as so many ranks; see `together`."""
        return together(size, body)

    def stop_after(self, steps: int) -> StopSignal:
        """A stop request that arrives during the `steps`-th step."""
        return StopAfter(steps)

    def gradient(self, model: torch.nn.Module) -> torch.Tensor:
        """All gradients of a model as one vector, zeros where there is none."""
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])

    def weights(self, model: torch.nn.Module) -> torch.Tensor:
        """All weights of a model as one vector, copied."""
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.fixture(scope="session")
def _speech() -> tuple[Any, ChatRenderer]:
    tokenizer = build_tokenizer([], 265)
    return tokenizer, ChatRenderer(tokenizer)


@pytest.fixture
def toy(tmp_path: Path, _speech: tuple[Any, ChatRenderer]) -> Toy:
    return Toy(tmp_path, *_speech)
