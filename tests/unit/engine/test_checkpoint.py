"""A checkpoint is whole or absent, and an old one goes only after its successor is complete."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys

import pytest
import torch

from posttrain.core.errors import ConfigError, StorageError
from posttrain.core.files import is_leftover, read_json, tidy, write_json
from posttrain.engine.checkpoint import Content, discard_checkpoints, latest_checkpoint, save_checkpoint
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
        save_checkpoint(tmp_path, Content(step, {"silent": step}, {"metrics.jsonl": 10 * step}), trainer_of(step))
    assert steps(tmp_path) == ["step_10", "step_11"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.state, found.position) == (11, {"silent": 11}, {"metrics.jsonl": 110})
    restored = trainer_of(0.0)
    restored.restore(found.folder)
    assert weight(restored) == 11.0


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_asked_for(tmp_path, keep):
    for step in (2, 9, 10, 11):
        save_checkpoint(tmp_path, Content(step, {}, {}), trainer_of(step), keep=keep)
    assert steps(tmp_path) == sorted(f"step_{step}" for step in (2, 9, 10, 11)[-keep:])


def test_extras_lie_in_files_of_their_own(tmp_path):
    partial = {"ids": [5, 7], "logps": [-0.1, -1.2345678901234567e-05], "text": "\u2028 \ud83d"}
    save_checkpoint(tmp_path, Content(3, {}, {}, {"rollouts": [[partial], []], "order": [None]}), trainer_of(1.0))
    assert steps(tmp_path / "step_3" / "extra") == ["order.json", "rollouts.json"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.others == ()
    assert found.extra("rollouts") == [[partial], []]
    assert found.extra("order") == [None]
    assert found.extra("nothing") is None


def test_a_number_that_is_none_is_named_and_nothing_is_saved(tmp_path):
    with pytest.raises(ValueError, match=r"'0\.logps\.1' is not a finite number"):
        save_checkpoint(tmp_path, Content(3, {}, {}, {"rollouts": [{"logps": [0.0, float("-inf")]}]}), trainer_of(1.0))
    assert steps(tmp_path) == []


def test_an_export_lies_beside_the_state_and_is_no_second_trainer(tmp_path):
    def exporter(folder) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text("w")

    save_checkpoint(tmp_path, Content(3, {}, {}), trainer_of(1.0), {"critic": trainer_of(2.0)}, export=exporter)
    assert steps(tmp_path / "step_3" / "model") == ["weights"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.others == ("critic",)


def test_a_failed_export_costs_nothing_that_was_saved(tmp_path):
    def full(folder) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_checkpoint(tmp_path, Content(2, {}, {}), trainer_of(2.0), keep=1)
    with pytest.raises(StorageError, match="step_3: No space left on device; nothing saved before is lost; free space"):
        save_checkpoint(tmp_path, Content(3, {}, {}), trainer_of(3.0), keep=1, export=full)
    assert steps(tmp_path) == ["step_2"]


@pytest.mark.parametrize("name", ["model", "adapter", "extra"])
def test_a_trainer_cannot_take_the_name_of_a_folder(tmp_path, name):
    with pytest.raises(ValueError, match=f"'{name}' is a folder of every checkpoint"):
        save_checkpoint(tmp_path, Content(3, {}, {}), trainer_of(1.0), {name: trainer_of(2.0)})


def test_a_checkpoint_of_the_first_schema_is_still_read(tmp_path):
    save_checkpoint(tmp_path, Content(3, {"silent": 1}, {}), trainer_of(1.0), {"critic": trainer_of(2.0)})
    file = tmp_path / "step_3" / "state.json"
    record = read_json(file)
    del record["others"]
    write_json(file, record | {"schema": 1})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.others, found.state) == (("critic",), {"silent": 1})


def test_none_yet(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def test_incomplete_folder_is_not_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path, Content(1, {}, {}), trainer_of(1.0))
    (tmp_path / "step_5").mkdir()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, Content(3, {}, {}), trainer_of(1.0))
    save_checkpoint(tmp_path, Content(3, {"again": True}, {}), trainer_of(2.0))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.state == {"again": True}
    assert steps(tmp_path) == ["step_3"]


def test_discard_removes_all(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, Content(step, {}, {}), trainer_of(step))
    discard_checkpoints(tmp_path)
    assert latest_checkpoint(tmp_path) is None


def test_a_second_trainer_has_a_folder_of_its_own(tmp_path):
    policy, critic = trainer_of(1.0), trainer_of(2.0)
    policy.version, critic.version = 5, 7
    save_checkpoint(tmp_path, Content(3, {}, {}), policy, {"critic": critic})
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
    save_checkpoint(tmp_path, Content(3, {}, {}), trainer_of(1.0))
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
    save_checkpoint(tmp_path, Content(3, {}, {}), trainer_of(1.0), {name: trainer_of(2.0) for name in saved})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    policy, others = trainer_of(0.0), {name: trainer_of(0.0) for name in asked}
    with pytest.raises(ConfigError, match=f"step_3' was {words}; resume with the settings it was made with"):
        found.restore(policy, others)
    assert [weight(trainer) for trainer in (policy, *others.values())] == [0.0] * (1 + len(asked))


def test_the_order_of_the_other_trainers_does_not_matter(tmp_path):
    save_checkpoint(tmp_path, Content(3, {}, {}), trainer_of(1.0), {"a": trainer_of(3.0), "b": trainer_of(2.0)})
    found = latest_checkpoint(tmp_path)
    assert found is not None
    fresh = {"b": trainer_of(0.0), "a": trainer_of(0.0)}
    found.restore(trainer_of(0.0), fresh)
    assert {name: weight(trainer) for name, trainer in fresh.items()} == {"a": 3.0, "b": 2.0}


CALLS = ("save_file", "torch.save", "write_json", "write_atomic", "export", "fsync", "replace", "unlink", "rmtree")


def others_of(names, value: float) -> dict[str, LocalTrainer]:
    return {name: trainer_of(10 * value) for name in names}


def exported(folder) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 100)


def save_whole(root, step: int, names: tuple[str, ...]) -> None:
    """A checkpoint with everything that one can hold."""
    content = Content(step, {"step": step}, {"metrics.jsonl": step}, {"rollouts": [{"id": step}]})
    save_checkpoint(root, content, trainer_of(step), others_of(names, step), export=exported)


def dying_save(root, victim: str, nth: int, names: tuple[str, ...]) -> None:
    """Save step 3 and end the process, without any clean-up, at the nth call of `victim`."""
    import shutil

    import posttrain.engine.checkpoint as checkpoint
    import posttrain.engine.trainer as trainer_module

    homes = {
        "save_file": (trainer_module, "save_file"),
        "torch.save": (torch, "save"),
        "write_json": (checkpoint, "write_json"),
        "write_atomic": (checkpoint, "write_atomic"),
        "export": (sys.modules[__name__], "exported"),
        "fsync": (os, "fsync"),
        "replace": (os, "replace"),
        "unlink": (os, "unlink"),
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
    save_whole(root, 3, names)
    os._exit(0)


@pytest.mark.parametrize("names", [(), ("critic",)], ids=["alone", "critic"])
@pytest.mark.parametrize("victim", CALLS)
def test_killed_at_any_write_a_complete_checkpoint_remains(tmp_path, victim, names):
    context = multiprocessing.get_context("fork")
    died = 0
    for nth in range(40):
        root = tmp_path / f"{nth}"
        for step in (1, 2):
            save_whole(root, step, names)
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
        assert found.extra("rollouts") == [{"id": found.step}]
        assert (found.folder / "model" / "weights").read_bytes() == b"w" * 100
        assert read_json(found.folder / "state.json")["step"] == found.step
        whole = {path.name for path in found.folder.rglob("*")}
        # what a deletion left half-done never looks like a checkpoint
        assert all({p.name for p in root.glob(f"{name}/**/*")} == whole for name in steps(root) if not is_leftover(name))
        tidy(root)
        save_whole(root, 4, names)
        after = latest_checkpoint(root)
        assert after is not None
        assert after.step == 4
        assert len(steps(root)) == 2
        if process.exitcode == 0:
            assert found.step == 3
            break
        assert process.exitcode == 42
        died += 1
    assert died > 0
    assert process.exitcode == 0
