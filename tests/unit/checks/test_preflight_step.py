"""Preflight of a step: dead adapters, detached blocks, updates that are lost, broken saving, wrong types. Each is seen failing."""

import math
from pathlib import Path

import pytest
import torch

from posttrain.checks import preflight_step as stepping
from posttrain.core.metrics import Max, Sum
from posttrain.core.storage import Room
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.sft import imitation
from posttrain.models.loading import load, save
from posttrain.models.lora import LoRA, add_lora
from posttrain.rollout.pack import Packing, pack

ROWS = [((1, 5, 9), (20, 21, 22, 2)), ((1, 7), (30, 31, 2))]


def stepped(toy, model: torch.nn.Module, lr: float = 1e-3) -> stepping.Stepped:
    trainer = LocalTrainer(model, Optim(lr=lr, warmup=0.0, schedule="constant"), 2, Ranks())
    batches = pack([toy.row(*row, str(place)) for place, row in enumerate(ROWS)], Packing())
    return stepping.take_steps(model, lambda: trainer.step(batches, imitation(7)))


def checks(found: stepping.Stepped) -> list[bool | None]:
    return [check(found).passed for check in (stepping.loss_check, stepping.gradient_check, stepping.moved_check)]


def test_a_healthy_step_reaches_and_moves_every_tensor(toy):
    found = stepped(toy, toy.model())
    assert checks(found) == [True, True, True]
    assert len(found.gradients) == len(found.moved) == 20  # 9 tensors in each of 2 blocks, embedding and final norm
    assert len(found.losses) == 1
    assert stepping.gradient_check(found).detail == "20 of 20 trainable tensors got a gradient"


def test_adapters_take_two_steps_and_all_move(toy):
    found = stepped(toy, add_lora(toy.model(), LoRA(rank=4, alpha=8), 0))
    assert len(found.losses) == 2
    assert len(found.gradients) == 28  # A and B of 7 linear layers in each of 2 blocks
    assert checks(found) == [True, True, True]


def test_one_step_would_have_called_every_healthy_adapter_dead(toy, monkeypatch):
    monkeypatch.setattr(stepping, "is_lora", lambda model: False)
    found = stepped(toy, add_lora(toy.model(), LoRA(rank=4, alpha=8), 0))
    assert sum(norm == 0.0 for norm in found.gradients.values()) == 14  # every A, since B is zero


def test_a_dead_adapter_is_named(toy):
    model = add_lora(toy.model(), LoRA(rank=4, alpha=8), 0)
    dead = model.base_model.model.model.layers[1].mlp.up_proj
    dead.scaling["default"] = 0.0  # in the model, trainable, and without effect
    check = stepping.gradient_check(stepped(toy, model))
    assert check.passed is False
    assert check.value == 2
    assert "layers.1.mlp.up_proj.lora_A" in check.detail
    assert check.catalog == ("S76", "P12")


def test_a_detached_block_is_named(toy):
    model = toy.model()
    block = model.model.layers[0].mlp
    forward = block.forward
    block.forward = lambda x: forward(x).detach()
    found = stepped(toy, model)
    check = stepping.gradient_check(found)
    assert check.passed is False
    assert check.value == 4  # gate, up and down, and the norm that feeds nothing else
    assert "layers.0.mlp.gate_proj.weight" in check.detail
    assert stepping.moved_check(found).passed is True  # nothing that had a gradient stood still


def test_nothing_to_train_is_no_pass(toy):
    model = toy.model().requires_grad_(False)
    found = stepping.take_steps(model, lambda: {"loss": Sum(1.0), "grad_norm": Max(0.0)})
    assert checks(found) == [True, False, False]


def test_updates_smaller_than_the_spacing_of_the_weights_are_found(toy):
    model = toy.model()
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0**20)  # float32 has steps of 1/16 there
    found = stepped(toy, model, lr=1e-3)
    check = stepping.moved_check(found)
    assert check.passed is False
    assert "model.norm.weight" in check.detail
    assert "P17" in check.catalog


def test_a_step_that_breaks_fails_and_says_where(toy):
    model = toy.model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    found = stepped(toy, model)
    check = stepping.loss_check(found)
    assert check.passed is False
    assert check.value is None
    assert "F14" in check.catalog
    assert found.broken is not None


def test_a_loss_without_a_number_fails(toy):
    found = stepping.take_steps(toy.model(), lambda: {"loss": Sum(1.0)})
    assert stepping.loss_check(found).passed is False


def test_hooks_leave_nothing_behind(toy):
    model = toy.model()
    stepped(toy, model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_saved_and_loaded_is_the_same_to_the_last_bit(toy):
    model = add_lora(toy.model(265), LoRA(rank=4, alpha=8), 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.fill_(0.01)
    check, tokenizer = stepping.reload_check(model, toy.tokenizer, (1, 5, 9, 20), save, load)
    assert (check.passed, check.value) == (True, 0.0)
    assert len(tokenizer) == 265
    assert any("lora_B" in name for name, _ in model.named_parameters())  # the model keeps its adapters


def test_a_save_that_loses_something_is_found(toy):
    def lossy(model: torch.nn.Module, tokenizer: object, folder: Path) -> None:
        with torch.no_grad():
            model.model.norm.weight.copy_(model.model.norm.weight.half().float() + 0.001)
        save(model, tokenizer, folder)
        with torch.no_grad():
            model.model.norm.weight.fill_(1.0)

    check, _ = stepping.reload_check(toy.model(265), toy.tokenizer, (1, 5, 9, 20), lossy, load)
    assert check.passed is False
    assert check.catalog == ("P1",)


def test_types_in_memory(toy):
    assert stepping.dtype_check(toy.model()).passed is True
    half = toy.model().to(torch.bfloat16)
    assert "trainable tensors are not float32" in stepping.dtype_check(half).detail
    frozen = half.requires_grad_(False)
    assert stepping.dtype_check(frozen).passed is False
    assert stepping.dtype_check(frozen, torch.bfloat16).passed is True


def test_a_model_that_says_it_is_quantised_and_is_not(toy):
    model = toy.model()
    model.config.quantization_config = {"load_in_4bit": True}
    check = stepping.dtype_check(model)
    assert check.passed is False
    assert check.catalog == ("P17",)
    assert "16 bits or more" in check.detail


def test_the_footprint_is_counted(toy):
    model = toy.model()
    assert stepping.dtype_check(model).value == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("free", "passed"), [(1000, True), (300, None), (259, False)])
def test_room_on_the_disk(tmp_path, free, passed):
    # 3 checkpoints of 80 and a model of 20: 260 bytes; from four fifths of what is free on it is mentioned
    check = stepping.room_check(tmp_path, Room(80, 3, 20), free)
    assert check.passed is passed
    assert check.catalog == ("F11",)
