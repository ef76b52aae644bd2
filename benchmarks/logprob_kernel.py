"""Time and memory of the sliced log-prob kernel against the path that holds all logits: `python benchmarks/logprob_kernel.py --help`.

Every measurement is one forward and backward pass in a process of its own, so that the peak of one is not hidden by another. The two
paths take turns, and swap places every time. Memory is what the peak resident set (getrusage) grew by, inputs excluded, the gradients
included. Seconds depend on what else the machine does: read them with their spread, and beside the CPU seconds. They also depend on how
dear fresh memory is, because the full path asks for gigabytes of it: the ratio of another machine may be higher or lower.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posttrain.core.sampling import Sampling
from posttrain.objectives.kernel import linear_scores
from posttrain.objectives.logprobs import logps_and_entropy


def full(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, differentiated by autograd."""
    return logps_and_entropy(hidden_NH @ weight_VH.T, targets_N, Sampling())


def sliced(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """A slice of the logits at a time."""
    scores = linear_scores(hidden_NH, weight_VH, targets_N, Sampling())
    return scores.logp_N, scores.entropy_N


PATHS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {"full": full, "sliced": sliced}
HEADS = ("trainable", "frozen")


def inputs(vocab: int, hidden: int, tokens: int, head: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, weight, targets and the gradient that arrives at each log-probability. Logits have standard deviation 3."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.empty(tokens, hidden).normal_(generator=generator).requires_grad_()
    weight_VH = torch.empty(vocab, hidden).normal_(std=3 / hidden**0.5, generator=generator).requires_grad_(head == "trainable")
    return hidden_NH, weight_VH, torch.randint(vocab, (tokens,), generator=generator), torch.randn(tokens, generator=generator)


def peak() -> int:
    """Largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def measure(path: str, vocab: int, hidden: int, tokens: int, head: str) -> dict[str, float]:
    """Seconds and MiB of one forward and backward pass."""
    warm = inputs(64, hidden, 8, "trainable")
    PATHS[path](*warm[:3])[0].backward(warm[3])
    hidden_NH, weight_VH, targets_N, by_logp_N = inputs(vocab, hidden, tokens, head)
    before, wall, cpu = peak(), time.perf_counter(), time.process_time()
    logp_N, _ = PATHS[path](hidden_NH, weight_VH, targets_N)
    logp_N.backward(by_logp_N)
    return {"seconds": time.perf_counter() - wall, "CPU seconds": time.process_time() - cpu, "MiB": peak() - before}


def results(path: str, vocab: int, hidden: int, tokens: int, head: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Values and gradients of one path."""
    hidden_NH, weight_VH, targets_N, by_logp_N = inputs(vocab, hidden, tokens, head)
    hidden_NH, weight_VH = (tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) for tensor in (hidden_NH, weight_VH))
    logp_N, entropy_N = PATHS[path](hidden_NH, weight_VH, targets_N)
    logp_N.backward(by_logp_N.to(dtype))
    found = {"logp": logp_N.detach(), "entropy": entropy_N, "by hidden": hidden_NH.grad, "by weight": weight_VH.grad}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def deviations(vocab: int, hidden: int, tokens: int, head: str) -> dict[str, float]:
    """Largest difference divided by the largest magnitude: between the paths, and of each from the numbers in float64."""
    one, other = (results(path, vocab, hidden, tokens, head, torch.float32) for path in PATHS)
    exact = results("sliced", vocab, hidden, tokens, head, torch.float64)  # the full path would need twice its gigabytes
    found = {}
    for name in one:
        for pair, a, b in (("sliced from full", other, one), ("full from float64", one, exact), ("sliced from float64", other, exact)):
            found[f"{name}, {pair}"] = ((a[name] - b[name]).abs().max() / b[name].abs().max()).item()
    return found


def child(task: str, *arguments: object) -> dict[str, float]:
    """Run one task of this script in a process of its own."""
    command = [sys.executable, __file__, "--task", task, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def line(text: str) -> None:
    """Show a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def compare(vocab: int, hidden: int, tokens: int, repeats: int) -> None:
    """Measure both paths in turn and print what came out."""
    shape = ("--vocab", vocab, "--hidden", hidden, "--tokens", tokens)
    line(f"V={vocab} H={hidden} N={tokens} float32, one thread, n={repeats} of each; median (min..max)")
    for head in HEADS:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS}
        for repeat in range(repeats):
            for name in list(PATHS)[:: -1 if repeat % 2 else 1]:
                runs[name].append(child(name, *shape, "--head", head))
        median = {}
        for name, found in runs.items():
            for key in found[0]:
                values = [run[key] for run in found]
                median[name, key] = statistics.median(values)
                line(f"  head {head:9}  {name:6}  {key:11} {median[name, key]:8.2f} ({min(values):.2f}..{max(values):.2f})")
        ratios = ", ".join(f"{key} {median['sliced', key] / median['full', key]:.3f}" for key in runs["full"][0])
        line(f"  head {head:9}  sliced / full: {ratios}")
        for name, value in child("deviations", *shape, "--head", head).items():
            line(f"  head {head:9}  largest deviation / largest magnitude: {name}: {value:.1e}")


def run(bench: Any) -> None:
    """As a member of harness.py: the vocabulary and width of SmolLM2-135M."""
    shape = ("--vocab", 49_152, "--hidden", 576, "--tokens", 2048)
    for head in HEADS:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS}
        for repeat in range(bench.repeats):
            for name in list(PATHS)[:: -1 if repeat % 2 else 1]:
                runs[name].append(child(name, *shape, "--head", head))
        for key, unit in (("seconds", "s"), ("MiB", "MiB")):
            sides = [[found[key] for found in runs[name]] for name in ("sliced", "full")]
            bench.add(
                f"log-prob kernel, {head} head: {key}", *sides, unit=unit, higher=False, bar=None, peer_name="all logits at once",
                conditions="vocabulary 49,152, width 576, 2,048 tokens, float32, forward and backward, a process per pass",
            )  # fmt: skip


def main() -> None:
    """Parse the command line; `--task` is for the script's own child processes."""
    parser = argparse.ArgumentParser(description="Log-prob kernel against the full logits.")
    for name, default in (("--vocab", 151_936), ("--hidden", 1024), ("--tokens", 2048), ("--repeats", 5)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--head", choices=HEADS, default="trainable", help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=[*PATHS, "deviations"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (options.vocab, options.hidden, options.tokens)
    if options.task == "deviations":
        line(json.dumps(deviations(*shape, options.head)))
    elif options.task:
        line(json.dumps(measure(options.task, *shape, options.head)))
    else:
        compare(*shape, options.repeats)


if __name__ == "__main__":
    main()
