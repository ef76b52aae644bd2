"""A checkpoint is whole or absent, and an old one goes only after its successor is complete."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.core.files import read_json, tidy
from posttrain.engine.checkpoint import discard_checkpoints, latest_checkpoint, save_checkpoint
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim


def trainer_of(value: float) -> LocalTrainer:
    module = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(value)
    return LocalTrainer(module, Optim(), 10, Ranks())


def weight(trainer: LocalTrainer) -> float:
    (value,) = trainer.parameters["weight"].unique().tolist()
    return value


def steps(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_newest_two_are_kept_in_numeric_order(tmp_path):
    for step in (2, 9, 10, 11):
        save_checkpoint(tmp_path, step, trainer_of(step), {"silent": step}, {"metrics.jsonl": 10 * step})
    assert steps(tmp_path) == ["step_10", "step_11"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.state, found.position) == (11, {"silent": 11}, {"metrics.jsonl": 110})
    restored = trainer_of(0.0)
    restored.restore(found.folder)
    assert weight(restored) == 11.0


def test_none_yet(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def test_incomplete_folder_is_not_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, trainer_of(1.0), {}, {})
    (tmp_path / "step_5").mkdir()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 3, trainer_of(1.0), {}, {})
    save_checkpoint(tmp_path, 3, trainer_of(2.0), {"again": True}, {})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.state == {"again": True}
    assert steps(tmp_path) == ["step_3"]


def test_discard_removes_all(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, trainer_of(step), {}, {})
    discard_checkpoints(tmp_path)
    assert latest_checkpoint(tmp_path) is None


def test_a_second_trainer_has_a_folder_of_its_own(tmp_path):
    policy, critic = trainer_of(1.0), trainer_of(2.0)
    policy.version, critic.version = 5, 7
    save_checkpoint(tmp_path, 3, policy, {}, {}, {"critic": critic})
    assert steps(tmp_path / "step_3") == ["critic", "optimizer.pt", "state.json", "trainable.safetensors"]
    assert steps(tmp_path / "step_3" / "critic") == ["optimizer.pt", "trainable.safetensors"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.others == ("critic",)
    fresh_policy, fresh_critic = trainer_of(0.0), trainer_of(0.0)
    found.restore(fresh_policy, {"critic": fresh_critic})
    assert (weight(fresh_policy), weight(fresh_critic)) == (1.0, 2.0)
    assert (fresh_policy.version, fresh_critic.version) == (5, 7)


def test_one_trainer_leaves_no_folder(tmp_path):
    save_checkpoint(tmp_path, 3, trainer_of(1.0), {}, {})
    assert steps(tmp_path / "step_3") == ["optimizer.pt", "state.json", "trainable.safetensors"]


@pytest.mark.parametrize(
    ("saved", "asked", "words"),
    [
        ((), ("critic",), "made without a second trainer and this run trains with critic"),
        (("critic",), (), "made with critic and this run trains without a second trainer"),
        (("critic",), ("teacher",), "made with critic and this run trains with teacher"),
        (("a", "b"), ("a",), "made with a, b and this run trains with a"),
    ],
)
def test_other_trainers_than_were_saved_are_refused_before_anything_changes(tmp_path, saved, asked, words):
    save_checkpoint(tmp_path, 3, trainer_of(1.0), {}, {}, {name: trainer_of(2.0) for name in saved})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    policy, others = trainer_of(0.0), {name: trainer_of(0.0) for name in asked}
    with pytest.raises(ConfigError, match=f"step_3' was {words}; resume with the settings it was made with"):
        found.restore(policy, others)
    assert [weight(trainer) for trainer in (policy, *others.values())] == [0.0] * (1 + len(asked))


def test_the_order_of_the_other_trainers_does_not_matter(tmp_path):
    save_checkpoint(tmp_path, 3, trainer_of(1.0), {}, {}, {"a": trainer_of(3.0), "b": trainer_of(2.0)})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    fresh = {"b": trainer_of(0.0), "a": trainer_of(0.0)}
    found.restore(trainer_of(0.0), fresh)
    assert {name: weight(trainer) for name, trainer in fresh.items()} == {"a": 3.0, "b": 2.0}


CALLS = ("save_file", "torch.save", "write_json", "fsync", "replace", "rmtree")


def others_of(names, value: float) -> dict[str, LocalTrainer]:
    return {name: trainer_of(10 * value) for name in names}


def dying_save(root, victim: str, nth: int, names: tuple[str, ...]) -> None:
    """Save step 3 and end the process, without any clean-up, at the nth call of `victim`."""
    import shutil

    import posttrain.engine.checkpoint as checkpoint
    import posttrain.engine.trainer as trainer_module

    homes = {
        "save_file": (trainer_module, "save_file"),
        "torch.save": (torch, "save"),
        "write_json": (checkpoint, "write_json"),
        "fsync": (os, "fsync"),
        "replace": (os, "replace"),
        "rmtree": (shutil, "rmtree"),
    }
    home, name = homes[victim]
    original = getattr(home, name)
    calls = iter(range(1000))

    def dying(*args, **kwargs):
        if next(calls) == nth:
            os._exit(42)
        return original(*args, **kwargs)

    setattr(home, name, dying)
    save_checkpoint(root, 3, trainer_of(3.0), {}, {}, others_of(names, 3.0))
    os._exit(0)


@pytest.mark.parametrize("names", [(), ("critic",)], ids=["alone", "critic"])
@pytest.mark.parametrize("victim", CALLS)
def test_killed_at_any_write_a_complete_checkpoint_remains(tmp_path, victim, names):
    context = multiprocessing.get_context("fork")
    died = 0
    for nth in range(20):
        root = tmp_path / f"{nth}"
        for step in (1, 2):
            save_checkpoint(root, step, trainer_of(step), {}, {}, others_of(names, step))
        process = context.Process(target=dying_save, args=(root, victim, nth, names))
        process.start()
        process.join()
        found = latest_checkpoint(root)
        assert found is not None
        assert found.step in (2, 3)
        restored, others = trainer_of(0.0), others_of(names, 0.0)
        found.restore(restored, others)
        assert weight(restored) == found.step
        assert [weight(other) for other in others.values()] == [10.0 * found.step] * len(names)
        assert read_json(found.folder / "state.json")["step"] == found.step
        tidy(root)
        save_checkpoint(root, 4, trainer_of(4.0), {}, {}, others_of(names, 4.0))
        after = latest_checkpoint(root)
        assert after is not None
        assert after.step == 4
        if process.exitcode == 0:
            assert found.step == 3
            break
        assert process.exitcode == 42
        died += 1
    assert died > 0
