"""Talk to any rung of a run, or to any model."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.errors import RunError
from posttrain.core.files import is_leftover
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.tasks import Message
from posttrain.core.trajectory import StopReason
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Request
from posttrain.models.loading import load
from posttrain.render.renderer import ChatRenderer
from posttrain.runs.run import MANIFEST, Run


def rungs(run: str | Path) -> list[str]:
    """Rungs of a run whose model is kept, in the order they were finished."""
    root = Run.open(run).path / "checkpoints"
    found = [p for p in root.iterdir() if (p / "final" / "config.json").is_file() and not is_leftover(p.name)] if root.is_dir() else []
    return [p.name for p in sorted(found, key=lambda p: (p / "final" / "config.json").stat().st_mtime_ns)]


def is_run(where: str | Path) -> bool:
    """Whether `where` is a run directory."""
    return (Path(where) / MANIFEST).is_file()


def split_rung(where: str) -> tuple[str, str | None]:
    """A run directory and the rung named behind it. Example: "runs/a:sft" -> ("runs/a", "sft"); anything else stays as it is."""
    run, _, rung = where.rpartition(":")
    return (run, rung) if run and not Path(where).exists() and is_run(run) else (where, None)


def model_of(where: str, rung: str | None = None) -> str:
    """What to load: `where` itself, or, when it is a run directory or RUN:RUNG, the kept model of that rung (the last one by default)."""
    where, named = split_rung(where)
    rung = rung or named
    if not is_run(where):
        return where
    known = rungs(where)
    if not known:
        raise RunError(f"{where} has no finished rung yet; let it run further")
    if rung is not None and rung not in known:
        raise RunError(f"{where} has no rung '{rung}'; finished are {', '.join(known)}")
    return str(Path(where) / "checkpoints" / (rung or known[-1]) / "final")


class Chat:
    """A conversation with one model.

    Example: Chat("runs/a", rung="sft").say("Compute 2 + 3.")  ->  "#### 5"
    """

    def __init__(self, where: str, rung: str | None = None, *, system: str | None = None, sampling: Sampling | None = None, seed: int = 0):
        run = split_rung(where)[0]
        if system is None and is_run(run):
            system = Run.open(run).config().get("system")
        model, tokenizer = load(model_of(where, rung))
        self.renderer = ChatRenderer(tokenizer, system=system)
        self.sampler = LocalSampler(model, self.renderer.stop_ids, self.renderer.special_ids)
        self.sampling = sampling or Sampling(temperature=0.0, max_tokens=200)
        self.seed = seed
        self.turns: list[Message] = []

    def say(self, text: str) -> str:
        """Send one user turn and return the answer; both join the conversation, or neither when the turn cannot be rendered."""
        turns = [*self.turns, Message("user", text)]
        prompt = self.renderer.prompt(turns)
        done = self.sampler.generate([Request(prompt.ids, self.sampling, derive(self.seed, "chat", len(turns)))])[0]
        answer = self.renderer.decode(done.ids)
        self.turns = [*turns, Message("assistant", answer)]
        return answer + (" [cut]" if done.stop is StopReason.LENGTH else "")

    def forget(self) -> None:
        """Start a new conversation."""
        self.turns.clear()
