"""A candidate from its run directory, and what its family's own runs say is usual."""

import json

import pytest
from promotion_records import HEALTHY, run_of, scored

from posttrain.checks.calibration import Family, calibrate, end_of
from posttrain.checks.candidate import by_label, candidate_of
from posttrain.checks.promotion import Thresholds, promotion
from posttrain.core.errors import EvidenceError, RunError
from posttrain.core.files import write_json

PAIR = [scored("before", 300), scored("after", 360)]


def family(tmp_path, kls=(0.1, 0.2, 0.3), **changed) -> Family:
    paths = [
        run_of(tmp_path / f"stable{n}", PAIR, [{**HEALTHY, "kl": kl, "entropy": 1 - kl}] * 12, seed=n, **changed)
        for n, kl in enumerate(kls)
    ]
    return calibrate(paths)


def test_the_end_is_the_mean_of_the_last_steps():
    lines = [{"zero_variance": 0.0, "kl": 9.0}] + [{"zero_variance": n / 10, "kl": n, "entropy": None} for n in range(10)] + [{"loss": 1.0}]
    end = end_of(lines)
    assert end is not None
    assert (end.steps, end.kl, end.entropy) == (10, 4.5, None)
    assert end.zero_variance == pytest.approx(0.45)
    assert end_of(lines, last=2).kl == 8.5
    assert end_of([{"loss": 1.0}]) is None


def test_a_family_is_usual_up_to_three_standard_deviations(tmp_path):
    # KL 0.1, 0.2, 0.3: mean 0.2, sample standard deviation 0.1; entropy 0.9, 0.8, 0.7: 0.8 - 0.3
    found = family(tmp_path)
    assert found.kl_ceiling == pytest.approx(0.2 + 3 * 0.1)
    assert found.entropy_floor == pytest.approx(0.8 - 3 * 0.1)
    assert found.runs == ("stable0", "stable1", "stable2")
    found.save(tmp_path / "family.json")
    assert Family.read(tmp_path / "family.json") == found


def test_a_floor_is_never_below_zero(tmp_path):
    assert family(tmp_path, (0.1, 0.5, 0.9)).entropy_floor == 0.0


def test_a_run_is_judged_with_its_family(tmp_path):
    usual = family(tmp_path)
    run = run_of(tmp_path / "new", PAIR, [{**HEALTHY, "kl": 0.4}] * 12, seed=9)
    write_json(run / "gates" / "thresholds.json", Thresholds().model_dump(mode="json"))
    found = promotion(candidate_of(run, family=usual))
    assert found.passed is True, found.reason
    assert found.subject == "after against before on 'sums'"
    wild = run_of(tmp_path / "wild", PAIR, [{**HEALTHY, "kl": 0.51}] * 12, seed=10)
    assert promotion(candidate_of(wild, family=usual)).of("drift").passed is False


def test_another_family_is_not_used(tmp_path):
    usual = family(tmp_path)
    run = run_of(tmp_path / "new", PAIR, model="another base")
    assert promotion(candidate_of(run, family=usual)).of("drift").passed is None


def test_calibration_refuses_what_is_not_stable(tmp_path):
    paths = [run_of(tmp_path / f"s{n}", PAIR, seed=n) for n in range(3)]
    with pytest.raises(EvidenceError, match="at least 3"):
        calibrate(paths[:2])
    with pytest.raises(EvidenceError, match="given twice"):
        calibrate([*paths, paths[0]])
    with pytest.raises(EvidenceError, match="not finished"):
        calibrate([*paths, run_of(tmp_path / "half", PAIR, finished=False)])
    with pytest.raises(EvidenceError, match="no reinforcement learning"):
        calibrate([*paths, run_of(tmp_path / "sft", PAIR, [{"loss": 1.0}] * 5)])
    with pytest.raises(EvidenceError, match="without disagreeing groups"):
        calibrate([*paths, run_of(tmp_path / "dead", PAIR, [{**HEALTHY, "zero_variance": 1.0}] * 12)])
    with pytest.raises(EvidenceError, match=r"another family than .*\(model\)"):
        calibrate([*paths, run_of(tmp_path / "other", PAIR, model="another base")])


def test_a_run_without_kl_gives_no_ceiling(tmp_path):
    silent = {name: value for name, value in HEALTHY.items() if name != "kl"}
    paths = [run_of(tmp_path / f"s{n}", PAIR, [silent] * 12, seed=n) for n in range(3)]
    assert calibrate(paths).kl_ceiling is None


def test_labels_follow_the_order_of_the_stages():
    records = [scored(name, 1, 4) for name in ("zeta", "alpha", "mid")]
    found = by_label(records, ("eval.zeta", "x", "eval.mid"))
    assert list(found) == ["zeta", "mid", "alpha"]


def test_retention_is_found_and_is_not_what_is_judged(tmp_path):
    chat = [scored("before", 300, suite="retention"), scored("after", 290, suite="retention")]
    found = candidate_of(run_of(tmp_path / "run", [*PAIR, *chat]))
    assert found.record.conditions.suite == "sums"
    assert found.retention == tuple(chat)


def test_another_control_is_read_from_a_file(tmp_path):
    run = run_of(tmp_path / "run", PAIR)
    control = scored("incumbent", 350)
    write_json(tmp_path / "control.json", control.to_json())
    assert candidate_of(run, against=tmp_path / "control.json").base == control
    other = scored("incumbent", 350, suite="other")
    write_json(tmp_path / "other.json", other.to_json())
    found = promotion(candidate_of(run, against=tmp_path / "other.json"))
    assert found.of("base").passed is False
    assert "suite is 'other' against 'sums'" in found.of("base").detail


def test_what_is_not_there_is_named(tmp_path):
    run = run_of(tmp_path / "run", PAIR)
    with pytest.raises(EvidenceError, match="no evaluation of 'sft'"):
        candidate_of(run, rung="sft")
    with pytest.raises(EvidenceError, match="not measured on 'chat'"):
        candidate_of(run, suite="chat")
    with pytest.raises(RunError, match="not a run"):
        candidate_of(tmp_path)
    alone = run_of(tmp_path / "alone", [scored("after", 1, 4, "retention")])
    with pytest.raises(EvidenceError, match="--suite"):
        candidate_of(alone)


def test_the_first_model_of_a_run_has_no_control(tmp_path):
    found = promotion(candidate_of(run_of(tmp_path / "run", PAIR), rung="before"))
    assert found.of("base").passed is False
    assert "drift" not in [check.name for check in found.checks]  # it was not made by reinforcement learning


@pytest.mark.parametrize("content", ["[]", '{"items": "many"}', '{"nothing": 1}', "{"])
def test_damaged_thresholds_give_one_line(tmp_path, content):
    run = run_of(tmp_path / "run", PAIR)
    (run / "gates").mkdir()
    (run / "gates" / "thresholds.json").write_text(content)
    with pytest.raises(RunError, match="thresholds.json"):
        candidate_of(run)


@pytest.mark.parametrize("content", [[], {"schema": 2}, {"schema": 1, "key": {}}])
def test_a_foreign_calibration_is_refused(tmp_path, content):
    (tmp_path / "family.json").write_text(json.dumps(content))
    with pytest.raises(EvidenceError, match="no calibration"):
        Family.read(tmp_path / "family.json")
