"""Every named algorithm runs in the loop, accounts for every rollout and token, and moves the policy."""

from __future__ import annotations

import copy
import math

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.engine.trainer import Optim
from posttrain.engine.weights import weights_digest
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, CriticSettings, World
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.objective import Objective
from posttrain.objectives.streams import LEFT_OUT
from posttrain.rewards.graders import FunctionGrader

BRISK = Optim(lr=3e-3, schedule="constant", warmup=0.0)


def draw(n: int, seed: int) -> list[Task]:
    rng = python_rng(seed, "tasks")
    return [Task(f"{a}", (Message("user", a),), {"x": "a", "y": "b"}[a]) for a in rng.choices("xy", k=n)]


def channels(task: Task, text: str) -> dict[str, float]:
    """Rewards that a random model varies in, on two channels."""
    return {"parity": float(len(text) % 2), "early": float("e" in text)}


def settings_for(objective: Objective) -> RL:
    """Two phases of two updates where the method allows it, one of one where it does not."""
    several = objective.ratio != "none"
    return RL(
        steps=2,
        prompts=4,
        siblings=5,
        minibatches=2 if several else 1,
        epochs=2 if several else 1,
        optim=BRISK,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_and_accounts_for_what_it_leaves_out(toy, name):
    objective = Objective.load({"kind": name, "drawing": {"cue": "#"}} if name == "s_grpo" else name)
    run = toy.recorder()
    model = toy.brief()
    settings = settings_for(objective)
    world = World(draw, FunctionGrader(channels, "channels"), toy.renderer, Sampling(max_tokens=12))
    before = weights_digest(model)
    trained = rl(toy.session(run), model, world, settings, objective, CriticSettings(warmup=1))
    assert weights_digest(model) == before
    lines = run.lines["metrics"]
    assert len(lines) == 2
    for line in lines:
        left = sum(value for key, value in line.items() if key.startswith("left_"))
        assert line["rollouts_trained"] + left == line["rollouts_kept"]
        assert all(
            value is None or isinstance(value, str) or math.isfinite(value) for value in line.values() if not isinstance(value, dict)
        )
    last = lines[-1]
    share = sum(last[f"fate_{fate.name.lower()}"] for fate in LEFT_OUT)
    assert 0.0 <= share < 1.0
    if objective.needs_critic:
        assert last["critic_loss"] > 0
        assert lines[0]["optimizer_step"] == 0  # the critic warms up, the policy waits
    assert weights_digest(trained) != before


def test_the_first_update_of_a_phase_is_on_policy_for_every_ratio(toy):
    for level in ("token", "sentence", "sequence"):
        limit = {"low": 3e-4, "high": 4e-4} if level == "sequence" else {}
        objective = Objective.load({"kind": "grpo", "ratio": level, "limit": limit})
        run = toy.recorder()
        settings = RL(steps=1, prompts=4, siblings=4, minibatches=1, epochs=1, optim=BRISK)
        world = World(draw, FunctionGrader(channels, "channels"), toy.renderer, Sampling(max_tokens=6))
        rl(toy.session(run), copy.deepcopy(toy.model(265)), world, settings, objective)
        line = run.lines["metrics"][-1]
        assert line["ratio_max"] == 1.0
        assert line["ess_staleness"] == pytest.approx(1.0)
        assert line["clip_fraction"] == 0.0


def test_same_seed_same_weights_with_a_drawn_gate(toy):
    objective = Objective.load({"kind": "grpo++", "limit": {"lower": 0.0, "upper": 100.0, "fraction": 0.2}})
    digests = set()
    for _ in range(2):
        run = toy.recorder()
        settings = RL(steps=2, prompts=4, siblings=4, minibatches=2, optim=BRISK)
        world = World(draw, FunctionGrader(channels, "channels"), toy.renderer, Sampling(max_tokens=6))
        digests.add(weights_digest(rl(toy.session(run), toy.model(265), world, settings, objective)))
        assert run.lines["metrics"][-1]["fate_gated"] > 0
    assert len(digests) == 1


def small_run(toy, objective: Objective, grader=None) -> tuple[str, dict]:
    run = toy.recorder()
    settings = RL(steps=1, prompts=4, siblings=4, minibatches=2, epochs=2, optim=BRISK)
    world = World(draw, grader or FunctionGrader(channels, "channels"), toy.renderer, Sampling(max_tokens=12))
    return weights_digest(rl(toy.session(run), toy.brief(), world, settings, objective)), run.lines["metrics"][-1]


def test_a_surrogate_of_ones_own_replaces_ratio_limit_and_correction(toy, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def reinforce(streams):\n"
        "    clean = streams.masked()\n"
        "    return -clean.advantage_BT * (1 + clean.logp_BT - clean.logp_BT.detach())\n"
    )
    plain, _ = small_run(toy, Objective.load({"kind": "default", "kl": {"estimator": "none"}}))
    own, line = small_run(toy, Objective.load({"surrogate": f"{file}:reinforce", "kl": {"estimator": "none"}}))
    named, _ = small_run(toy, Objective.load({"surrogate": "sapo", "kl": {"estimator": "none"}}))
    assert line["clip_fraction"] == 0.0
    assert len({plain, own, named}) == 3


@pytest.mark.parametrize(
    ("surrogate", "said"),
    [
        ("sappo", "known: sapo"),
        ("nowhere.py:loss", "no file nowhere.py"),
        ("{folder}/mine.py:advantages", "is advantage, not an objective"),
    ],
)
def test_a_surrogate_that_is_none_is_refused_by_name(toy, tmp_path, surrogate, said):
    (tmp_path / "mine.py").write_text("def advantages(rewards):\n    return rewards\n")
    with pytest.raises(ConfigError, match=said):
        small_run(toy, Objective.load({"surrogate": surrogate.format(folder=tmp_path)}))
