"""The client of completion servers refuses what it cannot train on, and gives up in time. The contract itself is in test_samplers.py."""

from __future__ import annotations

import sys
import time

import pytest
from completion_server import Server, serving
from sampler_contract import CONTROL, PROMPTS, STOP, llama

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.completions_server import CompletionsSampler, ServerError, ServerOptions, ServerTimeout
from posttrain.engine.types import Request

QUICK = ServerOptions(alternatives=64, pause=0.01, timeout=5.0, attempts=3)
ASKED = [Request(PROMPTS[i % 4], Sampling(max_tokens=4), i) for i in range(6)]


@pytest.fixture(scope="module")
def shared():
    with serving(llama()) as server:
        yield server


@pytest.fixture
def server(shared: Server):
    """A server that behaves, whatever the test before ordered."""
    fresh = Server(shared.model, url=shared.url)
    shared.__dict__.update({name: value for name, value in vars(fresh).items() if name not in ("lock", "busy")})
    return shared


@pytest.fixture
def client(server: Server):
    sampler = CompletionsSampler(server.url, "toy", STOP, CONTROL, QUICK)
    yield sampler
    sampler.close()


def test_another_model_is_refused(server):
    with pytest.raises(ServerError, match=r"serves \['toy'\], not 'base'; name one"):
        CompletionsSampler(server.url, "base", STOP, CONTROL, QUICK)


def test_a_server_without_token_ids_is_refused(server):
    server.ids = server.token_strings = False
    with pytest.raises(ServerError, match="no token ids; use a server that knows return_token_ids"):
        CompletionsSampler(server.url, "toy", STOP, CONTROL, QUICK)


def test_token_ids_may_stand_in_place_of_text(server, client):
    expected = client.generate(ASKED)
    server.ids = False
    assert client.generate(ASKED) == expected


def test_a_server_without_log_probabilities_is_refused(server):
    server.logprobs = "none"
    with pytest.raises(ServerError, match="no log-probabilities"):
        CompletionsSampler(server.url, "toy", STOP, CONTROL, QUICK)


def test_log_probabilities_before_temperature_are_refused(server):
    server.logprobs = "raw"
    with pytest.raises(ServerError, match="do not follow the temperature; start vLLM with --logprobs-mode processed_logprobs"):
        CompletionsSampler(server.url, "toy", STOP, CONTROL, QUICK)


def test_log_probabilities_before_the_cut_serve_uncut_draws_only(server):
    server.logprobs = "uncut"
    sampler = CompletionsSampler(server.url, "toy", STOP, CONTROL, QUICK)
    assert len(sampler.generate(ASKED)) == 6
    for cut in (Sampling(top_k=5, max_tokens=4), Sampling(top_p=0.9, max_tokens=4), Sampling(min_p=0.1, max_tokens=4)):
        with pytest.raises(ServerError, match="before top-k and top-p"):
            sampler.generate([*ASKED, Request(PROMPTS[0], cut, 1)])
    assert sampler.generate([Request(PROMPTS[0], Sampling(temperature=0.0, top_k=5, max_tokens=4), 1)])[0].candidates == ()
    sampler.close()


def test_a_cut_that_leaves_more_than_the_server_lists_is_refused(server):
    server.alternatives = 6
    sampler = CompletionsSampler(server.url, "toy", STOP, CONTROL, ServerOptions(alternatives=6))
    (done,) = sampler.generate([Request(PROMPTS[0], Sampling(top_k=6, max_tokens=4), 1)])
    assert {len(kept) for kept in done.candidates} == {6}
    with pytest.raises(ServerError, match="lists 6 alternatives per token and .* leaves more; start vLLM with a larger --max-logprobs"):
        sampler.generate([Request(PROMPTS[0], Sampling(top_p=0.99, max_tokens=4), 1)])
    with pytest.raises(ConfigError, match="top_k 7 needs 7 alternatives per token, the server gives 6"):
        sampler.generate([Request(PROMPTS[0], Sampling(top_k=7, max_tokens=4), 1)])
    sampler.close()


def test_alternatives_by_text_cannot_tell_what_a_cut_left(server, client):
    server.token_strings = False
    assert len(client.generate(ASKED)) == 6
    with pytest.raises(ServerError, match="leaves more"):
        client.generate([Request(PROMPTS[0], Sampling(top_k=5, max_tokens=4), 1)])


def test_nothing_is_left_to_the_defaults_of_the_server(server, client):
    client.generate([Request((1, 5, 9), Sampling(max_tokens=4), 77, drawn=(20,), limit=2)])
    body = server.bodies[-1]
    assert (body["prompt"], body["max_tokens"], body["stop_token_ids"]) == ([1, 5, 9, 20], 2, [0, 1, 2, 3])
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert neutral | {"frequency_penalty": 0.0, "ignore_eos": True} == {
        name: body[name] for name in (*neutral, "frequency_penalty", "ignore_eos")
    }


def test_requests_are_in_flight_together_and_answered_in_order(server, client):
    expected = client.generate(ASKED)
    server.bodies.clear()
    server.slow_first, server.delay, server.most_busy = True, 0.02, 0
    assert client.generate(ASKED) == expected
    assert server.most_busy == len(ASKED)


def test_concurrency_is_bounded(server):
    sampler = CompletionsSampler(server.url, "toy", STOP, CONTROL, ServerOptions(alternatives=64, concurrency=2))
    server.delay = 0.01
    server.most_busy = 0
    sampler.generate(ASKED)
    assert server.most_busy == 2
    sampler.close()


@pytest.mark.parametrize("failure", [0, 429, 500, 503])
def test_a_passing_failure_is_tried_again(server, client, failure):
    expected = client.generate(ASKED)
    server.failures = [failure, failure]
    assert client.generate(ASKED[:1]) == expected[:1]


@pytest.mark.parametrize(("failure", "said"), [(0, "RemoteProtocolError"), (503, "status 503: .*ordered.*to fail")])
def test_a_lasting_failure_is_named(server, client, failure, said):
    server.failures = [failure] * 3
    with pytest.raises(ServerError, match=rf"completions failed 3 times, last: .*{said}") as caught:
        client.generate(ASKED[:1])
    assert "\n" not in str(caught.value)
    assert server.failures == []


def test_a_refusal_is_not_repeated(server, client):
    server.failures = [400, 400]
    with pytest.raises(ServerError, match="refused the request: status 400"):
        client.generate(ASKED[:1])
    assert server.failures == [400]


def test_one_failure_ends_the_call(server, client):
    server.failures, server.delay = [400], 0.01
    with pytest.raises(ServerError, match="status 400"):
        client.generate(ASKED * 20)
    assert len(server.bodies) < 100  # what had not been sent is not sent any more
    server.bodies.clear()
    time.sleep(0.05)
    assert server.bodies == []  # nothing is still being asked
    assert len(client.generate(ASKED)) == 6


def test_a_server_that_hangs_is_given_up(server):
    sampler = CompletionsSampler(server.url, "toy", STOP, CONTROL, ServerOptions(alternatives=64, timeout=0.3, attempts=2, pause=0.01))
    server.delay = 1.0
    started = time.monotonic()
    with pytest.raises(ServerTimeout, match=r"failed 2 times, last: no answer in 0\.3 s"):
        sampler.generate(ASKED[:1])
    assert time.monotonic() - started < 5.0
    sampler.close()


def test_no_server(server):
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9/v1/models failed 2 times, last: ConnectError"):
        CompletionsSampler("http://127.0.0.1:9/v1", "toy", STOP, CONTROL, ServerOptions(attempts=2, pause=0.01))


def test_a_wrong_address(server):
    server.models = lambda: ["no", "object"]
    with pytest.raises(ServerError, match="a list where an object was expected; check the address"):
        CompletionsSampler(server.url, "toy", STOP, CONTROL, QUICK)
    del server.models


def test_more_tokens_than_the_server_holds(server, client):
    with pytest.raises(ConfigError, match="need 131 tokens, the engine holds 128"):
        client.generate([Request((1, 5, 9), Sampling(max_tokens=128), 1)])


def test_httpx_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"pip install 'posttrain\[server\]'"):
        CompletionsSampler("http://127.0.0.1:9/v1", "toy", STOP, CONTROL, QUICK)
