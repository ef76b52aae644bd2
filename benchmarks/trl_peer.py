"""What every TRL side shares: a callback that takes turns, a second process, and settings that match ours."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sides import Turns
from transformers import TrainerCallback


class TakesTurns(TrainerCallback):
    """A turn is a step."""

    def __init__(self, turns: Turns, facts: Callable[[Mapping[str, Any]], Mapping[str, Any]]):
        self._turns, self._facts = turns, facts
        self._last: Mapping[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Logs of a step come after its end; they belong to the turn that is running."""
        self._last = logs or self._last
        if logs and "loss" in logs:
            self._turns.boundary(lambda: {"loss": float(logs["loss"]), **self._facts(logs)})


def common(options: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """Settings of a trainer that match ours: constant rate, AdamW without decay, clipped gradients, float32, nothing saved."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="bench-trl-"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_steps": options["steps"],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "seed": 0,
    }


def join(function: str, module: str, options: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Set up this process's place among `options["processes"]`; the first starts the second and returns it."""
    torch.set_num_threads(options["threads"])
    if options.get("processes", 1) == 1 or "RANK" in os.environ:
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ.update(place | {"RANK": "0", "LOCAL_RANK": "0"})
    command = [sys.executable, str(Path(__file__).with_name("sides.py")), module, function, json.dumps(dict(options))]
    follower = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "BENCH_FOLLOWS": "1"}
    return subprocess.Popen(command, env=follower, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def end(second: subprocess.Popen[bytes] | None) -> None:
    """Wait for the second process."""
    if second is not None:
        second.wait(timeout=60)
