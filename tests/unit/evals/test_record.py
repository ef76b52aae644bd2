"""Evaluation records: derived figures by hand, and what cannot be constructed."""

import json
from dataclasses import replace

import pytest
from eval_records import record

from posttrain.core.errors import EvidenceError
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.record import EvalRecord, Outcome, require_trustworthy
from posttrain.stats.intervals import cluster_t, wilson


def test_single_sample_figures():
    made = record([["right"], ["wrong"], ["garbled"], ["cut"]])
    assert made.pass_at_1 == 0.25
    assert made.interval() == wilson(1, 4)
    assert made.parse_rate == 0.5
    assert made.truncation_rate == 0.25
    assert made.error_rate == 0.0
    assert made.mean_tokens == 3.0
    assert made.bounds == (0.25, 0.25)


def test_several_samples_are_clustered_by_item():
    made = record([["right", "right"], ["right", "wrong"], ["wrong", "wrong"]])
    assert made.pass_at_1 == 0.5
    assert made.interval(0.9) == cluster_t([1.0, 0.5, 0.0], 0.9)
    assert made.pass_at(1) == pytest.approx(0.5)
    assert made.pass_at(2) == pytest.approx(2 / 3)
    assert made.pass_at_interval(2) == cluster_t([1.0, 1.0, 0.0])
    assert made.pass_hat(2) == pytest.approx(1 / 3)  # both samples right on one item of three
    assert made.pass_hat_interval(2) == cluster_t([1.0, 0.0, 0.0])
    with pytest.raises(EvidenceError, match="pass@3 needs at least 3"):
        made.pass_at(3)


def test_grader_errors_are_not_wrong_answers():
    made = record([["right", "error"], ["error", "error"], ["wrong", "wrong"]])
    assert made.pass_at_1 == 0.5  # items 0 and 2; item 1 was never judged
    assert made.item_means == {"i0": 1.0, "i2": 0.0}
    assert made.error_rate == 0.5
    assert made.parse_rate == 1.0
    assert made.bounds == (pytest.approx(1 / 6), pytest.approx(4 / 6))
    assert made.interval().method == "cluster-t"


def test_one_sample_with_an_error_is_not_wilson():
    assert record([["right"], ["wrong"], ["error"]]).interval().method == "cluster-t"


def test_fractions_have_a_mean_but_no_pass_at_k():
    made = record([["half"], ["right"]])
    assert made.pass_at_1 == 0.75
    assert made.interval().method == "cluster-t"
    with pytest.raises(EvidenceError, match="fractions"):
        made.pass_at(1)


def test_round_trip_through_json():
    made = record([["right", "error"], ["cut", "wrong"], ["right", "garbled"]])
    data = json.loads(json.dumps(made.to_json()))
    again = EvalRecord.from_json(data)
    assert again.to_json() == made.to_json()
    assert again == made
    assert data["summary"]["interval"] == [made.interval().low, made.interval().high]
    assert data["summary"]["bounds"] == [pytest.approx(2 / 6), pytest.approx(3 / 6)]  # 2 right, 3 wrong, 1 error of 6
    assert data["items"][0] == {"id": "i0", "outcomes": [[1.0, "scored", "end", 3], [None, "error", "end", 3]]}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda data: data.update(schema=1), "schema 1, this version reads 2; evaluate again"),
        (lambda data: data.update(schema=99), "schema 99"),
        (lambda data: data.pop("items"), "items"),
        (lambda data: data.update(items=7), "TypeError"),
        (lambda data: data["conditions"].update(extra=1), "unknown field 'extra'"),
        (lambda data: data["conditions"].pop("seed"), "lack 'seed'"),
        (lambda data: data["conditions"]["sampling"].pop("top_p"), "lack 'sampling.top_p'"),
        (lambda data: data["items"][0]["outcomes"][0].__setitem__(1, "great"), "great"),
        (lambda data: data["items"][0]["outcomes"][0].__setitem__(0, True), "True"),
        (lambda data: data["items"][0]["outcomes"][0].__setitem__(3, -1), "length -1"),
        (lambda data: data["items"].pop(), "conditions say 2"),
        (lambda data: data["summary"].update(pass_at_1=0.9), "pass_at_1 says 0.9, its outcomes give 0.5"),
        (lambda data: data["summary"].update(error_rate=10**400), "error_rate says"),
        (lambda data: data["summary"]["bounds"].pop(), "bounds says"),
        (lambda data: data.update(summary=None), "no summary"),
        (lambda data: data.update(model_digest=""), "does not state its model_digest"),
    ],
)
def test_damaged_json_is_refused(damage, named):
    data = record([["right"], ["wrong"]]).to_json()
    damage(data)
    with pytest.raises(EvidenceError, match=named):
        EvalRecord.from_json(data)


@pytest.mark.parametrize("data", [None, [], "text", 3, True])
def test_json_that_is_no_mapping_is_refused(data):
    with pytest.raises(EvidenceError, match="not a mapping"):
        EvalRecord.from_json(data)


def test_inconsistent_records_cannot_be_built():
    good = record([["right"], ["wrong"]])
    with pytest.raises(EvidenceError, match="conditions say 3"):
        replace(good, conditions=replace(good.conditions, n_items=3))
    with pytest.raises(EvidenceError, match="1 samples, conditions say 2"):
        replace(good, conditions=replace(good.conditions, samples_per_item=2))
    with pytest.raises(EvidenceError, match="distinct"):
        replace(good, items=(good.items[0], good.items[0]))
    with pytest.raises(EvidenceError, match="model_digest"):
        replace(good, model_digest="")
    with pytest.raises(EvidenceError, match="label"):
        replace(good, label="")
    with pytest.raises(EvidenceError, match="1 of 2 items were scored"):
        record([["right"], ["error"]])
    with pytest.raises(EvidenceError, match="conditions say"):
        replace(good, items=())


def test_outcomes_keep_none_and_zero_apart():
    with pytest.raises(EvidenceError, match="only a grader error"):
        Outcome(None, RewardStatus.SCORED, StopReason.END, 1)
    with pytest.raises(EvidenceError, match="only a grader error"):
        Outcome(0.0, RewardStatus.ERROR, StopReason.END, 1)
    for value in (1.5, -0.1, float("nan")):
        with pytest.raises(EvidenceError, match="outside"):
            Outcome(value, RewardStatus.SCORED, StopReason.END, 1)


def test_truncation_limit():
    require_trustworthy(record([["right"]] * 99 + [["cut"]]))  # 1 %
    with pytest.raises(EvidenceError, match=r"2\.0% .* cut at 9 tokens \(limit 2%\); raise max_tokens, or set allow_truncation=true"):
        require_trustworthy(record([["right"]] * 98 + [["cut"]] * 2))
    require_trustworthy(record([["right"], ["cut"]]), max_truncation=0.6)
