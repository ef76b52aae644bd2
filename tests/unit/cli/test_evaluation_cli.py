"""`posttrain eval`, `compare`, `reconcile`, `select`, `retention`: their text, exit codes, one line for bad input, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from posttrain.cli import evaluation
from posttrain.cli.evaluation_lines import comparison_lines, record_lines, retention_lines, set_lines
from posttrain.core.errors import PosttrainError
from posttrain.core.files import write_json
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.compare import compare
from posttrain.evals.conditions import Conditions
from posttrain.evals.record import EvalRecord, ItemResult, Outcome
from posttrain.evals.retention import retention_report
from posttrain.models.loading import save

SRC = Path(__file__).resolve().parents[3] / "src"
app = typer.Typer()
app.command("eval")(evaluation.evaluate)
for command in (evaluation.compare, evaluation.reconcile, evaluation.select, evaluation.retention):
    app.command()(command)


def record(
    label: str, right: int, n: int = 500, *, wrong: int | None = None, samples: int = 1, start: int = 0, **changed: Any
) -> EvalRecord:
    """The first `right` items right, the next `wrong` wrong, the rest grader errors; several samples are all alike."""
    wrong = n - right if wrong is None else wrong
    outcomes = [Outcome(1.0, RewardStatus.SCORED, StopReason.END, 5)] * right + [
        Outcome(0.0, RewardStatus.SCORED, StopReason.END, 7)
    ] * wrong
    outcomes += [Outcome(None, RewardStatus.ERROR, StopReason.END, 6)] * (n - right - wrong)
    items = tuple(ItemResult(f"i{start + k}", (outcome,) * samples) for k, outcome in enumerate(outcomes))
    stated: dict[str, Any] = {
        "suite": "sums",
        "dataset": "sums",
        "split": "held_out",
        "split_digest": "split",
        "items_digest": f"items {start} {n}",
        "sampling": Sampling(temperature=0.0 if samples == 1 else 1.0, max_tokens=16),
        "thinking": "none",
        "extractor": "hash/1",
        "verifier": "hash-marker/1",
        "template_digest": "template",
        "tokenizer_digest": "tokenizer",
        "seed": 1,
        "turns": 1,
    }
    return EvalRecord(Conditions(n_items=n, samples_per_item=samples, **stated | changed), label, f"weights of {label}", items)


def put(path: Path, made: EvalRecord) -> str:
    write_json(path, made.to_json())
    return str(path)


def shown(*arguments: str, code: int = 0) -> list[str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output.splitlines()


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, PosttrainError), result.exception
    assert len(str(result.exception).splitlines()) == 1
    return str(result.exception)


def test_a_record_shows_its_number_with_every_condition():
    assert record_lines(record("sft", 250)) == [
        "sums: pass@1 0.500  95% [0.456, 0.544] (wilson)  n = 500 items x 1  "
        "role: selection, enough items to pick a checkpoint (1000 are for publication)",
        "parsed 100.0%, truncated 0.0%, grader errors 0.0%, 6.0 tokens on average",
        "conditions: greedy, temperature=0.0 top_p=1.0 top_k=0 min_p=0.0 max_tokens=16, thinking none  extractor hash/1  "
        "verifier hash-marker/1  seed 1",
        "items: held_out of sums (split)  items items 0 500  template template  tokenizer tokenizer",
        "model: sft (weights of sft)",
    ]


def test_errors_are_bounded_and_pass_at_k_stands_beside_pass_at_1():
    lines = record_lines(record("sft", 50, 100, wrong=30, samples=2))
    # 50 right, 30 wrong, 20 not judged: .625 of those that were; .5 to .7 of all
    assert lines[0].startswith("sums: pass@1 0.625")
    assert lines[1].startswith("pass@2 0.625  95% [")
    assert lines[2].startswith("pass^2 0.625  95% [")
    assert "the grader failed on some: pass@1 is 0.500 if they were all wrong, 0.700 if all right" in lines
    assert "role: pulse, it shows a trend and decides nothing" in lines[0]


def test_a_set_has_a_line_per_suite():
    lines = set_lines([record("sft", 50, 100, suite="sums.greedy"), record("sft", 50, 100, samples=4, suite="sums.sampled")])
    assert [line.split()[0] for line in lines] == ["suite", "sums.greedy", "sums.sampled"]
    assert lines[2].split()[-6:] == ["x", "4", "100.0%", "0.0%", "0.0%", "pulse"]


def test_two_records(tmp_path):
    lines = shown("compare", put(tmp_path / "a.json", record("sft", 250)), put(tmp_path / "b.json", record("grpo", 300)))
    assert lines[0] == "sums: sft -> grpo"
    assert lines[1].startswith("change in pass@1 +0.100  95% [+0.074, +0.126]  p <0.001 (cluster-t interval, exact McNemar test)  n = 500")
    assert lines[2].startswith("evidence: defensible, ")
    assert lines[3] == "scope: these two checkpoints on these items; a claim about the method needs several seeds of both"
    assert lines[4:] == ["items lost 0, gained 50", "solved before and after 250, gained 50, lost 0, never solved 200"]


def test_a_gap_inside_the_noise_says_what_would_have_been_seen():
    lines = comparison_lines(compare(record("sft", 250), record("grpo", 253)))
    assert "evidence: underpowered" in lines[2]
    # sd of 3 ones among 500: sqrt(3/500 (1 - 3/500) 500/499) = .0773; half-width .0773 / sqrt(500) * 1.9647 = .00679, times 1.4294
    assert lines[4].startswith("detectable at this n: 0.010;")
    assert lines[5] == "this cannot pick a checkpoint: the gap is inside the noise"
    assert "this cannot pick a checkpoint: 100 items are a pulse, take 500" in comparison_lines(
        compare(record("sft", 50, 100), record("grpo", 80, 100))
    )


def test_a_model_with_itself(tmp_path):
    place = put(tmp_path / "a.json", record("sft", 250))
    assert shown("compare", place, place)[-1].startswith("both records measured the same weights")


def test_folders_are_compared_suite_by_suite(tmp_path):
    for label, right in (("sft", 250), ("grpo", 300)):
        put(tmp_path / label / "one.json", record(label, right, suite="one"))
        put(tmp_path / label / "two.json", record(label, 250, suite="two"))
    put(tmp_path / "grpo" / "three.json", record("grpo", 3, suite="three"))
    lines = shown("compare", str(tmp_path / "sft"), str(tmp_path / "grpo"))
    assert [line.split()[0] for line in lines] == ["suite", "one", "two", "intervals:", "measured"]
    assert "defensible" in lines[1]
    assert lines[2].split()[-3:] == ["1.000", "500", "underpowered"]
    assert lines[-1] == "measured on one side only: three"


def test_two_runs_and_one_rung_of_a_run(tmp_path):
    for label, right in (("sft", 250), ("grpo", 300)):
        put(tmp_path / "run" / "evals" / f"{label}.sums.json", record(label, right))
    assert shown("compare", f"{tmp_path}/run:sft", f"{tmp_path}/run:grpo")[0] == "sums: sft -> grpo"
    assert "choose one of them, as PATH:grpo" in refused("compare", f"{tmp_path}/run", f"{tmp_path}/run:grpo")
    assert len(shown("compare", f"{tmp_path}/run", f"{tmp_path}/run")) == 4
    put(tmp_path / "again" / "evals" / "grpo.sums.json", replace(record("grpo", 300), model_digest="another run's weights"))
    told = f"sums: {tmp_path}/run:grpo -> {tmp_path}/again:grpo"
    assert shown("compare", f"{tmp_path}/run:grpo", f"{tmp_path}/again")[0] == told
    put(tmp_path / "again" / "evals" / "sft.sums.json", record("sft", 250))
    assert [line.split()[:3] for line in shown("compare", f"{tmp_path}/run", f"{tmp_path}/again")[1:3]] == [
        ["sums", "grpo", "grpo"],
        ["sums", "sft", "sft"],
    ]


def test_reconcile_shows_what_differs(tmp_path):
    one, other = record("sft", 250), record("sft", 200, verifier="hash-marker/2")
    lines = shown("reconcile", put(tmp_path / "a.json", one), put(tmp_path / "b.json", other))
    assert lines[:2] == ["sft: 0.500 against 0.400", "differs: verifier is 'hash-marker/1' against 'hash-marker/2'"]
    assert "of which 50 disagree" in lines[2]
    assert lines[3].startswith("verdict: explained: verifier is the one thing that differs")
    assert lines[4].startswith("absolute number: unresolved; quote neither")


def test_select_reports_elsewhere_or_shows_the_tie(tmp_path):
    picks = [put(tmp_path / f"{label}.json", record(label, right)) for label, right in (("s20", 250), ("s40", 300))]
    report = put(tmp_path / "report" / "s40.json", record("s40", 280, start=500))
    lines = shown("select", *picks, "--report", report)
    assert "picked: s40, +0.100 above the runner-up" in lines
    assert lines[-2].startswith("report: pass@1 0.560  95% [")
    assert lines[-1] == "optimism of the pick: +0.040 (0.600 where it was picked)"
    assert "report it on items that took no part" in shown("select", *picks)[-1]
    close = put(tmp_path / "s60.json", record("s60", 301))
    lines = shown("select", *picks, close, code=1)
    assert lines[-2] == "no pick: the gap of +0.002 to the runner-up is inside the paired noise; tied: s60, s40"
    assert "items that report 's40' also picked it" in refused("select", *picks, "--report", picks[1])


def test_select_asks_for_the_suite(tmp_path):
    for suite in ("one", "two"):
        for label, right in (("s20", 250), ("s40", 300)):
            put(tmp_path / f"{label}.{suite}.json", record(label, right, suite=suite))
    assert "several suites were measured: one, two; choose one with --suite" in refused("select", str(tmp_path))
    assert shown("select", str(tmp_path), "--suite", "two")[0].startswith("two: ")
    assert "holds no record of suite 'three'; measured are one, two" in refused("select", str(tmp_path), "--suite", "three")


def test_retention_names_losses_and_flips(tmp_path):
    sampled = Sampling(max_tokens=16)
    for label, greedy, drawn in (("before", 250, 300), ("after", 300, 250)):
        put(tmp_path / label / "chat.greedy.json", record(label, greedy, suite="chat.greedy", dataset="chat"))
        put(tmp_path / label / "chat.sampled.json", record(label, drawn, suite="chat.sampled", dataset="chat", sampling=sampled))
    lines = shown("retention", str(tmp_path / "before"), str(tmp_path / "after"), code=1)
    assert [line.split()[-1] for line in lines[1:3]] == ["gained", "lost"]
    assert lines[-1] == "chat: the sign depends on the decoding: +0.100 greedy, -0.100 sampled (both beyond noise)"
    kept = retention_report([(record("a", 250), record("b", 250))])
    assert retention_lines(kept)[1].split()[-1] == "kept"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or folder"),
        ("", "not readable as JSON"),
        ('{"schema": 2, "items": [', "not readable as JSON"),
        ('{"schema": 1}', "has schema 1, this version reads 2; evaluate again"),
        ("[]", "not a mapping"),
        ("NaN", "not a mapping"),
        ('{"schema": 2, "items": 3, "conditions": 4}', "malformed"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "reconcile", "select", "retention"])
def test_bad_input_is_one_line(tmp_path, command, content, said):
    good, bad = put(tmp_path / "good.json", record("a", 250)), tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    message = refused(command, good, str(bad))
    assert said in message or (content is None and "no such file" in message)
    assert "bad.json" in message


def test_empty_folders_and_unequal_conditions_are_one_line(tmp_path):
    good = put(tmp_path / "good.json", record("a", 250))
    (tmp_path / "empty").mkdir()
    assert "no evaluation record (*.json) in it" in refused("compare", good, str(tmp_path / "empty"))
    other = put(tmp_path / "other.json", record("b", 250, verifier="g/2", seed=9))
    assert "verifier is 'hash-marker/1' against 'g/2'; seed is 1 against 9" in refused("compare", good, other)
    assert "a margin of 0 is no loss" in refused("retention", good, good, "--margin", "0")
    models = put(tmp_path / "model.json", replace(record("b", 250), model_digest="x"))
    assert "are two models" in refused("reconcile", good, models)


def test_eval_writes_one_record_or_a_folder(toy, tmp_path):
    folder = tmp_path / "model"
    save(toy.model(265), toy.tokenizer, folder)
    common = [str(folder), "-n", "4", "--max-tokens", "4", "-s", "processes=1", "-s", "allow_truncation=true"]
    text = shown("eval", *common, "--mode", "sampled", "-s", "samples=2", "--out", str(tmp_path / "one.json"))
    assert any("n = 4 items x 2" in line for line in text)
    data = json.loads((tmp_path / "one.json").read_text())
    assert (data["conditions"]["sampling"]["mode"], data["role"], data["schema"]) == ("sampled", "pulse", 2)
    assert "exists already" in refused("eval", *common, "--out", str(tmp_path / "one.json"))
    shown("eval", *common, "--task", "arithmetic", "--task", "instruct", "--mode", "greedy", "--out", str(tmp_path / "set"))
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["arithmetic.greedy.json", "instruct.greedy.json"]
    assert "add --out FOLDER" in refused("eval", *common, "--task", "arithmetic", "--task", "instruct")
    assert "unknown decoding mode 'beam'" in refused("eval", *common, "--mode", "beam")
    assert "unknown task source" in refused("eval", *common, "--task", "nope")


def test_comparing_needs_no_torch(tmp_path):
    places = [put(tmp_path / f"{label}.json", record(label, right)) for label, right in (("a", 250), ("b", 300))]
    script = (
        "import sys; from posttrain.cli import evaluation as e; a, b = sys.argv[1:]; e.compare(a, b); e.reconcile(a, a); "
        "e.retention(a, b); e.select([a, b]); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *places], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
