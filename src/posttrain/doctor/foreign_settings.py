"""Settings of another trainer in our names, so that the linter can judge them: those of TRL, which others build on.

What a config leaves out stays unknown and silences the rules that read it; only what TRL does with every config is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPTIM = {"learning_rate": "lr", "lr_scheduler_type": "schedule", "warmup_ratio": "warmup", "max_grad_norm": "clip"}
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "min_p": "min_p", "max_completion_length": "max_tokens"}
_SECTION = {
    "rl": {"max_steps": "steps", "num_generations": "siblings", "num_iterations": "epochs"},
    "dpo": {"max_steps": "steps", "num_train_epochs": "epochs", "beta": "beta"},
    "sft": {"max_steps": "steps", "num_train_epochs": "epochs"},
}
_RUN = {"seed": "seed", "save_steps": "save_every"}
_VLLM = ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")
_AGGREGATION = {"grpo": "seq_mean_token_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}
_GRPO = frozenset({"num_generations", "max_completion_length", "num_iterations", "importance_sampling_level", "epsilon_high"})


def translated(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A flat config of TRL in our shape; None when it is none.

    Example: translated({"num_generations": 2, "learning_rate": 1e-6})["rl"]  # {"optim": {"lr": 1e-06}, "siblings": 2, "minibatches": 1}
    """
    if "learning_rate" not in config and not _GRPO & set(config):
        return None
    kind = "rl" if _GRPO & set(config) else "dpo" if "beta" in config else "sft"
    section: dict[str, Any] = {"optim": _renamed(config, _OPTIM), **_renamed(config, _SECTION[kind])}
    if section["optim"].get("schedule") == "constant_with_warmup":
        section["optim"]["schedule"] = "constant"
    if section.get("steps") == -1:  # TRL's word for: as many as the epochs have
        del section["steps"]
    found: dict[str, Any] = {kind: section, **_renamed(config, _RUN | {name: name for name in _VLLM})}
    if config.get("use_peft") is True:
        found["lora"] = {}
    if kind == "rl":
        section["minibatches"] = 1
        found |= {"sampling": _renamed(config, _SAMPLING), "objective": _objective(config)}
    return found


def _objective(config: Mapping[str, Any]) -> dict[str, Any]:
    """The policy gradient: GRPO's, with what the config changes of it."""
    unscaled = config.get("scale_rewards") in (False, "none")
    low = config.get("epsilon", 0.2)
    given = config.get("epsilon_high")
    limit = {"kind": "cispo" if config.get("loss_type") == "cispo" else "clip", "low": low, "high": low if given is None else given}
    found: dict[str, Any] = {
        "advantage": {"kind": "mean" if unscaled else "mean_std"},
        "ratio": config.get("importance_sampling_level", "token"),
        "against": "old",
        "limit": {**limit, "cap": config.get("delta")},
    }
    if isinstance(named := config.get("loss_type"), str):
        found["aggregation"] = _AGGREGATION.get(named, named)
    if (beta := config.get("beta")) is not None:
        found["kl"] = {"estimator": "none" if beta == 0 else "k3", "placement": "loss", "coef": beta}
    return found


def _renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
