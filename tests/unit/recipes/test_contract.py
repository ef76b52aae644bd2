"""The gates on a real model folder: prompts, training steps, held-out items, records, and the command line around them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.checks.acceleration import ACCELERATIONS, NotProven, require
from posttrain.checks.acceptance import Fared, baseline_of, watch
from posttrain.checks.gates import Gate, GateResult, Store, Verdict
from posttrain.cli import contract as cli
from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.engine.draft import Acceptance
from posttrain.engine.speculative import SpeculativeSampler
from posttrain.models.loading import save
from posttrain.models.tokenizer import build_tokenizer
from posttrain.recipes.contract import (
    Bench,
    ContractRun,
    Learner,
    check_acceleration,
    contract,
    default_layers,
    default_store,
    mixed,
    recorded,
)
from posttrain.recipes.single import RLRun, train

SMALL = {
    "task_settings": {"ops": ["+"], "high": 5, "harder_low": 6, "harder_high": 9, "held_out_percent": 65},
    "sampling": {"max_tokens": 6},
    "prompts": 6,
    "siblings": 2,
    "rl": {"steps": 2, "prompts": 2, "siblings": 2},
    "items": 6,
    "clock": "cpu",
}


@pytest.fixture
def folder(toy, tmp_path) -> Path:
    place = tmp_path / "model"
    save(toy.model(265), toy.tokenizer, place)
    return place


def settings_of(folder: Path, name: str, **changes) -> ContractRun:
    return ContractRun.load({"model": str(folder), "acceleration": name, **SMALL, **changes})


@pytest.mark.parametrize("name", list(ACCELERATIONS))
def test_every_acceleration_runs_all_its_gates(folder, tmp_path, name):
    settings, store = settings_of(folder, name), Store(tmp_path / "store")
    results = contract(settings, store)
    assert [result.gate for result in results] == list(ACCELERATIONS[name].gates)
    records = recorded(settings, store)
    for result in results:
        record = records[result.gate]
        assert record is not None
        assert record["verdict"] == result.verdict.value
        assert record["conditions"]["rl"]["prompts"] == 2
    verdicts = {result.gate: result.verdict for result in results}
    if Gate.IDENTITY in verdicts and name == "shared_prefill":
        assert verdicts[Gate.IDENTITY] is Verdict.PASSED
    if name == "int8":
        assert verdicts[Gate.LEARNING] is Verdict.NOT_SHOWN  # a random model is wrong everywhere: that shows nothing
    setup = Bench(settings).setup(Bench(settings).model)
    if set(verdicts.values()) == {Verdict.PASSED}:
        assert require(name, setup, store)
    else:
        with pytest.raises(NotProven):
            require(name, setup, store)


def test_both_arms_of_an_exact_path_take_the_same_step(folder):
    bench = Bench(settings_of(folder, "shared_prefill"))
    arms = [Learner(bench, build) for build in bench.sides().values()]
    for arm in arms:
        arm.step(1, mixed)
    one, other = (torch.cat([p.detach().flatten() for p in arm.policy.parameters()]) for arm in arms)
    start = torch.cat([p.detach().flatten() for p in bench.model.parameters()])
    assert not torch.equal(one, start)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert arms[0].trainer.version == 1
    arms[0].reset()
    assert torch.equal(torch.cat([p.detach().flatten() for p in arms[0].policy.parameters()]), start)
    assert arms[0].trainer.version == 0
    arms[0].step(2, mixed)
    assert not torch.equal(torch.cat([p.detach().flatten() for p in arms[0].policy.parameters()]), one)


def test_the_accelerated_sampler_follows_training(folder):
    """After an update the int8 sampler draws with the new weights, under the new version."""
    bench = Bench(settings_of(folder, "int8"))
    learner = Learner(bench, bench.member.build)
    learner.step(1, mixed)
    seen = []
    inner = learner.sampler

    class Spy:
        version = 0

        def generate(self, requests, progress=None):
            inner.version = self.version
            done = inner.generate(requests, progress)
            seen.append((requests, done))
            return done

    learner.sampler = Spy()
    learner.step(2, mixed)
    requests, done = seen[0]
    assert {completion.version for completion in done} == {1}
    assert [c.logps for c in Bench(learner.settings).member.build(bench.setup(bench.model)).generate(requests)] != [c.logps for c in done]


def test_a_draft_of_the_first_layers_follows_training(folder):
    bench = Bench(settings_of(folder, "speculative"))
    learner = Learner(bench, bench.member.build)
    sampler = learner.sampler
    assert isinstance(sampler, SpeculativeSampler)
    before = next(sampler.draft.parameters()).clone()
    learner.step(1, mixed)
    assert not torch.equal(next(sampler.draft.parameters()), before)
    assert default_layers(bench.model) == 1


def test_a_draft_with_another_tokenizer_is_refused(folder, toy, tmp_path):
    other = build_tokenizer(["aa bb aa bb"] * 50, 266)
    save(toy.model(266), other, tmp_path / "draft")
    with pytest.raises(ConfigError, match="266 tokens and the model 265"):
        contract(settings_of(folder, "speculative", draft=str(tmp_path / "draft")), Store(tmp_path / "store"))
    for word in ("aa", "bb"):  # as many tokens, and others
        save(toy.model(266), build_tokenizer([f"{word} {word} {word}"] * 50, 266), tmp_path / word)
    with pytest.raises(ConfigError, match="to the draft and"):
        Bench(settings_of(tmp_path / "aa", "speculative", draft=str(tmp_path / "bb")))
    save(toy.model(265, seed=1), toy.tokenizer, tmp_path / "fits")
    bench = Bench(settings_of(folder, "speculative", draft=str(tmp_path / "fits")))
    assert bench.key.digest != Bench(settings_of(folder, "speculative")).key.digest


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("int8", {"gates": "AX"}, "unknown gate 'X'"),
        ("shared_prefill", {"gates": "A"}, "its gates are I, B"),
        ("int8", {"gates": "C", "items": 4000}, "held_out tasks asked for"),
        ("int7", {}, "did you mean 'int8'"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(folder, name, changes, message, monkeypatch):
    monkeypatch.setattr("posttrain.recipes.contract.RUNNERS", {})
    with pytest.raises(ConfigError, match=message):
        contract(settings_of(folder, name, **changes))


def test_the_command_lists_measures_and_lists_again(folder, tmp_path, capsys):
    store = tmp_path / "store"
    given = {"gates": "I"}
    assert cli.run(None, None, {}, [], store) == 0
    shown = capsys.readouterr().out
    assert "int8            lossy   A -, B -, C -" in shown
    assert "(needs a draft)" in shown
    overrides = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]
    assert cli.run("shared_prefill", str(folder), given, overrides, store) == 0
    shown = capsys.readouterr().out
    assert "I  pass" in shown
    assert "may not be used for training on this model: no recorded pass of B" in shown
    assert cli.run(None, str(folder), {}, [], store) == 0
    assert "shared_prefill  exact   I passed, B -" in capsys.readouterr().out
    assert cli.run("int8", str(folder), {"gates": "A"}, overrides, store, as_json=True) in (0, 1)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["gate"] == "A"
    assert found["measured"]["n_prompts"] == 6
    assert cli.run("speculative", str(folder), given, overrides, store) == 1  # too few tokens to tell distributions apart
    shown = capsys.readouterr().out
    assert "acceptance" in shown
    assert "I  not shown" in shown


def test_the_command_asks_for_what_is_missing():
    with pytest.raises(ConfigError, match="posttrain contract int8 MODEL"):
        cli.run("int8", None, {}, [], None)
    with pytest.raises(ConfigError, match="did you mean 'speculative'"):
        cli.run("speculativ", None, {}, [], None)


def test_an_acceptance_that_falls_is_an_alarm(toy):
    rows = [Fared(1.0, batch, Acceptance(10, 40, 30, 24), 1.0).as_record() for batch in (1, 8)]
    record = {"measured": {"acceptance": rows}}
    assert baseline_of(record, 1.0) == 0.8
    with pytest.raises(EvidenceError, match="no acceptance rate at temperature 0.5"):
        baseline_of(record, 0.5)
    sampler = SpeculativeSampler(toy.model(), toy.model(seed=1), frozenset({2}), frozenset({2}))
    sampler.acceptance[1.0] = Acceptance(10, 40, 20, 8)
    assert watch(sampler, record) == []  # 0.4 is half of 0.8, not below it
    sampler.acceptance[1.0] = replace(sampler.acceptance[1.0], accepted=7)
    (alarm,) = watch(sampler, record)
    assert "0.3500 over 20 proposals, below 0.5 x the recorded 0.8000" in alarm


TINY_RL = {
    "task": "arithmetic",
    "task_settings": SMALL["task_settings"],
    "held_out": 4,
    "sampling": {"max_tokens": 6},
    "rl": {"steps": 1, "prompts": 2, "siblings": 2, "tries": 1},
}


def pass_all(folder: Path, name: str) -> None:
    """Records as if every gate had passed."""
    bench = Bench(settings_of(folder, name))
    for gate in bench.member.gates:
        default_store().save(bench.key, GateResult(gate, Verdict.PASSED, "", {}), {})


@pytest.mark.parametrize("name", ["int8", "speculative"])
def test_training_takes_an_acceleration_only_when_it_is_proven(folder, tmp_path, monkeypatch, name):
    """Refused before anything is computed; with passes on record the accelerated sampler draws, with LoRA as without."""
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    used = []
    member = ACCELERATIONS[name]
    monkeypatch.setitem(ACCELERATIONS, name, replace(member, build=lambda setup: used.append(setup) or member.build(setup)))
    settings = RLRun.load({"model": str(folder), **TINY_RL, "acceleration": name, "guard": {"gates": "off"}})  # it learns nothing here
    with pytest.raises(NotProven, match=f"run: posttrain contract {name} {folder}"):
        train(settings, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    pass_all(folder, name)
    train(settings, tmp_path / "plain")
    train(settings.override(["lora={rank: 2, alpha: 4}"]), tmp_path / "lora")
    assert len(used) == 2
    assert hasattr(used[1].model, "peft_config")


def test_workers_take_no_acceleration(folder):
    with pytest.raises(ConfigError, match="asynchronous workers have their own"):
        check_acceleration("int8", str(folder), ahead=True)
    check_acceleration(None, str(folder), ahead=True)
