"""Two processes that torchrun starts take the steps of one, sharded or not, with adapters or without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun_steps
from e2e_cli import SRC

from posttrain.engine.processes import Ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("torchrun") / "two.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    script = Path(torchrun_steps.__file__)
    done = subprocess.run([*torchrun, str(script), str(out)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return torchrun_steps.everything(Ranks())


def test_there_were_two_processes_and_only_fsdp2_divides(two):
    assert two["size"] == 2
    assert {kind: found["divided"] for kind, found in two["kinds"].items()} == {
        (sharding, lora): sharding == "fsdp2" for sharding in ("none", "fsdp2") for lora in (False, True)
    }


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_loss_and_weights_are_those_of_one_process(two, one, sharding, lora):
    ours, theirs = two["kinds"][sharding, lora], one["kinds"][sharding, lora]
    for step, expected in zip(ours["figures"], theirs["figures"], strict=True):
        assert step == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, atol=1e-6, rtol=0)
    start = torchrun_steps.steps(Ranks(), "none", lora)["figures"]
    assert start[0][0] > start[-1][0]
