"""The in-process trainer: one optimizer step from any split of its work into micro-batches and ranks.

A policy and a critic are trained by the same class; what they differ in is what their loss is told about a batch, the scorer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.core.metrics import Max, Mean, Metric, Sum, merge
from posttrain.core.sampling import Sampling
from posttrain.engine.batch import Batch
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score

Scorer = Callable[[Any, Batch], Any]
"""What a model says about a batch, with gradient. Example: `values` of engine/values.py for a critic."""

LossFunction = Callable[[Batch, Any], tuple[Tensor, dict[str, Metric]]]
"""Scalar loss of one micro-batch from the batch and what the scorer returned, already divided by the denominator of the whole step, with
metrics that carry their reduction."""


class Diverged(PosttrainError):
    """A loss or gradient became NaN or infinite. The step was not taken."""

    exit_code = 4


class Optim(Config):
    """AdamW and its schedule. The learning rate must suit the model's size: 1e-6 teaches a small model nothing, 5e-4 without warm-up
    breaks it."""

    lr: float = Field(default=5e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup: float = Field(default=0.1, ge=0, lt=1)
    """Share of the run's steps over which the rate rises to `lr`."""
    end: float = Field(default=0.0, ge=0, le=1)
    """Rate of the last step, as a share of `lr`; the constant schedule ignores it."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""

    def rate(self, step: int, total: int) -> float:
        """Learning rate of `step` in 0..total-1: rises over the first warmup * total steps, reaches end * lr exactly at the last.

        A single step after the warm-up keeps `lr`: it is first and last at once.

        Example: lr 1, linear, warmup 0.2, 10 steps: 0.5, 1.0 (warm-up over), 1.0, then down in equal parts to 0.0 at step 9.
        """
        rise = int(self.warmup * total)
        if step < rise:
            return self.lr * (step + 1) / rise
        if self.schedule == "constant" or total - rise < 2:
            return self.lr
        progress = (step - rise) / (total - 1 - rise)
        shape = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.end + (1 - self.end) * shape)


class LocalTrainer:
    """Owns the weights while they change. `version` counts optimizer steps taken.

    Args:
        model: changed in place, in evaluation mode throughout: dropout would make a policy disagree with itself between two passes.
        total: optimizer steps of the whole run, for the schedule; must be at least 1.
        sampling: the distribution to score tokens under; the default scorer's only setting.
        scorer: what a loss function gets to see of a batch; by default the log-probabilities and entropies of a policy.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optim,
        total: int,
        ranks: Ranks,
        sampling: Sampling | None = None,
        scorer: Scorer | None = None,
    ):
        if total < 1:
            raise ConfigError("this run would take 0 optimizer steps; give it more data, more epochs or smaller batches")
        self.model, self.optim, self.total, self.ranks = model.eval(), optim, total, ranks
        self.sampling = sampling or Sampling()
        self.scorer: Scorer = scorer or (lambda model, batch: score(model, batch, self.sampling))
        self.version = 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    def step(self, batches: Sequence[Batch], loss_function: LossFunction) -> dict[str, Metric]:
        """One optimizer step over this rank's micro-batches; gradients and metrics are those of all ranks together.

        Raises Diverged, with the step not taken, when the loss or the gradient norm is not finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts: list[dict[str, Metric]] = []
        for batch in batches:
            loss, metrics = loss_function(batch, self.scorer(self.model, batch))
            if loss.requires_grad:
                loss.backward()
            parts.append(metrics | {"loss": Sum(loss.item())})
        merged = merge(part for of_rank in self.ranks.gather(parts) for part in of_rank)
        loss, norm = merged["loss"].read(), self._reduce_gradients()
        if loss is None or not math.isfinite(loss) or not math.isfinite(norm):
            raise Diverged(
                f"loss {loss} and gradient norm {norm} at optimizer step {self.version}: the step was not taken; "
                f"lower optim.lr (now {self.optim.lr:g}), lengthen optim.warmup, or look at this step's batch"
            )
        rate = self.optim.rate(self.version, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return merged | {"loss": Mean(loss, 1.0), "grad_norm": Max(norm), "lr": Max(rate)}

    def _reduce_gradients(self) -> float:
        """Sum gradients over ranks in one message, clip to the norm bound, return the norm before clipping."""
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters.values()])
        self.ranks.sum_(flat)
        norm = flat.norm().item()
        if norm > self.optim.clip:
            flat.mul_(self.optim.clip / norm)
        for p, part in zip(self.parameters.values(), flat.split([p.numel() for p in self.parameters.values()]), strict=True):
            p.grad = part.view_as(p)
        return norm

    def save(self, folder: Path) -> None:
        """Trainable weights and optimizer state into an existing folder."""
        save_file({name: p.detach().contiguous() for name, p in self.parameters.items()}, folder / "trainable.safetensors")
        torch.save({"optimizer": self.optimizer.state_dict(), "version": self.version}, folder / "optimizer.pt")

    def restore(self, folder: Path) -> None:
        """The inverse of `save`."""
        stored = load_file(folder / "trainable.safetensors")
        if stored.keys() != self.parameters.keys():
            raise ConfigError(f"checkpoint '{folder}' holds other parameters than this model; resume with the settings it was made with")
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(stored[name])
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]
