"""The gates of a pipeline: what is judged between two stages, kept in the run, and what a failure does.

A gate is judged once. Its verdict lies in gates/NAME.json; what failed is also an alarm. Under the policy "stop" a gate that failed
ends the pipeline before the stage that would build on it, "warn" says so and goes on, "off" judges nothing. An open check (not enough
numbers, or something a person should look at) never stops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from posttrain.checks.candidate import THRESHOLDS
from posttrain.checks.probe import Scale, probe_of
from posttrain.checks.probe_gate import probe_gate, sequential
from posttrain.checks.promotion import Thresholds
from posttrain.core.errors import GateFailed, RunError
from posttrain.core.files import read_json, write_json
from posttrain.core.seeds import derive
from posttrain.core.trajectory import Group
from posttrain.core.verdicts import Check, GateVerdict
from posttrain.engine.checkpoint import latest_checkpoint
from posttrain.engine.local import LocalSampler
from posttrain.loops.rl_settings import World
from posttrain.loops.session import Session
from posttrain.rollout.collect import Collector, collect
from posttrain.runs.recorder import safe_name

GatePolicy = Literal["stop", "warn", "off"]
GATES = "gates"
"""Folder of a run that holds the verdicts."""
FIRST, MOST = 16, 64
"""Prompts of a launch gate: at first, and while no group disagrees."""
LEAST_SIBLINGS = 4


def gate_file(run: str | Path, name: str) -> Path:
    """Where a run keeps the verdict of a gate."""
    return Path(run) / GATES / f"{safe_name(name)}.json"


def judged(session: Session, name: str) -> GateVerdict | None:
    """The verdict that is kept under `name`, on every rank; None while there is none."""
    path = gate_file(session.run.path, name)
    record = session.ranks.first_says(read_json(path) if session.ranks.first and path.is_file() else None)
    try:
        return None if record is None else GateVerdict.from_record(record)
    except RunError as error:
        raise RunError(f"{path}: {error}") from None


def keep_verdict(session: Session, stage: str, found: GateVerdict) -> None:
    """Write a verdict, say what did not pass, and raise an alarm for what failed. Call it inside the stage that was judged."""
    if session.ranks.first:
        write_json(gate_file(session.run.path, found.gate), found.as_record())
    for check in (*found.failures, *found.open):
        session.console.warn(f"{found.gate}: {check.sentence}")
    for check in found.failures:
        session.run.alarm(stage, 0, check.name, check.sentence, evidence(found, check))


def evidence(found: GateVerdict, check: Check) -> dict[str, object]:
    """What an alarm stores of a check."""
    return {"gate": found.gate, "value": check.value, "bound": check.bound, "catalog": list(check.catalog)}


def enforce(session: Session, name: str, policy: GatePolicy) -> None:
    """Go on or not, by the verdict that is kept under `name`. Raises GateFailed, on every rank."""
    if policy != "stop" or (found := judged(session, name)) is None or found.passed is not False:
        return
    raise GateFailed(
        f"gate {name} failed, and what comes next would rest on it: {found.reason}; all checks are in {gate_file(session.run.path, name)}; "
        f"to go on all the same: {_way_past(session)}"
    )


def _way_past(session: Session) -> str:
    if session.command and session.command[0].endswith(".py"):
        return "call it again with resume=True and guard.gates=warn"
    return f"posttrain resume {session.run.path} --set guard.gates=warn"


def register_thresholds(session: Session) -> None:
    """Keep what a promotion of this run will be judged by, before there is a number to judge."""
    path = session.run.path / GATES / THRESHOLDS
    if session.ranks.first and not path.is_file():
        write_json(path, Thresholds().model_dump(mode="json"))


def launch_gate(session: Session, name: str, model: nn.Module, world: World, siblings: int, policy: GatePolicy) -> None:
    """Probe the tasks of the stage `name` with the model that it starts from; few prompts when they are enough.

    Drawn from a stream of its own, so that the stage draws what it would have drawn without the gate. Raises GateFailed under "stop".
    """
    stage = f"gate.{name}"
    if policy == "off":
        return
    if session.finished(stage) is None:
        if _begun(session, name):
            return
        session.rewind()
        with session.timed(stage) as info:
            found = _probed(session, name, model, world, max(siblings, LEAST_SIBLINGS))
            reading = found.figures["reading"]
            info |= {"verdict": found.as_record()["verdict"], "reading": reading}
            keep_verdict(session, stage, found)
        share, prompts = found.figures["mixed"], found.figures["prompts"]
        session.console.line(f"launch gate of {name}: {reading} ({share:.0%} of {prompts} groups disagree)")
    enforce(session, f"launch.{name}", policy)


def _begun(session: Session, name: str) -> bool:
    """Whether the stage has taken steps already: it is too late for a gate before it."""
    done = session.run.finished(name) is not None or latest_checkpoint(session.run.checkpoint_root(name)) is not None
    return session.ranks.first_says(done)


def _probed(session: Session, name: str, model: nn.Module, world: World, siblings: int) -> GateVerdict:
    sampler = LocalSampler(model, world.renderer.stop_ids, world.renderer.special_ids)
    collector = Collector(sampler, world.renderer, world.grader, world.sampling, siblings, session.ranks, world.env_of, world.turns)
    groups: list[Group] = []
    for count in sequential(FIRST, MOST):
        seed = derive(session.seed, "gate", name, len(groups))
        groups += collect(collector, world.draw(count, derive(seed, "tasks")), seed)
        probe = probe_of(groups, world.sampling, _scale(groups))
        if probe.teaching:
            break
    return probe_gate(probe, f"{len(groups)} prompts of {name}", gate=f"launch.{name}")


def _scale(groups: list[Group]) -> Scale:
    """0 to 1, widened to what the rewards reach: a user's own reward does not say its range."""
    values = [value for group in groups for value in group.rewards if value is not None]
    return Scale(min([0.0, *values]), max([1.0, *values]))
