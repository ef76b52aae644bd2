"""Workers in threads and in processes: weights before work, errors with their job, a quick end."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
from async_world import Scripted, source

from posttrain.core.errors import PosttrainError
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import StopReason
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import NotDelivered
from posttrain.engine.types import Request
from posttrain.engine.weights import PlainWeights, model_digests
from posttrain.rollout.asynchronous.build import ProvenHand, frozen_copy
from posttrain.rollout.asynchronous.flow import Flow
from posttrain.rollout.asynchronous.remote import ProcessLost, RemoteReceiver, Station, process_receiver
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.asynchronous.workers import Crew, WorkerFailed


def crew_of(*hands: Scripted, **changes) -> Crew:
    settings = Async(**({"bound": 1, "chunk": 4, "workers": len(hands)} | changes))
    return Crew(Flow(source(), settings, settings.ahead(1)), hands)


def begin(crew: Crew, jobs: int = 3) -> None:
    crew.open(0, 0, "weights 0")
    with crew.changing():
        crew.flow.issue(0, jobs, 0)


def test_nothing_is_drawn_before_weights_are_there_and_new_ones_are_taken_between_chunks():
    seen = threading.Event()

    def wait(requests):
        seen.set()
        time.sleep(0.01)

    hand = Scripted(wait)
    crew = crew_of(hand)
    try:
        with crew.changing():
            crew.flow.issue(0, 3, 0)
        time.sleep(0.02)
        assert not seen.is_set()
        crew.open(0, 0, "weights 0")
        with crew.changing():
            pass
        assert seen.wait(5)
        crew.open(1, 1, "weights 1")  # in the middle of the first chunk
        jobs = crew.take(3)
    finally:
        crew.close()
    assert hand.delivered == [("weights 0", 0), ("weights 1", 1)]
    assert hand.closed
    assert any(set(row.versions) == {0, 1} for job in jobs for row in job.rows)


@pytest.mark.parametrize(("error", "kind", "message"), [
    (ValueError("odd"), RuntimeError, r"worker 0 failed at job\(s\) 0, 1, 2 \(task\(s\) .*\): ValueError: odd"),
    (PosttrainError("no room"), WorkerFailed, r"worker 0 failed at job\(s\) 0, 1, 2 \(task\(s\) .*\): no room"),
])  # fmt: skip
def test_an_error_ends_the_wait_and_names_the_jobs(error, kind, message):
    def fail(requests):
        raise error

    crew = crew_of(Scripted(fail))
    try:
        begin(crew)
        with pytest.raises(kind, match=message) as caught:
            crew.take(3)
        assert caught.value.__cause__ is error
    finally:
        crew.close()


def test_a_crew_ends_while_its_workers_are_at_it():
    crew = crew_of(Scripted(lambda requests: time.sleep(0.2)), Scripted(lambda requests: time.sleep(0.2)))
    before = threading.active_count()
    begin(crew)
    time.sleep(0.02)
    started = time.monotonic()
    crew.close()
    assert time.monotonic() - started < 2
    assert threading.active_count() == before - 2


def test_ctrl_c_reaches_a_trainer_that_waits():
    """The second Ctrl-C raises at once; a wait that swallowed it would hang the run."""
    crew = crew_of(Scripted(lambda requests: time.sleep(0.3)))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background ignores the signal
    try:
        begin(crew)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            crew.take(3)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
        crew.close()


# --- samplers elsewhere ----------------------------------------------------------------------------------------------------------------


def make(toy):
    return partial(CopySampler, toy.model(265), toy.renderer.stop_ids, toy.renderer.special_ids)


def request(**changes) -> Request:
    return Request(**({"prompt": (1, 70, 71), "sampling": Sampling(max_tokens=6), "seed": 3} | changes))


def same_as_here(remote: RemoteReceiver, toy) -> None:
    """Weights arrive, draws are those of a sampler in this process, errors come back, partial completions go on."""
    model, here = toy.model(265, seed=5), make(toy)()
    with pytest.raises(NotDelivered):
        remote.generate([request()])
    for receiver in (here, remote):
        receiver.receive(PlainWeights(model), 7)
    assert remote.version == 7
    assert dict(remote.digests()) == model_digests(model)
    (whole,) = remote.generate([request()])
    assert [whole] == here.generate([request()])
    (part,) = remote.generate([request(limit=2)])
    assert (part.ids, part.stop, part.version) == (whole.ids[:2], StopReason.PAUSED, 7)
    assert remote.logps((1, 70), (71, 72)) == pytest.approx(here.logps((1, 70), (71, 72)), abs=1e-6)
    with pytest.raises(NotDelivered, match="no place for 'strange'"):
        remote.receive({"strange": torch.zeros(2)}, 8)


def test_a_station_is_the_sampler_by_name(toy):
    import pickle

    station = Station(pickle.dumps(make(toy)))
    same_as_here(RemoteReceiver(station.do, lambda: None), toy)


@pytest.mark.slow
def test_a_sampler_in_a_process_is_the_one_here_and_its_death_is_named(toy):
    receiver = process_receiver(make(toy))
    try:
        same_as_here(receiver, toy)
        pid = receiver.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessLost, match=r"ended with code -9 .*; resume the run"):
            receiver.generate([request()])
    finally:
        receiver.close()


def test_a_hand_refuses_weights_that_did_not_arrive(toy):
    deaf = make(toy)()
    canary = ((1, 70), (71, 72, 73))
    hand = ProvenHand(deaf, canary)
    hand.deliver(frozen_copy(toy.model(265, seed=1)), 0)
    deaf.receive = lambda weights, version: setattr(deaf, "version", version)  # type: ignore[method-assign]
    with pytest.raises(NotDelivered, match=r"version 1 did not arrive: \d+ of \d+ tensors differ"):
        hand.deliver(frozen_copy(toy.model(265, seed=2)), 1)
    with pytest.raises(NotDelivered):
        hand.generate([request()])


def test_a_frozen_copy_does_not_follow_the_trainer(toy):
    model = toy.model()
    frozen = model.get_parameter("model.norm.weight").requires_grad_(False)
    copied = frozen_copy(model)
    before = toy.weights(copied)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert torch.equal(toy.weights(copied), before)
    assert copied.get_parameter("model.norm.weight") is frozen
