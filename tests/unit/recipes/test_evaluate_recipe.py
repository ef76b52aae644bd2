"""Evaluations of a real, tiny model: equal bytes whatever the batches, ranks and rows, nothing touched, several tasks and modes."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.weights import weights_digest
from posttrain.envs.arithmetic import Arithmetic
from posttrain.evals.partial import parts_of
from posttrain.evals.pulse import measure_pulse
from posttrain.evals.record import EvalRecord
from posttrain.evals.runner import evaluate as evaluate_suites
from posttrain.evals.shelf import read_record, read_records
from posttrain.evals.suite import Suite
from posttrain.loops.sft import imitation
from posttrain.models.loading import save
from posttrain.recipes.evaluate import EvalRun, Job, evaluate, evaluate_set, measure_job, suite_of
from posttrain.rollout.episodes import play
from posttrain.rollout.pack import Packing, pack

SRC = Path(__file__).resolve().parents[3] / "src"
SMALL = {"ops": ["+"], "high": 5, "harder_low": 6, "harder_high": 9, "held_out_percent": 65}


@pytest.fixture
def folder(toy, tmp_path) -> Path:
    place = tmp_path / "model"
    save(toy.model(265), toy.tokenizer, place)
    return place


def settings_of(folder: Path, **changes) -> EvalRun:
    given = {"task": "arithmetic", "task_settings": SMALL, "items": 12, "samples": 2, "sampling": {"max_tokens": 6}, "processes": 1}
    return EvalRun.load({"model": str(folder), "allow_truncation": True, **given, **changes})


def record_with(toy, settings: EvalRun, *, rows: int = 512, ranks: Ranks | None = None) -> EvalRecord:
    """The record of a model in this process, decoded `rows` rows at a time."""
    ranks, model = ranks or Ranks(), toy.model(265)
    sampler = LocalSampler(model, toy.renderer.stop_ids, toy.renderer.special_ids, max_rows=rows)
    job = Job(suite_of(settings), None)

    def play_all(openings):
        return ranks.interleave(play(sampler, toy.renderer, ranks.share(openings)))

    return measure_job(ranks, job, settings, toy.renderer, weights_digest(model), play_all, False)


def test_neither_batches_nor_rows_nor_ranks_change_the_record(toy, folder):
    wanted = record_with(toy, settings_of(folder)).to_json()
    assert len({tuple(map(tuple, item["outcomes"])) for item in wanted["items"]}) > 1
    for batch, rows in ((1, 1), (5, 3), (12, 7), (100, 512)):
        assert record_with(toy, settings_of(folder, batch=batch), rows=rows).to_json() == wanted, (batch, rows)
    for record in toy.together(3, lambda ranks: record_with(toy, settings_of(folder, batch=5), ranks=ranks)):
        assert record.to_json() == wanted


def test_the_order_of_the_items_changes_nothing_but_their_order(toy, folder):
    suite = suite_of(settings_of(folder))
    turned = Suite(suite.name, suite.tasks[::-1], suite.grader, suite.sampling, suite.samples, True)
    model = toy.model(265)

    def measured(of: Suite) -> EvalRecord:
        sampler = LocalSampler(model, toy.renderer.stop_ids, toy.renderer.special_ids, max_rows=5)
        return evaluate_suites(sampler, toy.renderer, [of], seed=1, label="m", model_digest="w")[of.name]

    one, other = measured(suite), measured(turned)
    assert one.items == other.items[::-1]
    assert one.pass_at_1 == other.pass_at_1


def test_an_evaluation_touches_no_generator_and_no_training(toy):
    """Three optimizer steps, with and without evaluations between them: equal weights, equal states of every global generator."""
    source = Arithmetic.load(SMALL)
    suite = Suite("a", tuple(source.tasks("held_out", 6, 0)), source.grader, Sampling(max_tokens=5), 2, allow_truncation=True)

    def trained(measure: bool) -> tuple[torch.Tensor, list[int]]:
        model = toy.model(265)
        model.train()  # dropout or not, a mode that was set stays set
        trainer = LocalTrainer(model, Optim(lr=1e-2, schedule="constant", warmup=0.0), 3, Ranks())
        drawn = []
        for step in range(3):
            rows = [toy.row((1, 5, 9), (20 + step, 21, 2), "a"), toy.row((1, 6), (22, 2), "b")]
            trainer.step(pack(rows, Packing()), imitation(5))
            if measure:
                model.eval()
                sampler = LocalSampler(model, toy.renderer.stop_ids, toy.renderer.special_ids)
                before = copy.deepcopy(toy.weights(model))
                measure_pulse(sampler, toy.renderer, suite, 7)
                evaluate_suites(sampler, toy.renderer, [suite], seed=1, label="m", model_digest="w")
                assert torch.equal(before, toy.weights(model))
                model.train()
            drawn.append(random.getrandbits(32) ^ int(np.random.randint(1 << 30)) ^ int(torch.randint(1 << 30, (1,))))  # noqa: NPY002
        return toy.weights(model), drawn

    states = []
    for measure in (False, True):
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)
        states.append(trained(measure))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


def test_several_tasks_and_modes_in_one_folder(folder, tmp_path):
    settings = settings_of(folder, task_settings={}, items=5)
    records = evaluate_set(settings, ["arithmetic", "instruct"], ["sampled", "greedy"], tmp_path / "set")
    names = ["arithmetic.greedy", "arithmetic.sampled", "instruct.greedy", "instruct.sampled"]
    assert list(records) == names
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [f"{name}.json" for name in names]
    read = {record.conditions.suite: record for record in read_records(tmp_path / "set")}
    assert read == records
    greedy, sampled = read["arithmetic.greedy"].conditions, read["arithmetic.sampled"].conditions
    assert (greedy.mode, greedy.samples_per_item, greedy.dataset, greedy.split) == ("greedy", 1, "arithmetic", "held_out")
    assert (sampled.mode, sampled.samples_per_item, sampled.sampling.temperature) == ("sampled", 2, 1.0)
    again = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    (tmp_path / "set" / "instruct.greedy.json").unlink()
    evaluate_set(settings, ["arithmetic", "instruct"], ["sampled", "greedy"], tmp_path / "set", resume=True)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    assert {name for name in again if again[name] != kept[name]} == {"instruct.greedy.json"}
    with pytest.raises(ConfigError, match="exists already"):
        evaluate_set(settings, ["arithmetic"], ["greedy"], tmp_path / "set")


@pytest.mark.parametrize(
    ("tasks", "modes", "out", "said"),
    [
        (["arithmetic"], ["beam"], "set", "unknown decoding mode 'beam'; use greedy or sampled"),
        (["arithmetic", "instruct"], ["greedy"], "set", "task_settings belong to one task"),
        (["arithmetic", "arithmetic"], ["greedy"], "set", "task_settings belong|named twice"),
        (["arithmetic"], ["greedy"], "set.json", "names a file, but several records are written"),
    ],
)
def test_sets_that_cannot_be(folder, tmp_path, tasks, modes, out, said):
    with pytest.raises(ConfigError, match=said):
        evaluate_set(settings_of(folder), tasks, modes, tmp_path / out)


def test_skipped_items_are_those_of_another_half(folder):
    first, second = (suite_of(settings_of(folder, items=6, skip=skip)) for skip in (0, 6))
    assert [task.id for task in suite_of(settings_of(folder)).tasks] == [task.id for half in (first, second) for task in half.tasks]
    assert first.whence == second.whence
    assert first.items_digest != second.items_digest


def test_nothing_can_be_resumed_without_a_file(folder):
    with pytest.raises(ConfigError, match="nothing can be resumed without a file"):
        evaluate(settings_of(folder), resume=True)


@pytest.mark.slow
def test_killed_processes_leave_what_is_resumed_to_the_same_bytes(folder, tmp_path):
    """SIGKILL as soon as the second batch is on the disk; the next process goes on from there."""
    settings = settings_of(folder, batch=1, items=24, task_settings={})
    evaluate(settings, tmp_path / "whole.json")
    target = tmp_path / "killed.json"
    script = (
        "import sys; from posttrain.recipes.evaluate import EvalRun, evaluate; "
        "evaluate(EvalRun.load(__import__('json').loads(sys.argv[1])), sys.argv[2], resume=True)"
    )
    command = [sys.executable, "-c", script, json.dumps(settings.model_dump(mode="json")), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (parts_of(target).exists() and parts_of(target).read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    assert target.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert read_record(target).conditions.n_items == 24
