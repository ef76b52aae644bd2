"""Dynamic sampling: replace groups that carry no signal, such as those whose rewards are all equal, within a budget of tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Group
from posttrain.rollout.collect import Collector, collect


@dataclass(frozen=True, slots=True)
class Filled:
    """A step's groups: generated = kept + the degenerate ones, which train nothing."""

    generated: tuple[Group, ...]
    kept: tuple[Group, ...]

    @property
    def tries_per_kept(self) -> float | None:
        """Groups generated per group kept: about 1 in the sweet spot, large when tasks are out of reach or mastered."""
        return len(self.generated) / len(self.kept) if self.kept else None


def fill(
    collector: Collector,
    draw: Callable[[int], Sequence[Task]],
    target: int,
    tries: float,
    seed: int,
    carries_signal: Callable[[Group], bool],
    collect: Callable[[Collector, Sequence[Task], int], list[Group]] = collect,
) -> Filled:
    """Draw tasks until `target` groups carry signal or `tries * target` groups were generated.

    A batch that stays short is trained short and reported: padding it with groups of equal rewards would only dilute the average.
    """
    generated: list[Group] = []
    kept: list[Group] = []
    budget = max(target, int(target * tries))
    while len(kept) < target and len(generated) < budget:
        wanted = min(target - len(kept), budget - len(generated))
        groups = collect(collector, draw(wanted), derive(seed, len(generated)))
        generated += groups
        kept += [group for group in groups if carries_signal(group)]
    return Filled(tuple(generated), tuple(kept))
