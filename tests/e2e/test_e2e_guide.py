"""The examples of CONTRIBUTING.md are code that runs, and the files and folders it names exist."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_cli import Cli

from posttrain.core.sampling import Sampling
from posttrain.engine.processes import Ranks
from posttrain.engine.types import Request
from posttrain.objectives.streams import Streams
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


def test_objective_example_and_its_companion(examples: dict[str, Any]) -> None:
    logp = torch.tensor([[0.4, 0.0, math.nan]], dtype=torch.float64, requires_grad=True)
    zeros, advantage = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[2.0, -1.0, math.nan]], dtype=torch.float64)
    loss = examples["tanh_gate"](Streams(logp, zeros, zeros, advantage, torch.tensor([[True, True, False]])))
    # ratios e^0.4 = 1.49182 and 1: -2 (1 + tanh 0.49182), 1 (1 + 0)
    assert loss[0, :2].tolist() == pytest.approx([-2 * (1 + math.tanh(math.exp(0.4) - 1)), 1.0])
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    assert slope.tolist() == [pytest.approx([-examples["tanh_gate_coefficient"](0.4, 2.0), 1.0, 0.0])]


def test_certificate_of_the_example_and_of_the_one_that_looks_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def tanh_gate(" in block)
    (tmp_path / "gates.py").write_text(block)
    for name, code, says in (("tanh_gate", 0, "tanh_gate (objective): all laws hold"), ("centred_gate", 1, "NOT CERTIFIED")):
        assert f"gates.py:{name}" in text
        assert says in text
        assert Cli(tmp_path).call(monkeypatch, "certify", f"{tmp_path}/gates.py:{name}") == code
        shown = capsys.readouterr().out
        assert says in shown
        failed = {line.split()[0] for line in shown.splitlines() if " FAIL " in line}
        assert failed == (set() if code == 0 else {"partition", "permutation"})


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
