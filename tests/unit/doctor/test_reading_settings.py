"""The flat settings of a stage, from the configs of every recipe."""

from __future__ import annotations

import pytest

from posttrain.doctor.settings import flat, in_force, objective_of, settings_of, stage_kind
from posttrain.objectives.objective import Objective
from posttrain.recipes.ladder import Ladder
from posttrain.recipes.single import DPORun, RLRun, SFTRun
from posttrain.runs.method import method_of

LADDER = Ladder().model_dump(mode="json")


def test_the_last_rung_of_the_ladder():
    found = settings_of(LADDER, "grpo")
    expected = {
        "steps": 200,
        "prompts": 32,
        "siblings": 16,
        "tries": 2.0,
        "minibatches": 1,
        "updates": 1,
        "optim.lr": 1e-4,
        "optim.schedule": "constant",
        "optim.warmup": 0.1,
        "sampling.temperature": 1.0,
        "sampling.max_tokens": 16,
        "asynchronous.bound": 0,
        "machine.precision": "float32",
        "lora": False,
        "seed": 0,
        "algorithm": "default",
        "objective.kind": "default",
        "objective.advantage.kind": "mean_std",
        "objective.ratio": "token",
        "objective.limit.kind": "clip",
        "objective.limit.low": 0.2,
        "objective.limit.high": 0.28,
        "objective.correction.kind": "none",
        "objective.aggregation": "token_mean",
        "objective.kl.estimator": "k2",
        "objective.kl.placement": "loss",
        "objective.kl.coef": 0.005,
        "objective.entropy.coef": 0.0,
    }
    assert {name: found[name] for name in expected} == expected
    assert not [name for name in found if name.startswith(("grpo.", "dpo.", "sft.", "mine."))]


def test_the_other_rungs_are_told_their_own_sections():
    sft, dpo, base = (settings_of(LADDER, stage) for stage in ("sft", "dpo", "base"))
    assert (sft["batch_size"], sft["optim.lr"], sft["steps"]) == (32, 2e-3, 500)  # (8000 + 8000) rows / 32
    assert (dpo["beta"], dpo["batch_size"], dpo["optim.lr"]) == (0.1, 16, 5e-5)
    assert (base["optim.lr"], base["batch_size"]) == (3e-3, 128)
    assert "objective.kind" not in sft
    assert "siblings" not in dpo


def test_a_single_run_says_its_objective_in_full():
    config = RLRun(model="m", objective=Objective.load({"kind": "gspo"}), held_out=50, turns=3).model_dump(mode="json")
    found = settings_of(config, "rl")
    whole = Objective.load({"kind": "gspo"}).model_dump(mode="json")
    assert {name: value for name, value in found.items() if name.startswith("objective.")} == flat(whole, "objective")
    assert (found["held_out"], found["turns"], found["siblings"], found["model"]) == (50, 3, 8, "m")


def test_asynchronous_and_adapters():
    config = RLRun.load({"model": "m", "asynchronous": {"bound": 4}, "lora": {"rank": 8}}).model_dump(mode="json")
    found = settings_of(config, "rl")
    assert (found["asynchronous.bound"], found["lora"], found["lora.rank"]) == (4, True, 8)


def test_sft_and_dpo_runs():
    sft = settings_of(SFTRun(model="m", task="arithmetic", demonstrations=100).model_dump(mode="json"), "sft")
    assert (sft["steps"], sft["lora"]) == (4, False)  # 100 / 32 rounded up, one epoch
    assert "steps" not in settings_of(SFTRun(model="m", data="rows.jsonl").model_dump(mode="json"), "sft")
    assert settings_of(DPORun(model="m", data="d").model_dump(mode="json"), "dpo")["beta"] == 0.1


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "ppo"])
def test_a_named_algorithm_means_what_the_manifest_says_it_meant(name: str):
    method = method_of({"algorithm": name})
    objective = objective_of({"algorithm": "something of another version"}, method)
    whole = Objective.load(name).model_dump(mode="json")
    assert objective["limit"] == whole["limit"]
    assert objective["correction"] == whole["correction"]
    assert (objective["advantage"]["kind"], objective["ratio"]) == (whole["advantage"]["kind"], whole["ratio"])
    assert objective_of({"algorithm": name}, {}) == objective  # an older manifest does not say it; this version's meaning is taken


def test_an_unknown_algorithm_and_junk_give_nothing():
    assert objective_of({"algorithm": "no such"}, {}) == {}
    assert objective_of({"objective": ["x"]}, {}) == {}
    assert settings_of({}, "rl") == {}
    assert settings_of({"rl": [1], "sampling": 3, "rows": "x", "lora": []}, "rl")["sampling"] == 3


def test_kinds_of_stages():
    assert [stage_kind(name, (), {}) for name in ("base", "sft", "dpo", "grpo", "rl", "mine")] == [
        "sft",
        "sft",
        "preference",
        "rl",
        "rl",
        "other",
    ]
    assert stage_kind("rl", ("reward_mean", "loss"), {"objective": {"advantage": {"kind": "teacher"}}}) == "distill"
    assert stage_kind("anything", ("reward_mean",), {}) == "rl"


def test_flat_is_bounded_and_keeps_lists_whole():
    assert flat({"a": {"b": [1, 2], "c": {"d": None}}, "e": 1}) == {"a.b": [1, 2], "a.c.d": None, "e": 1}
    assert len(flat({str(i): i for i in range(100)}, most=10)) == 10


def test_in_force_ignores_changes_that_make_no_sense():
    history = [{"settings": {"a.b": [1, 2], "c.d": 5, "x": [1, 2, 3]}}, {"settings": {"a.b.c": [0, 1]}}, 7]
    assert in_force({"a": {"b": 1}}, {"history": history}) == {"a": {"b": 2}}
    assert in_force({"a": 1}, {"history": "junk"}) == {"a": 1}
