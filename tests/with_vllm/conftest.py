"""Fixtures of the tests that run inside vLLM's environment: `make test-vllm`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))

from sampler_contract import CONTROL, STOP, Case, forward_of, llama  # noqa: E402

from posttrain.engine.vllm_sampler import VllmSampler  # noqa: E402

torch.set_num_threads(1)
TOLERANCE = 1e-4
"""Of a single log-probability: vLLM's kernels add in another order than torch's."""
MISLEADING = {"top_k": 3, "repetition_penalty": 1.5, "temperature": 0.4, "eos_token_id": 40}
"""Defaults of the model that must not reach a request."""


def report(name: str, seconds: float, gaps: Sequence[float]) -> None:
    """One line about a sampler, when its tests are over."""
    mean, most = sum(gaps) / max(1, len(gaps)), max(gaps, default=0.0)
    sys.stderr.write(
        f"\n{name}: up in {seconds:.1f} s; log-probabilities of {len(gaps)} sampled tokens differ by {mean:.1e}, at most {most:.1e}\n"
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract's model, saved with generation defaults that would change every distribution."""
    path = tmp_path_factory.mktemp("vllm") / "model"
    llama().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(MISLEADING))
    return path


@pytest.fixture(scope="session")
def vllm_case(folder: Path) -> Iterator[Case]:
    """vLLM in this process, with cache blocks short enough for the contract's prompts to share some."""
    started = time.perf_counter()
    sampler = VllmSampler(folder, STOP, CONTROL, context=128, options={"block_size": 32})
    case = Case(sampler, forward_of(llama()), TOLERANCE, splits=False)
    seconds = time.perf_counter() - started
    yield case
    report("vllm in process", seconds, case.gaps)
    sampler.close()
