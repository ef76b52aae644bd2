"""Asynchronous rollouts as the loop sees them: groups for a step, an account after it, and everything a checkpoint needs.

Graders run here, in the trainer's thread: some of them use signals, which other threads may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.core.trajectory import Group, Rollout
from posttrain.objectives.objective import Objective
from posttrain.rewards.types import score
from posttrain.rollout.asynchronous.accounting import AccountError, ages
from posttrain.rollout.asynchronous.flow import Flow, Line
from posttrain.rollout.asynchronous.jobs import Job
from posttrain.rollout.asynchronous.workers import Driver, Weights
from posttrain.rollout.collect import Collector
from posttrain.rollout.dynamic import Filled


class Live:
    """The jobs of a stage and who draws them.

    Args:
        flow: the jobs, fresh or restored.
        driver: who moves them.
        steps: training steps of the stage: nothing is issued for later ones.
    """

    def __init__(self, flow: Flow, driver: Driver, steps: int):
        self.flow, self.driver, self.steps = flow, driver, steps
        self._waited = 0
        self._lines: list[Line] = []
        flow.listeners.append(self._lines.append)

    def fill(self, step: int, version: int, weights: Weights | None, target: int, tries: float, signal: Callable[[Group], bool]) -> Filled:
        """Groups for one step, as `rollout.dynamic.fill` gives them: until `target` carry signal or `tries * target` were taken.

        Every group taken beyond the first `target` is replaced by a newly issued one, so that as much stays in flight.
        """
        self.driver.open(step, version, weights)
        with self.driver.changing():
            self.flow.issue_ahead(target, self.steps)
        generated: list[Group] = []
        kept: list[Group] = []
        budget, call, self._waited = max(target, int(target * tries)), 0, 0
        while len(kept) < target and len(generated) < budget:
            wanted = min(target - len(kept), budget - len(generated))
            if generated:
                call += 1
                with self.driver.changing():
                    self.flow.issue(call, wanted, len(generated))
            jobs = self.driver.take(wanted)
            self._waited = max(self._waited, *(step - job.step for job in jobs))
            groups = [group_of(job, self.flow.source.collector, version) for job in jobs]
            generated += groups
            kept += [group for group in groups if signal(group)]
        self.driver.seal()
        return Filled(tuple(generated), tuple(kept))

    def settle(self, filled: Filled, left: Mapping[str, int], objective: Objective) -> dict[str, float | int]:
        """Enter what became of a step's rollouts, check the law, and say how old and how fair the step was.

        Raises AccountError when something was lost or counted twice.
        """
        flow, seen = self.flow, self.flow.seen
        budget = flow.source.collector.sampling.max_tokens
        with self.driver.changing():
            trained = flow.ledger.settle(filled.generated, filled.kept, objective, budget)
        expected = sum(len(group.rollouts) for group in filled.kept) - sum(left.values())
        if trained != expected:
            raise AccountError(f"{trained} rollouts of step {flow.step} have rows, and the update reports {expected}")
        flow.ledger.check(seen.generated, seen.in_flight)
        return {
            **ages(filled.generated, flow.version),
            **flow.ledger.fairness(seen.lengths),
            **flow.ledger.figures(seen.generated, seen.in_flight),
            "in_flight_groups": seen.groups,
            "attempts_max": seen.attempts,
            "waited_max": self._waited,
        }

    def save(self, state: bool = False) -> tuple[list[Line], dict[str, Any]]:
        """Schedule lines since the last call and, when asked for, the state that belongs right behind them (JSON values only)."""
        with self.driver.changing():
            lines = list(self._lines)
            self._lines.clear()
            return lines, self.flow.json() if state else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        with self.driver.changing():
            self.flow.restore(state)

    def close(self) -> None:
        """Stop drawing."""
        self.driver.close()


def group_of(job: Job, collector: Collector, version: int) -> Group:
    """A finished job as a scored group; `version` stands for completions without a token."""
    drawn = [row.trajectory(job.task, index, job.prompt, version) for index, row in enumerate(job.rows)]
    return Group(job.task, tuple(Rollout(trajectory, score(collector.grader, job.task, trajectory)) for trajectory in drawn))
