"""The examples of CONTRIBUTING.md are code that runs, and the files and folders it names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.core.sampling import Sampling
from posttrain.engine.processes import Ranks
from posttrain.engine.types import Request
from posttrain.rewards.proof import prove
from posttrain.rollout.collect import Collector, collect

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ["CONTRIBUTING.md", "docs/architecture.md"]


@pytest.fixture(scope="module")
def examples() -> dict[str, Any]:
    """Names that the code blocks define, executed in the order in which they stand."""
    names: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL):
        exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    return names


def test_objective_example(examples: dict[str, Any]) -> None:
    values = examples["hinge"](torch.tensor([0.2, 2.0]), torch.tensor([-0.5, 0.0]))
    torch.testing.assert_close(values, torch.tensor([0.3, 0.0]))


def test_environment_and_reward_examples_keep_the_promises(examples: dict[str, Any]) -> None:
    source = examples["Backwards"]()
    train, held_out = source.tasks("train", 40, 3), source.tasks("held_out", 2, 0)
    assert {task.prompt for task in train}.isdisjoint({task.prompt for task in held_out})
    assert source.tasks("held_out", 2, 9) == held_out
    assert prove(source.grader, train, gold=source.gold, wrong=source.wrong).checks == 3 * 40 + 1


def test_engine_example_drives_the_pipeline(examples: dict[str, Any], toy: Any) -> None:
    source = examples["Backwards"]()
    assert len(examples["Scripted"]((2,)).generate([Request((1,), Sampling(), 0)] * 3)) == 3
    sampler = examples["Scripted"]((*toy.tokenizer.encode("elppa", add_special_tokens=False), *toy.renderer.stop_ids))
    collector = Collector(sampler, toy.renderer, source.grader, Sampling(), 2, Ranks())
    groups = collect(collector, source.tasks("train", 12, 0), 0)
    assert [group.rewards for group in groups] == [(float(group.task.answer == "elppa"),) * 2 for group in groups]


@pytest.mark.parametrize("guide", GUIDES)
def test_named_files_exist(guide: str) -> None:
    named = set(re.findall(r"`((?:tests|docs|design|objectives|rollout|engine|envs|core|loops)/[\w/.-]*)", (ROOT / guide).read_text()))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists() and not (ROOT / "src" / "posttrain" / name).exists()] == []


def test_package_table_is_complete() -> None:
    table = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE))
    assert table == {path.parent.name for path in (ROOT / "src" / "posttrain").glob("*/__init__.py")}
