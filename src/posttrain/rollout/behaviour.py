"""What the policy does, apart from what it is paid for: repeats itself, answers alike, takes turns, calls tools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.trajectory import Group, Owner, Trajectory
from posttrain.render.tool_calls import OPEN, BadCall, parse

GRAM = 4
"""Tokens of the pieces whose return counts as repetition."""
SHORTEST = 32
"""Sampled tokens below which a completion is too short to loop; it counts as 0."""


def behaviour(groups: Sequence[Group]) -> dict[str, float]:
    """duplicates: completions equal to an earlier sibling.  repetition: tokens inside a piece used before, mean over completions.
    turns: assistant turns per episode.  With tool calls, or prompts that say how to make one, also calls per episode, and the shares that
    repeat one or cannot be read."""
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    alike = sum(len(group.rollouts) - len({rollout.trajectory.ids for rollout in group.rollouts}) for group in groups)
    found = {
        "duplicates": alike / len(trajectories),
        "repetition": float(np.mean([repetition(trajectory.ids) for trajectory in trajectories])),
        "turns": float(np.mean([turns(trajectory) for trajectory in trajectories])),
    }
    offered = any(OPEN in message.content for group in groups for message in group.task.prompt)
    return found | _calls([trajectory.transcript or trajectory.text for trajectory in trajectories], offered)


def repetition(ids: Sequence[int]) -> float:
    """Share of the tokens that end a piece of `GRAM` tokens which has occurred before; 0 for completions shorter than `SHORTEST`.

    Example: 40 times the same token: 37 pieces, all but the first seen before, 36 / 40 = 0.9.
    """
    if len(ids) < SHORTEST:
        return 0.0
    pieces = np.lib.stride_tricks.sliding_window_view(np.asarray(ids), GRAM)
    return (len(pieces) - len(np.unique(pieces, axis=0))) / len(ids)


def turns(trajectory: Trajectory) -> int:
    """Assistant turns of an episode: stretches of the policy's own tokens between those of others."""
    if not trajectory.owners:
        return 1
    own = np.array([owner in (Owner.SAMPLED, Owner.FORCED) for owner in trajectory.owners])
    return max(1, int(np.count_nonzero(own & ~np.concatenate([[False], own[:-1]]))))


def _calls(texts: Sequence[str], offered: bool) -> dict[str, float]:
    """Nothing where no episode calls a tool and no prompt says how to."""
    if not offered and not any(OPEN in text for text in texts):
        return {}
    total = repeated = malformed = 0
    for text in texts:
        calls = parse(text)
        read = [(call.name, str(sorted(call.arguments.items()))) for call in calls if not isinstance(call, BadCall)]
        total, malformed, repeated = total + len(calls), malformed + len(calls) - len(read), repeated + len(read) - len(set(read))
    return {"calls": total / len(texts), "repeated_calls": repeated / max(total, 1), "malformed_calls": malformed / max(total, 1)}
