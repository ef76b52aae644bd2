"""posttrain: teach a language model with supervised fine-tuning, preference optimisation and reinforcement learning, and measure it.

Everything the command line does is one of these calls. They are looked up on first use, so that importing the package stays instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Message": "core.tasks",
    "Task": "core.tasks",
    "Sampling": "core.sampling",
    "Ladder": "recipes.ladder",
    "ladder": "recipes.ladder",
    "PRESETS": "recipes.presets",
    "Objective": "objectives.objective",
    "SFTRun": "recipes.single",
    "DPORun": "recipes.single",
    "RLRun": "recipes.single",
    "train": "recipes.single",
    "EvalRun": "recipes.evaluate",
    "evaluate": "recipes.evaluate",
    "EvalRecord": "evals.record",
    "compare": "evals.compare",
    "Chat": "recipes.chat",
    "Run": "runs.run",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from posttrain.core.sampling import Sampling
    from posttrain.core.tasks import Message, Task
    from posttrain.evals.compare import compare
    from posttrain.evals.record import EvalRecord
    from posttrain.objectives.objective import Objective
    from posttrain.recipes.chat import Chat
    from posttrain.recipes.evaluate import EvalRun, evaluate
    from posttrain.recipes.ladder import Ladder, ladder
    from posttrain.recipes.presets import PRESETS
    from posttrain.recipes.single import DPORun, RLRun, SFTRun, train
    from posttrain.runs.run import Run


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'posttrain' has no attribute '{name}'")
    return getattr(importlib.import_module(f"posttrain.{_HOMES[name]}"), name)
