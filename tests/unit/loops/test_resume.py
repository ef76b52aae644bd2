"""A run that was stopped or killed and resumed is the run that never stopped: same lines, same weights."""

from __future__ import annotations

import pytest

from posttrain.core.errors import Interrupted
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, Tokens
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.weights import weights_digest
from posttrain.loops.preference import DPO, dpo
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, CriticSettings, World
from posttrain.loops.session import Stage, Stopwatch
from posttrain.loops.sft import SFT, sft
from posttrain.objectives.objective import Objective
from posttrain.rewards.graders import FunctionGrader
from posttrain.rollout.samples import Pair

OPTIM = Optim(lr=1e-3)


def run_sft(toy, session):
    rows = [toy.row((1, 5), (20 + i, 21, 2), f"r{i}") for i in range(11)]
    return sft(session, toy.model(), rows, SFT(batch_size=4, epochs=2, optim=OPTIM))  # 3 steps per epoch


def run_dpo(toy, session):
    def response(token: int) -> Tokens:
        return Tokens((token, 2), (Owner.SAMPLED,) * 2)

    pairs = [Pair(f"p{i}", Tokens((1, 5 + i), (Owner.USER,) * 2), response(20 + i), response(40 + i)) for i in range(8)]
    return dpo(session, toy.model(), pairs, DPO(batch_size=3, epochs=2, optim=OPTIM))  # 3 steps per epoch


def run_rl(toy, session, objective, name):
    def draw(n: int, seed: int) -> list[Task]:
        return [Task(f"{seed % 97}-{i}", (Message("user", "xyz"[(seed + i) % 3]),), "a") for i in range(n)]

    world = World(draw, FunctionGrader(lambda task, text: float(len(text) % 2), "parity"), toy.renderer, Sampling(max_tokens=4))
    settings = RL(steps=6, prompts=2, siblings=4, optim=OPTIM)
    return rl(session, toy.model(265), world, settings, objective, CriticSettings(warmup=2), name)


def run_grpo(toy, session):
    return run_rl(toy, session, Objective(), "grpo")


def run_ppo(toy, session):
    """The critic and its optimizer are part of a checkpoint too; a stop after 1 falls into its warm-up."""
    return run_rl(toy, session, Objective.load("ppo"), "ppo")


def run_steered(toy, session):
    """Every number that a controller moves is loop state."""
    axes = {"kl": {"target": 1e-6, "coef": 0.1}, "limit": {"steer": {"entropy": 9.0}}}
    return run_rl(toy, session, Objective.load(axes), "steered")


LOOPS = {"sft": run_sft, "dpo": run_dpo, "grpo": run_grpo, "ppo": run_ppo, "steered": run_steered}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stopped_and_resumed_equals_uninterrupted(toy, name, stop):
    # a stop after 3 of 6 steps lies exactly between two epochs
    straight, run = toy.recorder(), toy.recorder()
    expected = LOOPS[name](toy, toy.session(straight))
    with pytest.raises(Interrupted, match=rf"{name} stopped after step {stop} of 6, saved; to continue: posttrain --resume"):
        LOOPS[name](toy, toy.session(run, stop=toy.stop_after(stop)))
    assert len(run.lines["metrics"]) == stop
    resumed = LOOPS[name](toy, toy.session(run))
    assert len(run.lines["metrics"]) == 6
    assert run.lines == straight.lines
    assert weights_digest(resumed) == weights_digest(expected)


@pytest.mark.parametrize("name", LOOPS)
def test_killed_between_checkpoints_repeats_only_what_was_not_saved(toy, monkeypatch, name):
    straight, run = toy.recorder(), toy.recorder()
    expected = LOOPS[name](toy, toy.session(straight))
    original, steps = Stage.record, []

    def dying(stage, step, *args, **kwargs):
        original(stage, step, *args, **kwargs)
        steps.append(step)
        if len(steps) == 4:
            raise MemoryError

    monkeypatch.setattr(Stage, "record", dying)
    with pytest.raises(MemoryError):
        LOOPS[name](toy, toy.session(run, save_every=2))
    assert len(run.lines["metrics"]) == 4
    resumed = LOOPS[name](toy, toy.session(run, save_every=2))
    assert steps == [0, 1, 2, 3, 2, 3, 4, 5]  # saved after step 2; steps 2 and 3 are done again
    assert run.lines == straight.lines
    assert weights_digest(resumed) == weights_digest(expected)


@pytest.mark.parametrize("name", LOOPS)
def test_killed_before_the_first_checkpoint_starts_again(toy, name):
    straight, run = toy.recorder(), toy.recorder()
    LOOPS[name](toy, toy.session(straight))
    run.metric(name, 0, {"loss": 1.0})  # what a killed attempt left
    LOOPS[name](toy, toy.session(run))
    assert run.lines == straight.lines


def test_stopping_again_and_again_still_arrives(toy):
    straight, run = toy.recorder(), toy.recorder()
    expected = run_sft(toy, toy.session(straight))
    for _ in range(6):
        with pytest.raises(Interrupted):
            run_sft(toy, toy.session(run, stop=toy.stop_after(1)))
    assert weights_digest(run_sft(toy, toy.session(run))) == weights_digest(expected)
    assert run.lines == straight.lines


def stage_of(toy, run, steps: int, save_every: int) -> Stage:
    trainer = LocalTrainer(toy.model(), Optim(), steps, Ranks())
    return Stage(toy.session(run, save_every=save_every), "s", trainer, steps)


def saved(run) -> list[str]:
    root = run.checkpoint_root("s")
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def test_checkpoints_are_due_every_few_steps_and_not_at_the_end(toy):
    run = toy.recorder()
    seen = []
    for step in stage_of(toy, run, 6, 2).steps():
        seen.append((step, saved(run)))
    # each entry is what was on disk while the step ran
    assert seen[2] == (2, ["step_2"])
    assert seen[5] == (5, ["step_2", "step_4"])
    assert saved(run) == ["step_2", "step_4"]


def test_state_travels_with_the_checkpoint(toy):
    run = toy.recorder()
    stage = stage_of(toy, run, 4, 2)
    for step in stage.steps():
        stage.state["seen"] = step
        if step == 2:
            break
    again = stage_of(toy, run, 4, 2)
    assert (again.first, again.state) == (2, {"seen": 1})


def test_a_finished_stage_keeps_its_time_and_drops_its_checkpoints(toy):
    run = toy.recorder()
    session = toy.session(run, save_every=1)
    assert session.finished("s") is None
    with session.timed("s") as info:
        for step in Stage(session, "s", LocalTrainer(toy.model(), Optim(), 3, Ranks()), 3).steps():
            run.metric("s", step, {})
        final = run.checkpoint_root("s") / "final"
        final.mkdir()
        (final / "weights").write_text("w")
        info["tasks"] = 5
    assert saved(run) == ["final"]
    later = toy.session(run)
    found = later.finished("s")
    assert found is not None
    assert found["tasks"] == 5
    assert list(found["digests"]) == ["checkpoints/s/final/weights"]
    assert later.position["metrics"] == 3
    assert later.seconds["s"] == session.seconds["s"]
    # a later stage without a checkpoint forgets its own lines, not those of the finished one
    run.metric("t", 0, {})
    later.rewind()
    assert len(run.lines["metrics"]) == 3


def test_stopwatch_adds_up():
    watch = Stopwatch()
    for _ in range(2):
        with watch("sample"):
            pass
    assert set(watch.seconds) == {"sample"}
    assert watch.seconds["sample"] >= 0
