"""What a stage keeps for later, how much of it, whether it fits, and that nothing outside a checkpoint is needed to go on."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.core import storage
from posttrain.core.errors import ConfigError, Interrupted, StorageError
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Message, Task
from posttrain.engine.checkpoint import latest_checkpoint
from posttrain.engine.machine import Machine
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.weights import weights_digest
from posttrain.loops.rl import rl
from posttrain.loops.rl_settings import RL, World
from posttrain.loops.session import Session, Stage
from posttrain.loops.sft import SFT, sft
from posttrain.models.lora import LoRA, add_lora, merged
from posttrain.objectives.objective import Objective
from posttrain.rewards.graders import FunctionGrader
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal
from posttrain.runs.run import Run

OPTIM = Optim(lr=1e-3, schedule="cosine")


def run_sft(toy, session, model=None):
    """3 steps per epoch, 2 epochs."""
    rows = [toy.row((1, 5), (20 + i, 21, 2), f"r{i}") for i in range(11)]
    return sft(session, model or toy.model(265), rows, SFT(batch_size=4, epochs=2, optim=OPTIM))


def run_rl(toy, session):
    def draw(n: int, seed: int) -> list[Task]:
        return [Task(f"{seed % 97}-{i}", (Message("user", "xyz"[(seed + i) % 3]),), "a") for i in range(n)]

    world = World(draw, FunctionGrader(lambda task, text: float(len(text) % 2), "parity"), toy.renderer, Sampling(max_tokens=4))
    return rl(session, toy.model(265), world, RL(steps=6, prompts=2, siblings=4, optim=OPTIM), Objective(), name="grpo")


LOOPS = {"sft": run_sft, "grpo": run_rl}


def stage_of(toy, session, steps: int = 6) -> Stage:
    return Stage(session, "s", LocalTrainer(toy.model(), Optim(), steps, session.ranks), steps)


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", LOOPS)
def test_generators_have_no_part_in_a_checkpoint(toy, name):
    # whatever the global generators hold when a run is resumed, every stream is that of its seed and name
    straight, run = toy.recorder(), toy.recorder()
    expected = LOOPS[name](toy, toy.session(straight))
    with pytest.raises(Interrupted):
        LOOPS[name](toy, toy.session(run, stop=toy.stop_after(3)))
    torch.manual_seed(12345)
    random.seed(12345)
    np.random.seed(12345)  # noqa: NPY002  the global generator is what is disturbed
    resumed = LOOPS[name](toy, toy.session(run))
    assert run.lines == straight.lines
    assert weights_digest(resumed) == weights_digest(expected)


@pytest.mark.parametrize("stop", [3, 6])
def test_at_the_end_of_an_epoch_and_of_the_run(toy, stop):
    straight, run = toy.recorder(), toy.recorder()
    expected = run_sft(toy, toy.session(straight))
    with pytest.raises(Interrupted, match=f"after step {stop} of 6"):
        run_sft(toy, toy.session(run, stop=toy.stop_after(stop)))
    resumed = run_sft(toy, toy.session(run))
    assert len(run.lines["metrics"]) == 6
    assert [line["epoch"] for line in run.lines["metrics"]] == [1, 1, 1, 2, 2, 2]
    assert run.lines == straight.lines
    assert weights_digest(resumed) == weights_digest(expected)


def test_the_schedule_goes_on_where_it_was(toy):
    run = toy.recorder()
    for stop in (1, 2):
        with pytest.raises(Interrupted):
            run_sft(toy, toy.session(run, stop=toy.stop_after(stop)))
    run_sft(toy, toy.session(run))
    assert [line["lr"] for line in run.lines["metrics"]] == [pytest.approx(OPTIM.rate(step, 6)) for step in range(6)]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_as_many_checkpoints_as_the_machine_allows(toy, limit):
    run = toy.recorder()
    session = replace(toy.session(run, save_every=1), machine=Machine(save_total_limit=limit))
    for _ in stage_of(toy, session).steps():
        assert len(names_in(run.checkpoint_root("s")) if run.checkpoint_root("s").is_dir() else []) <= limit
    assert names_in(run.checkpoint_root("s")) == [f"step_{step}" for step in range(6 - limit, 6)]


def test_a_checkpoint_carries_the_model_when_there_are_words_for_it(toy):
    run = toy.recorder()
    session = replace(toy.session(run, save_every=2), tokenizer=toy.tokenizer)
    trained = run_sft(toy, session)
    root = run.checkpoint_root("sft")
    assert names_in(root) == ["step_2", "step_4"]
    for step in (2, 4):
        assert names_in(root / f"step_{step}") == ["model", "optimizer.pt", "state.json", "trainable.safetensors"]
        AutoTokenizer.from_pretrained(root / f"step_{step}" / "model")
    # the export is the policy of that step: a fresh run stopped there ends with it
    with pytest.raises(Interrupted):
        run_sft(toy, toy.session(other := toy.recorder(), stop=toy.stop_after(4)))
    again = stage_trainer(toy, other)
    shown = AutoModelForCausalLM.from_pretrained(root / "step_4" / "model")
    assert weights_digest(shown) == weights_digest(again.model) != weights_digest(trained)


def stage_trainer(toy, run) -> LocalTrainer:
    trainer = LocalTrainer(toy.model(265), OPTIM, 6, Ranks())
    found = latest_checkpoint(run.checkpoint_root("sft"))
    assert found is not None
    found.restore(trainer, {})
    return trainer


@pytest.mark.parametrize(("export", "words"), [(False, True), (True, False)])
def test_nothing_is_exported_when_told_so_or_without_words(toy, export, words):
    run = toy.recorder()
    session = replace(toy.session(run, save_every=2), machine=Machine(export=export), tokenizer=toy.tokenizer if words else None)
    run_sft(toy, session)
    assert names_in(run.checkpoint_root("sft") / "step_4") == ["optimizer.pt", "state.json", "trainable.safetensors"]


def test_exporting_adapters_changes_no_number(toy):
    plain, run = toy.recorder(), toy.recorder()
    expected = run_sft(toy, toy.session(plain, save_every=1), add_lora(toy.model(265), LoRA(rank=4), 0))
    session = replace(toy.session(run, save_every=1), tokenizer=toy.tokenizer)
    trained = run_sft(toy, session, add_lora(toy.model(265), LoRA(rank=4), 0))
    assert run.lines == plain.lines
    assert weights_digest(merged(trained)) == weights_digest(merged(expected))
    assert names_in(run.checkpoint_root("sft") / "step_5") == ["adapter", "model", "optimizer.pt", "state.json", "trainable.safetensors"]


class Buffer:
    """A buffer of the size of the last step."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.asked = 0

    def save(self) -> list[int]:
        self.asked += 1
        return list(self.items)


def test_what_a_loop_keeps_comes_back_as_it_was_at_the_checkpoint(toy):
    run = toy.recorder()
    stage, buffer = stage_of(toy, toy.session(run, save_every=2)), Buffer()
    assert stage.keep("buffer", buffer.save) == []
    for step in stage.steps():
        buffer.items.append(step)
        if step == 4:
            break
    assert buffer.asked == 2  # once per checkpoint
    again, fresh = stage_of(toy, toy.session(run)), Buffer()
    assert again.first == 4
    assert again.keep("buffer", fresh.save) == [[0, 1, 2, 3]]
    assert again.keep("other", fresh.save) == []


def test_every_rank_keeps_its_own_and_sees_them_all(toy):
    run = toy.recorder()

    def one(ranks: Ranks) -> list[list[int]]:
        session = replace(
            toy.session(run if ranks.first else None, save_every=2), ranks=ranks, run=run if ranks.first else Run.silent(run.path)
        )
        stage, buffer = stage_of(toy, session, 4), Buffer()
        found = stage.keep("buffer", buffer.save)
        for step in stage.steps():
            buffer.items.append(10 * ranks.rank + step)
        return found

    assert toy.together(2, one) == [[], []]
    for size in (1, 2, 3):
        found = toy.together(size, one)
        assert found == [[[0, 1], [10, 11]]] * size if size == 1 else all(part == found[0] for part in found)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", LOOPS)
def test_another_number_of_processes_goes_on_up_to_the_last_digits(toy, name, before, after):
    straight, run = toy.recorder(), toy.recorder()
    expected = LOOPS[name](toy, toy.session(straight))

    def attempt(size: int, stop: int | None):
        def one(ranks: Ranks):
            asked = toy.stop_after(stop) if stop else StopSignal()
            recorder = run if ranks.first else Run.silent(run.path)
            return LOOPS[name](toy, Session(ranks, recorder, Console.quiet(), asked, 0, 20))

        return toy.together(size, one)

    with pytest.raises(Interrupted):
        attempt(before, 3)
    for trained in attempt(after, None):
        assert torch.allclose(toy.weights(trained), toy.weights(expected), rtol=0, atol=2e-6)
    assert [line["step"] for line in run.lines["metrics"]] == list(range(6))
    for line, other in zip(run.lines["metrics"], straight.lines["metrics"], strict=True):
        assert {**line, "stage": 0} == pytest.approx({**other, "stage": 0}, abs=1e-5)
    assert run.lines["rollouts"] == straight.lines["rollouts"]


def test_a_stage_that_does_not_fit_is_refused_before_its_first_step(toy, monkeypatch):
    run = toy.recorder()
    monkeypatch.setattr(storage, "free_bytes", lambda path: 600_000)
    stage_of(toy, toy.session(run, save_every=5))  # one checkpoint
    with pytest.raises(StorageError, match=r"checkpoints/s: 3 checkpoints of .* needed, 600 kB free; .*save_total_limit"):
        stage_of(toy, toy.session(run, save_every=1))
    stage_of(toy, replace(toy.session(run, save_every=1), machine=Machine(save_total_limit=1)))
    assert not run.checkpoint_root("s").exists()


def test_what_is_there_already_is_not_counted_twice(toy, monkeypatch):
    run = toy.recorder()
    for step in stage_of(toy, toy.session(run, save_every=1)).steps():
        if step == 4:
            break
    monkeypatch.setattr(storage, "free_bytes", lambda path: 700_000)
    assert stage_of(toy, toy.session(run, save_every=1)).first == 4


def test_checkpoints_that_outlived_their_stage_are_removed(toy):
    run = toy.recorder()
    session = toy.session(run, save_every=1)
    with session.timed("s"):
        for _ in stage_of(toy, session).steps():
            pass
    left = run.checkpoint_root("s") / "step_5"
    left.mkdir()
    (left / "state.json").write_text("{}")  # killed between the record of the stage and this deletion
    assert toy.session(run).finished("s") is not None
    assert names_in(run.checkpoint_root("s")) == []


def test_a_checkpoint_of_another_optimizer_is_refused(toy):
    run = toy.recorder()
    with pytest.raises(Interrupted):
        run_sft(toy, toy.session(run, stop=toy.stop_after(2)))
    trainer = LocalTrainer(toy.model(265), OPTIM, 6, Ranks(), machine=Machine(optimizer="adamw"))
    file = run.checkpoint_root("sft") / "step_2" / "optimizer.pt"
    state = torch.load(file, weights_only=True)
    torch.save(state | {"kind": "adamw8bit"}, file)
    with pytest.raises(ConfigError, match="adamw8bit"):
        Stage(toy.session(run), "sft", trainer, 6)
