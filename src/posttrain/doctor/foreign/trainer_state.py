"""trainer_state.json of the Hugging Face Trainer and of everything built on it, TRL among them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.doctor.foreign.table import Table, add_row
from posttrain.doctor.lines import Limits, Problems
from posttrain.runs.reading import file_size, load_mapping, number

NAME = "trainer_state.json"
_SETTINGS = {"max_steps": "steps", "num_train_epochs": "epochs", "train_batch_size": "batch_size", "save_steps": "save_every"}
ARGUMENTS: Mapping[str, str] = {
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup",
    "max_grad_norm": "optim.clip",
    "weight_decay": "optim.weight_decay",
    "max_steps": "steps",
    "num_generations": "siblings",
    "num_iterations": "epochs",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "max_completion_length": "sampling.max_tokens",
    "epsilon": "objective.limit.low",
    "epsilon_high": "objective.limit.high",
    "loss_type": "objective.aggregation",
    "importance_sampling_level": "objective.ratio",
    "seed": "seed",
}
"""Arguments of TRL's trainers that have a counterpart here."""


def read_trainer_state(path: Path, table: Table, problems: Problems, limits: Limits) -> None:
    """Rows of log_history: training and evaluation rows of one step are one row."""
    if (size := file_size(path)) > limits.records_bytes:
        problems.add(path.name, f"{size} bytes; more than {limits.records_bytes} are not read as one JSON value")
        return
    state, problem = load_mapping(path)
    if problem is not None:
        problems.add(path.name, problem)
        return
    history = state.get("log_history")
    if not isinstance(history, list):
        problems.add(path.name, "has no list log_history")
        return
    for place, row in enumerate(history, start=1):
        if isinstance(row, Mapping):
            add_row(table, row, path.name, place, problems, limits)
        else:
            problems.add(path.name, "holds an entry of log_history that is no object; skipped")
    table.settings |= {ours: state[theirs] for theirs, ours in _SETTINGS.items() if (number(state.get(theirs)) or 0) > 0}
    done, planned = number(state.get("global_step")), number(state.get("max_steps"))
    if done and planned and done >= planned:
        table.finished = {"steps": int(done)}


def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's arguments under our names; plain values only.

    Example: arguments({"num_generations": 8, "learning_rate": 1e-6})  # {"siblings": 8, "optim.lr": 1e-06}
    """
    found = {ours: values[theirs] for theirs, ours in ARGUMENTS.items() if isinstance(values.get(theirs), int | float | str)}
    if (beta := number(values.get("beta"))) is not None:
        found |= {"objective.kl.coef": beta} if "num_generations" in values else {"beta": beta}
    return found
