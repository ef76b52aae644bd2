"""Episodes: an assistant's turn, what the world says to it, the next turn, until one of the two has nothing more to say.

    prompt | turn: sampled ... <end> | harness: <tool> 53944 <end> <assistant> | turn: sampled ... <end>
             trained                   read, never trained                       trained

All live episodes take their turn in one call of the sampler. A tool's result is spliced in as tokens behind those that were sampled:
nothing is ever tokenised again (spec/faults.md 40), and a sampler with a prefix cache reads only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, StopReason, Tokens, Trajectory
from posttrain.engine.types import Completion, Request, Sampler
from posttrain.envs.types import Env, EnvOf
from posttrain.render.types import Renderer


@dataclass(frozen=True, slots=True)
class Opening:
    """An episode that is to be played.

    Example: Opening(task, index=0, prompt=renderer.prompt(task.prompt), sampling=Sampling(max_tokens=64), seed=derive(0, 3, 0))
    """

    task: Task
    index: int
    """Which of the task's siblings this is."""
    prompt: Tokens
    sampling: Sampling
    """`max_tokens` bounds what is sampled in all turns together; what the world says is not counted."""
    seed: int
    env_of: EnvOf | None = None
    """Opens the episode's world; None means that a single turn is the answer."""
    turns: int = 1
    """Most turns of the policy; an episode whose world still answers then ends as StopReason.TURNS."""


@dataclass(slots=True)
class _Episode:
    """An episode that is being played."""

    opening: Opening
    env: Env | None
    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    sampled: int = 0
    turns: int = 0
    text: str = ""
    stop: StopReason | None = None

    def request(self) -> Request:
        """The next turn. The first draws from the episode's own stream, as a completion without turns does."""
        seed = derive(self.opening.seed, "turn", self.turns) if self.turns else self.opening.seed
        sampling = self.opening.sampling
        return Request(self.opening.prompt.ids + tuple(self.ids), sampling, seed, limit=sampling.max_tokens - self.sampled)

    def take(self, done: Completion, text: str) -> None:
        """Append a turn of the policy."""
        self.ids += done.ids
        self.logps += done.logps
        self.owners += [Owner.SAMPLED] * len(done.ids)
        self.versions += done.versions or (done.version,) * len(done.ids)
        self.candidates += done.candidates
        self.sampled += len(done.ids)
        self.turns += 1
        self.text = text
        self.messages.append(Message("assistant", text))

    def hear(self, said: Sequence[Message], tokens: Tokens, cut: bool) -> None:
        """Append what the world said."""
        self.messages += said
        self.ids += tokens.ids
        self.logps += [0.0] * len(tokens)
        self.owners += tokens.owners
        self.versions += [self.versions[-1]] * len(tokens)
        self.candidates += [(index,) for index in tokens.ids] if cut else []


def play(
    sampler: Sampler, renderer: Renderer, openings: Sequence[Opening], progress: Callable[[int], None] | None = None
) -> list[Trajectory]:
    """Play every episode to its end; trajectories in the order of `openings`. `progress` is told of each number of episodes that ended."""
    episodes = [_Episode(o, o.env_of(o.task) if o.env_of else None, list(o.task.prompt)) for o in openings]
    single = all(episode.env is None for episode in episodes)
    live = episodes
    while live:
        for episode, done in zip(live, sampler.generate([e.request() for e in live], progress if single else None), strict=True):
            episode.take(done, renderer.decode(done.ids))
            _go_on(episode, done, renderer)
        waiting = [episode for episode in live if episode.stop is None]
        if progress and not single and len(waiting) < len(live):
            progress(len(live) - len(waiting))
        live = waiting
    return [_trajectory(episode) for episode in episodes]


def _go_on(episode: _Episode, done: Completion, renderer: Renderer) -> None:
    """Let the world answer, or say why the episode is over."""
    stop = StopReason.LENGTH if done.stop is StopReason.PAUSED else done.stop  # the limit was what the budget had left
    said = episode.env.reply(episode.text) if episode.env and stop is StopReason.END else ()
    if not said:
        episode.stop = stop
    elif episode.turns >= episode.opening.turns:
        episode.stop = StopReason.TURNS
    elif episode.sampled >= episode.opening.sampling.max_tokens:
        episode.stop = StopReason.LENGTH
    else:
        episode.hear(said, renderer.reply(episode.messages, said), cut=bool(episode.candidates))


def _trajectory(episode: _Episode) -> Trajectory:
    assert episode.stop is not None
    several = episode.turns > 1
    mixed = len(set(episode.versions)) > 1
    return Trajectory(
        task_id=episode.opening.task.id,
        index=episode.opening.index,
        prompt=episode.opening.prompt,
        ids=tuple(episode.ids),
        logps=tuple(episode.logps),
        stop=episode.stop,
        text=episode.text,
        version=min(episode.versions),
        owners=tuple(episode.owners) if several else (),
        versions=tuple(episode.versions) if mixed else (),
        candidates=tuple(episode.candidates),
        transcript=_transcript(episode) if several else "",
    )


def _transcript(episode: _Episode) -> str:
    said = episode.messages[len(episode.opening.task.prompt) :]
    return "\n".join(f"{message.role}: {message.content}" for message in said)
