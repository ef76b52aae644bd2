"""Policy gradient on sampled groups: exact ratios, no step without signal, every option runs, and the policy improves."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import StopReason
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.weights import weights_digest
from posttrain.evals.pulse import Pulse
from posttrain.evals.suite import Suite
from posttrain.loops.policy_step import Actors, Plan, learn, policy_scorer, prepare
from posttrain.loops.rl import equation, rl
from posttrain.loops.rl_records import survival
from posttrain.loops.rl_settings import RL, World
from posttrain.loops.sft import SFT, sft
from posttrain.objectives.objective import Objective
from posttrain.rewards.graders import ExactTextGrader, FunctionGrader
from posttrain.rollout.dynamic import Filled
from posttrain.rollout.pack import Packing
from posttrain.rollout.samples import supervised_sample

STILL = Optim(lr=1e-30, schedule="constant", warmup=0.0)
"""A rate that changes no float32 weight."""
BRISK = Optim(lr=3e-3, schedule="constant", warmup=0.0)
SHORT = Sampling(max_tokens=4)
LONG = Sampling(max_tokens=64)


def draw(n: int, seed: int) -> list[Task]:
    rng = python_rng(seed, "tasks")
    return [Task(f"{a}", (Message("user", a),), {"x": "a", "y": "b"}[a]) for a in rng.choices("xy", k=n)]


def long_words(task: Task, text: str) -> float:
    """A reward that a random model often varies in."""
    return float(len(text) % 2)


def world(toy, grader=None, sampling: Sampling = SHORT) -> World:
    return World(draw, grader or FunctionGrader(long_words, "parity"), toy.renderer, sampling)


def small(**changes) -> RL:
    return RL(**({"steps": 2, "prompts": 4, "siblings": 4, "optim": BRISK} | changes))


def held(estimator: str, coef: float, **axes) -> Objective:
    """The default objective with another KL term."""
    return Objective.load({"kl": {"estimator": estimator, "coef": coef}, **axes})


FREE = held("none", 0.0)
"""The default objective without a KL term."""


def trainer_of(model, optim: Optim = BRISK, sampling: Sampling = SHORT) -> LocalTrainer:
    return LocalTrainer(model, optim, 10, Ranks(), sampling)


def mixed(toy):
    return [toy.group([1.0, 0.0, 0.0, 1.0], task=f"t{i}", ids=[(20 + i, 2), (30, 31 + i, 2), (40, 2), (41, 42, 2)]) for i in range(4)]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_ratio_is_one_and_kl_zero_while_the_policy_has_not_moved(toy, temperature, minibatches, epochs, kl):
    run = toy.recorder()
    settings = small(minibatches=minibatches, epochs=epochs, optim=STILL)
    rl(toy.session(run), toy.brief(), world(toy, sampling=Sampling(max_tokens=4, temperature=temperature)), settings, held(kl, 0.1))
    lines = run.lines["metrics"]
    assert lines[-1]["optimizer_step"] == 2 * minibatches * epochs
    for line in lines:
        assert line["ratio_max"] == 1.0
        assert line["kl"] == 0.0
        assert line["clip_fraction"] == 0.0
        assert line["mismatch_max"] < 1e-5
    assert run.lines["alarms"] == []


@pytest.mark.parametrize("sampling", [SHORT, Sampling(temperature=0.5, max_tokens=4), Sampling(top_k=9, top_p=0.9, max_tokens=4)], ids=str)
def test_old_and_reference_equal_the_current_scores_bit_for_bit(toy, sampling):
    model = toy.model()
    trainer = trainer_of(model, sampling=sampling)
    plan = Plan(Objective(), minibatches=2, epochs=2, packing=Packing(row_tokens=12, micro_tokens=24))
    part = prepare(Actors(trainer, reference=copy.deepcopy(model)), list(enumerate(mixed(toy))), plan)
    assert len(part.batches) > 1
    for batch in part.batches:
        current = score(model, batch, sampling).logp_BT
        assert current.requires_grad
        assert batch.old_BT is not None
        assert batch.reference_BT is not None
        assert torch.equal(batch.old_BT, current)
        assert torch.equal(batch.reference_BT, current)


def test_single_update_needs_no_old_policy(toy):
    part = prepare(Actors(trainer_of(toy.model())), list(enumerate(mixed(toy))), Plan(FREE))
    assert all(batch.old_BT is None and batch.reference_BT is None for batch in part.batches)


def test_later_updates_of_a_phase_keep_the_old_policy(toy):
    # the second pass over the same rollouts has ratios other than 1
    model = toy.model()
    trainer = trainer_of(model)
    metrics, _ = learn(Actors(trainer), mixed(toy), Plan(FREE, epochs=2))
    assert trainer.version == 2
    assert (metrics["ratio_max"].read() or 0.0) > 1.0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # 4 groups of rows of 2 + 3 + 2 + 3 tokens; the constant is rows x token budget = 16 x 4
    [("token_mean", 40.0), ("seq_mean_token_mean", 16.0), ("seq_mean_token_sum", 16.0), ("constant", 64.0), ("prompt_mean", 4.0)],
)
def test_denominator_of_a_step(toy, aggregation, expected):
    part = prepare(Actors(trainer_of(toy.model())), list(enumerate(mixed(toy))), Plan(held("none", 0.0, aggregation=aggregation)))
    assert (part.denominator, part.tokens) == (expected, 40.0)


def test_a_sibling_at_the_mean_still_counts(toy):
    # [1, 0.5, 0]: the middle one has advantage 0, but its 2 tokens belong to the step: its KL term, and the denominator 6
    group = toy.group([1.0, 0.5, 0.0])
    part = prepare(Actors(trainer_of(toy.model()), reference=toy.model()), [(0, group)], Plan(Objective()))
    assert part.denominator == 6.0
    assert sum(len(batch.sample_B) for batch in part.batches) == 3


def test_minibatches_split_the_groups_and_each_is_one_step(toy):
    trainer = trainer_of(toy.model())
    learn(Actors(trainer), mixed(toy), Plan(FREE, minibatches=2, epochs=3))
    assert trainer.version == 6
    short = trainer_of(toy.model())
    learn(Actors(short), mixed(toy)[:1], Plan(FREE, minibatches=2))  # one group for two minibatches: one step
    assert short.version == 1


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.9, 1.0])
def test_constant_reward_takes_no_step(toy, value):
    run = toy.recorder()
    model = toy.brief()
    practice = world(toy, FunctionGrader(lambda task, text: value, "constant"), LONG)
    trained = rl(toy.session(run), model, practice, small(steps=3), held("k2", 0.5))
    assert weights_digest(trained) == weights_digest(model)
    for line in run.lines["metrics"]:
        assert line["optimizer_step"] == 0
        assert "loss" not in line
        assert (line["groups_generated"], line["groups_kept"], line["tries_per_kept"]) == (8, 0, None)


def test_no_step_without_signal_even_with_momentum(toy):
    model = toy.model()
    reference = toy.model(seed=3)  # a KL term that would pull
    trainer = trainer_of(model)
    actors, plan = Actors(trainer, reference=reference), Plan(held("k2", 0.5))
    for _ in range(3):
        learn(actors, mixed(toy), plan)
    before, state = toy.weights(model), copy.deepcopy(trainer.optimizer.state_dict())
    assert learn(actors, [], plan) == ({}, {})
    silent = [toy.group([value, value, value], task=f"{value}") for value in (0.0, 0.1, 1.0)]
    metrics, left = learn(actors, silent, plan)  # groups that the loop would not have kept
    assert left == {"unscored": 0, "overlong": 0, "pivot": 0, "no_signal": 9, "too_few": 0}
    assert "loss" not in metrics
    assert trainer.version == 3
    assert torch.equal(toy.weights(model), before)
    for index, entry in state["state"].items():
        now = trainer.optimizer.state_dict()["state"][index]
        assert all(torch.equal(now[key], entry[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


class Fading:
    """Mixed rewards for the first `calls` judgements, equal ones afterwards."""

    name = "fading/1"

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, task: Task, text: str):
        self.left -= 1
        return FunctionGrader(lambda task, text: float(self.left % 2) if self.left >= 0 else 0.3, self.name)(task, text)


def test_steps_after_the_signal_fades_change_nothing(toy):
    runs = [toy.recorder(), toy.recorder()]
    ends = [
        weights_digest(rl(toy.session(run), toy.brief(), world(toy, Fading(16), LONG), small(steps=steps), Objective()))
        for run, steps in zip(runs, (1, 4), strict=True)
    ]
    assert runs[0].lines["metrics"][0]["groups_kept"] > 0
    assert [line["optimizer_step"] for line in runs[1].lines["metrics"]] == [1, 1, 1, 1]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_training_ends_early_when_patience_runs_out(toy, value):
    """Out of reach or mastered: the policy so far is the result, the run goes on, and an alarm says what happened."""
    run, model = toy.recorder(), toy.brief()
    grader = FunctionGrader(lambda task, text: value, "constant")
    trained = rl(toy.session(run), model, world(toy, grader, LONG), small(steps=9, patience=3), Objective())
    assert len(run.lines["metrics"]) == 3
    assert run.lines["alarms"] == [{"stage": "rl", "step": 2, "name": "no_signal"}]
    assert weights_digest(trained) == weights_digest(model)


def test_a_short_batch_is_trained_short_and_reported(toy):
    # rewards differ only in groups of task x: about half of them are kept, and one try each leaves the batch short
    grader = FunctionGrader(lambda task, text: float(len(text) % 2) if task.id == "x" else 1.0, "half")
    run = toy.recorder()
    rl(toy.session(run), toy.brief(), world(toy, grader, LONG), small(prompts=8, tries=1.0), Objective())
    line = run.lines["metrics"][0]
    assert line["groups_generated"] == 8
    assert 0 < line["groups_kept"] < 8
    assert line["tries_per_kept"] == pytest.approx(8 / line["groups_kept"])
    assert (line["rollouts_generated"], line["rollouts_kept"]) == (32, 4 * line["groups_kept"])
    assert line["rollouts_trained"] == line["rollouts_kept"]
    assert line["optimizer_step"] == 1


def test_input_model_is_not_touched(toy):
    model = toy.brief()
    before = weights_digest(model)
    trained = rl(toy.session(), model, world(toy), small(), Objective())
    assert weights_digest(model) == before != weights_digest(trained)


def test_one_sibling_is_refused_where_siblings_are_the_baseline(toy):
    with pytest.raises(ConfigError, match="siblings = 0"):
        RL.load({"siblings": 0})
    for name in ("default", "rloo", "passk"):
        with pytest.raises(ConfigError, match=r"compares siblings, and 1 completion per prompt has none: .*; use siblings >= 2"):
            rl(toy.session(), toy.brief(), world(toy), small(siblings=1), Objective.load(name))
    with pytest.raises(ConfigError, match=r"advantage\.k = 4 needs more than 4 siblings; use k <= 3 or more siblings"):
        rl(toy.session(), toy.brief(), world(toy), small(), Objective.load("passk"))


def test_several_updates_without_a_ratio_are_refused(toy):
    with pytest.raises(ConfigError, match=r"ratio=none is on-policy, and 6 updates per sampling phase are not; use minibatches=1"):
        rl(toy.session(), toy.brief(), world(toy), small(minibatches=2, epochs=3), Objective.load("reinforce"))


def test_a_teacher_that_is_missing_is_refused(toy):
    objective = Objective.load({"advantage": "teacher", "kl": {"estimator": "none"}})
    with pytest.raises(ConfigError, match="advantage=teacher needs a teacher; give one"):
        rl(toy.session(), toy.brief(), world(toy), small(), objective)


def test_prompts_must_divide_into_minibatches():
    with pytest.raises(ConfigError, match=r"10 prompts do not divide into 4 minibatches; .*e\.g\. 12"):
        RL.load({"prompts": 10, "minibatches": 4})


def test_greedy_sampling_is_refused(toy):
    with pytest.raises(ConfigError, match="identical siblings"):
        rl(toy.session(toy.recorder()), toy.model(), world(toy, sampling=Sampling(temperature=0.0)), small(), Objective())


def test_equation_names_the_batch_and_the_divergence():
    words = equation(RL(prompts=8, siblings=4, minibatches=2, epochs=3, steps=5), Objective(), 2)
    assert "8 prompts x 4 completions = 32 rollouts per step" in words
    assert "2 minibatch(es) x 3 epoch(s) = 6 optimizer step(s) each" in words
    assert "default: advantage mean_std, ratio token, limit clip, correction none, token_mean" in words
    assert words.endswith("KL k2 in the loss x 0.005, descends KL(policy || reference), in float32")
    assert equation(RL(), Objective.load("grpo"), 1).endswith("KL k3 in the loss x 0.04, descends KL(reference || policy), in float32")
    assert equation(RL(), FREE, 1).endswith("no KL term")
    assert "ratio token against behaviour, limit band" in equation(RL(), Objective.load("mimo"), 1)


@pytest.mark.parametrize(
    ("advantage", "aggregation", "kl"),
    list(
        product(
            ["mean", "mean_std", "leave_one_out"],
            ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "prompt_mean"],
            ["k2", "k3", "rho_k3", "full", "top_k"],
        )
    ),
)
def test_every_advertised_option_takes_a_step(toy, advantage, aggregation, kl):
    model = toy.model()
    before = weights_digest(model)
    objective = held(kl, 0.005, advantage=advantage, aggregation=aggregation)
    trainer = LocalTrainer(model, BRISK, 10, Ranks(), SHORT, policy_scorer(objective, SHORT))
    metrics, _ = learn(Actors(trainer, reference=toy.model(seed=3)), mixed(toy), Plan(objective))
    assert (metrics["kl"].read() or 0.0) > 0
    assert weights_digest(model) != before


@pytest.mark.parametrize("kl", ["k2", "k3", "rho_k3", "full", "top_k"])
def test_kl_alone_has_a_gradient_and_returns_to_the_reference(toy, kl):
    # a large coefficient outweighs the rewards: the divergence falls
    model, reference = toy.model(std=0.36), toy.model()
    objective = held(kl, 100.0)
    trainer = LocalTrainer(model, Optim(lr=1e-3, schedule="constant", warmup=0.0), 15, Ranks(), SHORT, policy_scorer(objective, SHORT))
    actors = Actors(trainer, reference=reference)
    seen = [learn(actors, mixed(toy), Plan(objective))[0]["kl"].read() or 0.0 for _ in range(15)]
    assert 0 < seen[-1] < 0.5 * seen[0]


def test_no_reference_no_kl(toy):
    run = toy.recorder()
    rl(toy.session(run), toy.brief(), world(toy), small(), FREE)
    assert all("kl" not in line for line in run.lines["metrics"])


def test_weights_that_do_not_move_do_not_drift(toy):
    run = toy.recorder()
    model = toy.brief()
    trained = rl(toy.session(run), model, world(toy), small(steps=4, optim=STILL), Objective())
    assert weights_digest(trained) == weights_digest(model)
    assert max(line["mismatch_max"] for line in run.lines["metrics"]) < 1e-5


def test_a_pulse_is_taken_when_due_and_leaves_the_training_alone(toy):
    bare, watched = toy.recorder(), toy.recorder()
    plain = rl(toy.session(bare), toy.brief(), world(toy), small(steps=3), Objective())
    items = tuple(replace(task, id=f"{place}") for place, task in enumerate(world(toy).draw(5, 77)))
    suite = Suite("pulse", items, world(toy).grader, SHORT, 1, allow_truncation=True)
    other = rl(toy.session(watched), toy.brief(), replace(world(toy), pulse=Pulse(suite, every=2)), small(steps=3), Objective())
    assert weights_digest(plain) == weights_digest(other)
    assert [line.get("heldout_n") for line in watched.lines["metrics"]] == [5.0, None, 5.0]
    stripped = [{k: v for k, v in line.items() if not k.startswith("heldout_")} for line in watched.lines["metrics"]]
    assert stripped == bare.lines["metrics"]


def test_counts_of_a_step_reconcile(toy):
    run = toy.recorder()
    rl(toy.session(run), toy.brief(), world(toy), small(steps=2), Objective())
    for line in run.lines["metrics"]:
        assert line["tokens"] == line["tokens_sampled"]  # nothing was masked
        assert line["tokens_forced"] == 0
        assert line["version_lag"] == 0
        assert line["dropped"] == 0
        assert line["survivors_min"] == small(steps=2).siblings
        shares = ("mixed", "all_right", "all_wrong", "unanimous_partial", "unanimous_unparseable")
        assert sum(line[name] for name in shares) == pytest.approx(1.0)


def test_dropped_rollouts_are_counted_over_all_that_were_generated(toy):
    kept = toy.group([1.0, 0.0, 0.0, 1.0])
    cut = toy.group([0.0, 0.0, 0.0, None], stops=[StopReason.LENGTH] * 3 + [StopReason.END])
    found = survival(Filled((kept, cut), (kept,)), Objective.load({"kind": "grpo", "overlong": "drop"}), version=3)
    assert found["dropped"] == 0.5  # three cut and one that could not be judged, of eight
    assert (found["survivors_median"], found["survivors_min"]) == (2.0, 0.0)
    assert found["version_lag"] == 3.0  # drawn by version 0
    assert found["tokens_sampled"] == 8.0
    assert survival(Filled((kept, cut), (kept,)), Objective(), version=3, epochs=4)["tokens_sampled"] == 32.0  # trained once per pass
    assert "tokens_sampled" not in survival(Filled((kept, cut), ()), Objective(), version=3)  # nothing was kept, and nothing trained
    assert survival(Filled((kept, cut), (kept,)), Objective(), version=0)["dropped"] == 0.125


def test_steered_numbers_reach_the_update_and_are_recorded(toy, monkeypatch):
    # entropy of a random model is far above 0.01 and far below 9: the bonus falls, the bound opens, each by one step per phase
    used = []

    def watched(actors, groups, plan):
        used.append((plan.objective.kl.coef, plan.objective.entropy.coef, plan.objective.limit.high))
        return learn(actors, groups, plan)

    monkeypatch.setattr("posttrain.loops.rl.learn", watched)
    run = toy.recorder()
    low = {"coef": 0.003, "target": 0.01, "step": 0.001}
    rl(toy.session(run), toy.brief(), world(toy), small(steps=3), Objective.load({"entropy": low}))
    assert [entropy for _, entropy, _ in used] == pytest.approx([0.003, 0.002, 0.001])
    assert [line["steered_entropy_coef"] for line in run.lines["metrics"][1:]] == pytest.approx([0.002, 0.001])
    used.clear()
    rl(toy.session(), toy.brief(), world(toy), small(steps=3), Objective.load({"limit": {"steer": {"entropy": 9.0, "step": 0.1}}}))
    assert [high for _, _, high in used] == pytest.approx([0.28, 0.38, 0.48])
    used.clear()
    # the policy starts at its reference: KL 0, so the coefficient falls by 2 % until it has moved
    rl(toy.session(), toy.brief(), world(toy), small(steps=3, optim=STILL), held("k2", 0.5, kind="grpo"))
    rl(toy.session(), toy.brief(), world(toy), small(steps=3, optim=STILL), Objective.load({"kl": {"coef": 0.5, "target": 0.1}}))
    assert [coef for coef, _, _ in used] == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.49, 0.4802])


def test_rollouts_are_kept_with_the_version_that_drew_them(toy):
    run = toy.recorder()
    rl(toy.session(run), toy.brief(), world(toy), small(steps=3, keep_rollouts=2), Objective())
    kept = run.lines["rollouts"]
    assert len(kept) == 3 * 2 * 4
    steps = {line["step"]: line["optimizer_step"] for line in run.lines["metrics"]}
    for record in kept:
        assert record["version"] == (steps[record["step"] - 1] if record["step"] else 0)


def test_every_step_draws_other_tasks_and_tokens(toy):
    run = toy.recorder()
    rl(toy.session(run), toy.brief(), world(toy, sampling=Sampling(max_tokens=8)), small(steps=3, optim=STILL), Objective())
    by_step = [[record["completion"] for record in run.lines["rollouts"] if record["step"] == step] for step in range(3)]
    assert by_step[0] != by_step[1] != by_step[2] != by_step[0]


def test_the_policy_learns_which_answer_belongs_to_which_question(toy):
    # taught to say a or b at random, it is rewarded for a after x and b after y: from about one half to nearly always
    chats = [(Message("user", question), Message("assistant", answer)) for question in "xy" for answer in "ab"]
    rows = [supervised_sample(toy.renderer.conversation(chat), f"{i}") for i, chat in enumerate(chats)]
    start = sft(toy.session(), toy.model(265, std=0.05), rows, SFT(epochs=40, batch_size=4, optim=Optim(lr=1e-2, warmup=0.1)))
    run = toy.recorder()
    settings = small(steps=60, prompts=8, siblings=8, optim=Optim(lr=5e-3, schedule="constant", warmup=0.0))
    rl(toy.session(run), start, world(toy, ExactTextGrader()), settings, Objective())
    rewards = [line["reward_mean"] for line in run.lines["metrics"]]
    assert 0.3 < sum(rewards[:2]) / 2 < 0.7
    assert sum(rewards[-3:]) / 3 > 0.9
