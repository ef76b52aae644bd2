"""Groups for probes, without a model: an outcome per sibling."""

from collections.abc import Sequence

from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Group, Owner, RewardStatus, Rollout, Score, StopReason, Tokens, Trajectory

Sibling = float | str
"""A reward, or "unparseable", "truncated", "error"."""


def group(siblings: Sequence[Sibling], place: int = 0, *, texts: Sequence[str] = (), answer: str | None = None, length: int = 5) -> Group:
    """One group of a task; texts differ from sibling to sibling unless given."""
    task = Task(f"t{place}", (Message("user", f"question {place}"),), f"answer{place}" if answer is None else answer)
    rollouts = []
    for index, sibling in enumerate(siblings):
        status = RewardStatus(sibling) if isinstance(sibling, str) else RewardStatus.SCORED
        value = None if sibling == "error" else 0.0 if isinstance(sibling, str) else sibling
        stop = StopReason.LENGTH if sibling == "truncated" else StopReason.END
        text = texts[index] if texts else f"{place}-{index}"
        prompt = Tokens((1, 5), (Owner.TEMPLATE, Owner.USER))
        trajectory = Trajectory(task.id, index, prompt, (9,) * length, (-1.0,) * length, stop, text, 0)
        rollouts.append(Rollout(trajectory, Score(value, status, grader="scripted")))
    return Group(task, tuple(rollouts))


def groups(*kinds: tuple[int, Sequence[Sibling]]) -> list[Group]:
    """So many groups of each kind."""
    wanted = [siblings for count, siblings in kinds for _ in range(count)]
    return [group(siblings, place) for place, siblings in enumerate(wanted)]
