"""A completion server in a thread: LocalSampler behind /v1/completions, in the format of vLLM, with faults to order."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from sampler_contract import distribution, forward_of
from transformers import PreTrainedModel

from posttrain.core.sampling import Sampling
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Completion, Request

TOKEN = "token_id:"


@dataclass
class Server:
    """What the server does, and what it saw. The switches are read at every request."""

    model: PreTrainedModel
    name: str = "toy"
    url: str = ""
    alternatives: int = 64
    """Most log-probabilities per token; more are refused."""
    ids: bool = True
    """Whether it returns token ids."""
    token_strings: bool = True
    """Whether it writes tokens as ids instead of text."""
    logprobs: str = "processed"
    """Or "raw" (before temperature), "uncut" (before top-k), or "none"."""
    failures: list[int] = field(default_factory=list)
    """Statuses to answer with before it works; 0 closes the connection without an answer."""
    delay: float = 0.0
    """Seconds before each completion."""
    context: int | None = 128
    bodies: list[dict[str, Any]] = field(default_factory=list)
    busy: int = 0
    """Requests being answered now."""
    most_busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    slow_first: bool = False
    """Answer early requests last, so that the order of answers is not that of requests."""

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.name, "object": "model", "max_model_len": self.context}]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
            min_p=body["min_p"],
            max_tokens=body["max_tokens"],
        )
        request = Request(tuple(body["prompt"]), sampling, body["seed"])
        with self.lock:
            self.bodies.append(body)
            number = len(self.bodies)
            (done,) = LocalSampler(self.model, frozenset(body["stop_token_ids"]), frozenset()).generate([request])
            scores = self._scores(request, done, min(body["logprobs"], self.alternatives))
        time.sleep(self.delay + (0.05 / number if self.slow_first else 0.0))
        ended = done.ids[-1] in body["stop_token_ids"]
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "stop" if ended else "length", "logprobs": scores}
        if self.ids:
            choice |= {"token_ids": list(done.ids), "prompt_token_ids": list(request.prompt)}
        return {"object": "text_completion", "model": self.name, "choices": [choice]}

    def _scores(self, request: Request, done: Completion, listed: int) -> dict[str, Any] | None:
        if self.logprobs == "none":
            return None
        seen = {"raw": Sampling(), "uncut": Sampling(temperature=request.sampling.temperature)}.get(self.logprobs, request.sampling)
        logits = forward_of(self.model)([*request.prompt, *done.ids])[len(request.prompt) - 1 : -1]
        logp_TV = torch.stack([distribution(logits_V, seen) for logits_V in logits]).clamp(min=-9999.0)
        name = (TOKEN if self.token_strings else "text ") + "{}"
        tops = []
        for token, logp_V in zip(done.ids, logp_TV, strict=True):
            ranked = logp_V.topk(listed).indices.tolist()
            tops.append({name.format(other): float(logp_V[other]) for other in [token, *ranked]})
        sampled = [float(logp_V[token]) for token, logp_V in zip(done.ids, logp_TV, strict=True)]
        return {"tokens": [name.format(token) for token in done.ids], "token_logprobs": sampled, "top_logprobs": tops}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def do_GET(self) -> None:
        self._send(200, self.server.behaviour.models())

    def do_POST(self) -> None:
        behaviour = self.server.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with behaviour.lock:
            failure = behaviour.failures.pop(0) if behaviour.failures else None
            behaviour.busy += 1
            behaviour.most_busy = max(behaviour.most_busy, behaviour.busy)
        try:
            if failure == 0:
                self.close_connection = True
            elif failure is not None:
                self._send(failure, {"error": {"message": "ordered\nto fail"}})
            elif body["model"] != behaviour.name:
                self._send(404, {"error": {"message": "no such model"}})
            else:
                self._send(200, behaviour.complete(body))
        finally:
            with behaviour.lock:
                behaviour.busy -= 1

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):  # the client gave up waiting, as a test wants it to
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Quiet."""


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    behaviour: Server


@contextmanager
def serving(model: PreTrainedModel, **switches: Any) -> Iterator[Server]:
    """A server on a free port of this machine, until the block ends."""
    http = _Http(("127.0.0.1", 0), _Handler)
    http.behaviour = Server(model, url=f"http://127.0.0.1:{http.server_address[1]}/v1", **switches)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield http.behaviour
    finally:
        http.shutdown()
        http.server_close()
        thread.join(timeout=10)
