"""The local sampler against `transformers.generate` and against the bare chain of the model's own matrix products.

The chain is what a decode step cannot do without: the projections of every block and the head, at the same number of rows, and nothing
else. Every piece of our work begins with a new version of the weights, as in training: nothing is remembered from the piece before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import shared
import torch
import torch.nn.functional as F
from grpo import MIXED_END
from harness import Bench, Measure, Side, rates, same
from sides import Turns
from torch import nn

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Request
from posttrain.models.loading import load
from posttrain.render.renderer import ChatRenderer

SMOLLM2_NEW, SMOLLM2_PROMPTS = 64, 4
QUESTIONS = ("What is 12 + 7?", "Name three colours of the rainbow.", "Why is the sky blue?", "Write one sentence about a cat.")


def setup(options: Mapping[str, Any]) -> tuple[nn.Module, list[tuple[int, ...]], int, frozenset[int], frozenset[int]]:
    """Model, prompts, most new tokens, stop ids and control ids."""
    torch.set_num_threads(options["threads"])
    if options["model"] == "tiny":
        longest = shared.MIXED if options.get("mixed") else shared.EQUAL
        renderer = ChatRenderer(shared.tokenizer())
        model = shared.tiny_model(longest, MIXED_END if options.get("mixed") else 0.0)
        texts = shared.questions(options["prompts"])
    else:
        model, tokenizer = load("smollm2")
        renderer, longest, texts = ChatRenderer(tokenizer), SMOLLM2_NEW, QUESTIONS
        endless(model, renderer.stop_ids | renderer.special_ids)
    prompts = [renderer.prompt(task.prompt).ids for task in shared.tasks_of(texts)]
    return model, prompts, longest, renderer.stop_ids, renderer.special_ids


def endless(model: Any, control: frozenset[int]) -> None:
    """A bias of the head that keeps control tokens from being drawn, so that every completion has full length."""
    old = model.lm_head
    head = nn.Linear(old.in_features, old.out_features, bias=True)
    head.weight = old.weight
    with torch.no_grad():
        head.bias.zero_()[sorted(control)] = -100.0
    head.requires_grad_(False)
    model.lm_head = head


def ours(turns: Turns, options: Mapping[str, Any]) -> None:
    """One `generate` of the product's sampler per turn."""
    model, prompts, longest, stops, controls = setup(options)
    sampler = LocalSampler(model, stops, controls)
    tokens, step = 0, 0
    while turns.boundary(tokens=tokens):
        sampler.version = step = step + 1
        requests = [
            Request(prompt, Sampling(max_tokens=longest), derive(0, step, place, index))
            for place, prompt in enumerate(prompts)
            for index in range(shared.SIBLINGS)
        ]
        tokens = sum(len(completion.ids) for completion in sampler.generate(requests))


def generate(turns: Turns, options: Mapping[str, Any]) -> None:
    """One call of the library's `generate` per turn, on the same rows at once."""
    model, prompts, longest, stops, _ = setup(options)
    rows = [prompt for prompt in prompts for _ in range(shared.SIBLINGS)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    tokens = 0
    ends = torch.tensor(sorted(stops))
    while turns.boundary(tokens=tokens):
        out = model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest,
            eos_token_id=sorted(stops), pad_token_id=0,
        )[:, width:]  # fmt: skip
        closed = torch.isin(out, ends).long()
        tokens = int((closed.cumsum(-1) - closed == 0).sum())  # up to and including the first end


@torch.no_grad()
def chain(turns: Turns, options: Mapping[str, Any]) -> None:
    """The matrix products of as many decode steps as `ours` takes, with all rows alive."""
    model, prompts, longest, *_ = setup(options)
    rows = len(prompts) * shared.SIBLINGS
    weights = [module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name]
    weights.append(model.get_output_embeddings().weight)  # type: ignore[operator]
    inputs = {size: torch.randn(rows, size) for size in {weight.shape[1] for weight in weights}}
    tokens = 0
    while turns.boundary(tokens=tokens):
        for _ in range(longest):
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
        tokens = rows * longest


def run(bench: Bench) -> None:
    """Every shape against `generate`; those of equal lengths against the chain too."""
    for prompts in (16, 64):
        for mixed in (False, True):
            what = "mixed lengths up to 64" if mixed else "24 new tokens each"
            conditions = f"1.4M parameters, prompts of 37 tokens, temperature 1, {what}, float32"
            name = f"sampler, tiny, {prompts} x {shared.SIBLINGS}, {'mixed' if mixed else 'equal'} lengths"
            measure(bench, name, {"model": "tiny", "prompts": prompts, "mixed": mixed}, (6.0 if mixed else 3.0, 0.5), conditions)


def measure(bench: Bench, name: str, options: Mapping[str, Any], bars: tuple[float, float], conditions: str) -> None:
    """One shape."""
    sides = {"ours": Side("sampler", "ours", options), "generate": Side("sampler", "generate", options)}
    mixed = options.get("mixed", False)
    if not mixed:
        sides["chain"] = Side("sampler", "chain", options)
    found = bench.rounds(sides)
    check(found, mixed)
    bench.compare(
        name, found["ours"], found["generate"], bar=bars[0], conditions=conditions, per="tokens", peer_name="transformers.generate"
    )
    if not mixed:
        bench.compare(
            f"{name}, share of the products' rate", found["ours"], found["chain"], bar=bars[1], conditions=conditions, per="tokens",
            peer_name="bare matrix products",
        )  # fmt: skip


def check(found: Mapping[str, Sequence[Measure]], mixed: bool) -> None:
    """As many tokens on both sides; with mixed lengths, which either side draws, about as many."""
    tokens = {name: sum(m.facts["tokens"] for m in side) / len(side) for name, side in found.items()}
    for name in found:
        same(f"tokens per piece of {name}", tokens["ours"], tokens[name], tolerance=0.12 * tokens["ours"] if mixed else 0.0)
    assert all(rates(side, "tokens") for side in found.values())
