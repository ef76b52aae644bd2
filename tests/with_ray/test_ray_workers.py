"""Workers as Ray actors, on a real Ray: make test-ray. Ray is no part of the development environment."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import ray

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import NotDelivered
from posttrain.engine.trainer import Optim
from posttrain.engine.types import Request
from posttrain.engine.weights import PlainWeights, model_digests, weights_digest
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, World
from posttrain.objectives.objective import Objective
from posttrain.rewards.graders import FunctionGrader
from posttrain.rollout.asynchronous.ray_workers import ray_receiver
from posttrain.rollout.asynchronous.settings import Async


@pytest.fixture(scope="module", autouse=True)
def cluster():
    yield
    ray.shutdown()


def test_an_actor_is_the_sampler_that_a_thread_has(toy):
    make = partial(CopySampler, toy.model(265), toy.renderer.stop_ids, toy.renderer.special_ids)
    model, here, there = toy.model(265, seed=5), make(), ray_receiver(make)
    request = Request((1, 70, 71), Sampling(max_tokens=6), 3)
    try:
        with pytest.raises(NotDelivered, match="received no weights"):
            there.generate([request])
        for receiver in (here, there):
            receiver.receive(PlainWeights(model), 7)
        assert there.digests() == model_digests(model)
        assert there.generate([request]) == here.generate([request])
    finally:
        there.close()


def test_a_run_with_actors_is_accounted_for_and_replays_without_them(toy, tmp_path: Path):
    def draw(n: int, seed: int) -> list[Task]:
        return [Task(a, (Message("user", a),), "a") for a in python_rng(seed, "tasks").choices("xyz", k=n)]

    def run(how: Async, recorder):
        world = World(draw, FunctionGrader(lambda task, text: float(len(text) % 2), "parity"), toy.renderer, Sampling(max_tokens=8))
        settings = RL(steps=6, prompts=4, siblings=4, optim=Optim(lr=3e-3, schedule="constant", warmup=0.0))
        objective = Objective.load({"correction": {"kind": "truncate"}})
        return weights_digest(rl(toy.session(recorder), toy.model(265), world, settings, objective, asynchronous=how))

    live, again, how = toy.recorder(), toy.recorder(), Async(bound=2, workers=2, chunk=3, engine="ray")
    expected = run(how, live)
    for line in live.lines["metrics"]:
        parts = (line[f"account_{name}_tokens"] for name in ("trained", "filtered", "stale", "errored", "in_flight"))
        assert line["account_generated_tokens"] == sum(parts)
    schedule = tmp_path / "schedule.jsonl"
    schedule.write_text("".join(json.dumps(line) + "\n" for line in live.lines["schedule"]))
    assert run(how.model_copy(update={"replay": str(schedule)}), again) == expected
    assert json.dumps(live.lines) == json.dumps(again.lines)
