"""S-GRPO's groups: one chain of thought, cut at several places, an answer asked for at each.

    chain          t t t t t t t t t end
    sibling 0      t t | cue a a end               a cue is forced after the cut, the answer is sampled
    sibling 1      t t t t t | cue a end
    sibling 2      the chain itself

Correct siblings share a falling scale, the earliest first: 1, 1/2, 1/4, ...; wrong ones get 0. So the group says not only whether thinking
led to the answer but when it could have stopped. The forced cue is read and never trained. Source: S-GRPO 2025 (arXiv 2505.07686).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from posttrain.core.errors import ConfigError
from posttrain.core.seeds import derive, numpy_rng
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Group, Owner, RewardStatus, Rollout, Tokens, Trajectory
from posttrain.engine.types import Completion, Request
from posttrain.objectives.axes import EarlyExit
from posttrain.rewards.types import score
from posttrain.rollout.collect import Collector, trajectory_of


def collect_early_exits(
    collector: Collector, tasks: Sequence[Task], seed: int, progress: Callable[[int], None] | None = None, *, how: EarlyExit
) -> list[Group]:
    """One group per task, in task order, on every rank: at most `how.cuts` early exits in order of position, and the chain last.

    A chain shorter than the number of cuts is cut at every place it has. An exit has what is left of the token budget for its answer.
    """
    mine = collector.ranks.share(list(enumerate(tasks)))
    prompts = [collector.renderer.prompt(task.prompt) for _, task in mine]
    cue = tuple(collector.renderer.tokenizer.encode(how.cue, add_special_tokens=False))
    if collector.sampling.max_tokens < len(cue) + 2:
        raise ConfigError(
            f"the early-exit cue {how.cue!r} takes {len(cue)} of {collector.sampling.max_tokens} tokens; raise sampling.max_tokens"
        )
    chains = collector.sampler.generate(
        [Request(prompt.ids, collector.sampling, derive(seed, place, "chain")) for (place, _), prompt in zip(mine, prompts, strict=True)],
        progress,
    )
    places = [
        cuts_of(len(chain.ids), how.cuts, collector.sampling.max_tokens - len(cue), derive(seed, place, "cuts"))
        for (place, _), chain in zip(mine, chains, strict=True)
    ]
    requests = [
        Request(
            prompt.ids + chain.ids[:cut] + cue,
            collector.sampling.model_copy(update={"max_tokens": collector.sampling.max_tokens - cut - len(cue)}),
            derive(seed, place, "exit", cut),
        )
        for (place, _), prompt, chain, cuts in zip(mine, prompts, chains, places, strict=True)
        for cut in cuts
    ]
    answers = iter(collector.sampler.generate(requests))
    groups = []
    for (_, task), prompt, chain, cuts in zip(mine, prompts, chains, places, strict=True):
        exits = [_exit(collector, task, index, prompt, chain, cut, cue, next(answers)) for index, cut in enumerate(cuts)]
        whole = trajectory_of(collector, task, len(cuts), prompt, chain)
        groups.append(Group(task, falling(tuple(Rollout(t, score(collector.grader, task, t)) for t in (*exits, whole)))))
    return collector.ranks.interleave(groups)


def cuts_of(length: int, wanted: int, room: int, seed: int) -> list[int]:
    """Up to `wanted` distinct cut positions in order: at least one token before a cut, one after it, and room for an answer."""
    last = min(length - 1, room - 1)
    if last < 1:
        return []
    chosen = numpy_rng(seed, "positions").choice(last, size=min(wanted, last), replace=False)
    return sorted(int(position) + 1 for position in chosen)


def falling(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """Halve the score of each rollout that scored above 0 for every such rollout before it.

    Example: scores 0, 1, 0, 1, 1 become 0, 1, 0, 0.5, 0.25.
    """
    right, result = 0, []
    for rollout in rollouts:
        value = rollout.score.value
        if value is None or value <= 0 or rollout.score.status is not RewardStatus.SCORED:
            result.append(rollout)
            continue
        result.append(Rollout(rollout.trajectory, replace(rollout.score, value=value * 0.5**right, parts=(("before_decay", value),))))
        right += 1
    return tuple(result)


def _exit(
    collector: Collector, task: Task, index: int, prompt: Tokens, chain: Completion, cut: int, cue: tuple[int, ...], answer: Completion
) -> Trajectory:
    ids = chain.ids[:cut] + cue + answer.ids
    owners = (Owner.SAMPLED,) * cut + (Owner.FORCED,) * len(cue) + (Owner.SAMPLED,) * len(answer.ids)
    logps = chain.logps[:cut] + (0.0,) * len(cue) + answer.logps
    drawn_by = _versions(chain)[:cut] + (answer.version,) * len(cue) + _versions(answer)
    mixed = min(drawn_by) != max(drawn_by)
    whole = Completion(
        ids,
        logps,
        answer.stop,
        min(drawn_by),
        versions=drawn_by if mixed else (),
        candidates=_candidates(chain)[:cut] + ((),) * len(cue) + _candidates(answer) if chain.candidates or answer.candidates else (),
    )
    return replace(trajectory_of(collector, task, index, prompt, whole), owners=owners)


def _versions(completion: Completion) -> tuple[int, ...]:
    """One per id."""
    return completion.versions or (completion.version,) * len(completion.ids)


def _candidates(completion: Completion) -> tuple[tuple[int, ...], ...]:
    """One set per id, empty where nothing was cut."""
    return completion.candidates or ((),) * len(completion.ids)
