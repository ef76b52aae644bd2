"""Gates of a pipeline: kept once, told as alarms, stopping or not; and the probe before a stage of reinforcement learning."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from posttrain.core.errors import GateFailed, RunError
from posttrain.core.files import write_json
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.tasks import Message, Task
from posttrain.core.verdicts import Check, GateVerdict
from posttrain.engine.processes import Ranks
from posttrain.loops.rl_settings import World
from posttrain.loops.session import Session
from posttrain.recipes.gates import enforce, gate_file, judged, keep_verdict, launch_gate, register_thresholds
from posttrain.rewards.graders import FunctionGrader


def verdict(*outcomes: bool | None, name: str = "handover.sft") -> GateVerdict:
    checks = tuple(Check(f"c{n}", passed, 0.5, 0.8, f"detail {n}", "repair it", ("P13",)) for n, passed in enumerate(outcomes))
    return GateVerdict(name, "sft, measured", checks)


class Practice:
    """Tasks that are counted as they are drawn, with a reward by text."""

    def __init__(self, toy, reward: Callable[[str], float]):
        self.drawn: list[tuple[int, int]] = []
        grader = FunctionGrader(lambda task, text: reward(text), "toy/1")
        self.world = World(self.draw, grader, toy.renderer, Sampling(max_tokens=40))  # brief answers: hardly any is cut

    def draw(self, n: int, seed: int) -> list[Task]:
        self.drawn.append((n, seed))
        return [Task(f"{seed}-{place}", (Message("user", f"say {place}"),), f"{place}") for place in range(n)]


def by_length(text: str) -> float:
    return float(len(text) % 2)


def test_a_verdict_is_kept_with_an_alarm_for_every_check_that_failed(toy):
    run = toy.recorder()
    session, found = toy.session(run), verdict(True, None, False)
    keep_verdict(session, "eval.sft", found)
    assert judged(session, "handover.sft") == found
    assert run.lines["alarms"] == [{"stage": "eval.sft", "step": 0, "name": "c2"}]  # c1 asks for a look, and is no alarm
    assert json.loads(gate_file(run.path, "handover.sft").read_text())["verdict"] == "failed"
    assert judged(session, "handover.dpo") is None


@pytest.mark.parametrize(
    ("outcomes", "policy", "stops"),
    [
        ((True, False), "stop", True),
        ((True, False), "warn", False),
        ((True, False), "off", False),
        ((True, None), "stop", False),
        ((True, True), "stop", False),
    ],
)
def test_only_a_failed_gate_stops_and_only_when_asked_to(toy, outcomes, policy, stops):
    session = toy.session()
    keep_verdict(session, "eval.sft", verdict(*outcomes))
    if not stops:
        enforce(session, "handover.sft", policy)
        return
    with pytest.raises(
        GateFailed, match=r"gate handover\.sft failed.*c1: detail 1; repair it \[P13\].*posttrain resume .* --set guard.gates=warn"
    ):
        enforce(session, "handover.sft", policy)


def test_a_script_is_told_to_call_again(toy):
    session = toy.session()
    session.command = ["mine.py"]
    keep_verdict(session, "eval.sft", verdict(False))
    with pytest.raises(GateFailed, match=r"resume=True and guard\.gates=warn"):
        enforce(session, "handover.sft", "stop")


def test_a_damaged_verdict_is_named(toy):
    session = toy.session()
    write_json(gate_file(session.run.path, "handover.sft"), {"schema": 7})
    with pytest.raises(RunError, match=r"handover\.sft\.json: not a gate record"):
        enforce(session, "handover.sft", "stop")


def test_a_gate_that_was_never_judged_stops_nothing(toy):
    enforce(toy.session(), "handover.sft", "stop")


def test_a_launch_gate_that_passes_draws_few_prompts_and_is_judged_once(toy):
    run, practice = toy.recorder(), Practice(toy, by_length)
    launch_gate(toy.session(run, seed=3), "rl", toy.brief(), practice.world, 4, "stop")
    assert practice.drawn == [(16, derive(derive(3, "gate", "rl", 0), "tasks"))]
    found = judged(toy.session(run), "launch.rl")
    assert found is not None
    assert found.figures["prompts"] == 16
    assert found.of("signal").passed is True
    assert run.stages["gate.rl"]["reading"] == found.figures["reading"]
    launch_gate(toy.session(run, seed=3), "rl", toy.brief(), practice.world, 4, "stop")
    assert len(practice.drawn) == 1


def test_a_launch_gate_with_nothing_to_learn_looks_at_all_prompts_and_stops(toy):
    run, practice = toy.recorder(), Practice(toy, lambda text: 0.0)
    with pytest.raises(GateFailed, match=r"launch\.rl failed"):
        launch_gate(toy.session(run), "rl", toy.brief(), practice.world, 4, "stop")
    assert [n for n, _ in practice.drawn] == [16, 48]
    found = judged(toy.session(run), "launch.rl")
    assert found is not None
    assert found.of("signal").passed is False
    assert found.figures["reading"] == "too hard"
    assert "signal" in [line["name"] for line in run.lines["alarms"]]
    # the same run goes on under another policy, and does not draw again
    launch_gate(toy.session(run), "rl", toy.brief(), practice.world, 4, "warn")
    assert len(practice.drawn) == 2
    with pytest.raises(GateFailed):
        launch_gate(toy.session(run), "rl", toy.brief(), practice.world, 4, "stop")


def test_off_judges_nothing(toy):
    run, practice = toy.recorder(), Practice(toy, lambda text: 0.0)
    launch_gate(toy.session(run), "rl", toy.brief(), practice.world, 4, "off")
    assert practice.drawn == []
    assert judged(toy.session(run), "launch.rl") is None
    assert run.stages == {}


def test_a_stage_that_is_finished_has_no_gate_before_it(toy):
    run, practice = toy.recorder(), Practice(toy, lambda text: 0.0)
    run.finish_stage("rl", {"seconds": 1.0, "position": {}})
    launch_gate(toy.session(run), "rl", toy.brief(), practice.world, 4, "stop")
    assert practice.drawn == []


def test_a_reward_with_another_range_is_judged_on_its_own(toy):
    run, practice = toy.recorder(), Practice(toy, lambda text: 5.0 * by_length(text) - 1.0)
    launch_gate(toy.session(run), "rl", toy.brief(), practice.world, 4, "stop")
    found = judged(toy.session(run), "launch.rl")
    assert found is not None
    assert found.figures["reward_range"] == [-1.0, 4.0]
    assert found.of("range").passed is True


def test_siblings_are_at_least_four_and_otherwise_those_of_the_stage(toy):
    for siblings, drawn in ((1, 4), (6, 6)):
        run, practice = toy.recorder(), Practice(toy, by_length)
        launch_gate(toy.session(run), "rl", toy.brief(), practice.world, siblings, "stop")
        found = judged(toy.session(run), "launch.rl")
        assert found is not None
        assert found.figures["siblings"] == drawn


def test_all_ranks_stop_together_and_only_the_first_writes(toy):
    run = toy.recorder()

    def body(ranks: Ranks) -> str:
        mine = run if ranks.first else toy.recorder()
        session = replace_ranks(toy.session(mine), ranks)
        try:
            launch_gate(session, "rl", toy.brief(), Practice(toy, lambda text: 0.0).world, 4, "stop")
        except GateFailed as error:
            return str(error).split(":")[0]
        return "went on"

    assert toy.together(2, body) == ["gate launch.rl failed, and what comes next would rest on it"] * 2
    assert gate_file(run.path, "launch.rl").is_file()
    assert sum(gate_file(other.path, "launch.rl").is_file() for other in toy.recorders) == 1


def replace_ranks(session: Session, ranks: Ranks) -> Session:
    return replace(session, ranks=ranks)


def test_thresholds_are_kept_once(toy):
    session = toy.session()
    register_thresholds(session)
    path = session.run.path / "gates" / "thresholds.json"
    assert json.loads(path.read_text())["items"] == 500
    write_json(path, {"items": 700})
    register_thresholds(session)
    assert json.loads(path.read_text()) == {"items": 700}
