"""AdamW, and the 8-bit one that is there when its package is."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.engine.machine import Machine
from posttrain.engine.optimizers import make_optimizer
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
EIGHT = Machine(optimizer="adamw8bit")


class Moments8(torch.optim.AdamW):
    """Takes the place of the package's optimizer where it is not installed."""


@pytest.fixture
def package(monkeypatch):
    module, inner = ModuleType("bitsandbytes"), ModuleType("bitsandbytes.optim")
    module.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    inner.AdamW8bit = Moments8  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", inner)


def test_adamw_is_torchs():
    weight = torch.nn.Parameter(torch.ones(2))
    made = make_optimizer("adamw", [weight], **SETTINGS)
    assert type(made) is torch.optim.AdamW
    assert {name: made.defaults[name] for name in SETTINGS} == SETTINGS


def test_a_missing_package_is_refused_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"adamw8bit needs the package 'bitsandbytes'.*posttrain\[8bit\].*machine\.optimizer=adamw"):
        LocalTrainer(torch.nn.Linear(2, 2), Optim(), 1, Ranks(), machine=EIGHT)


def test_the_package_gets_the_settings(package):
    trainer = LocalTrainer(torch.nn.Linear(2, 2), Optim(lr=3e-4, weight_decay=0.1), 1, Ranks(), machine=EIGHT)
    assert type(trainer.optimizer) is Moments8
    assert trainer.optimizer.defaults["lr"] == 3e-4
    assert trainer.optimizer.defaults["weight_decay"] == 0.1


@pytest.mark.parametrize(("saved", "asked"), [(EIGHT, Machine()), (Machine(), EIGHT)])
def test_a_checkpoint_of_another_optimizer_is_refused(package, tmp_path, saved, asked):
    LocalTrainer(torch.nn.Linear(2, 2), Optim(), 1, Ranks(), machine=saved).save(tmp_path)
    other = LocalTrainer(torch.nn.Linear(2, 2), Optim(), 1, Ranks(), machine=asked)
    before = other.model.weight.clone()
    with pytest.raises(ConfigError, match=f"made with machine.optimizer={saved.optimizer}, not {asked.optimizer}"):
        other.restore(tmp_path)
    assert torch.equal(other.model.weight, before)
