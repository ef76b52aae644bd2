"""The whole ladder through the command line: what it leaves behind, and that equal seeds give equal numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_cli import TOY, Cli, cache_of, ladder, numbers, reference, results
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.runs.listing import verify
from posttrain.runs.run import Run

RUNGS = ["base", "sft", "dpo", "grpo"]
SUITES = {"arithmetic", "arithmetic_greedy", "harder", "retention"}
STAGES = ["base", "eval.base", "sft", "eval.sft", "mine", "dpo", "eval.dpo", "grpo", "eval.grpo"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)


def test_summary_has_every_rung_and_suite_with_n_interval_and_rates(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["schema"] == 1
    assert [rung["rung"] for rung in summary["rungs"]] == RUNGS
    assert list(summary["seconds_per_stage"]) == [*STAGES[:-2], "gate.grpo", *STAGES[-2:]]
    for place, rung in enumerate(summary["rungs"]):
        assert rung["suites"].keys() == SUITES
        for figures in rung["suites"].values():
            assert (figures["n_items"], figures["samples_per_item"]) == (8, 1)
            low, high = figures["interval"]
            assert 0 <= low <= figures["pass_at_1"] <= high <= 1
            assert low < high
            assert 0 <= figures["parse_rate"] <= 1
            assert 0 <= figures["truncation_rate"] <= 1
            change = figures["paired_change"]
            assert (change is None) == (place == 0)
            if change is not None:
                assert change["against"] == RUNGS[place - 1]
                before = summary["rungs"][place - 1]["suites"]
                name = next(name for name, found in rung["suites"].items() if found is figures)
                assert change["delta"] == pytest.approx(figures["pass_at_1"] - before[name]["pass_at_1"])


def test_sft_taught_the_form_of_an_answer(run: Path) -> None:
    base, sft, *_ = (rung["suites"]["arithmetic_greedy"] for rung in results(run)["rungs"])
    assert base["parse_rate"] < 0.5
    assert sft["parse_rate"] > 0.9


def test_run_directory_holds_records_of_every_stage(run: Path) -> None:
    found = Run.open(run)
    manifest = found.manifest
    assert manifest["stages"] == STAGES
    assert manifest["command"][:2] == ["posttrain", "ladder"]
    assert manifest["seeds"] == {"seed": 0}
    assert all(found.finished(stage) for stage in STAGES)
    assert {line["stage"] for line in found.metrics()} == {"base", "sft", "mine", "dpo", "grpo"}
    assert [line["step"] for line in found.metrics("grpo")] == list(range(12))
    assert {path.stem for path in (run / "evals").iterdir()} == {f"{rung}.{suite}" for rung in RUNGS for suite in SUITES}
    assert found.rollouts("grpo")[0].keys() >= {"prompt", "completion", "gold", "value", "status", "stop", "version"}
    assert verify(run) == []


def test_report_stands_alone_and_shows_the_table(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "<svg" in page
    assert all(rung in page for rung in RUNGS)
    assert "<script src" not in page
    assert 'href="http' not in page


def test_every_rung_loads_as_a_plain_model_and_step_checkpoints_are_gone(run: Path) -> None:
    weights = []
    for rung in RUNGS:
        folder = run / "checkpoints" / rung / "final"
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert len(AutoTokenizer.from_pretrained(folder)) == model.get_input_embeddings().num_embeddings
        weights.append((folder / "model.safetensors").read_bytes())
        assert [path.name for path in folder.parent.iterdir()] == ["final"]
    assert len(set(weights)) == len(RUNGS)


def test_results_go_to_stdout_and_progress_to_stderr(run: Path) -> None:
    out, err = (run.parent / "stdout").read_text(), (run.parent / "stderr").read_text()
    assert out.startswith("| Rung ")
    assert f"posttrain chat {run}" in out
    assert out.count("\n") == 2 + len(RUNGS) * len(SUITES) + 2
    assert "steps/s" in err
    assert "1420 rows / 16 rows per step = 89 steps per epoch (the last has 12)" in err
    assert "4 prompts x 4 completions = 16 rollouts per step" in err
    assert "Writing model shards" not in err
    assert "Loading weights" not in err
    assert "had no effect" not in err


def test_same_seed_gives_the_same_bytes_and_another_seed_does_not(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = Cli(cache_of(run))
    assert cli.run(ladder(tmp_path / "again")).returncode == 0
    assert numbers(tmp_path / "again") == numbers(run)
    assert results(tmp_path / "again") == results(run)
    other = [*TOY, "grpo.steps=1", "mine.prompts=60"]
    assert cli.call(monkeypatch, *ladder(tmp_path / "other", "--seed", "7", settings=other)) == 0
    assert numbers(tmp_path / "other") != numbers(run)
    same = [line for line in Run.open(run).metrics("base") if line.pop("seconds")]
    assert [line for line in Run.open(tmp_path / "other").metrics("base") if line.pop("seconds")] == same


def test_two_processes_finish_and_only_the_first_speaks(run: Path, tmp_path: Path) -> None:
    done = Cli(tmp_path / "cache").run(ladder(tmp_path / "two", "--processes", "2"))
    assert done.returncode == 0, done.stderr
    assert [rung["rung"] for rung in results(tmp_path / "two")["rungs"]] == RUNGS
    assert "Traceback" not in done.stderr
    assert done.stderr.count("grpo 12/12 steps") == 1
    assert done.stdout.count("report:") == 1
    losses = [line["loss"] for line in Run.open(tmp_path / "two").metrics("base")]
    assert losses == pytest.approx([line["loss"] for line in Run.open(run).metrics("base")], rel=0.05)


@pytest.mark.slow
def test_two_processes_repeat_themselves(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert Cli(tmp_path / f"cache-{name}").run(ladder(tmp_path / name, "--processes", "2")).returncode == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert results(tmp_path / "a") == results(tmp_path / "b")
