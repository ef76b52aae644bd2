"""Asynchronous reinforcement learning: bound 0 is the synchronous run, a schedule replays to the last bit, a resumed run loses nothing."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from posttrain.core.errors import ConfigError, Interrupted, RunError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.trainer import Optim
from posttrain.engine.weights import weights_digest
from posttrain.loops import rollout_source
from posttrain.loops.rl import equation, rl
from posttrain.loops.rl_settings import RL, CriticSettings, World, check_asynchronous
from posttrain.objectives.objective import Objective
from posttrain.rewards.graders import FunctionGrader
from posttrain.rollout.asynchronous import workers
from posttrain.rollout.asynchronous.schedule import ReplayError
from posttrain.rollout.asynchronous.settings import Async
from posttrain.runs.recorder import SilentRun

BRISK = Optim(lr=3e-3, schedule="constant", warmup=0.0)
CORRECTED = Objective.load({"correction": {"kind": "truncate"}})
TOKENS = 12


def draw(n: int, seed: int) -> list[Task]:
    rng = python_rng(seed, "tasks")
    return [Task(f"{a}", (Message("user", a * rng.choice((1, 4))),), "a") for a in rng.choices("xyz", k=n)]


def parity(task: Task, text: str) -> float:
    """A reward that a random model often varies in."""
    return float(len(text) % 2)


def world(toy, reward=parity) -> World:
    return World(draw, FunctionGrader(reward, "parity"), toy.renderer, Sampling(max_tokens=TOKENS))


def settings(**changes) -> RL:
    return RL(**({"steps": 5, "prompts": 4, "siblings": 4, "optim": BRISK, "keep_rollouts": 4} | changes))


def run(toy, asynchronous: Async | None, session=None, objective: Objective = CORRECTED, reward=parity, **changes):
    """Final weights of a run; its records are in the session's recorder."""
    made = session or toy.session()
    return rl(made, toy.model(265), world(toy, reward), settings(**changes), objective, asynchronous=asynchronous)


def schedule(recorder) -> list[dict]:
    return recorder.lines.get("schedule", [])


def taken(recorder) -> list[list[int]]:
    return [line["jobs"] for line in schedule(recorder) if line["kind"] == "take"]


def replayable(recorder, folder: Path) -> str:
    """The recorder's schedule as a file."""
    path = folder / "schedule.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in schedule(recorder)))
    return str(path)


def balanced(line: dict) -> bool:
    """The accounting law, from a metrics line."""
    return all(
        line[f"account_generated_{unit}"]
        == sum(line[f"account_{name}_{unit}"] for name in ("trained", "filtered", "stale", "errored", "in_flight"))
        for unit in ("rollouts", "tokens")
    )


@pytest.fixture
def slow_workers(monkeypatch):
    """Workers that take a moment for every chunk, differently long, so that training overtakes them."""
    plain = CopySampler.generate

    def generate(self, requests, progress=None):
        time.sleep(0.002 * (len(requests) % 5))
        return plain(self, requests, progress)

    monkeypatch.setattr(CopySampler, "generate", generate)


def test_bound_0_is_the_synchronous_run_to_the_last_bit_when_samplers_forget(toy, monkeypatch):
    """What a sampler remembers of earlier calls, here of the canary, changes last digits; one that remembers nothing gives equal bytes."""
    monkeypatch.setattr(
        rollout_source, "sampler_of", lambda model, r: partial(CopySampler, model, r.stop_ids, r.special_ids, prefix_bytes=0)
    )
    plain, ours = toy.recorder(), toy.recorder()
    expected = run(toy, None, toy.session(plain), tries=1.0)
    found = run(toy, Async(bound=0, chunk=TOKENS), toy.session(ours), tries=1.0)
    assert weights_digest(found) == weights_digest(expected)
    assert plain.lines["rollouts"] == ours.lines["rollouts"]
    for before, after in zip(plain.lines["metrics"], ours.lines["metrics"], strict=True):
        assert before == {name: after[name] for name in before}


def test_bound_0_draws_and_trains_what_the_synchronous_run_does(toy):
    plain, ours = toy.recorder(), toy.recorder()
    run(toy, None, toy.session(plain), tries=3.0)
    run(toy, Async(bound=0, chunk=5, workers=2), toy.session(ours), tries=3.0)
    assert plain.lines["rollouts"] == ours.lines["rollouts"]
    assert any(line["groups_generated"] > 4 for line in ours.lines["metrics"])
    for before, after in zip(plain.lines["metrics"], ours.lines["metrics"], strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "kl",
            "reward_mean",
            "length",
            "groups_generated",
            "rollouts_trained",
            "optimizer_step",
        ):
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name
        assert after["age_max"] == 0
        assert after["old_tokens"] == 0.0
        assert after["account_in_flight_rollouts"] == 0


def test_older_rollouts_are_trained_and_none_beyond_the_bound(toy, slow_workers):
    """How much of the bound is used is up to the clock here; in a simulated one it is exact (test_async_flow)."""
    for bound in (1, 3):
        recorder = toy.recorder()
        run(toy, Async(bound=bound, workers=2, chunk=3), toy.session(recorder), steps=8)
        ages = [line["age_max"] for line in recorder.lines["metrics"]]
        assert 0 < max(ages) <= bound
        assert all(balanced(line) for line in recorder.lines["metrics"])
        assert recorder.lines["metrics"][-1]["account_in_flight_rollouts"] == 0
        issued = sum(line["draw"][2] for line in schedule(recorder) if line["kind"] == "issue")
        assert sorted(number for numbers in taken(recorder) for number in numbers) == list(range(issued))


def test_completions_go_on_with_new_weights_and_say_so(toy, slow_workers):
    recorder = toy.recorder()
    run(toy, Async(bound=2, workers=2, chunk=2), toy.session(recorder), steps=8)
    mixed = [line for line in recorder.lines["rollouts"] if line["newest"] > line["version"]]
    assert mixed
    assert all(line["tokens"] <= TOKENS for line in recorder.lines["rollouts"])
    chunks = [line for line in schedule(recorder) if line["kind"] == "chunk"]
    assert any(before > 0 for line in chunks for _, _, before, _ in line["rows"])
    assert all(new <= 2 for line in chunks for _, _, _, new in line["rows"])


@pytest.mark.parametrize(
    "how", [Async(bound=2, workers=2, chunk=2), Async(bound=1, workers=2, chunk=3, order="arrival"), Async(bound=1, order="issue", chunk=5)]
)
def test_replay_gives_the_same_bytes(toy, slow_workers, tmp_path, how):
    live, again = toy.recorder(), toy.recorder()
    expected = run(toy, how, toy.session(live), steps=8, tries=2.0)
    before = threading.active_count()
    replay = how.model_copy(update={"replay": replayable(live, tmp_path)})
    found = run(toy, replay, toy.session(again), steps=8, tries=2.0)
    assert threading.active_count() == before
    assert weights_digest(found) == weights_digest(expected)
    assert json.dumps(live.lines) == json.dumps(again.lines)
    assert len({line["version"] for line in schedule(live) if line["kind"] == "chunk"}) > 3


def test_a_schedule_of_another_run_is_refused_by_line(toy, tmp_path):
    live = toy.recorder()
    how = Async(bound=1, chunk=4)
    run(toy, how, toy.session(live))
    replay = how.model_copy(update={"replay": replayable(live, tmp_path)})
    with pytest.raises(ReplayError, match=r"schedule line 1 is .*; replay with the settings, model and code of the recorded run"):
        run(toy, replay, prompts=2)
    with pytest.raises(ReplayError, match=r"line \d+ is .* and what happened is"):
        run(toy, replay, toy.session(seed=1))
    with pytest.raises(ReplayError, match=r"and what happened is \{'kind': 'issue', 'step': 4, 'draw': \[5, 0, 4, 0\]\}"):
        run(toy, replay, steps=6)
    last = max(place for place, line in enumerate(schedule(live)) if line["kind"] == "take")
    live.lines["schedule"] = schedule(live)[:last]
    with pytest.raises(ReplayError, match="the schedule ends before step 4 has its groups"):
        run(toy, how.model_copy(update={"replay": replayable(live, tmp_path)}))
    with pytest.raises(RunError, match="holds no schedule"):
        run(toy, how.model_copy(update={"replay": str(tmp_path)}))


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_accounts_for_every_job_and_sends_its_weights_first(toy, slow_workers, stop, monkeypatch):
    sent = []
    plain = CopySampler.receive
    monkeypatch.setattr(
        CopySampler, "receive", lambda self, weights, version: (sent.append((version, len(weights))), plain(self, weights, version))
    )
    recorder, how = toy.recorder(), Async(bound=2, workers=2, chunk=2)
    with pytest.raises(Interrupted):
        run(toy, how, toy.session(recorder, stop=toy.stop_after(stop)), steps=6)
    state = json.loads(next(recorder.path.rglob("rollouts.json")).read_text())[0]
    assert state["jobs"]
    before = len(schedule(recorder))
    sent.clear()
    run(toy, how, toy.session(recorder), steps=6)
    assert sent[0] == (stop, max(count for _, count in sent))  # everything, as the version that was reached
    lines = schedule(recorder)
    resumed = [line["kind"] for line in lines].index("resume")
    assert resumed >= before
    issued = sum(line["draw"][2] for line in lines if line["kind"] == "issue")
    assert sorted(number for numbers in taken(recorder) for number in numbers) == list(range(issued))
    assert all(balanced(line) for line in recorder.lines["metrics"])
    assert [line["step"] for line in recorder.lines["metrics"]] == list(range(6))
    assert recorder.lines["metrics"][-1]["account_in_flight_rollouts"] == 0
    assert max(line["age_max"] for line in recorder.lines["metrics"]) <= 2


def test_a_resumed_run_can_be_replayed(toy, slow_workers, tmp_path):
    recorder, again, how = toy.recorder(), toy.recorder(), Async(bound=2, workers=2, chunk=2)
    with pytest.raises(Interrupted):
        run(toy, how, toy.session(recorder, stop=toy.stop_after(2)))
    expected = run(toy, how, toy.session(recorder))
    found = run(toy, how.model_copy(update={"replay": replayable(recorder, tmp_path)}), toy.session(again))
    assert weights_digest(found) == weights_digest(expected)
    assert json.dumps(recorder.lines) == json.dumps(again.lines)


def test_a_grader_that_fails_is_errored_and_the_account_stays_closed(toy, slow_workers):
    recorder = toy.recorder()

    def sometimes(task: Task, text: str) -> float:
        if len(text) % 3 == 0:
            raise ValueError("no verdict")
        return float(len(text) % 2)

    run(toy, Async(bound=1, workers=2, chunk=4), toy.session(recorder), reward=sometimes)
    last = recorder.lines["metrics"][-1]
    assert last["account_errored_rollouts"] > 0
    assert last["account_filtered_rollouts"] > 0
    assert last["account_trained_rollouts"] == sum(line["rollouts_trained"] for line in recorder.lines["metrics"])
    assert all(balanced(line) for line in recorder.lines["metrics"])


def test_an_error_in_a_worker_reaches_the_loop_with_its_job(toy, monkeypatch):
    plain = CopySampler.generate

    def generate(self, requests, progress=None):
        if self.version == 2 and len(requests) > 1:
            raise ValueError("out of luck")
        return plain(self, requests, progress)

    monkeypatch.setattr(CopySampler, "generate", generate)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match=r"worker 0 failed at job\(s\) \d+.* \(task\(s\) [xyz].*\): ValueError: out of luck") as caught:
        run(toy, Async(bound=1, chunk=4))
    assert isinstance(caught.value.__cause__, ValueError)
    assert threading.active_count() == before


def test_weights_that_do_not_arrive_stop_the_run(toy, monkeypatch):
    monkeypatch.setattr(CopySampler, "receive", lambda self, weights, version: setattr(self, "version", version))
    with pytest.raises(
        workers.WorkerFailed, match=r"worker 0 failed .*version 0 did not arrive|worker 0 failed .*version 1 did not arrive"
    ):
        run(toy, Async(bound=1, chunk=4))


def test_stopping_while_a_worker_is_slow_takes_seconds(toy, monkeypatch):
    plain = CopySampler.generate

    def generate(self, requests, progress=None):
        time.sleep(0.05)
        return plain(self, requests, progress)

    monkeypatch.setattr(CopySampler, "generate", generate)
    started, before = time.monotonic(), threading.active_count()
    with pytest.raises(Interrupted):
        run(toy, Async(bound=2, chunk=4, workers=2), toy.session(stop=toy.stop_after(1)))
    assert threading.active_count() == before
    assert time.monotonic() - started < 20


def test_every_rank_gets_the_groups_of_the_first(toy):
    recorder = toy.recorder()

    def body(ranks):
        session = toy.session(recorder if ranks.first else None)
        session = replace(session, ranks=ranks, run=session.run if ranks.first else SilentRun())
        return weights_digest(run(toy, Async(bound=1, chunk=4), session, steps=3))

    assert len(set(toy.together(2, body))) == 1
    assert all(balanced(line) for line in recorder.lines["metrics"])


def test_what_cannot_be_drawn_ahead_is_refused(toy):
    def refuse(asynchronous: Async, objective: dict, **changes) -> str:
        with pytest.raises(ConfigError) as caught:
            check_asynchronous(asynchronous, settings(**changes), Objective.load(objective))
        return str(caught.value)

    plain = {"ratio": "none", "limit": {"kind": "none"}}
    assert "ratio=none is on-policy, and asynchronous.bound = 2" in refuse(Async(bound=2), plain)
    assert "asynchronous.bound=0" in refuse(Async(bound=2), plain)
    assert "drawing=early_exit" in refuse(Async(bound=0), {"drawing": {"kind": "early_exit"}})
    assert "bound = 1 is less than the 4 optimizer steps" in refuse(Async(bound=1), {}, minibatches=2, epochs=2)
    corrected = plain | {"correction": {"kind": "truncate"}}
    assert check_asynchronous(Async(bound=2), settings(), Objective.load(corrected)) == []
    assert check_asynchronous(Async(bound=0), settings(), Objective.load(plain)) == []
    assert check_asynchronous(None, settings(), Objective.load(plain)) == []
    (warning,) = check_asynchronous(Async(bound=2), settings(), Objective())
    assert "objective.correction=truncate" in warning
    assert check_asynchronous(Async(bound=2), settings(), Objective.load({"against": "behaviour"})) == []


def test_the_batch_equation_says_how_far_ahead():
    said = equation(settings(), Objective(), 1, Async(bound=3, workers=2))
    assert "2 asynchronous worker(s) as threads, at most 16 groups in flight, no token older than 3 optimizer step(s)" in said
    assert "asynchronous" not in equation(settings(), Objective(), 1)


def test_several_updates_per_step_count_as_that_many_versions(toy, slow_workers):
    recorder = toy.recorder()
    run(toy, Async(bound=5, workers=2, chunk=3), toy.session(recorder), minibatches=2, steps=8)
    ages = [line["age_max"] for line in recorder.lines["metrics"]]
    assert max(ages) in (2, 4)  # at most two steps ahead, of two updates each


def test_steps_without_an_update_and_a_critic_in_warm_up_replay_too(toy, slow_workers, tmp_path):
    """The version stands still while steps go on: chunks belong to steps, not to versions."""
    live, again, how = toy.recorder(), toy.recorder(), Async(bound=2, workers=2, chunk=3)

    def ppo(asynchronous: Async, recorder):
        critic, objective = CriticSettings(warmup=2), Objective.load("ppo")
        return rl(toy.session(recorder), toy.model(265), world(toy), settings(), objective, critic, asynchronous=asynchronous)

    expected = ppo(how, live)
    assert [line["optimizer_step"] for line in live.lines["metrics"]] == [0, 0, 1, 2, 3]
    found = ppo(how.model_copy(update={"replay": replayable(live, tmp_path)}), again)
    assert weights_digest(found) == weights_digest(expected)
    assert json.dumps(live.lines) == json.dumps(again.lines)


def test_older_policies_are_not_taken_for_a_broken_sampler(toy, slow_workers):
    recorder = toy.recorder()
    run(toy, Async(bound=2, workers=2, chunk=3), toy.session(recorder), steps=6)
    stale = [line for line in recorder.lines["metrics"] if line["old_tokens"] > 0]
    assert max(line["mismatch_max"] for line in stale) > 1e-3
    assert max(1 - line["ess_mismatch"] for line in stale) > 1e-4
    assert not [alarm for alarm in recorder.lines["alarms"] if alarm["name"] == "sampler_trainer_mismatch"]


def test_a_replay_is_not_resumed_and_ray_has_to_be_there(toy, tmp_path, monkeypatch):
    live, how = toy.recorder(), Async(bound=1, chunk=4)
    run(toy, how, toy.session(live))
    replay, recorder = how.model_copy(update={"replay": replayable(live, tmp_path)}), toy.recorder()
    with pytest.raises(Interrupted):
        run(toy, replay, toy.session(recorder, stop=toy.stop_after(2)))
    with pytest.raises(ConfigError, match="a replay cannot be resumed"):
        run(toy, replay, toy.session(recorder))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"asynchronous.engine=ray needs Ray; install posttrain\[ray\]"):
        run(toy, Async(engine="ray"))


class Echo:
    """A world that answers every turn of odd length with that length."""

    def reply(self, text: str) -> tuple[Message, ...]:
        return (Message("tool", f"{len(text)}"),) if len(text) % 2 else ()


def run_episodes(toy, asynchronous: Async | None, recorder, stop=None):
    """The same with a world that answers, three turns at most."""
    model = toy.brief()
    with_tools = replace(world(toy), env_of=lambda task: Echo(), turns=3)
    session = toy.session(recorder) if stop is None else toy.session(recorder, stop=toy.stop_after(stop))
    sizes = settings(steps=6, tries=1.0, keep_rollouts=4)
    return weights_digest(rl(session, model, with_tools, sizes, CORRECTED, asynchronous=asynchronous))


def test_episodes_of_several_turns_are_those_of_the_synchronous_loop(toy):
    plain, ours = toy.recorder(), toy.recorder()
    run_episodes(toy, None, plain)
    run_episodes(toy, Async(bound=0, workers=2, chunk=2), ours)
    assert any("tool: " in line["completion"] for line in plain.lines["rollouts"])
    assert plain.lines["rollouts"] == ours.lines["rollouts"]
    assert all(balanced(line) for line in ours.lines["metrics"])


@pytest.mark.parametrize("stop", [None, 3])
def test_episodes_replay_also_after_a_resume(toy, slow_workers, tmp_path, stop):
    live, again, how = toy.recorder(), toy.recorder(), Async(bound=2, workers=2, chunk=2)
    if stop is not None:
        with pytest.raises(Interrupted):
            run_episodes(toy, how, live, stop)
    expected = run_episodes(toy, how, live)
    assert any("tool: " in line["completion"] for line in live.lines["rollouts"])
    assert all(balanced(line) for line in live.lines["metrics"])
    assert run_episodes(toy, how.model_copy(update={"replay": replayable(live, tmp_path)}), again) == expected
    assert json.dumps(live.lines) == json.dumps(again.lines)
