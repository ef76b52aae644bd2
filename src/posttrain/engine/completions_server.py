"""Sampling from any OpenAI-compatible completion server that returns token ids and log-probabilities, such as vLLM's.

A server has defaults of its own (vLLM reads top-k, top-p and penalties from the model's generation_config.json), so every one that
would change the distribution is sent with every request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.replies import EngineError, call_seed, check, completion, kept, wants_candidates
from posttrain.engine.types import Completion, Request

TOKEN = "token_id:"
"""How vLLM writes a token in place of its text, when asked to."""
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
PROBED = 5
"""Alternatives that the probes at the start compare."""
FLAT = 1e-3
"""Two alternatives closer than this (nats) say nothing about the temperature."""
SAME = 0.02
"""Relative difference up to which two gaps between log-probabilities count as equal; servers may compute in 16 bits."""


class ServerError(EngineError):
    """A completion server that is not there, serves something else, or leaves out what training needs."""


class ServerTimeout(ServerError):
    """A completion server that did not answer in time, however often it was asked."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to talk to a server. Example: ServerOptions(timeout=60, alternatives=50) for `vllm serve --max-logprobs 50`."""

    timeout: float = 600.0
    """Seconds until one attempt is given up."""
    attempts: int = 4
    """Tries per request, the first included; the seed makes a repeated request harmless."""
    pause: float = 0.5
    """Seconds before the second attempt; doubles with each."""
    concurrency: int = 32
    """Requests in flight; the server batches them."""
    alternatives: int = 20
    """Most log-probabilities per token that the server returns: vLLM's --max-logprobs. A cut that leaves more tokens is refused."""
    key: str = ""
    """Sent as bearer token."""


class CompletionsSampler:
    """Draws through POST {url}/completions. Weights are the server's own: `version` is what the caller says they are.

    The start is refused, with the remedy, when the server is not there, serves another model, returns no token ids or no
    log-probabilities, or log-probabilities before temperature (seen from two alternatives whose distance must double from temperature 1
    to 0.5; a server that lists no alternatives cannot be told apart). vLLM needs `--logprobs-mode processed_logprobs`, and on a CPU
    `--no-enable-chunked-prefill`: seeded requests whose prompts it reads in parts end its engine there.

    A completion continued in a second call is reproducible, but not the one that a single call draws: see `engine/replies.py`.

    Args:
        url: with the version path, e.g. "http://127.0.0.1:8000/v1".
        model: name under which the server offers it.
        stop_ids: tokens with which the assistant closes its turn.
        control_ids: every control token; drawing one that is no stop token also ends the completion, as StopReason.CONTROL.
        options: timeouts, attempts, concurrency.

    Raises:
        ConfigError: httpx is not installed.
        ServerError: as said above.
    """

    def __init__(self, url: str, model: str, stop_ids: frozenset[int], control_ids: frozenset[int], options: ServerOptions | None = None):
        self.url, self.model, self.ends, self.version = url.rstrip("/"), model, (stop_ids, control_ids), 0
        self.options = options or ServerOptions()
        headers = {"Authorization": f"Bearer {self.options.key}"} if self.options.key else {}
        self._http = _httpx()
        limits = self._http.Limits(max_connections=self.options.concurrency)
        self._client = self._http.Client(headers=headers, timeout=self.options.timeout, limits=limits)
        with ExitStack() as failed:
            failed.callback(self.close)
            self.context = self._find_model()
            self.proves_cuts = self._probe()
            failed.pop_all()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """See Sampler. Requests are sent `concurrency` at a time.

        Raises:
            ServerError: an attempt too many, a refusal, or an answer that no completion can be made of.
        """
        check(requests, self.context)
        self._check_cuts(requests)
        version = self.version
        results: dict[int, Completion] = {}
        pool = ThreadPoolExecutor(max(1, min(self.options.concurrency, len(requests))))
        try:
            asked = {pool.submit(self._one, request, version): place for place, request in enumerate(requests)}
            for future in as_completed(asked):
                results[asked[future]] = future.result()
                if progress:
                    progress(1)
        finally:
            pool.shutdown(cancel_futures=True)
        return [results[place] for place in range(len(requests))]

    def _check_cuts(self, requests: Sequence[Request]) -> None:
        """Whether the server can say what top-k, top-p and min-p left."""
        cut = [request.sampling for request in requests if wants_candidates(request)]
        if cut and not self.proves_cuts:
            raise ServerError(
                f"{self.url} returns log-probabilities before top-k and top-p; sample without them or use vLLM with {PROCESSED}"
            )
        widest = max((sampling.top_k for sampling in cut), default=0)
        if widest > self.options.alternatives:
            raise ConfigError(
                f"top_k {widest} needs {widest} alternatives per token, the server gives {self.options.alternatives}; {WIDEN}"
            )

    def _one(self, request: Request, version: int) -> Completion:
        wide = wants_candidates(request)
        most = self.options.alternatives
        listed = min(most, request.sampling.top_k + 1) if request.sampling.top_k else most
        answer = _parse(self.url, self._complete(request, listed if wide else 1))
        candidates = [kept(alternatives) for alternatives in answer.alternatives] if wide else []
        found = [candidate for candidate in candidates if candidate is not None]
        if len(found) < len(candidates) or (wide and len(found) != len(answer.ids)):
            raise ServerError(
                f"{self.url} lists {listed} alternatives per token and {request.sampling} leaves more; {WIDEN}, or lower top_k"
            )
        return completion(request, answer.ids, answer.logps, found, version, self.ends)

    def _complete(self, request: Request, listed: int) -> Mapping[str, Any]:
        sampling = request.sampling
        body = {
            "model": self.model,
            "prompt": [*request.prompt, *request.drawn],
            "max_tokens": request.room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": call_seed(request),
            "logprobs": listed,
            "stop_token_ids": sorted(self.ends[0] | self.ends[1]),
            **UNTOUCHED,
        }
        return self._ask("POST", "/completions", body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """JSON of one exchange, tried again while the failure may pass."""
        options, failure = self.options, ""
        timed_out = False
        for attempt in range(options.attempts):
            if attempt:
                time.sleep(options.pause * 2 ** (attempt - 1))
            try:
                reply = self._client.request(method, self.url + path, json=body)
            except self._http.TransportError as error:
                timed_out = isinstance(error, self._http.TimeoutException)
                failure = f"no answer in {options.timeout:g} s" if timed_out else f"{type(error).__name__}: {error}"
                continue
            if reply.status_code == 200:
                return _json(self.url + path, reply)
            timed_out, failure = False, f"status {reply.status_code}: {_one_line(reply.text)}"
            if reply.status_code not in RETRIED:
                raise ServerError(f"{self.url}{path} refused the request: {failure}; check model name, context length and key")
        error = ServerTimeout if timed_out else ServerError
        raise error(
            f"{self.url}{path} failed {options.attempts} times, last: {failure}; check that the server runs, or raise timeout and attempts"
        )

    def _find_model(self) -> int | None:
        """Context length of the model, if the server tells."""
        listed = self._ask("GET", "/models").get("data")
        models = {entry.get("id"): entry for entry in listed if isinstance(entry, dict)} if isinstance(listed, list) else {}
        if self.model not in models:
            raise ServerError(
                f"{self.url} serves {sorted(map(str, models))}, not '{self.model}'; name one of those or start the server with it"
            )
        context = models[self.model].get("max_model_len")
        return context if isinstance(context, int) else None

    def _probe(self) -> bool:
        """Whether log-probabilities are those after top-k. Raises when they are those before temperature, or are missing."""
        start = min(self.ends[0] | self.ends[1], default=0)
        width = min(PROBED, self.options.alternatives)
        plain, cold, single = (
            _parse(self.url, self._complete(Request((start,), sampling, 0), width))
            for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=0.5), Sampling(max_tokens=1, top_k=1))
        )
        if plain.alternatives and cold.alternatives:
            one, half = _gaps(plain.alternatives[0], cold.alternatives[0])
            if one > FLAT and abs(half - 2 * one) > SAME * one:
                raise ServerError(f"{self.url} returns log-probabilities that do not follow the temperature; start vLLM with {PROCESSED}")
        return single.logps[0] > -FLAT


UNTOUCHED: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "stream": False,
    "n": 1,
}
"""Sent with every request: no penalty, no ending but ours, and tokens as ids."""
PROCESSED = "--logprobs-mode processed_logprobs"
WIDEN = "start vLLM with a larger --max-logprobs and set alternatives to it"


@dataclass(frozen=True, slots=True)
class _Answer:
    ids: tuple[int, ...]
    logps: tuple[float, ...]
    alternatives: tuple[Mapping[int, float], ...]
    """Listed log-probabilities by id, for each token; empty when the server lists none, or by text only."""


def _parse(url: str, data: Mapping[str, Any]) -> _Answer:
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    scores = choice.get("logprobs") or {}
    ids, logps = choice.get("token_ids"), scores.get("token_logprobs")
    if ids is None:
        ids = [_id(token) for token in scores.get("tokens") or ()]
    if not ids or not all(isinstance(token, int) for token in ids):
        raise ServerError(f"{url} returned no token ids; use a server that knows return_token_ids, such as vLLM 0.10.2 or later")
    if not logps or not all(isinstance(logp, (int, float)) for logp in logps):
        raise ServerError(f"{url} returned no log-probabilities of the sampled tokens; use a server that honours 'logprobs'")
    listed = [{_id(token): logp for token, logp in (top or {}).items()} for top in scores.get("top_logprobs") or ()]
    by_id = all(alternatives and None not in alternatives for alternatives in listed)
    return _Answer(tuple(ids), tuple(map(float, logps)), tuple(listed) if by_id else ())  # type: ignore[arg-type]


def _id(token: str) -> int | None:
    number = token.removeprefix(TOKEN)
    return int(number) if number != token and number.isdigit() else None


def _gaps(plain: Mapping[int, float], cold: Mapping[int, float]) -> tuple[float, float]:
    """Distance of the two most distant alternatives that both list, in each of them; 0 when fewer than two are common."""
    common = sorted(plain.keys() & cold.keys(), key=lambda token: plain[token])
    return (plain[common[-1]] - plain[common[0]], cold[common[-1]] - cold[common[0]]) if common else (0.0, 0.0)


def _json(where: str, reply: Any) -> Mapping[str, Any]:
    try:
        data = reply.json()
    except ValueError as error:
        raise ServerError(f"{where} answered '{_one_line(reply.text)}', which is no JSON; check the address") from error
    if not isinstance(data, dict):
        raise ServerError(f"{where} answered with a {type(data).__name__} where an object was expected; check the address")
    return data


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("sampling from a server needs httpx; pip install 'posttrain[server]'") from error
    return httpx
