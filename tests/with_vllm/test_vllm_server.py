"""vLLM's own OpenAI server behind the client passes the contract of every sampler."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sampler_contract import CHECKS, CONTROL, STOP, VOCAB, Case, forward_of, llama

from conftest import TOLERANCE, report
from posttrain.engine.completions_server import CompletionsSampler, ServerError, ServerOptions

OPTIONS = ServerOptions(alternatives=VOCAB, timeout=120.0, attempts=2)
STARTS = 280.0
"""Seconds that a server may take to come up."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Address of a server of vLLM that is up; its process group is ended with the block."""
    port, log = free_port(), folder.parent / f"server{len(list(folder.parent.glob('server*')))}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "toy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "128", "--max-logprobs", "-1", "--no-enable-chunked-prefill", *arguments]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "NO_PROXY": "127.0.0.1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        wait(process, port, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + STARTS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no server within {STARTS} s: {log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def server_case(folder: Path) -> Iterator[Case]:
    started = time.perf_counter()
    with serving(folder, "--logprobs-mode", "processed_logprobs") as url:
        sampler = CompletionsSampler(url, "toy", STOP, CONTROL, OPTIONS)
        case = Case(sampler, forward_of(llama()), TOLERANCE, splits=False)
        seconds = time.perf_counter() - started
        yield case
        report("vllm server", seconds, case.gaps)
        sampler.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_server_keeps_the_contract(server_case, check):
    check(server_case)


def test_the_context_is_known(server_case):
    assert server_case.sampler.context == 128


def test_another_model_is_refused(server_case):
    with pytest.raises(ServerError, match=r"serves \['toy'\], not 'base'"):
        CompletionsSampler(server_case.sampler.url, "base", STOP, CONTROL, OPTIONS)


def test_a_server_with_its_own_defaults_is_refused(folder):
    """Without --logprobs-mode vLLM returns log-probabilities before temperature."""
    with serving(folder) as url, pytest.raises(ServerError, match="do not follow the temperature; start vLLM with --logprobs-mode"):
        CompletionsSampler(url, "toy", STOP, CONTROL, OPTIONS)
