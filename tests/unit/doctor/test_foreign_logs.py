"""Logs of other trainers: JSON lines, CSV, W&B exports, trainer_state.json, kept completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.errors import RunError
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.foreign.completions import rollout
from posttrain.doctor.lines import Limits
from posttrain.doctor.reading import read_evidence


def rows_of(found: Evidence) -> dict[str, dict[int, float]]:
    """Metric to step to value."""
    frame = found.frames["train"]
    return {
        name: {frame.steps[int(row)]: float(value) for row, value in zip(column.positions, column.values, strict=True)}
        for name, column in frame.columns.items()
    }


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


STATE = {
    "global_step": 30,
    "max_steps": 30,
    "log_history": [
        {"loss": 0.5, "reward": 0.25, "frac_reward_zero_std": 0.75, "completions/clipped_ratio": 0.125, "step": 10, "epoch": 0.1},
        {"eval_reward": 0.5, "eval_loss": 1.5, "step": 10},
        {"loss": 0.25, "reward": 0.5, "step": 30},
        {"train_runtime": 9.0, "train_loss": 0.4, "step": 30},
    ],
}


def test_trainer_state_has_training_and_evaluation_rows_of_one_step_together(tmp_path: Path):
    (tmp_path / "trainer_state.json").write_text(json.dumps(STATE))
    found = read_evidence(tmp_path)
    rows = rows_of(found)
    assert rows["reward_mean"] == {10: 0.25, 30: 0.5}
    assert rows["heldout_mean"] == {10: 0.5}
    assert rows["heldout_loss"] == {10: 1.5}
    assert rows["truncated"] == {10: 0.125}
    assert rows["mixed"] == {10: 0.25}
    assert rows["train_loss"] == {30: 0.4}
    frame = found.frames["train"]
    assert (found.source, frame.kind, frame.settings["steps"], found.finished) == ("trl", "rl", 30, {"train": {"steps": 30}})
    assert found.manifest["names"]["truncated"] == "completions/clipped_ratio"
    assert "train_loss" in found.manifest["unmapped"]
    assert frame.facts["finished"] is True
    assert frame.facts["source"] == "trl"


def test_of_several_checkpoints_the_state_of_the_newest_is_read(tmp_path: Path):
    for step in (9, 100, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 1.0, "step": step}]}))
    assert read_evidence(tmp_path).frames["train"].steps == [100]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 1.0, "step": 7}]}))
    assert read_evidence(tmp_path).frames["train"].steps == [7]


def test_preference_and_supervised_logs_have_their_kinds(tmp_path: Path):
    dpo = jsonl(tmp_path / "a.jsonl", {"step": 1, "loss": 0.7, "rewards/chosen": 0.1, "rewards/rejected": -0.1, "rewards/accuracies": 0.6})
    sft = jsonl(tmp_path / "b.jsonl", {"step": 1, "loss": 0.7, "mean_token_accuracy": 0.8})
    assert (read_evidence(dpo).frames["train"].kind, read_evidence(sft).frames["train"].kind) == ("preference", "sft")


def test_json_lines_with_an_envelope_and_nested_figures(tmp_path: Path):
    path = jsonl(tmp_path / "log.jsonl", {"step": 3, "data": {"actor/entropy": 0.5}, "rewards": {"acc": 0.25}, "note": "x", "flag": True})
    assert rows_of(read_evidence(path)) == {"entropy": {3: 0.5}, "channel_acc_mean": {3: 0.25}}


def test_a_wandb_history_with_numbers_as_text_and_a_missing_last_line_end(tmp_path: Path):
    path = jsonl(tmp_path / "wandb-history.jsonl", {"_step": 0, "critic/score/mean": "0.5", "_timestamp": 9.0})
    path.write_text(path.read_text() + '{"_step": 2, "critic/score/mean": "NaN", "actor/entropy": 1}')
    found = read_evidence(tmp_path)
    assert (found.source, rows_of(found)) == ("wandb", {"reward_mean": {0: 0.5}, "entropy": {2: 1.0}})
    assert found.frames["train"].events == {"non_finite": 1}
    assert found.problems == [
        "wandb-history.jsonl: line 2 holds NaN, Infinity or a number that no float can hold; it counts as not known (critic/score/mean)"
    ]


def test_the_trainers_step_goes_before_the_loggers_counter(tmp_path: Path):
    path = jsonl(
        tmp_path / "h.jsonl",
        {"_step": 0, "train/global_step": 10, "train/loss": 1.0},
        {"_step": 1, "eval/reward": 0.5},
        {"_step": 2, "train/global_step": 20, "train/loss": 2.0},
    )
    assert rows_of(read_evidence(path)) == {"loss": {10: 1.0, 20: 2.0}, "heldout_mean": {10: 0.5}}


def test_rows_out_of_order_are_sorted_and_of_one_step_the_later_value_holds(tmp_path: Path):
    path = jsonl(tmp_path / "h.jsonl", {"step": 5, "loss": 1.0}, {"step": 2, "loss": 3.0}, {"step": 5, "loss": 0.5, "kl": 0.1})
    found = read_evidence(path)
    assert (found.frames["train"].steps, rows_of(found)) == ([2, 5], {"loss": {2: 3.0, 5: 0.5}, "kl": {5: 0.1}})


def test_rows_without_a_step_are_counted(tmp_path: Path):
    path = jsonl(tmp_path / "h.jsonl", {"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0})
    assert rows_of(read_evidence(path))["loss"] == {0: 3.0, 1: 2.0, 2: 1.0}


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_csv_with_any_usual_mark(tmp_path: Path, mark: str):
    lines = ["\ufeffstep,reward,kl,name", "0,0.5,,a", "1,0.75,1e-3,b", "x,1,1,c", "2,0.5"]
    (tmp_path / "run.csv").write_text("\n".join(lines).replace(",", mark), encoding="utf-8")
    found = read_evidence(tmp_path)
    assert rows_of(found) == {"reward_mean": {0: 0.5, 1: 0.75, 2: 0.5}, "kl": {1: 0.001}}
    assert found.problems == ["run.csv: line 4 has no usable step; skipped", "run.csv: line 5 has 2 cells for 4 columns"]
    assert found.source == "csv"
    assert found.frames["train"].facts["log.unreadable"] == 1


def test_a_chart_exported_by_wandb(tmp_path: Path):
    head = '"Step","calm-sky-3 - train/reward","calm-sky-3 - train/reward__MIN","calm-sky-3 - train/reward__MAX"'
    (tmp_path / "wandb_export.csv").write_text(head + '\n"10","0.5","0.4","0.6"\n"20","","",""\n"30","0.75","0.7","0.8"\n')
    found = read_evidence(tmp_path)
    assert rows_of(found)["reward_mean"] == {10: 0.5, 30: 0.75}
    assert found.manifest["unmapped"] == ["calm-sky-3 - train/reward__MIN", "calm-sky-3 - train/reward__MAX"]


def test_a_tag_exported_by_tensorboard(tmp_path: Path):
    (tmp_path / "run-a-tag-entropy.csv").write_text("Wall time,Step,Value\n1700000000.5,3,0.25\n")
    assert rows_of(read_evidence(tmp_path)) == {"entropy": {3: 0.25}}


def test_one_json_value_of_rows_or_of_series(tmp_path: Path):
    (tmp_path / "rows.json").write_text('[{"step": 1, "loss": 2.0}, 5]')
    (tmp_path / "series.json").write_text('{"train/reward": {"1": 0.5, "2": 0.25}, "train/loss": [1.0, 2.0], "odd": {"x": 1}}')
    assert rows_of(read_evidence(tmp_path / "rows.json"))["loss"] == {1: 2.0}
    found = read_evidence(tmp_path / "series.json")
    assert rows_of(found) == {"reward_mean": {1: 0.5, 2: 0.25}, "loss": {0: 1.0, 1: 2.0}}
    assert found.problems == ["series.json: holds a series that is not STEP: VALUE; left out"]


def test_the_users_names_go_before_the_known_ones(tmp_path: Path):
    path = jsonl(tmp_path / "log.jsonl", {"step": 1, "my_score": 0.5, "reward": 9.0})
    assert rows_of(read_evidence(path, names={"my_score": "reward_mean"})) == {"reward_mean": {1: 0.5}, "reward": {1: 9.0}}


def test_the_config_beside_a_wandb_history_gives_settings(tmp_path: Path):
    jsonl(tmp_path / "files" / "wandb-history.jsonl", {"_step": 0, "reward": 0.5})
    (tmp_path / "config.yaml").write_text("num_generations:\n  value: 8\nbeta:\n  value: 0.04\nlearning_rate:\n  value: 1.0e-06\n")
    settings = read_evidence(tmp_path).frames["train"].settings
    assert settings == {"siblings": 8, "optim.lr": 1e-6, "objective.kl.coef": 0.04}


def test_other_logs_of_a_directory_are_named(tmp_path: Path):
    jsonl(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0})
    jsonl(tmp_path / "other.jsonl", {"step": 1, "loss": 2.0})
    found = read_evidence(tmp_path)
    assert rows_of(found)["loss"] == {1: 1.0}
    assert (found.manifest["files"], found.manifest["not_read"], found.problems) == (["metrics.jsonl"], ["other.jsonl"], [])


def test_kept_completions_are_rollouts(tmp_path: Path):
    jsonl(tmp_path / "metrics.jsonl", {"step": 1, "reward": 1.0})
    jsonl(tmp_path / "completions.jsonl", *({"step": i, "input": "2+2", "output": "4", "score": 1.0} for i in range(5)))
    found = read_evidence(tmp_path, limits=Limits(rollouts=2))
    assert found.rollouts["train"] == [{"step": i, "prompt": "2+2", "completion": "4", "value": 1.0} for i in (3, 4)]
    assert found.problems == []


def test_a_completion_as_a_conversation_with_rewards_of_its_own():
    row = {
        "step": 3,
        "prompt": [{"content": "a"}, {"content": "2+2"}],
        "completion": [[{"role": "assistant", "content": "4"}]],
        "exact": 1.0,
        "form": 0.5,
    }
    assert rollout(row) == {"step": 3, "prompt": "2+2", "completion": "4", "parts": {"exact": 1.0, "form": 0.5}}


def test_completions_in_parquet(tmp_path: Path):
    from pyarrow import table
    from pyarrow.parquet import write_table

    jsonl(tmp_path / "metrics.jsonl", {"step": 1, "reward": 1.0})
    (tmp_path / "completions").mkdir()
    for number in (1, 2):
        write_table(
            table({"step": [number], "prompt": ["p"], "completion": ["c"], "exact": [0.5]}),
            tmp_path / f"completions/completions_0000{number}.parquet",
        )
    assert read_evidence(tmp_path).rollouts["train"] == [
        {"step": 2, "prompt": "p", "completion": "c", "value": 0.5, "parts": {"exact": 0.5}}
    ]
    (tmp_path / "completions/completions_00003.parquet").write_bytes(b"PAR1 no parquet")
    found = read_evidence(tmp_path)
    assert found.rollouts == {}
    assert found.problems[0].startswith("completions_00003.parquet: not readable as parquet")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer_state.json", "{}"),
        ("trainer_state.json", '{"log_history": [1, "x"]}'),
        ("trainer_state.json", "{"),
        ("log.jsonl", "\n\n"),
        ("log.jsonl", '{"note": "no number"}\n'),
        ("log.csv", "a,b\n"),
        ("log.csv", '"a\n'),
        ("log.json", "7"),
        ("x.txt", "hello"),
    ],
)
def test_a_log_without_any_figure_is_one_line(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(RunError) as caught:
            read_evidence(path)
        assert str(caught.value).isprintable()
