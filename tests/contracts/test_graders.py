"""Every task source and its grader keep the same promises: proof, disjoint splits, fixed held-out sets, any thread."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain.core.errors import ConfigError, GraderError
from posttrain.core.tasks import Task, tasks_digest
from posttrain.core.trajectory import RewardStatus, StopReason, Tokens, Trajectory
from posttrain.envs.sources import SOURCES, source
from posttrain.envs.types import TaskSource, env_of
from posttrain.rewards.proof import prove
from posttrain.rewards.types import score

N = 24
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "arithmetic": ("arithmetic", {}),
    "arithmetic-times": ("arithmetic", {"ops": ["*"], "high": 20, "harder_low": 21, "harder_high": 30}),
    "arithmetic-working": ("arithmetic", {"response": "{a} {op} {b} is {value}\n#### {value}"}),
    "calculator": ("calculator", {}),
    "calculator-taught": ("calculator", {"describe": False, "ops": ["+"]}),
    "word_problems": ("word_problems", {}),
    "word_problems-working": ("word_problems", {"working": True}),
    "instruct": ("instruct", {}),
    "instruct-mentions": ("instruct", {"grading": "mentions"}),
    "countdown": ("countdown", {}),
    "gsm8k": ("gsm8k", {}),
    "gsm8k-boxed": ("gsm8k", {"extraction": "boxed"}),
    "gsm8k-lenient": ("gsm8k", {"extraction": "last_number", "solution": "answer"}),
    "gym": ("gym", {"dataset": "basic_arithmetic", "held_out_size": N, "harder": {"min_digits": 5, "max_digits": 6}}),
    "gym-marker": ("gym", {"dataset": "chain_sum", "held_out_size": N, "harder": {"min_terms": 7, "max_terms": 8}, "form": "marker"}),
}


def write_questions(path: Path, start: int) -> str:
    rows = [
        {"question": f"Ann has {n} pens and buys {n}. How many?", "answer": f"She has <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n:,}"}
        for n in range(start, start + 40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(params=VARIANTS)
def tasks_of(request: pytest.FixtureRequest, tmp_path: Path) -> TaskSource:
    name, settings = VARIANTS[request.param]
    if name == "gsm8k":
        starts = {"train": 490, "held_out": 520, "harder": 700}
        files = {split: write_questions(tmp_path / f"{split}.jsonl", start) for split, start in starts.items()}
        settings = {**settings, **files}
    return source(name, **settings)


def prompts(tasks: list[Task]) -> set[str]:
    return {" ".join(message.content for message in task.prompt) for task in tasks}


def test_every_source_is_covered() -> None:
    assert {name for name, _ in VARIANTS.values()} == set(SOURCES)


def test_gold_scores_and_nothing_or_wrong_does_not(tasks_of: TaskSource) -> None:
    for split in ("train", "held_out", "harder"):
        report = prove(tasks_of.grader, tasks_of.tasks(split, N, 1), gold=tasks_of.gold, wrong=tasks_of.wrong)
        assert report.tasks == N
    assert tasks_of.grader.name.rpartition("/")[2].isdigit()


def test_splits_share_no_prompt(tasks_of: TaskSource) -> None:
    train = prompts([task for seed in range(6) for task in tasks_of.tasks("train", 40, seed)])
    held_out, harder = prompts(tasks_of.tasks("held_out", N, 0)), prompts(tasks_of.tasks("harder", N, 0))
    assert not train & held_out
    assert not train & harder
    assert not held_out & harder
    assert len(held_out) == len(harder) == N


def test_held_out_and_harder_are_fixed_and_train_follows_its_seed(tasks_of: TaskSource) -> None:
    for split in ("held_out", "harder"):
        tasks = tasks_of.tasks(split, N, 0)
        assert tasks_digest(tasks) == tasks_digest(tasks_of.tasks(split, N, 12345))
        assert tasks_of.tasks(split, 10, 7) == tasks[:10]
        assert len({task.id for task in tasks}) == N
    assert tasks_of.tasks("train", N, 3) == tasks_of.tasks("train", N, 3)
    assert tasks_of.tasks("train", N, 3) != tasks_of.tasks("train", N, 4)


def test_a_demonstration_is_the_task_answered_by_gold(tasks_of: TaskSource) -> None:
    task = tasks_of.tasks("train", 1, 0)[0]
    demonstration = tasks_of.demonstration(task)
    assert (demonstration.id, demonstration.messages[: len(task.prompt)]) == (task.id, task.prompt)
    assert env_of(tasks_of) is not None or len(demonstration.messages) == len(task.prompt) + 1
    assert (demonstration.messages[-1].role, demonstration.messages[-1].content) == ("assistant", tasks_of.gold(task))


def test_graders_judge_in_worker_threads(tasks_of: TaskSource) -> None:
    tasks = tasks_of.tasks("held_out", 8, 0)
    with ThreadPoolExecutor(4) as pool:
        gold = list(pool.map(lambda task: tasks_of.grader(task, tasks_of.gold(task)), tasks))
        wrong = list(pool.map(lambda task: tasks_of.grader(task, tasks_of.wrong(task)), tasks))
        proof = pool.submit(prove, tasks_of.grader, tasks, gold=tasks_of.gold, wrong=tasks_of.wrong).result()
    assert [outcome.value for outcome in gold] == [1.0] * 8
    assert [outcome.value for outcome in wrong] == [0.0] * 8
    assert proof.tasks == 8


def test_scores_carry_status_and_grader(tasks_of: TaskSource) -> None:
    task = tasks_of.tasks("train", 1, 0)[0]
    gold = tasks_of.gold(task)
    outcome = tasks_of.grader(task, gold)
    assert (outcome.status, outcome.grader) == (RewardStatus.SCORED, tasks_of.grader.name)
    assert outcome.parsed
    assert outcome.parsed in " ".join(gold.replace(",", "").split()).casefold() + gold
    assert tasks_of.grader(task, "").status is RewardStatus.UNPARSEABLE
    cut = Trajectory(task.id, 0, Tokens((), ()), (), (), StopReason.LENGTH, gold, 0)
    assert score(tasks_of.grader, task, cut).status is RewardStatus.TRUNCATED


def test_bad_requests_are_one_clear_line(tasks_of: TaskSource) -> None:
    with pytest.raises(ConfigError, match="unknown split 'test'"):
        tasks_of.tasks("test", 1, 0)
    with pytest.raises(ConfigError, match="at least 1"):
        tasks_of.tasks("train", 0, 0)


def test_a_prose_answer_in_gold_position_fails_the_proof(tasks_of: TaskSource) -> None:
    with pytest.raises(GraderError, match="wrong answer"):
        prove(tasks_of.grader, tasks_of.tasks("train", 2, 0), gold=tasks_of.gold, wrong=tasks_of.gold)
