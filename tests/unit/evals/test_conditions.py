"""Conditions: no field can be left out, empty or of the wrong type; differences are named one by one."""

import json
import math
from dataclasses import fields, replace

import pytest
from eval_records import STATED, conditions, record
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.evals.conditions import Conditions, differences
from posttrain.evals.record import EvalRecord, Role, role_of

TEXTS = [name for name, value in STATED.items() if isinstance(value, str) and name != "thinking"]
COUNTS = [name for name, value in STATED.items() if isinstance(value, int)]
JUNK = st.one_of(st.none(), st.booleans(), st.floats(), st.lists(st.integers()), st.just(""), st.just(" \n"), st.binary())


@pytest.mark.parametrize("name", [field.name for field in fields(Conditions)])
def test_no_field_can_be_left_out(name):
    with pytest.raises(TypeError, match=name):
        Conditions(**{key: value for key, value in STATED.items() if key != name})


@given(name=st.sampled_from(TEXTS), value=st.one_of(JUNK, st.integers()))
def test_no_text_can_be_empty_or_something_else(name, value):
    with pytest.raises(EvidenceError, match=f"does not state its {name}"):
        conditions(**{name: value})


@given(name=st.sampled_from(COUNTS), value=st.one_of(JUNK, st.text(), st.integers(max_value=-1)))
def test_no_count_can_be_negative_or_something_else(name, value):
    with pytest.raises(EvidenceError, match=f"{name} is .*whole number"):
        conditions(**{name: value})


@given(value=st.one_of(JUNK, st.text(), st.integers(), st.dictionaries(st.text(), st.integers())))
def test_no_sampling_can_be_something_else(value):
    with pytest.raises(EvidenceError, match="does not state its sampling"):
        conditions(sampling=value)


@given(
    value=st.one_of(JUNK.filter(lambda junk: not isinstance(junk, list)), st.text().filter(lambda text: text not in ("on", "off", "none")))
)
def test_thinking_is_on_off_or_none(value):
    with pytest.raises(EvidenceError, match="thinking is"):
        conditions(thinking=value)


@given(
    path=st.sampled_from([(), ("conditions",), ("conditions", "sampling"), ("summary",)]),
    which=st.integers(min_value=0, max_value=40),
)
def test_no_field_can_be_missing_from_a_file(path, which):
    data = json.loads(json.dumps(record([["right"], ["wrong"]]).to_json()))
    inside = data
    for key in path:
        inside = inside[key]
    names = sorted(inside)
    del inside[names[which % len(names)]]
    with pytest.raises(EvidenceError) as raised:
        EvalRecord.from_json(data)
    assert "\n" not in str(raised.value)


@given(
    path=st.sampled_from([(), ("conditions",), ("conditions", "sampling"), ("summary",), ("items", 0), ("items", 0, "outcomes", 0)]),
    which=st.integers(min_value=0, max_value=40),
    value=st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.integers(min_value=10**9), st.text()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
        max_leaves=5,
    ),
)
def test_a_changed_file_is_refused_in_one_line_or_reads_the_same(path, which, value):
    """Anything put in the place of a field either is the same value, another valid name, or is refused without a traceback."""
    data = json.loads(json.dumps(record([["right"], ["wrong"]]).to_json()))
    inside = data
    for key in path:
        inside = inside[key]
    keys = sorted(inside) if isinstance(inside, dict) else list(range(len(inside)))
    inside[keys[which % len(keys)]] = value
    try:
        made = EvalRecord.from_json(data)
    except EvidenceError:
        return
    again = json.loads(json.dumps(made.to_json()))
    assert EvalRecord.from_json(again) == made
    assert again["items"] == data["items"]
    assert (made.conditions.n_items, made.pass_at_1) == (2, 0.5)


def test_json_states_the_decoding_mode():
    assert conditions().to_json()["sampling"]["mode"] == "sampled"
    assert conditions(sampling=Sampling(temperature=0.0)).mode == "greedy"
    data = record([["right"], ["wrong"]]).to_json()
    data["conditions"]["sampling"]["mode"] = "greedy"
    with pytest.raises(EvidenceError, match="decoding mode says 'greedy', but temperature 1 is sampled"):
        EvalRecord.from_json(data)


def test_every_difference_is_named():
    a = conditions()
    assert differences(a, a) == []
    b = replace(a, verifier="g/2", sampling=Sampling(max_tokens=64, temperature=0.5), seed=3)
    found = {difference.name: (difference.a, difference.b) for difference in differences(a, b)}
    assert found == {"verifier": ("g/1", "g/2"), "sampling.temperature": (1.0, 0.5), "sampling.max_tokens": (9, 64), "seed": (0, 3)}
    assert [str(d) for d in differences(a, b, ignore=frozenset({"seed", "sampling.temperature", "verifier"}))] == [
        "sampling.max_tokens is 9 against 64"
    ]


@pytest.mark.parametrize("name", [*TEXTS, *COUNTS, "sampling", "thinking"])
def test_every_field_is_part_of_the_identity(name):
    other = {"sampling": Sampling(max_tokens=10), "thinking": "off"}.get(name) or (99 if name in COUNTS else "other")
    changed = replace(conditions(), **{name: other})
    assert changed.digest != conditions().digest
    assert [difference.name.split(".")[0] for difference in differences(conditions(), changed)] == [name]


def test_the_role_follows_from_the_scored_items():
    assert [role_of(n) for n in (2, 499, 500, 999, 1000)] == [Role.PULSE, Role.PULSE, Role.SELECTION, Role.SELECTION, Role.PUBLICATION]
    assert record([["right"]] * 500).role is Role.SELECTION
    one_short = record([["right"]] * 499 + [["error"]])
    assert one_short.role is Role.PULSE  # 499 of its 500 items were scored
    data = one_short.to_json() | {"role": "selection"}
    with pytest.raises(EvidenceError, match="claims the role 'selection', its 499 scored items make it a pulse"):
        EvalRecord.from_json(data)


def test_nan_in_a_file_is_refused():
    data = record([["right"], ["wrong"]]).to_json()
    data["summary"]["mean_tokens"] = math.nan
    with pytest.raises(EvidenceError, match="mean_tokens says nan, its outcomes give 3.0"):
        EvalRecord.from_json(data)
    data = record([["right"], ["wrong"]]).to_json()
    data["conditions"]["sampling"]["temperature"] = math.nan
    with pytest.raises(EvidenceError, match="temperature"):
        EvalRecord.from_json(data)
