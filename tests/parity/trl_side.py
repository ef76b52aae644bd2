"""TRL's own code, called without its machinery: no model, no data set, no optimizer.

A trainer object is made without its constructor and given the attributes that the called method reads: every field of TRL's config with its
default, overlaid with what a test sets. The methods that generate text, grade it and score it return the streams of a `Batch`. Everything
between them and the loss is TRL's: advantages, weights for the sampler's mismatch, ratio, clip, KL term, reduction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from posttrain.core.seeds import numpy_rng

PAD, END = 0, 1


@dataclass(frozen=True)
class Batch:
    """Groups of `siblings` completions, padded on the right to T tokens, in nats. Every row has at least one trained token.

    `lengths_B` are the tokens of each completion; `mask_BT` is also False at some tokens inside, as for the output of a tool.
    """

    logp_BT: Tensor
    old_BT: Tensor
    behaviour_BT: Tensor
    reference_BT: Tensor
    entropy_BT: Tensor
    mask_BT: Tensor
    lengths_B: tuple[int, ...]
    rewards_B: tuple[float | None, ...]
    siblings: int

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return int(self.mask_BT.sum())


@dataclass(frozen=True)
class Found:
    """A loss, its gradient with respect to logp (and the entropy, where it has one), and what was measured."""

    loss: Tensor
    gradient_BT: Tensor
    entropy_gradient_BT: Tensor
    metrics: Mapping[str, float | None]
    inputs: dict[str, Any]
    """What TRL made of rewards and streams before the loss: advantages, importance_sampling_ratio."""


def random_batch(seed: int, *, drift: float = 0.3, mismatch: float = 0.3, holes: float = 0.15) -> Batch:
    """Two ragged groups of five with mixed rewards. TRL forms n / (n - 1) in float32; 5 / 4 is exact there.

    Args:
        drift: spread of logp - old per token; 0 for the first update of an on-policy step.
        mismatch: spread of old - behaviour per token. TRL keeps what the sampler recorded in float32, so it is rounded to that here.
        holes: share of tokens inside a completion that are not trained.
    """
    rng = numpy_rng(seed, "trl")
    rows, siblings, width = 10, 5, 9
    lengths = rng.integers(1, width + 1, size=rows)
    lengths[rng.integers(rows)] = width
    inside_BT = torch.arange(width) < torch.from_numpy(lengths)[:, None]
    mask_BT = inside_BT & torch.from_numpy(rng.random((rows, width)) >= holes)
    mask_BT[:, 0] = True
    noise = [torch.from_numpy(rng.standard_normal((rows, width))) for _ in range(5)]
    old_BT = -0.05 - noise[0].abs()
    rewards = rng.integers(0, 3, size=rows) + 0.25 * rng.integers(0, 2, size=rows)
    return Batch(
        logp_BT=old_BT + drift * noise[1],
        old_BT=old_BT,
        behaviour_BT=(old_BT + mismatch * noise[2]).float().double(),
        reference_BT=old_BT + 0.5 * noise[3],
        entropy_BT=noise[4].abs(),
        mask_BT=mask_BT,
        lengths_B=tuple(int(length) for length in lengths),
        rewards_B=tuple(float(reward) for reward in rewards),
        siblings=siblings,
    )


def one_batch(
    logp: Sequence[Sequence[float]], rewards: Sequence[float | None], *, drift: float = 0.0, siblings: int | None = None
) -> Batch:
    """Rows of given log-probabilities, of any length; old = logp - drift, sampler and reference equal old, entropy 1."""
    lengths = tuple(len(row) for row in logp)
    logp_BT = torch.zeros(len(logp), max(lengths), dtype=torch.float64)
    for row, values in enumerate(logp):
        logp_BT[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    old_BT = logp_BT - drift
    return Batch(logp_BT, old_BT, old_BT, old_BT, torch.ones_like(logp_BT), mask_BT, lengths, tuple(rewards), siblings or len(logp))


class _OneProcess:
    """What the trainers ask of an accelerator, with nothing to gather."""

    device = torch.device("cpu")
    num_processes, process_index = 1, 0
    sync_gradients, is_main_process = True, True

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def defaults(config: type) -> dict[str, Any]:
    """The fields of a TRL config that have a plain default."""
    return {field.name: field.default for field in fields(config) if field.default is not MISSING}


def _trainer(kind: type, config: type, batch: Batch, settings: dict[str, Any]) -> Any:
    """A trainer whose models are objects with a `stream`; `num_iterations=2` (the default here) makes it score the old policy."""
    values = defaults(config) | {"steps_per_generation": 1, "num_iterations": 2, "pad_to_multiple_of": None} | settings
    trainer = object.__new__(kind)
    vars(trainer).update(values)
    high = values["epsilon"] if values["epsilon_high"] is None else values["epsilon_high"]
    vars(trainer).update(
        args=SimpleNamespace(**values),
        accelerator=_OneProcess(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False, stream=batch.old_BT),
        ref_model=SimpleNamespace(stream=batch.reference_BT),
        epsilon_low=values["epsilon"],
        epsilon_high=high,
        num_generations=batch.siblings,
        reward_weights=torch.tensor(values.get("reward_weights") or [1.0]),
        current_gradient_accumulation_steps=values["gradient_accumulation_steps"],
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=bool(values.get("entropy_coef")),
        environment_factories=None,
        environments=None,
        tools=None,
        _is_vlm=False,
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        eos_token_ids=[END],
        reward_funcs=settings.get("channels") or [lambda **_: list(batch.rewards_B)],
        reward_processing_classes=[None],
        reward_func_names=["reward"] * len(settings.get("channels") or [""]),
        state=SimpleNamespace(global_step=0),
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **wanted: (
        model.stream,
        batch.entropy_BT if not wanted.get("compute_entropy") else model.entropy,
        None,
    )
    trainer._generate = lambda prompts: _generated(batch, settings)
    if not settings.get("graded"):
        trainer._calculate_rewards = lambda *_: _rewards(batch, settings)
    return trainer


def _generated(batch: Batch, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Ids (the last one END unless the row is named in `cut`), tool mask and what the sampler recorded, each row at its own length."""
    cut = settings.get("cut", ())
    ids = [[2] * (n - 1) + [2 if row in cut else END] for row, n in enumerate(batch.lengths_B)]
    tool_mask = [batch.mask_BT[row, :n].int().tolist() for row, n in enumerate(batch.lengths_B)]
    recorded = [batch.behaviour_BT[row, :n].tolist() for row, n in enumerate(batch.lengths_B)]
    return [[3]] * len(ids), ids, tool_mask, [""] * len(ids), recorded, {}, None, None


def _rewards(batch: Batch, settings: dict[str, Any]) -> Tensor:
    """[rows, reward functions] in float64, NaN where unscored; `channels` replaces the batch's own reward."""
    columns = settings.get("channels") or [batch.rewards_B]
    return torch.tensor([[torch.nan if value is None else value for value in column] for column in columns], dtype=torch.float64).T


def grpo_inputs(batch: Batch, **settings: Any) -> dict[str, Any]:
    """GRPOTrainer from generated text to what its loss reads: `advantages`, `importance_sampling_ratio`, masks.

    Beside fields of GRPOConfig, `settings` may hold `cut` (rows without an end token), `channels` (one list of rewards per reward function)
    and `graded` (rewards pass through TRL's own collection, in float32, instead of float64).
    """
    return _trainer(GRPOTrainer, GRPOConfig, batch, settings)._generate_and_score_completions([{"prompt": ""}] * len(batch.lengths_B))


def grpo(batch: Batch, *, parts: int = 1, advantage_BT: Tensor | None = None, **settings: Any) -> Found:
    """GRPOTrainer from rewards to loss and gradient, in `parts` micro-batches of one optimizer step.

    Args:
        advantage_BT: replaces what TRL makes of the rewards.
        settings: as in `grpo_inputs`.
    """
    trainer = _trainer(GRPOTrainer, GRPOConfig, batch, settings | {"gradient_accumulation_steps": parts})
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(batch.lengths_B))
    if settings.get("num_iterations", 2) > 1:
        inputs["old_per_token_logps"] = batch.old_BT  # with accumulation TRL takes the step for on-policy and leaves it out
    if advantage_BT is not None:
        inputs["advantages"] = advantage_BT
    rows = len(batch.lengths_B)
    # `num_items_in_batch` covers one generation: `steps_per_generation` micro-batches, of which one step takes `parts`.
    trainer.args.steps_per_generation = parts
    return _differentiate(trainer, batch, inputs, [slice(i * rows // parts, (i + 1) * rows // parts) for i in range(parts)])


def grpo_window(batch: Batch, rows: slice, windows: int, advantage_BT: Tensor, **settings: Any) -> Found:
    """One of `windows` optimizer steps, each of one micro-batch, that share a generation: the step that takes `rows`."""
    trainer = _trainer(GRPOTrainer, GRPOConfig, batch, settings | {"steps_per_generation": windows})
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(batch.lengths_B))
    return _differentiate(trainer, batch, inputs | {"advantages": advantage_BT}, [rows])


def rloo(batch: Batch, *, advantage_B: Tensor | None = None, **settings: Any) -> Found:
    """RLOOTrainer from rewards to loss and gradient; `advantage_B` as in `grpo`, `settings` are fields of RLOOConfig."""
    trainer = _trainer(RLOOTrainer, RLOOConfig, batch, settings)
    prompt_ids, ids, _, texts, *_ = _generated(batch, settings)
    trainer._generate = lambda prompts: (prompt_ids, ids, texts)
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(batch.lengths_B))
    if advantage_B is not None:
        inputs["advantages"] = advantage_B
    return _differentiate(trainer, batch, inputs, [slice(0, len(batch.lengths_B))])


def _differentiate(trainer: Any, batch: Batch, inputs: dict[str, Any], parts: Sequence[slice]) -> Found:
    rows = len(batch.lengths_B)
    logp_BT, entropy_BT = batch.logp_BT.clone().requires_grad_(), batch.entropy_BT.clone().requires_grad_()
    total = torch.zeros((), dtype=batch.logp_BT.dtype)
    for part in parts:
        own = {key: value[part] if getattr(value, "ndim", 0) and len(value) == rows else value for key, value in inputs.items()}
        loss = trainer._compute_loss(SimpleNamespace(stream=logp_BT[part], entropy=entropy_BT[part]), own)
        loss.backward()
        total = total + loss.detach()
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    slopes = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (logp_BT, entropy_BT)]
    return Found(total, slopes[0], slopes[1], metrics, inputs)


def dpo_loss(policy: Batch, beta: float) -> Found:
    """DPOTrainer's sigmoid loss: the first half of the rows is chosen, the second rejected."""
    trainer = object.__new__(DPOTrainer)
    logp_BT = policy.logp_BT.clone().requires_grad_()

    def scores(stream_BT: Tensor) -> SimpleNamespace:
        masked_BT = torch.where(policy.mask_BT, stream_BT, 0.0)  # a fused head returns 0 where the label is ignored
        return SimpleNamespace(log_probs=masked_BT, entropy=policy.entropy_BT, mean_logits=masked_BT, is_top1=policy.mask_BT)

    model = torch.nn.Identity()  # TRL looks into it for adapters
    vars(model)["is_gradient_checkpointing"] = False
    vars(trainer).update(
        defaults(DPOConfig)
        | {
            "beta": beta,
            "loss_types": ["sigmoid"],
            "loss_weights": [1.0],
            "accelerator": _OneProcess(),
            "model": model,
            "ref_model": lambda **_: scores(policy.reference_BT),
            "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
            "precompute_ref_logps": False,
            "aux_loss_enabled": False,
            "ld_alpha": None,
            "_metrics": {"train": defaultdict(list)},
            "_total_train_tokens": 0,
            "_tp_size": 1,
        }
    )
    first = torch.zeros_like(policy.mask_BT[:, :1])  # the prompt, whose token is no label
    mask = torch.cat([first, policy.mask_BT], dim=1).int()
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss = trainer._compute_loss(lambda **_: scores(logp_BT), inputs, return_outputs=False)
    (gradient_BT,) = torch.autograd.grad(loss, logp_BT)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if isinstance(values, list)}
    return Found(loss.detach(), gradient_BT, torch.zeros_like(gradient_BT), metrics, {})
