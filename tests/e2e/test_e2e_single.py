"""One stage on one's own model, data and reward; then measuring, comparing, talking, looking at runs. All through the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_cli import ARITHMETIC, PATIENCE, Cli, cache_of, last_error, numbers, reference
from transformers import AutoModelForCausalLM

from posttrain.core.files import read_json
from posttrain.runs.run import Run

Shown = Callable[..., str]
TASK = ["--task", "arithmetic", "--set", f"task_settings={json.dumps(ARITHMETIC)}", "--set", "held_out=8", "--set", "sampling.max_tokens=8"]
EVAL = ["--items", "8", "--max-tokens", "8", "--set", f"task_settings={json.dumps(ARITHMETIC)}", "--set", "processes=1"]
ROWS: dict[str, Callable[[int], dict[str, object]]] = {
    "messages": lambda n: {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n}"}]},
    "completion": lambda n: {"prompt": f"say {n}", "completion": f"{n}"},
    "text": lambda n: {"text": f"{n} comes after {n - 1}"},
    "preference": lambda n: {"prompt": f"say {n}", "chosen": f"{n}", "rejected": "no"},
    "task": lambda n: {
        "prompt": f"Compute {n % 6} + {n // 6}. Give the final integer after '####'.",
        "answer": n % 6 + n // 6,
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)


@pytest.fixture
def shown(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Call the command line; it must succeed; returns its standard output."""

    def call(*arguments: object) -> str:
        code = Cli(cache_of(run)).call(monkeypatch, *map(str, arguments))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call


def rows(folder: Path, kind: str, n: int) -> Path:
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(ROWS[kind](index)) + "\n" for index in range(n)))
    return path


@pytest.mark.parametrize(("kind", "model"), [("messages", "sft"), ("completion", "sft"), ("text", "base")])
def test_sft_on_rows_of_a_file(shown: Shown, run: Path, tmp_path: Path, kind: str, model: str) -> None:
    out, data = tmp_path / "out", rows(tmp_path, kind, 10)
    given = ["--set", "sft.batch_size=4", "--set", "sft.epochs=3", "--set", "sft.optim.lr=3e-3"]
    assert "report:" in shown("train", "sft", "--model", f"{run}:{model}", "--data", data, "--out", out, *given)
    lines = Run.open(out).metrics("sft")
    assert [line["rows"] for line in lines] == [4, 4, 2] * 3
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert Run.open(out).manifest["digests"].keys() == {"data", "model", "tokenizer", "template"}
    assert AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "sft" / "final").num_parameters() > 0
    assert read_json(out / "summary.json")["rungs"] == []
    assert (out / "report.html").is_file()


def test_dpo_on_preference_rows_measures_before_and_after(shown: Shown, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["--set", "dpo.batch_size=4", "--set", "dpo.epochs=3", "--set", "dpo.optim.lr=1e-3", *TASK]
    table = shown("train", "dpo", "--model", f"{run}:sft", "--data", rows(tmp_path, "preference", 10), "--out", out, *given)
    assert [rung["rung"] for rung in read_json(out / "summary.json")["rungs"]] == ["before", "after"]
    assert "vs before" in table
    lines = Run.open(out).metrics("dpo")
    assert [line["pairs"] for line in lines] == [4, 4, 2] * 3
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_rl_on_task_rows_with_adapters_repeats_from_its_own_config(shown: Shown, run: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", rows(tmp_path, "task", 36)
    given = ["--set", "rl.steps=3", "--set", "rl.prompts=4", "--set", "rl.siblings=4", "--set", "sampling.max_tokens=8"]
    shown("train", "rl", "--model", f"{run}:sft", "--data", data, "--out", out, "--set", "lora={}", *given)
    found = Run.open(out)
    assert len(found.metrics("rl")) == 3
    held_out = read_json(out / "summary.json")["rungs"][0]["suites"]["held_out"]["n_items"]
    assert 2 <= held_out <= 12
    assert AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "rl" / "final").num_parameters() > 0
    shown("train", "rl", "--config", out / "config.yaml", "--out", tmp_path / "again")
    assert numbers(tmp_path / "again") == numbers(out)
    shown("train", "rl", "--out", out, "--resume")
    assert numbers(tmp_path / "again") == numbers(out)


def test_a_reward_function_of_ones_own(run: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("example_reward.py")
    assert len(script.read_text().splitlines()) < 30
    command = [sys.executable, str(script), f"{run}:sft", str(tmp_path / "out")]
    environment = Cli(cache_of(run)).environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = Run.open(tmp_path / "out")
    assert len(found.metrics("rl")) == 10
    given = {(line["completion"], line["gold"]): line["value"] for line in found.rollouts("rl")}
    assert {line["grader"] for line in found.rollouts("rl")} == {"closeness/user"}
    read = {(text, gold): re.fullmatch(r"#### (\d{1,5})", text) for text, gold in given}
    assert sum(found is not None for found in read.values()) > 2
    for (text, gold), value in given.items():
        number = read[text, gold]
        assert number is None or value == 1 / (1 + abs(int(number[1]) - int(gold)))


def test_measure_compare_and_refuse_other_conditions(
    shown: Shown, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, sft, short = (tmp_path / f"{name}.json" for name in ("base", "sft", "short"))
    text = shown("eval", f"{run}:base", "--out", base, *EVAL, "--set", "allow_truncation=true")
    assert "n = 8 items x 1" in text
    assert "temperature=0.0 top_p=1.0 top_k=0 min_p=0.0 max_tokens=8" in text
    shown("eval", f"{run}:sft", "--out", sft, *EVAL)
    greedy = read_json(run / "evals" / "sft.arithmetic_greedy.json")
    record = read_json(sft)
    assert record["items"] == greedy["items"]
    assert record["model_digest"] == greedy["model_digest"]
    text = shown("compare", base, sft)
    assert "n = 8 paired items" in text
    assert "McNemar" in text
    shown("eval", f"{run}:sft", "--out", short, *EVAL, "--set", "sampling.max_tokens=7")
    assert Cli(cache_of(run)).call(monkeypatch, "compare", str(sft), str(short)) == 2
    assert "sampling.max_tokens is 8 against 7" in last_error(capsys.readouterr().err)


def test_too_much_truncation_is_refused_after_the_record_is_saved(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "cut.json"
    assert Cli(cache_of(run)).call(monkeypatch, "eval", str(run), *EVAL, "--set", "sampling.max_tokens=1", "--out", str(record)) == 2
    assert "truncat" in last_error(capsys.readouterr().err)
    assert len(read_json(record)["items"]) == 8


def test_chat_answers_lines_of_standard_input(run: Path) -> None:
    done = Cli(cache_of(run)).run(["chat", f"{run}:sft"], "Compute 2 + 2. Give the final integer after '####'.\n/new\n" * 2)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("####")
    assert done.stderr.strip() == ""


def test_runs_are_listed_shown_verified_and_reported(
    shown: Shown, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown("runs", "list", tmp_path) == f"no runs in {tmp_path}\n"
    run = Path(shutil.copytree(run, tmp_path / "copy"))  # the shared one stays as it is
    listed = shown("runs", "list", tmp_path)
    assert str(run) in listed
    assert "finished" in listed
    text = shown("runs", "show", run)
    assert "eval.grpo" in text
    assert "| grpo | arithmetic " in text
    assert "everything recorded is still there" in shown("runs", "verify", run)
    assert shown("runs", "report", run).strip() == str(run / "report.html")
    weights = run / "checkpoints" / "dpo" / "final" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert Cli(tmp_path).call(monkeypatch, "runs", "verify", str(run)) == 1
    assert "checkpoints/dpo/final/model.safetensors: changed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tiny", "smollm2", "sft", "dpo", "rl", "arithmetic", "gsm8k"])
def test_recipes_lists_names_and_the_settings_of_each(shown: Shown, name: str) -> None:
    assert f"  {name} " in shown("recipes")
    settings = shown("recipes", name).splitlines()
    assert settings
    assert all(" = " in line for line in settings)
    assert {"tiny": "grpo.optim.lr = 0.0001", "sft": "demonstrations = 2000", "rl": "objective.kind = default"}.get(
        name, settings[0]
    ) in settings


@pytest.mark.parametrize("command", ["", "ladder", "train", "resume", "recipes", "eval", "compare", "chat", "runs", "runs list"])
def test_every_command_has_help(shown: Shown, command: str) -> None:
    assert "Usage:" in shown(*command.split(), "--help")
