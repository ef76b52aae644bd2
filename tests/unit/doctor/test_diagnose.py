"""Suspects with their figures, their order, the verdict of the run, the walk through the layers, and the text."""

from __future__ import annotations

import json

import pytest
from doctor_traces import LOW, entry, evidence, frame, groups, ramp, step, wobble

from posttrain.core.errors import EvidenceError
from posttrain.doctor.combined import Early, Not, Setting
from posttrain.doctor.diagnose import diagnose
from posttrain.doctor.entries import Action, Entry, Layer, Tier, Verdict
from posttrain.doctor.signals import Level
from posttrain.doctor.suspects import Suspect, find_suspects, state
from posttrain.doctor.text import LONGEST, diagnosis_json, diagnosis_lines

N = 100
SICK = {"reward_mean": step(0.6, 0.1, 60), "entropy": step(0.5, 0.02, 40, 0.0)}
SPLIT = groups(mixed=0.7, zero_variance=0.3, all_right=0.1, all_wrong=0.2)
WELL = {"reward_mean": ramp(0.2, 0.7, N), "entropy": 0.5, **SPLIT}
QUIET_SIGN = Level("kl", ">", 5.0)


def catalog(*entries: Entry) -> dict[str, Entry]:
    return {one.id: one for one in entries}


def suspects(*entries: Entry, settings=None, facts=None, **columns) -> list[Suspect]:
    one = frame(N, **columns)
    one.settings, one.facts = settings or {}, facts or {}
    return find_suspects(evidence(one), catalog(*entries), {})


def test_a_confirmed_suspect_has_steps_and_figures():
    (found,) = suspects(entry("F1", LOW), **SICK)
    assert (found.first_step, found.last_step, found.still, found.confirmed) == (42, 99, True, True)  # rows 40, 41, 42 are the first three
    assert found.evidence_for[0] == "step 42: entropy 0.02, 0.02, 0.02 (last 3), bound < 0.1"
    assert found.confidence == 1.0  # 0.75 + 0.25 * 58 / 58
    assert found.decides


def test_what_spoke_against_is_no_suspect():
    assert suspects(entry("F1", LOW, against=(Level("reward_mean", "<", 0.7),)), **SICK) == []


def test_one_that_passed_has_less_confidence_and_says_so():
    (found,) = suspects(entry("F1", LOW), entropy=lambda row: 0.02 if 20 <= row < 30 else 0.5)
    assert not found.still
    # rows 22 to 29 of the 78 since: 0.3 + 0.4 * 8 / 78
    assert found.confidence == pytest.approx(0.3 + 0.4 * 8 / 78)
    assert found.evidence_against == ("held at 8 of 78 rows since, last at step 29, not at the end",)
    assert not found.decides


def test_what_only_the_first_rows_can_show_stays_true():
    (found,) = suspects(entry("F1", Early(Level("grad_norm", ">", 100), rows=3)), grad_norm=lambda row: 500.0 if row < 2 else 1.0)
    assert found.still
    assert found.decides
    assert found.confidence == 1.0


def test_an_unrecorded_metric_makes_it_possible_and_is_named():
    (found,) = suspects(entry("F1", LOW, Level("duplicates", ">", 0.8)), entropy=0.02)
    assert not found.confirmed
    assert not found.decides
    assert found.unknown == ("duplicates",)
    assert found.confidence == pytest.approx(0.4 / 2)


def test_a_sign_that_does_not_hold_makes_it_impossible():
    three = (LOW, Level("entropy", "<", 0.2), Level("duplicates", ">", 0.8))
    assert len(suspects(entry("F1", *three), **SICK)) == 1
    assert suspects(entry("F1", *three, Level("reward_mean", ">", 0.9)), **SICK) == []


@pytest.mark.parametrize("sign", [Setting("optim.schedule", "==", "constant"), Not(Level("reward_mean", ">", 0.9))])
def test_settings_and_absences_alone_suspect_nothing(sign):
    assert suspects(entry("F1", sign, QUIET_SIGN), settings={"optim.schedule": "constant"}, reward_mean=0.1) == []


def test_settings_alone_are_a_risk_and_decide_nothing():
    (found,) = suspects(entry("F1", Setting("optim.schedule", "==", "constant")), settings={"optim.schedule": "constant"}, **WELL)
    assert found.confirmed
    assert found.risk
    assert not found.decides


def test_facts_are_evidence_and_decide():
    sign = Setting("eval.parse_rate", "<", 0.8, where="facts")
    (found,) = suspects(entry("F1", sign), facts={"eval.parse_rate": 0.4}, **WELL)
    assert found.decides
    assert not found.risk
    assert found.evidence_for == ("eval.parse_rate = 0.4",)


def test_what_holds_of_the_whole_run_is_said_once():
    sign = Setting("eval.parse_rate", "<", 0.8, where="facts")
    first, second = frame(N, stage="sft", **WELL), frame(N, **WELL)
    first.facts = second.facts = {"eval.parse_rate": 0.4}
    found = find_suspects(evidence(first, second), catalog(entry("F1", sign)), {})
    assert [one.stage for one in found] == ["sft"]
    second.facts = {"eval.parse_rate": 0.5}
    assert len(find_suspects(evidence(first, second), catalog(entry("F1", sign)), {})) == 2


def test_missing_exonerating_metric_lowers_the_confidence():
    (found,) = suspects(entry("F1", LOW, against=(QUIET_SIGN,)), **SICK)
    assert found.unknown == ("kl",)
    assert found.confidence == pytest.approx(0.9)


def test_another_name_is_reported_once_under_the_first():
    found = suspects(entry("F1", LOW), entry("S1", Level("entropy", "<", 0.2), same_as="F1"), **SICK)
    assert [one.entry.id for one in found] == ["F1"]


def test_a_look_alike_is_told_apart_with_its_figures():
    first = entry("F1", LOW, confused={"F2": "entropy is alive there"})
    second = entry("F2", Level("entropy", ">", 0.3))
    found = suspects(first, second, **SICK)[0]
    assert found.apart == ("F2 failure F2: entropy is alive there; here: entropy 0.02, bound > 0.3 (does not hold)",)


def test_a_look_alike_that_fits_as_well_is_said():
    first = entry("F1", LOW, confused={"F2": "how"})
    found = suspects(first, entry("F2", Level("reward_mean", "<", 0.3)), **SICK)
    one = next(item for item in found if item.entry.id == "F1")
    assert "F2 fits as well" in one.evidence_against
    assert one.confidence == pytest.approx(0.85)


def test_an_alarm_of_the_run_itself_counts_as_evidence():
    alarms = ({"stage": "grpo", "step": 43, "name": "F1", "detail": ""},)
    (found,) = find_suspects(evidence(frame(N, **SICK), alarms=alarms), catalog(entry("F1", LOW)), {})
    assert "its alarm was raised while the run trained, at step 43" in found.evidence_for


def test_data_goes_before_the_algorithm_among_equals():
    found = suspects(entry("F1", LOW), entry("F2", LOW, layer=Layer.DATA), entry("F3", LOW, layer=Layer.SEAM), **SICK)
    assert [one.entry.id for one in found] == ["F2", "F3", "F1"]


def test_leading_evidence_goes_before_lagging_among_equals():
    found = suspects(entry("F1", LOW, tier=Tier.LAGGING), entry("F2", LOW, tier=Tier.LEADING), **SICK)
    assert [one.entry.id for one in found] == ["F2", "F1"]


def test_what_is_still_there_goes_before_what_passed_whatever_its_layer():
    passed = entry("F2", Level("kl", ">", 1.0), layer=Layer.DATA)
    found = suspects(passed, entry("F1", LOW), kl=lambda row: 2.0 if row == 50 else 0.0, **SICK)
    assert [one.entry.id for one in found] == ["F1", "F2"]


def test_the_verdict_is_the_likeliest_suspects():
    found = diagnose(evidence(frame(N, **SICK, **SPLIT)), catalog(entry("F9", LOW, verdict=Verdict.BROKEN_SEAM)))
    assert found.verdict is Verdict.BROKEN_SEAM
    assert found.because == "F9 failure F9 in grpo since step 42"
    assert found.failures == ("F9",)
    assert found.next_check.startswith("the check of F9 (confirms or clears F9); then first: the fix of F9")


def test_a_note_decides_nothing():
    found = diagnose(evidence(frame(N, **{**WELL, "entropy": 0.05})), catalog(entry("S8", LOW, action=Action.NOTE)))
    assert found.verdict is Verdict.HEALTHY
    assert found.failures == ()


def test_a_collapse_that_the_whole_stage_denies_does_not_decide():
    """The suspect says collapsed, the reward rises throughout: the run is healthy, and the suspect says what speaks against it."""
    odd = entry("F1", LOW, against=(Level("kl", ">", 1.0),))
    found = diagnose(evidence(frame(N, **{**WELL, "entropy": 0.05})), catalog(odd))
    assert found.verdict is Verdict.HEALTHY
    # 1.0 for one that is still there, 0.9 for the missing kl, 0.5 for being at odds with the stage
    assert found.suspects[0].confidence == pytest.approx(0.45)
    assert any("the stage as a whole is healthy" in line for line in found.suspects[0].evidence_against)


def test_a_broken_seam_decides_whatever_the_curve_looks_like():
    seam = entry("F12", Level("mismatch_max", ">", 0.5), layer=Layer.SEAM, verdict=Verdict.BROKEN_SEAM)
    assert diagnose(evidence(frame(N, mismatch_max=2.0, **WELL)), catalog(seam)).verdict is Verdict.BROKEN_SEAM


def test_a_sick_stage_is_not_hidden_by_a_healthy_one():
    sft = frame(N, "sft", "sft", loss=ramp(0.5, 2.0, N))
    found = diagnose(evidence(sft, frame(N, **WELL)), {})
    assert found.verdict is Verdict.DRIFTING
    assert found.because.startswith("sft: loss rises")


def test_a_short_run_has_no_verdict_but_says_what_its_signs_say():
    short = frame(5, entropy=0.02)
    found = diagnose(evidence(short), {})
    assert found.verdict is None
    assert not found.sick
    assert found.next_check == "let it run: a stage has a verdict from 10 rows on"
    assert diagnose(evidence(short), catalog(entry("F1", LOW))).verdict is Verdict.COLLAPSED


def test_missing_data_names_the_metric_that_decides():
    found = diagnose(evidence(frame(N, reward_mean=wobble(0.3), entropy=0.5)), {})
    assert found.verdict is None
    assert found.next_check == "record zero_variance: it would decide"


def test_nothing_at_all_is_refused_with_the_first_problem():
    with pytest.raises(EvidenceError, match="holds no metrics .*: metrics.jsonl: missing; give a run directory"):
        diagnose(evidence(problems=("metrics.jsonl: missing",)), {})


def test_the_walk_goes_from_data_to_the_algorithm():
    seam = entry("F12", Level("mismatch_max", ">", 0.5), layer=Layer.SEAM, verdict=Verdict.BROKEN_SEAM)
    walk = diagnose(evidence(frame(N, mismatch_max=2.0, **WELL)), catalog(seam, entry("F1", LOW))).walk
    assert [one.layer.value for one in walk] == ["data", "reward", "evaluation", "seam", "infrastructure", "configuration", "algorithm"]
    found = {one.layer.value: one for one in walk}
    assert found["seam"].found == "suspect"
    assert "F12" in found["seam"].looked
    assert found["data"].found == "ok"
    assert "mixed 0.7" in found["data"].looked
    assert found["evaluation"].found == "cannot tell"
    assert "heldout_mean" in found["evaluation"].looked
    assert found["algorithm"].looked.endswith("1 of 1 failures can be told")


def test_supervised_training_has_no_reward_to_look_at():
    walk = diagnose(evidence(frame(N, "sft", "sft", loss=ramp(2.0, 0.5, N))), {}).walk
    assert [one.found for one in walk if one.layer in (Layer.REWARD, Layer.SEAM)] == ["does not apply"] * 2


def test_a_failed_gate_makes_its_layer_suspect():
    walk = diagnose(evidence(frame(N, **WELL), gates={"probe": {"verdict": "failed"}}), {}).walk
    assert walk[0].found == "suspect"
    assert "gate probe failed" in walk[0].looked


def test_a_live_run_is_said_to_be_one():
    found = diagnose(evidence(frame(N, **WELL), finished=False), {})
    assert found.open_stages == ("grpo",)
    assert any("grpo has not ended" in line for line in diagnosis_lines(found))


def test_half_a_line_is_no_failure_while_the_run_is_written():
    broken = catalog(
        entry("S90", Setting("last_line_cut", "==", True, where="facts"), layer=Layer.INFRASTRUCTURE, verdict=Verdict.INFRASTRUCTURE)
    )
    one = frame(N, **WELL)
    one.facts = {"last_line_cut": True, "problems": 1}
    run = evidence(one, finished=False, problems=("metrics.jsonl: the last line is cut; ignored",))
    assert diagnose(run, broken).verdict is Verdict.INFRASTRUCTURE
    assert diagnose(run, broken, live=True).verdict is Verdict.HEALTHY
    ended = evidence(one, problems=run.problems)
    assert diagnose(ended, broken, live=True).verdict is Verdict.INFRASTRUCTURE  # the stage says that it ended: half a line is a loss


def test_the_text_starts_with_the_verdict_and_ends_with_the_next_check():
    lines = diagnosis_lines(diagnose(evidence(frame(N, **SICK, **SPLIT)), catalog(entry("F1", LOW))))
    assert lines[0] == "collapsed: F1 failure F1 in grpo since step 42"
    assert lines[-1].startswith("next: the check of F1")
    assert any(line.strip().startswith("for      step 42: entropy") for line in lines)


def test_brief_keeps_the_figures_of_the_first_suspect_only():
    found = diagnose(evidence(frame(N, **SICK)), catalog(entry("F1", LOW), entry("F2", LOW)))
    assert len([line for line in diagnosis_lines(found) if line.strip().startswith("fix ")]) == 2
    assert len([line for line in diagnosis_lines(found, brief=True) if line.strip().startswith("fix ")]) == 1


def test_texts_of_a_run_cannot_reach_the_terminal():
    evil = "grpo\x1b[2J\r\u2028" + "x" * 1000
    one = frame(N, stage=evil, **SICK)
    found = diagnose(evidence(one, problems=("\x07bell",), finished=False), catalog(entry("F1", LOW)))
    lines = diagnosis_lines(found)
    assert all(line.isprintable() and len(line) <= LONGEST + 3 for line in lines)
    assert "\x1b" not in str(diagnosis_json(found))
    assert "\\x07bell" in str(diagnosis_json(found)["problems"][0])


def test_json_is_plain_and_whole():
    found = diagnose(evidence(frame(N, **SICK, **SPLIT)), catalog(entry("F1", LOW)))
    again = json.loads(json.dumps(diagnosis_json(found), allow_nan=False))
    assert (again["verdict"], again["sick"], again["failures"]) == ("collapsed", True, ["F1"])
    assert again["suspects"][0]["first_step"] == 42
    assert again["walk"][0]["layer"] == "data"


def test_state_is_none_where_a_sign_cannot_be_told():
    one = frame(5, entropy=0.02)
    assert [state(LOW, one, row) for row in (0, 1, 2)] == [None, None, True]
    assert state(Level("kl", ">", 1), one, 4) is None
