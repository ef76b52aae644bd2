"""PPO with a critic, end to end: it needs no siblings, learns a toy task, and its critic learns what a state is worth."""

from __future__ import annotations

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
from posttrain.loops.sft import SFT, sft
from posttrain.objectives.objective import Objective
from posttrain.rewards.graders import ExactTextGrader, FunctionGrader
from posttrain.rollout.samples import supervised_sample

FAST = Optim(lr=1e-2, schedule="constant", warmup=0.0)
STILL = Optim(lr=1e-30, schedule="constant", warmup=0.0)


def draw(n: int, seed: int) -> list[Task]:
    rng = python_rng(seed, "tasks")
    return [Task(f"{a}", (Message("user", a),), {"x": "a", "y": "b"}[a]) for a in rng.choices("xy", k=n)]


def taught(toy):
    """A model that says a or b at random after x or y."""
    chats = [(Message("user", question), Message("assistant", answer)) for question in "xy" for answer in "ab"]
    rows = [supervised_sample(toy.renderer.conversation(chat), f"{i}") for i, chat in enumerate(chats)]
    return sft(toy.session(), toy.model(265, std=0.05), rows, SFT(epochs=40, batch_size=4, optim=Optim(lr=1e-2, warmup=0.1)))


def practice(toy, grader=None) -> World:
    return World(draw, grader or ExactTextGrader(), toy.renderer, Sampling(max_tokens=4))


def test_ppo_learns_which_answer_belongs_to_which_question_without_siblings(toy):
    run = toy.recorder()
    settings = RL(steps=20, prompts=64, siblings=1, epochs=2, optim=Optim(lr=5e-3, schedule="constant", warmup=0.0))
    rl(toy.session(run), taught(toy), practice(toy), settings, Objective.load("ppo"), CriticSettings(optim=FAST, warmup=3))
    lines = run.lines["metrics"]
    rewards = [line["reward_mean"] for line in lines]
    assert 0.3 < sum(rewards[:4]) / 4 < 0.6
    assert sum(rewards[-3:]) / 3 > 0.85
    # three steps of warm-up, then two updates per phase; the critic learns in all of them
    assert [line["optimizer_step"] for line in lines] == [0, 0, 0, *range(2, 36, 2)]
    assert all(line["rollouts_trained"] == 64 for line in lines)
    assert all(math.isfinite(line["critic_loss"]) for line in lines)
    assert all("loss" not in line for line in lines[:3])
    assert all("loss" in line for line in lines[3:])


def test_the_critic_learns_what_a_state_is_worth(toy):
    # x always earns 1 and y nothing, whatever is answered; a policy that stands still leaves the critic alone with that
    grader = FunctionGrader(lambda task, text: float(task.id == "x"), "question")
    run, model = toy.recorder(), taught(toy)
    settings = RL(steps=25, prompts=32, siblings=1, optim=STILL)
    objective = Objective.load({"kind": "ppo", "kl": {"estimator": "none"}})
    trained = rl(toy.session(run), model, practice(toy, grader), settings, objective, CriticSettings(optim=FAST, warmup=0))
    lines = run.lines["metrics"]
    assert lines[0]["critic_loss"] == pytest.approx(0.5 * lines[0]["reward_mean"], abs=0.1)  # all values start at 0
    assert lines[-1]["critic_loss"] < 0.02
    assert lines[-1]["critic_explained_variance"] > 0.9
    # the critic is a copy: the policy did not move with it
    assert weights_digest(trained) == weights_digest(model)


def test_a_warm_up_as_long_as_the_run_is_refused(toy):
    for warmup in (3, 9):
        with pytest.raises(ConfigError, match=rf"the critic warms up for {warmup} of 3 steps, and the policy would never train; lower"):
            rl(toy.session(), taught(toy), practice(toy), RL(steps=3), Objective.load("ppo"), CriticSettings(warmup=warmup))
    rl(toy.session(), taught(toy), practice(toy), RL(steps=1, prompts=2, siblings=2), Objective.load("grpo"))  # no critic, no warm-up


def test_the_schedule_of_the_policy_covers_its_own_steps(toy):
    # 2 of 6 steps are warm-up: the policy's rate falls over 4, the critic's over 6, both to 0 at the end
    run, falling = toy.recorder(), Optim(lr=1e-3, schedule="linear", warmup=0.0)
    settings, critic = RL(steps=6, prompts=2, siblings=2, optim=falling), CriticSettings(optim=falling, warmup=2)
    rl(toy.session(run), taught(toy), practice(toy), settings, Objective.load("ppo"), critic)
    lines = run.lines["metrics"]
    assert [line["lr"] for line in lines[2:]] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3, 0.0])
    assert [line["critic_lr"] for line in lines] == pytest.approx([1e-3 * k / 5 for k in (5, 4, 3, 2, 1, 0)])


def test_the_settings_of_the_critic_are_used(toy):
    seen = {}
    for name, critic in {"slow": CriticSettings(optim=STILL, warmup=0), "fast": CriticSettings(optim=FAST, warmup=0)}.items():
        run = toy.recorder()
        rl(toy.session(run), taught(toy), practice(toy), RL(steps=3, prompts=4, siblings=4, optim=STILL), Objective.load("ppo"), critic)
        seen[name] = [line["critic_loss"] for line in run.lines["metrics"]]
        assert run.lines["metrics"][-1]["critic_lr"] == critic.optim.lr
    assert seen["slow"][0] == pytest.approx(seen["fast"][0])
    assert seen["slow"][-1] > seen["fast"][-1]


@pytest.mark.parametrize("clip", [None, 1e-6])
def test_value_clipping_reaches_the_critic(toy, clip):
    # 2 passes: the second starts from moved values, which a band of nothing stops
    run = toy.recorder()
    settings = RL(steps=1, prompts=8, siblings=2, epochs=2, optim=STILL)
    rl(toy.session(run), taught(toy), practice(toy), settings, Objective.load("ppo"), CriticSettings(optim=FAST, warmup=0, clip=clip))
    clipped = run.lines["metrics"][0]["critic_clipped"]
    assert clipped == 0 if clip is None else clipped > 0.1
