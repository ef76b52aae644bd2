"""The contract: no path samples for training without recorded passes of its class's gates, and none is credited with another's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from posttrain.checks.acceleration import (
    ACCELERATIONS,
    Acceleration,
    Kind,
    NotProven,
    Setup,
    Unshared,
    acceleration,
    key_of,
    plain,
    proven_sampler,
    require,
)
from posttrain.checks.gate_distribution import model_scorer
from posttrain.checks.gate_identity import identity_gate, sibling_requests
from posttrain.checks.gates import Gate, GateResult, Store, Verdict
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.sampling import Sampling
from posttrain.engine.draft import first_layers
from posttrain.engine.int8 import Int8Sampler
from posttrain.engine.speculative import SpeculativeSampler

STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})


def setup_of(toy, **options) -> Setup:
    return Setup(options.pop("model", None) or toy.model(), STOP, CONTROL, **options)


def passed(gate: Gate, verdict: Verdict = Verdict.PASSED) -> GateResult:
    return GateResult(gate, verdict, "as measured", {"n": 3})


def record_all(store: Store, name: str, setup: Setup) -> None:
    for gate in ACCELERATIONS[name].gates:
        store.save(key_of(ACCELERATIONS[name], setup), passed(gate), {})


@pytest.mark.parametrize(("kind", "letters"), [(Kind.SAFE, "B"), (Kind.EXACT, "IB"), (Kind.LOSSY, "ABC")])
def test_gates_by_class(kind, letters):
    member = Acceleration("x", 1, kind, "", build=plain, view=lambda setup: setup.model)
    assert "".join(gate.value for gate in member.gates) == letters


def test_a_lossy_path_must_say_what_it_computes_with():
    with pytest.raises(ValueError, match="no view of its model"):
        Acceleration("x", 1, Kind.LOSSY, "", build=plain)


def test_the_shipped_paths():
    assert {name: member.kind.value for name, member in ACCELERATIONS.items()} == {
        "shared_prefill": "exact",
        "int8": "lossy",
        "speculative": "exact",
    }
    assert all(name == member.name for name, member in ACCELERATIONS.items())
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        acceleration("int4")


def test_nothing_measured_is_refused_with_the_remedy(toy, tmp_path):
    with pytest.raises(NotProven, match=r"\(A not measured, B not measured, C not measured\); run: posttrain contract int8 runs/a"):
        require("int8", setup_of(toy), Store(tmp_path), label="runs/a")


@pytest.mark.parametrize("missing", [Gate.DISTRIBUTION, Gate.SPEED, Gate.LEARNING])
@pytest.mark.parametrize("verdict", [None, Verdict.FAILED, Verdict.NOT_SHOWN])
def test_every_gate_of_the_class_must_have_passed(toy, tmp_path, missing, verdict):
    setup, store = setup_of(toy), Store(tmp_path)
    for gate in ACCELERATIONS["int8"].gates:
        if gate is not missing:
            store.save(key_of(ACCELERATIONS["int8"], setup), passed(gate), {})
    if verdict is not None:
        store.save(key_of(ACCELERATIONS["int8"], setup), passed(missing, verdict), {})
    with pytest.raises(NotProven, match=rf"\({missing.value} {verdict or 'not measured'}\)"):
        require("int8", setup, store)
    store.save(key_of(ACCELERATIONS["int8"], setup), passed(missing), {})
    assert require("int8", setup, store).name == "int8"
    assert isinstance(proven_sampler("int8", setup, store), Int8Sampler)


def test_a_pass_that_was_followed_by_a_failure_is_none(toy, tmp_path):
    setup, store = setup_of(toy), Store(tmp_path)
    record_all(store, "int8", setup)
    store.save(key_of(ACCELERATIONS["int8"], setup), passed(Gate.LEARNING, Verdict.FAILED), {})
    with pytest.raises(NotProven):
        require("int8", setup, store)


def test_a_pass_belongs_to_its_path_alone(toy, tmp_path):
    """Other weights, another version, another draft, more proposals per pass, another precision, another acceleration."""
    model, store = toy.model(), Store(tmp_path)
    setup = setup_of(toy, model=model, draft=first_layers(model, 1))
    record_all(store, "speculative", setup)
    assert require("speculative", setup, store)
    with torch.no_grad():
        changed = toy.model()
        changed.model.norm.weight[0] += 1e-6
    others = [
        setup_of(toy, model=changed, draft=setup.draft),
        replace(setup, draft=toy.model(seed=1)),
        replace(setup, ahead=5),
        replace(setup, model=toy.model().double(), draft=toy.model(seed=1).double()),
    ]
    for other in others:
        with pytest.raises(NotProven):
            require("speculative", other, store)
    newer = {"speculative": replace(ACCELERATIONS["speculative"], version=2)}
    with pytest.raises(NotProven):
        require("speculative", setup, store, registry=newer)
    with pytest.raises(NotProven):
        require("shared_prefill", setup, store)


@pytest.mark.parametrize("package", ["posttrain.__version__", "torch.__version__", "transformers.__version__"])
def test_a_pass_belongs_to_its_engine(toy, tmp_path, monkeypatch, package):
    setup, store = setup_of(toy), Store(tmp_path)
    record_all(store, "int8", setup)
    monkeypatch.setattr(package, "0.0.0")
    with pytest.raises(NotProven):
        require("int8", setup, store)


def test_the_kernel_is_part_of_the_path(toy, monkeypatch):
    before = key_of(ACCELERATIONS["int8"], setup_of(toy))
    monkeypatch.setattr("posttrain.checks.acceleration.product_name", lambda: "another_product")
    assert key_of(ACCELERATIONS["int8"], setup_of(toy)).digest != before.digest


def test_the_record_says_what_was_found_and_how_often(toy, tmp_path):
    key, store = key_of(ACCELERATIONS["int8"], setup_of(toy)), Store(tmp_path)
    store.save(key, passed(Gate.SPEED, Verdict.NOT_SHOWN), {"pairs": 5})
    store.save(key, passed(Gate.SPEED, Verdict.FAILED), {"pairs": 5})
    path = store.save(key, passed(Gate.SPEED), {"pairs": 7})
    record = json.loads(path.read_text())
    assert (record["schema"], record["gate"], record["verdict"]) == (1, "B", "passed")
    assert record["earlier"] == ["not shown", "failed"]
    assert record["conditions"] == {"pairs": 7}
    assert record["measured"] == {"n": 3}
    assert record["key"]["quantisation"].startswith("int8")
    assert store.verdict(key, Gate.SPEED) is Verdict.PASSED
    assert store.verdict(key, Gate.LEARNING) is None


@pytest.mark.parametrize("change", [{"schema": 2}, {"gate": "A"}, {"key": {}}])
def test_a_record_that_was_moved_or_altered_is_refused(toy, tmp_path, change):
    key, store = key_of(ACCELERATIONS["int8"], setup_of(toy)), Store(tmp_path)
    path = store.save(key, passed(Gate.SPEED), {})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match="measure again"):
        store.verdict(key, Gate.SPEED)


def test_a_lossy_path_registered_as_exact_is_caught(toy, tmp_path):
    """int8 claims to be exact: gate I finds other ids or log-probabilities, and nobody may use it."""
    registry = {"int8": replace(ACCELERATIONS["int8"], kind=Kind.EXACT)}
    setup, store = setup_of(toy), Store(tmp_path)
    member = registry["int8"]
    requests = sibling_requests([(1, 5, 9), (1, 7)], 4, Sampling(max_tokens=8), 0)
    scorer = model_scorer(setup.model)
    result = identity_gate(member.reference(setup), member.build(setup), scorer, requests, member.same)
    assert result.verdict is Verdict.FAILED
    assert "differ" in result.summary
    store.save(key_of(member, setup), result, {})
    store.save(key_of(member, setup), passed(Gate.SPEED), {})
    with pytest.raises(NotProven, match="I failed"):
        require("int8", setup, store, registry=registry)


def test_speculative_needs_a_draft(toy):
    with pytest.raises(ConfigError, match="needs a draft"):
        key_of(ACCELERATIONS["speculative"], setup_of(toy))
    setup = setup_of(toy, draft=toy.model(seed=1))
    assert isinstance(ACCELERATIONS["speculative"].build(setup), SpeculativeSampler)


def test_the_reference_of_shared_prefill_never_sees_two_siblings_at_once(toy, monkeypatch):
    seen = []

    class Spy:
        def __init__(self, inner):
            self.inner, self.version = inner, 0

        def generate(self, requests, progress=None):
            seen.append([request.prompt for request in requests])
            self.inner.version = self.version
            return self.inner.generate(requests, progress)

    monkeypatch.setattr("posttrain.checks.acceleration.plain", lambda setup: Spy(plain(setup)))
    requests = sibling_requests([(1, 5, 9), (1, 7), (1, 5, 9)], 2, Sampling(max_tokens=4), 0)
    sampler = Unshared(setup_of(toy))
    sampler.version = 3
    done = sampler.generate(requests)
    assert all(len(set(call)) == len(call) for call in seen)
    assert sum(map(len, seen)) == 6
    assert {completion.version for completion in done} == {3}
    assert [c.ids for c in done] == [c.ids for c in plain(setup_of(toy)).generate(requests)]
