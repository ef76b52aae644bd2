"""Gates through the command line: a ladder and a run of reinforcement learning that stop in time, and go on when told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from e2e_cli import ARITHMETIC, TOY, Cli, cache_of, ladder, last_error, reference

from posttrain.cli.gates import judge
from posttrain.core.files import read_json, read_jsonl
from posttrain.runs.run import Run

RL = ["--set", "rl.steps=1", "--set", "rl.prompts=2", "--set", "rl.siblings=4", "--set", "held_out=8", "--set", "sampling.max_tokens=8"]
UNTAUGHT = [*(s for s in TOY if not s.startswith(("rows.", "sft."))), "rows.arithmetic=8", "rows.instruct=0", "sft.optim.lr=1e-6"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)


def verdict(run: Path, name: str) -> dict:
    return read_json(run / "gates" / f"{name}.json")


def test_a_healthy_ladder_passes_its_gates_and_keeps_their_verdicts(run: Path) -> None:
    names = sorted(path.name for path in (run / "gates").iterdir())
    assert names == ["handover.dpo.json", "handover.grpo.json", "handover.sft.json", "launch.grpo.json", "thresholds.json"]
    assert all(verdict(run, name)["verdict"] != "failed" for name in ("handover.sft", "handover.dpo", "launch.grpo"))
    assert verdict(run, "launch.grpo")["figures"]["buckets"]["mixed"] > 0
    assert Run.open(run).finished("gate.grpo") is not None


def test_a_ladder_whose_sft_taught_no_form_stops_before_dpo_and_goes_on_when_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cli = tmp_path / "out", Cli(cache_of(run))
    assert cli.call(monkeypatch, *ladder(out, settings=UNTAUGHT)) == 6
    error = last_error(capsys.readouterr().err)
    assert "gate handover.sft failed" in error
    assert "form" in error
    assert "--set guard.gates=warn" in error
    assert verdict(out, "handover.sft")["verdict"] == "failed"
    assert [line["name"] for line in read_jsonl(out / "alarms.jsonl") if line["stage"] == "eval.sft"] == ["form"]
    assert Run.open(out).finished("mine") is None
    # the gate does not open by itself
    assert cli.call(monkeypatch, "resume", str(out)) == 6
    capsys.readouterr()
    # and the pipeline goes past it when told: mining finds nothing to mine, which is its own error
    cli.call(monkeypatch, "resume", str(out), "--set", "guard.gates=warn")
    assert "gate" not in last_error(capsys.readouterr().err)


def test_reinforcement_learning_stops_where_there_is_nothing_to_learn(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cli = tmp_path / "out", Cli(cache_of(run))
    given = ["train", "rl", "--model", f"{run}:base", "--task", "arithmetic", "--set", f"task_settings={json.dumps(ARITHMETIC)}", *RL]
    assert cli.call(monkeypatch, *given, "--out", str(out)) == 6
    assert "gate launch.rl failed" in last_error(capsys.readouterr().err)
    found = verdict(out, "launch.rl")
    assert found["figures"]["prompts"] == 64
    assert found["figures"]["reading"] == "truncated"  # the base does not close its turn, and that is looked at first
    assert Run.open(out).metrics("rl") == []
    assert cli.call(monkeypatch, *given, "--out", str(tmp_path / "off"), "--set", "guard.gates=off") == 0
    assert not (tmp_path / "off" / "gates" / "launch.rl.json").exists()
    assert len(Run.open(tmp_path / "off").metrics("rl")) == 1


def test_the_gate_changes_nothing_that_is_trained(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = []
    for policy in ("stop", "off"):
        out = tmp_path / policy
        given = ["train", "rl", "--model", f"{run}:sft", "--task", "arithmetic", "--set", f"task_settings={json.dumps(ARITHMETIC)}", *RL]
        assert Cli(cache_of(run)).call(monkeypatch, *given, "--out", str(out), "--set", f"guard.gates={policy}") == 0
        kept.append((out / "checkpoints" / "rl" / "final" / "model.safetensors").read_bytes())
    capsys.readouterr()
    assert kept[0] == kept[1]


def test_a_real_run_is_judged_for_promotion(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    found = judge(copy, against=None, rung=None, suite=None, family=None, overrides=[])
    assert found.subject == "grpo against dpo on 'arithmetic'"
    assert found.passed is False  # 12 steps on 4 prompts gain nothing
    assert found.of("thresholds").passed is True
    assert found.of("base").passed is True
    assert found.of("held_out").passed is False
    assert found.of("items").passed is None
    assert found.of("drift").passed is None
    assert found.of("variance").passed is True
    assert verdict(copy, "promotion")["verdict"] == "failed"
