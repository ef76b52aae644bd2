"""GSM8K rows and reasoning-gym data sets as task sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.trajectory import RewardStatus
from posttrain.envs.gsm8k import GSM8K
from posttrain.envs.gym import _CHUNK, Gym, tagged


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(question: str, answer: str) -> dict[str, object]:
    return {"question": question, "answer": answer}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    train = [row("How much?", "Twice <<600*2=1200>>1200.\n#### 1,200"), row("How   MANY?", "#### 3"), *[row("Which?", "#### -4")] * 2]
    return {"train": write(tmp_path / "train.jsonl", train), "held_out": write(tmp_path / "test.jsonl", [row("How many?", "#### 3")])}


def test_training_leaves_out_held_out_and_repeated_questions(files: dict[str, str]) -> None:
    tasks = GSM8K(**files).tasks("train", 40, 0)
    assert {task.id for task in tasks} == {"train-1", "train-3"}
    assert len({task.id for task in tasks[:2]}) == 2  # nothing repeats before everything was drawn


def test_gold_shows_the_solution_without_calculator_marks(files: dict[str, str]) -> None:
    asked = GSM8K(**files)
    task = next(task for task in asked.tasks("train", 2, 0) if task.id == "train-1")
    assert task.answer == "1200"
    assert task.prompt[0].content == "How much?\nGive the final number after '####'."
    assert asked.gold(task) == "Twice 1200.\n#### 1200"
    assert GSM8K(**files, solution="answer").gold(task) == "#### 1200"
    assert asked.grader(task, "#### 1,200").value == 1.0
    assert asked.grader(task, "#### 120").value == 0.0
    boxed = GSM8K(**files, extraction="boxed", instruction="")
    assert boxed.gold(task) == "Twice 1200.\n\\boxed{1200}"
    assert boxed.tasks("held_out", 1, 0)[0].prompt[0].content == "How many?"


@pytest.mark.parametrize(
    ("bad", "field"),
    [({"question": "q"}, "answer"), (row("", "#### 1"), "question"), (row("q", "1"), "answer"), (row("q", "#### one"), "answer")],
)
def test_a_row_without_a_usable_answer_is_named(tmp_path: Path, files: dict[str, str], bad: dict[str, object], field: str) -> None:
    broken = write(tmp_path / "broken.jsonl", [row("fine", "#### 1"), bad])
    with pytest.raises(DataError) as caught:
        GSM8K(train=broken, held_out=files["held_out"]).tasks("train", 1, 0)
    assert (caught.value.file, caught.value.line, caught.value.field) == (broken, 2, field)


def test_gsm8k_splits_that_do_not_exist(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="harder split has no file"):
        GSM8K(**files).tasks("harder", 1, 0)
    with pytest.raises(ConfigError, match="1 exist"):
        GSM8K(**files).tasks("held_out", 2, 0)
    with pytest.raises(DataError, match="also occurs in the held-out file"):
        GSM8K(train=files["held_out"], held_out=files["held_out"]).tasks("train", 1, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so <answer> 5\n6 </answer>.", "5\n6"),
        ("<answer>5</answer><answer>6</answer>", None),
        ("<answer>5", None),
        ("<answer><answer>5</answer>", None),
        ("<answer></answer>", None),
        ("5", None),
    ],
)
def test_tagged(text: str, expected: str | None) -> None:
    assert tagged(text) == expected


def test_gym_unknown_names_and_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match="did you mean 'basic_arithmetic'"):
        Gym(dataset="basic_arithmetik").tasks("train", 1, 0)
    with pytest.raises(ConfigError, match="refused"):
        Gym(dataset="basic_arithmetic", settings={"terms": 3}).tasks("train", 1, 0)
    with pytest.raises(ConfigError, match="seed or size"):
        Gym(dataset="basic_arithmetic", settings={"seed": 3}).tasks("train", 1, 0)
    with pytest.raises(ConfigError, match="no harder split"):
        Gym(dataset="basic_arithmetic").tasks("harder", 1, 0)
    with pytest.raises(ConfigError, match="raise held_out_size"):
        Gym(dataset="basic_arithmetic", held_out_size=4).tasks("held_out", 5, 0)


def test_gym_never_trains_a_held_out_question_of_a_small_data_set() -> None:
    asked = Gym(dataset="chain_sum", settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, held_out_size=30)
    held_out = {task.prompt[0].content for task in asked.tasks("held_out", 30, 0)}
    train = {task.prompt[0].content for task in asked.tasks("train", 150, 0)}
    assert len(held_out) == 30
    assert not held_out & train


def test_gym_says_when_everything_is_held_out() -> None:
    asked = Gym(dataset="chain_sum", settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, held_out_size=500)
    with pytest.raises(ConfigError, match="nearly every question is held out"):
        asked.tasks("train", 1, 0)


def test_gym_tasks_can_be_judged_by_a_new_instance() -> None:
    task = Gym(dataset="basic_arithmetic", held_out_size=8).tasks("train", 3, 5)[2]
    anew = Gym(dataset="basic_arithmetic", held_out_size=8)
    assert anew.grader(task, anew.gold(task)).value == 1.0


def test_gym_goes_on_with_another_seed_after_a_chunk() -> None:
    tasks = Gym(dataset="basic_arithmetic", held_out_size=8).tasks("train", _CHUNK + 50, 0)
    seeds = sorted({task.meta["seed"] for task in tasks})
    assert seeds[1] - seeds[0] == _CHUNK
    assert len({task.id for task in tasks}) == _CHUNK + 50


def test_gym_counts_partial_marks_only_when_told() -> None:
    strict = Gym(dataset="basic_arithmetic", held_out_size=8)
    task = strict.tasks("held_out", 1, 0)[0]
    hedged = f"<answer>{task.answer} {'9' * len(task.answer)}</answer>"
    assert strict.grader(task, hedged).value == 0.0
    partial = Gym(dataset="basic_arithmetic", held_out_size=8, partial=True)
    assert 0.0 < (partial.grader(task, hedged).value or 0.0) < 1.0
    assert strict.grader.name != partial.grader.name
    assert strict.grader(task, task.answer).status is RewardStatus.UNPARSEABLE
