"""Bake-offs: every metric for every method, incomplete runs barred, tests named, and the label of a registration."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from posttrain.core.errors import EvidenceError, PosttrainError, RunError
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.bakeoff import Bakeoff, Duel, Standing, bakeoff, disagreements
from posttrain.evals.bakeoff_runs import entrants, read_entrant
from posttrain.evals.bakeoff_text import bakeoff_lines, verdict
from posttrain.evals.conditions import Conditions
from posttrain.evals.record import EvalRecord, ItemResult, Outcome
from posttrain.runs.preregistration import Prereg
from posttrain.stats.intervals import Interval

CONDITIONS = Conditions(
    suite="sums",
    dataset="sums",
    split="held_out",
    split_digest="s",
    items_digest="i",
    n_items=100,
    samples_per_item=1,
    sampling=Sampling(max_tokens=8),
    thinking="none",
    extractor="e/1",
    verifier="v/1",
    template_digest="t",
    tokenizer_digest="k",
    seed=0,
    turns=1,
)
PLAN = Prereg("2025-12-31T00:00:00+00:00", "pass@1", True, "sums", {"steps": 20.0}, ("a", "b"), seeds=1, min_effect=0.02)


def record(name: str, solved: range, conditions: Conditions = CONDITIONS) -> EvalRecord:
    """One sample per item; the items whose numbers are in `solved` are right."""
    items = (
        ItemResult(f"i{at}", (Outcome(float(at in solved), RewardStatus.SCORED, StopReason.END, 3),)) for at in range(conditions.n_items)
    )
    return EvalRecord(conditions, name, f"weights of {name}", tuple(items))


def write_run(root: Path, name: str, rewards, solved: range | None = None, planned: int = 20, seed: int = 0, **changes) -> str:
    """A run directory of one rl stage with one reward per step; entropy falls as the reward rises."""
    path = root / name
    (path / "stages").mkdir(parents=True)
    (path / "evals").mkdir()
    (path / "manifest.json").write_text(json.dumps({"created": "2026-01-01T00:00:00+00:00", "seeds": {"seed": seed}, "command": []}))
    (path / "config.yaml").write_text(f"rl:\n  steps: {planned}\n")
    lines = [
        {"schema": 1, "stage": "rl", "step": step, "reward_mean": reward, "entropy": 1 - reward, "tokens": 100, "seconds": {"step": 0.5}}
        for step, reward in enumerate(rewards)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if len(rewards) == planned:
        (path / "stages" / "rl.json").write_text("{}")
    if solved is not None:
        (path / "evals" / "after.sums.json").write_text(json.dumps(record(name, solved, **changes).to_json()))
    return f"{name}={path}"


def standing(report: Bakeoff, name: str) -> Standing:
    return next(one for one in report.standings if one.name == name)


def flat(value: float, steps: int = 20) -> list[float]:
    return [value] * steps


def test_all_metrics_for_all_methods(tmp_path):
    runs = [write_run(tmp_path, "a", flat(0.5), range(60)), write_run(tmp_path, "b", flat(0.4), range(40))]
    report = bakeoff(entrants(runs))
    assert report.step == 19
    assert [(one.name, one.kind) for one in report.standings] == [
        ("pass@1 on sums", "over the budget"),
        ("reward_mean at step 19", "at the matched step"),
        ("entropy at step 19", "at the matched step"),
        ("max reward_mean", "over the budget"),
        ("mean reward_mean", "over the budget"),
        ("sustained entropy", "over the budget"),
        ("tokens", "over the budget"),
        ("seconds", "over the budget"),
    ]
    values = {one.name: {score.arm: score.value for score in one.scores} for one in report.standings}
    assert all(set(scores) == {"a", "b"} for scores in values.values())
    assert values["max reward_mean"] == pytest.approx({"a": 0.5, "b": 0.4})
    assert values["tokens"] == {"a": 2000, "b": 2000}
    assert values["seconds"] == {"a": 10.0, "b": 10.0}
    assert standing(report, "seconds").leader is None
    assert verdict(standing(report, "seconds")) == "a tie"


def test_one_run_per_arm_is_tested_over_items(tmp_path):
    runs = [write_run(tmp_path, "a", flat(0.5), range(40, 100)), write_run(tmp_path, "b", flat(0.4), range(50, 90))]
    report = bakeoff(entrants(runs))
    one = standing(report, "pass@1 on sums")
    # 60 against 40 of the same 100 items: 20 gained, none lost; p = 2 / 2^20
    assert (one.leader, one.winner) == ("a", "a")
    assert one.duel is not None
    assert (one.duel.delta, one.duel.p_value) == (pytest.approx(0.2), pytest.approx(2**-19))
    assert [(score.n, score.of) for score in one.scores] == [(100, "items")] * 2
    assert one.scores[0].interval is not None
    assert one.scores[0].interval.method == "wilson"
    reward = standing(report, "max reward_mean")
    assert (reward.leader, reward.winner, reward.duel) == ("a", None, None)
    assert verdict(reward) == "a leads; not tested: one run per arm, so the spread between seeds is unknown"


def test_a_lead_within_the_noise_is_no_win(tmp_path):
    runs = [write_run(tmp_path, "a", flat(0.5), range(52)), write_run(tmp_path, "b", flat(0.4), range(50))]
    one = standing(bakeoff(entrants(runs)), "pass@1 on sums")
    assert (one.leader, one.winner) == ("a", None)
    assert verdict(one).endswith("no winner shown")


def test_a_win_needs_both_the_interval_and_the_test():
    apart, across = Interval(0.01, 0.2, 0.95, "x"), Interval(-0.01, 0.2, 0.95, "x")
    assert Duel(0.1, apart, 0.01, "m", adjusted=0.02).resolved
    assert not Duel(0.1, across, 0.01, "m", adjusted=0.02).resolved
    assert not Duel(0.1, apart, 0.01, "m", adjusted=0.06).resolved


def test_several_seeds_are_tested_over_seeds(tmp_path):
    runs = []
    for arm, solved in (("a", (60, 62, 64)), ("b", (50, 52, 54))):
        for seed, right in enumerate(solved):
            runs.append(f"{arm}={write_run(tmp_path, f'{arm}{seed}', flat(right / 100), range(right), seed=seed).partition('=')[2]}")
    one = standing(bakeoff(entrants(runs)), "pass@1 on sums")
    # means .62 and .52, sd .02 each: t = .1 / (.02 * sqrt(2/3)) = 6.12 with 4 degrees of freedom, p = .0036
    assert one.duel is not None
    assert (one.duel.delta, round(one.duel.p_value, 4)) == (pytest.approx(0.1), 0.0036)
    assert one.duel.method == "unpaired welch-t over seeds"
    assert [(score.n, score.of) for score in one.scores] == [(3, "runs")] * 2


def test_an_incomplete_run_cannot_win_the_budget(tmp_path):
    # combo is ahead at the step that all reached, and never came to the end
    runs = [
        write_run(tmp_path, "gspo", [0.1 + 0.02 * step for step in range(20)], range(55)),
        write_run(tmp_path, "jitter", [0.1 + 0.01 * step for step in range(20)], range(50)),
        write_run(tmp_path, "combo", [0.1 + 0.05 * step for step in range(15)], range(70)),
    ]
    report = bakeoff(entrants(runs))
    assert report.step == 14
    matched = standing(report, "reward_mean at step 14")
    assert matched.leader == "combo"
    # means over steps 5 to 14, the middle of which is 9.5
    assert {score.arm: score.value for score in matched.scores} == pytest.approx({"combo": 0.575, "gspo": 0.29, "jitter": 0.195})
    assert standing(report, "max reward_mean").leader == "gspo"
    assert standing(report, "pass@1 on sums").leader == "gspo"
    (barred,) = (score for score in standing(report, "max reward_mean").scores if score.arm == "combo")
    assert barred.barred == "incomplete: the log ends at step 14, the last of 20 is 19"
    assert standing(report, "max reward_mean").scores[-1] is barred
    text = "\n".join(bakeoff_lines(report))
    assert "    incomplete: stage 'rl' was never finished" in text
    assert "   - combo   " in text
    assert "cannot win, incomplete: the log ends at step 14" in text


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda lines: lines[:5] + lines[6:], "1 of the 20 steps up to the last are missing from the log"),
        (lambda lines: [*lines, lines[-1]], "1 steps are in the log twice"),
    ],
)
def test_a_log_with_a_hole_is_incomplete(tmp_path, edit, problem):
    path = Path(write_run(tmp_path, "a", flat(0.5)).partition("=")[2])
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert read_entrant(path, "a").complete
    (path / "metrics.jsonl").write_text("".join(edit(lines)))
    assert read_entrant(path, "a").problems == (problem,)


def test_rankings_that_disagree_are_said_in_words(tmp_path):
    runs = [write_run(tmp_path, "a", flat(0.5), range(60)), write_run(tmp_path, "b", flat(0.4), range(40))]
    said = disagreements(bakeoff(entrants(runs)))
    assert said[0].startswith("the ranking depends on the metric: a leads by pass@1 on sums, reward_mean at step 19, max reward_mean")
    assert "; b leads by entropy at step 19, sustained entropy" in said[0]
    assert said[1] == "a is number 1 by pass@1 on sums and number 2 by entropy at step 19"
    agreed = bakeoff(entrants(runs))
    only = replace(agreed, standings=tuple(one for one in agreed.standings if one.leader == "a"))
    assert disagreements(only) == ["every metric puts a in front"]


def test_other_conditions_are_not_ranked(tmp_path):
    other = replace(CONDITIONS, sampling=Sampling(max_tokens=8, temperature=0.5))
    runs = [write_run(tmp_path, "a", flat(0.5), range(60)), write_run(tmp_path, "b", flat(0.4), range(90), conditions=other)]
    one = standing(bakeoff(entrants(runs)), "pass@1 on sums")
    assert [score.arm for score in one.ranked] == ["a"]
    assert "temperature" in one.scores[-1].barred


def test_the_registered_metric_comes_first(tmp_path):
    runs = [write_run(tmp_path, "a", flat(0.5), range(60)), write_run(tmp_path, "b", flat(0.4), range(40))]
    report = bakeoff(entrants(runs), PLAN)
    assert (report.standings[0].name, report.standings[0].label) == ("pass@1 on sums", "pre-registered")
    assert {one.label for one in report.standings[1:]} == {"exploratory: not the registered metric"}
    report = bakeoff(entrants(runs), replace(PLAN, metric="max reward_mean", suite=""))
    assert [(one.name, one.label) for one in report.standings][0] == ("max reward_mean", "pre-registered")
    unregistered = bakeoff(entrants(runs))
    assert {one.label for one in unregistered.standings} == {"exploratory: nothing was registered before the runs"}


@pytest.mark.parametrize(
    ("plan", "label"),
    [
        (
            replace(PLAN, budget={"steps": 30.0}),
            "exploratory: budget steps of a: 30 registered, 20 spent; budget steps of b: 30 registered, 20 spent",
        ),
        (replace(PLAN, at="2026-06-01T00:00:00+00:00"), "exploratory: time: registered 2026-06-01"),
        (replace(PLAN, arms=("a", "b", "c")), "exploratory: arms: c registered, not run"),
        (replace(PLAN, seeds=3), "exploratory: seeds of a: 3 registered, 1 run"),
        (replace(PLAN, higher=False), "exploratory: direction: lower registered as better"),
    ],
)
def test_a_departure_makes_it_exploratory(tmp_path, plan, label):
    runs = [write_run(tmp_path, "a", flat(0.5), range(60)), write_run(tmp_path, "b", flat(0.4), range(40))]
    assert bakeoff(entrants(runs), plan).standings[0].label.startswith(label)


def test_a_registered_metric_stands_alone_and_the_others_are_adjusted(tmp_path):
    runs = []
    for arm, base in (("a", 60), ("b", 50)):
        for seed in range(3):
            made = write_run(tmp_path, f"{arm}{seed}", flat(base / 100 + seed / 50), range(base + 2 * seed), seed=seed)
            runs.append(f"{arm}={made.partition('=')[2]}")
    first = bakeoff(entrants(runs), replace(PLAN, seeds=3)).standings[0]
    assert first.duel is not None
    assert first.duel.adjusted == first.duel.p_value
    free = standing(bakeoff(entrants(runs)), first.name)
    assert free.duel is not None
    assert free.duel.adjusted > 4 * free.duel.p_value  # six metrics are tested, all alike


def test_steps_to_a_target(tmp_path):
    runs = [write_run(tmp_path, "a", [0.0] * 5 + [1.0] * 15), write_run(tmp_path, "b", [0.0] * 10 + [1.0] * 10)]
    one = standing(bakeoff(entrants(runs), target=0.5), "steps to reward_mean 0.5")
    # windows of 10 steps: five ones are in the window after step 10 for a, after step 15 for b
    assert [(score.arm, score.value) for score in one.scores] == [("a", 10.0), ("b", 15.0)]


def test_what_is_no_bake_off(tmp_path):
    a, b = write_run(tmp_path, "a", flat(0.5), range(60)), write_run(tmp_path, "b", flat(0.4), range(40))
    with pytest.raises(EvidenceError, match="needs two or more runs, got 1"):
        entrants([a])
    with pytest.raises(EvidenceError, match="is given twice"):
        entrants([a, a])
    with pytest.raises(EvidenceError, match="all runs belong to the arm 'x'"):
        bakeoff(entrants(["x=" + a.partition("=")[2], "x=" + b.partition("=")[2]]))
    with pytest.raises(RunError, match="is not a run"):
        entrants([a, str(tmp_path / "none")])
    with pytest.raises(RunError, match="no step of stage 'sft' in its log; its stages are rl"):
        entrants([a, b], "sft")
    with pytest.raises(EvidenceError, match="the registered metric 'accuracy' was not measured; measured: pass@1 on sums"):
        bakeoff(entrants([a, b]), replace(PLAN, metric="accuracy", suite=""))


LINES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "stage": st.sampled_from(["rl", "", "../x", "*", "[", 5, None, "r\u2028l"]),
            "step": st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2),
            "reward_mean": st.none() | st.floats() | st.text(max_size=2) | st.just(10**400),
            "seconds": st.none() | st.dictionaries(st.text(max_size=2), st.floats() | st.none(), max_size=2),
        },
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(LINES, LINES, st.binary(max_size=20), st.sampled_from(["{}", "[]", "nul", '{"seeds": 5, "created": 7}']))
def test_whatever_the_runs_hold_is_a_report_or_one_line(tmp_path_factory, first, second, junk, manifest):
    root = tmp_path_factory.mktemp("runs")
    for name, lines in (("a", first), ("b", second)):
        (root / name / "evals").mkdir(parents=True)
        (root / name / "manifest.json").write_text(manifest)
        (root / name / "config.yaml").write_bytes(junk)
        (root / name / "evals" / "rl.sums.json").write_bytes(junk)
        (root / name / "metrics.jsonl").write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + junk)
    said = []
    try:
        said = bakeoff_lines(bakeoff(entrants([str(root / "a"), str(root / "b")])))
    except PosttrainError as error:
        said = [str(error)]
    assert all("\n" not in line for line in said)


def test_the_command_line(tmp_path):
    import typer

    from posttrain.cli.claims import bakeoff as command
    from posttrain.runs.preregistration import register

    runs = [write_run(tmp_path, "a", flat(0.5), range(60)), write_run(tmp_path, "b", flat(0.4), range(40))]
    register(tmp_path / "plan.json", PLAN)
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, [*runs, "--prereg", str(tmp_path / "plan.json")])
    assert done.exit_code == 0, done.output
    assert "pass@1 on sums, over the budget, higher is better  [pre-registered]" in done.stdout
    assert "a against b: +0.2 [+0.1202, +0.2798], p <0.001, adjusted <0.001" in done.stdout


def test_no_torch_is_needed(tmp_path):
    import subprocess

    code = "import posttrain.evals.bakeoff_text, posttrain.runs.claims_collect, posttrain.cli.claims, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
