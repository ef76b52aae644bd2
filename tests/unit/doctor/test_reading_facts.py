"""What records say beyond metrics, from small records written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.doctor.evidence import Evidence
from posttrain.doctor.facts import facts_of, missing_steps
from posttrain.doctor.frame import frame_of


def record(
    score: float, *, n: int = 400, temperature: float = 1.0, items: str = "i", template: str = "t", **summary: float
) -> dict[str, Any]:
    conditions = {
        "n_items": n,
        "samples_per_item": 1,
        "items_digest": items,
        "template_digest": template,
        "sampling": {"temperature": temperature},
    }
    return {"summary": {"pass_at_1": score, **summary}, "conditions": conditions}


def run(**fields: Any) -> Evidence:
    frame = frame_of("rl", "rl", [(step, {"parsed": 0.5 + step / 100}) for step in range(20)], settings={"steps": 20})
    manifest = {"stages": ["eval.before", "rl", "eval.after"], "packages": {"torch": "2.9"}, "installed": {"versions": {"a": "1"}}}
    return Evidence(Path("r"), **{"frames": {"rl": frame}, "manifest": manifest, **fields})


def test_the_evaluations_next_to_a_stage_on_the_suite_that_says_most():
    evals = {
        "before.sums": record(0.2, parse_rate=0.5, truncation_rate=0.25),
        "after.sums": record(0.6, parse_rate=0.9, truncation_rate=0.0, error_rate=0.01),
        "before.small": record(0.9, n=50),
        "after.small": record(0.1, n=50),
        "before.greedy": record(0.3, temperature=0.0),
        "after.greedy": record(0.5, temperature=0.0),
    }
    found = facts_of(run(evals=evals), "rl")
    assert (found["eval.before.score"], found["eval.after.score"], found["eval.after.n"]) == (0.2, 0.6, 400)
    assert (found["eval.after.parse_rate"], found["eval.after.truncated"], found["eval.after.errors"]) == (0.9, 0.0, 0.01)
    assert (found["eval.before.truncated"], found["eval.same_conditions"], found["eval.same_items"]) == (0.25, True, True)
    assert (found["eval.after.sums.pass_at_1"], found["eval.after.greedy.mode"]) == (0.6, "greedy")


def test_the_ladder_measures_a_rung_under_its_own_name():
    manifest = {"stages": ["base", "eval.base", "sft", "eval.sft", "dpo", "eval.dpo"]}
    evals = {f"{label}.sums": record(score) for label, score in (("base", 0.0), ("sft", 0.3), ("dpo", 0.5))}
    found = facts_of(run(manifest=manifest, evals=evals), "dpo")
    assert (found["eval.before.score"], found["eval.after.score"]) == (0.3, 0.5)
    first = facts_of(run(manifest=manifest, evals=evals), "sft")
    assert (first["eval.before.score"], first["eval.after.score"]) == (0.0, 0.3)
    running = facts_of(run(manifest=manifest, evals={name: e for name, e in evals.items() if "dpo" not in name}), "dpo")
    assert running["eval.before.score"] == 0.3
    assert "eval.after.score" not in running
    assert "eval.parse_rate" not in running
    assert running["eval.same_conditions"] is True
    base = facts_of(run(manifest=manifest, evals=evals), "base")
    assert "eval.pass_at_1" not in base


def test_the_worst_rates_over_all_suites_of_the_newest_evaluation():
    evals = {
        "after.a": record(0.6, n=400, parse_rate=0.9, truncation_rate=0.0, error_rate=0.01),
        "after.b": record(0.1, n=80, parse_rate=0.7, truncation_rate=0.2, error_rate=0.0),
        "before.a": record(0.2, n=10, parse_rate=0.1),
    }
    found = facts_of(run(evals=evals), "rl")
    assert (found["eval.parse_rate"], found["eval.truncation_rate"], found["eval.error_rate"]) == (0.7, 0.2, 0.01)
    assert (found["eval.n"], found["eval.pass_at_1"]) == (80, 0.6)


def test_conditions_that_differ():
    found = facts_of(run(evals={"before.s": record(0.2), "after.s": record(0.6, items="j", template="u")}), "rl")
    assert (found["eval.same_conditions"], found["eval.same_items"], found["eval.template_differs"]) == (False, False, True)


def test_decoding_modes_disagree_only_beyond_two_standard_errors():
    def evals(greedy_after: float) -> dict[str, Any]:
        sampled = {"before.s": record(0.30), "after.s": record(0.60)}
        return sampled | {"before.g": record(0.50, temperature=0.0), "after.g": record(greedy_after, temperature=0.0)}

    # Standard error of 0.50 -> 0.46 at n 400: sqrt((0.25 + 0.2484) / 400) = 0.0353; two of them are 0.0706.
    assert facts_of(run(evals=evals(0.46)), "rl")["eval.decoding_disagrees"] is False
    assert facts_of(run(evals=evals(0.40)), "rl")["eval.decoding_disagrees"] is True  # 0.10 > 2 * sqrt(0.49 / 400) = 0.07
    assert "eval.decoding_disagrees" not in facts_of(run(evals={"before.s": record(0.3), "after.s": record(0.6)}), "rl")


def test_pass_at_1_rises_while_fewer_items_are_solved_at_all():
    def of(*items: tuple[float, ...]) -> dict[str, Any]:
        rows = [{"id": str(i), "outcomes": [[value, "scored", "end", 3] for value in values]} for i, values in enumerate(items)]
        return {**record(0.5), "items": rows}

    before, after = of((1, 0), (1, 0), (0, 0)), of((1, 1), (0, 1), (0, 0))
    narrow = of((1, 1), (0, 0), (0, 0), (1, 1))  # mean 1/2, solved 1/2; before: mean 1/3, solved 2/3
    assert facts_of(run(evals={"before.s": before, "after.s": after}), "rl")["eval.pass_at_k_falls"] is False
    assert facts_of(run(evals={"before.s": before, "after.s": narrow}), "rl")["eval.pass_at_k_falls"] is True
    single = of((1,), (0,))
    assert "eval.pass_at_k_falls" not in facts_of(run(evals={"before.s": single, "after.s": single}), "rl")


def test_how_far_a_stage_got():
    open_run = facts_of(run(), "rl")
    assert (open_run["finished"], open_run["stage.finished"], open_run["ended_silently"]) == (False, False, True)
    closed = facts_of(run(finished={"rl": {}}), "rl")
    assert (closed["finished"], closed["ended.early"], closed["steps.done"], closed["stages_missing"]) == (False, False, 1.0, 2)
    assert (closed["stage.finished"], closed["ended_silently"]) == (True, False)
    assert facts_of(run(finished={name: {} for name in ("eval.before", "rl", "eval.after")}))["finished"] is True
    short = frame_of("rl", "rl", [(0, {}), (1, {})], settings={"steps": 20})
    early = run(finished={"rl": {}}, frames={"rl": short})
    assert (facts_of(early, "rl")["ended.early"], facts_of(early, "rl")["steps.done"]) == (True, 0.1)
    short.events["no_signal"] = 1
    assert facts_of(early, "rl")["ended.early"] is False


def test_an_alarm_that_ends_the_stage_explains_its_end():
    alarm = {"stage": "rl", "step": 1, "name": "F1", "detail": "", "evidence": {"action": "stop"}}
    short = frame_of("rl", "rl", [(0, {}), (1, {})], settings={"steps": 20})
    found = facts_of(run(finished={"rl": {}}, frames={"rl": short}, alarms=[alarm]), "rl")
    assert (found["interrupted"], found["ended.early"]) == (True, False)
    noted = facts_of(run(alarms=[{**alarm, "evidence": {"action": "warn"}}]), "rl")
    assert noted["interrupted"] is False


def test_planned_steps_come_from_the_batch_equation_where_settings_do_not_say():
    frame = frame_of("dpo", "preference", [(step, {}) for step in range(45)])
    finished = {"dpo": {"batch_equation": "1440 pairs / 16 per step = 90 steps x 1 epoch(s) = 90 optimizer steps"}}
    found = facts_of(run(frames={"dpo": frame}, finished=finished), "dpo")
    assert (found["steps.done"], found["ended.early"]) == (0.5, True)


def test_missing_steps_allow_for_a_regular_stride():
    assert missing_steps([0, 1, 2, 5]) == 2
    assert missing_steps([0, 10, 20, 40]) == 1
    assert missing_steps([7]) == 0
    assert missing_steps([]) == 0


def test_training_figures_are_of_the_last_ten_values_of_this_stage():
    found = facts_of(run(), "rl")
    assert found["train.parse_rate"] == pytest.approx(0.645)  # steps 10 to 19: 0.5 + 0.145
    sft = frame_of("sft", "sft", [(0, {"token_accuracy": 0.5, "loss": 1.0})])
    rl = frame_of("rl", "rl", [(0, {"parsed": 1.0})])
    evidence = run(frames={"sft": sft, "rl": rl})
    assert facts_of(evidence, "rl")["train.token_accuracy"] == 0.5
    assert "train.parse_rate" not in facts_of(evidence, "sft")


def test_manifest_and_gates():
    gate = {
        "verdict": "passed",
        "checks": [{"name": "mixed", "value": 0.4}, "junk", {"name": ["x"]}],
        "figures": {"prompts": 64, "list": []},
    }
    found = facts_of(run(gates={"launch.rl": gate}))
    assert found["manifest.packages.torch"] == "2.9"
    assert not [name for name in found if "installed" in name]
    assert (found["gate.launch.rl"], found["gate.launch.rl.mixed"], found["gate.launch.rl.prompts"]) == ("passed", 0.4, 64)


def test_a_foreign_log_does_not_count_as_killed():
    found = facts_of(run(source="csv", manifest={}), "rl")
    assert "finished" not in found
    assert "ended_silently" not in found
    assert "ended.early" not in found
    assert "interrupted" not in found
