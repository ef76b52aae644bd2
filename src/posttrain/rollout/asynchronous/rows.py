"""One sibling of a job: an episode, token by token, that stops and goes on.

A single answer is an episode of one turn. Turns draw from the seeds that the synchronous loop gives them (rollout/episodes.py), and what
the world says stands between them as tokens that nobody drew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.seeds import derive
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, StopReason, Tokens, Trajectory
from posttrain.engine.types import Completion, Request
from posttrain.envs.types import Env
from posttrain.rollout.collect import Collector


@dataclass(frozen=True, slots=True)
class Turn:
    """What follows from the end of a turn: the episode's end, or what the world says.

    Example: Turn("<call>2*3</call>", None, (Message("tool", "6"),), Tokens(...)) goes on; Turn("6", StopReason.END) is over.
    """

    text: str
    stop: StopReason | None
    said: tuple[Message, ...] = ()
    tokens: Tokens = Tokens((), ())


@dataclass(slots=True)
class Row:
    """One sibling, as far as it has been drawn.

    Example: Row(seed=7, ids=[40, 2], owners=[SAMPLED] * 2, logps=[-0.1, -0.3], versions=[3, 4], stop=StopReason.END): weights changed after
    its first token.
    """

    seed: int
    ids: list[int] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    stop: StopReason | None = None
    """None while there is more to draw."""
    start: int = 0
    """Where in `ids` the present turn begins."""
    messages: list[Message] = field(default_factory=list)
    """Turns that are over, and what the world said to them."""
    env: Env | None = None
    """The world of this episode, once it has been asked something."""

    @property
    def drawn(self) -> int:
        """Tokens that the policy drew, in all turns."""
        return self.owners.count(Owner.SAMPLED)

    @property
    def turns(self) -> int:
        """Turns that are over."""
        return sum(message.role == "assistant" for message in self.messages)

    def request(self, prompt: Sequence[int], collector: Collector, chunk: int) -> Request:
        """What is left to draw of the present turn, at most `chunk` tokens of it; the budget covers all turns together."""
        seed = derive(self.seed, "turn", self.turns) if self.turns else self.seed
        left = collector.sampling.max_tokens - self.drawn
        return Request((*prompt, *self.ids[: self.start]), collector.sampling, seed, tuple(self.ids[self.start :]), min(chunk, left))

    def turn(self, task: Task, completion: Completion, collector: Collector) -> Turn | None:
        """What follows when `completion` is appended; None while the turn goes on. Asks the world, which may take time.

        A world that went down with its process is opened again and told everything once more.
        """
        stop = completion.stop
        if stop is StopReason.PAUSED:
            if self.drawn + len(completion.ids) < collector.sampling.max_tokens:
                return None
            stop = StopReason.LENGTH
        text = collector.renderer.decode((*self.ids[self.start :], *completion.ids))
        if collector.env_of is None or stop is not StopReason.END:
            return Turn(text, stop)
        if self.env is None:
            self.env = collector.env_of(task)
            for message in self.messages:
                if message.role == "assistant":
                    self.env.reply(message.content)
        said = tuple(self.env.reply(text))
        if not said:
            return Turn(text, stop)
        if self.turns + 1 >= collector.turns:
            return Turn(text, StopReason.TURNS)
        if self.drawn + len(completion.ids) >= collector.sampling.max_tokens:
            return Turn(text, StopReason.LENGTH)
        before = (*task.prompt, *self.messages, Message("assistant", text))
        return Turn(text, None, said, collector.renderer.reply(before, said))

    def extend(self, completion: Completion, limit: int, turn: Turn | None) -> None:
        """Append what one call drew, and what followed.

        Raises ValueError when a sampler drew more than it was asked for, or nothing and is not done.
        """
        new = len(completion.ids)
        if new > limit or len(completion.logps) != new:
            raise ValueError(f"asked for at most {limit} tokens and got {new} with {len(completion.logps)} log-probabilities")
        if completion.stop is StopReason.PAUSED and not new:
            raise ValueError("a completion was paused before its first token: it would never end")
        self._append(Tokens(completion.ids, (Owner.SAMPLED,) * new), completion.logps, completion.versions or (completion.version,) * new)
        self.candidates += completion.candidates
        if turn is None:
            return
        self.stop = turn.stop
        self.messages += (Message("assistant", turn.text), *turn.said)
        self._append(turn.tokens, (0.0,) * len(turn.tokens), (self.versions[-1:] or [completion.version]) * len(turn.tokens))
        self.candidates += [(index,) for index in turn.tokens.ids] if self.candidates else []
        self.start = len(self.ids) if turn.stop is None else self.start

    def _append(self, tokens: Tokens, logps: Sequence[float], versions: Sequence[int]) -> None:
        self.ids += tokens.ids
        self.owners += tokens.owners
        self.logps += logps
        self.versions += versions

    def trajectory(self, task: Task, index: int, prompt: Tokens, version: int) -> Trajectory:
        """The finished episode; `version` stands for one without a token. Owners and versions are written per token where they differ."""
        assert self.stop is not None, "an episode that goes on is no trajectory"
        several = self.turns > 1
        return Trajectory(
            task_id=task.id,
            index=index,
            prompt=prompt,
            ids=tuple(self.ids),
            logps=tuple(self.logps),
            stop=self.stop,
            text=next(message.content for message in reversed(self.messages) if message.role == "assistant"),
            version=min(self.versions, default=version),
            owners=tuple(self.owners) if several else (),
            versions=tuple(self.versions) if len(set(self.versions)) > 1 else (),
            candidates=tuple(self.candidates),
            transcript="\n".join(f"{message.role}: {message.content}" for message in self.messages) if several else "",
        )

    def ahead(self) -> Row:
        """A copy to draw further with, in a world of its own."""
        return Row.of(self.json())

    def json(self) -> dict[str, Any]:
        """As plain values, for a checkpoint; the world is not among them."""
        drawn = {"ids": list(self.ids), "owners": [int(owner) for owner in self.owners], "logps": list(self.logps)}
        state = {"versions": list(self.versions), "candidates": [list(kept) for kept in self.candidates], "start": self.start}
        messages = [[message.role, message.content] for message in self.messages]
        return {"seed": self.seed, **drawn, **state, "messages": messages, "stop": None if self.stop is None else self.stop.value}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Row:
        """The inverse of `json`."""
        return cls(
            stored["seed"],
            list(stored["ids"]),
            [Owner(owner) for owner in stored["owners"]],
            list(stored["logps"]),
            list(stored["versions"]),
            [tuple(ids) for ids in stored["candidates"]],
            None if stored["stop"] is None else StopReason(stored["stop"]),
            stored["start"],
            [Message(role, content) for role, content in stored["messages"]],
        )
