"""A checkpoint is whole or absent, and an old one goes only after its successor is complete."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from posttrain.core.files import read_json, tidy
from posttrain.engine.checkpoint import discard_checkpoints, latest_checkpoint, save_checkpoint
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim


def trainer_of(value: float) -> LocalTrainer:
    module = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(value)
    return LocalTrainer(module, Optim(), 10, Ranks())


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
    assert restored.model.weight.tolist() == [[11.0, 11.0]]


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


CALLS = ("save_file", "torch.save", "write_json", "fsync", "replace", "rmtree")


def dying_save(root, victim: str, nth: int) -> None:
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
    save_checkpoint(root, 3, trainer_of(3.0), {}, {})
    os._exit(0)


@pytest.mark.parametrize("victim", CALLS)
def test_killed_at_any_write_a_complete_checkpoint_remains(tmp_path, victim):
    context = multiprocessing.get_context("fork")
    died = 0
    for nth in range(12):
        root = tmp_path / f"{nth}"
        for step in (1, 2):
            save_checkpoint(root, step, trainer_of(step), {}, {})
        process = context.Process(target=dying_save, args=(root, victim, nth))
        process.start()
        process.join()
        found = latest_checkpoint(root)
        assert found is not None
        assert found.step in (2, 3)
        restored = trainer_of(0.0)
        restored.restore(found.folder)
        assert restored.model.weight.tolist() == [[float(found.step)] * 2]
        assert read_json(found.folder / "state.json")["step"] == found.step
        tidy(root)
        save_checkpoint(root, 4, trainer_of(4.0), {}, {})
        after = latest_checkpoint(root)
        assert after is not None
        assert after.step == 4
        if process.exitcode == 0:
            assert found.step == 3
            break
        assert process.exitcode == 42
        died += 1
    assert died > 0
