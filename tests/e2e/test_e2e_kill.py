"""Killed at random points and resumed, an RL run ends with the bytes of one that nobody killed. The whole of it: `kill_points.py 50`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from e2e_cli import PATIENCE, Cli, cache_of, reference

SCRIPT = Path(__file__).with_name("kill_points.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)


def killed(run: Path, *arguments: str, patience: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = Cli(cache_of(run)).environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience, check=False)


def test_three_kills(run: Path) -> None:
    done = killed(run, "3", "--model", str(run / "checkpoints" / "sft" / "final"), patience=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "default: 3 kills over" in done.stdout
    assert "all completed with the bytes of the uninterrupted run" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["default", "s_grpo", "tools"])
def test_ten_kills(run: Path, kind: str) -> None:
    model = [] if kind == "tools" else ["--model", str(run / "checkpoints" / "sft" / "final")]  # the script teaches one to call tools
    done = killed(run, "10", "--run", kind, "--seed", "7", *model, patience=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: 10 kills over" in done.stdout


@pytest.mark.slow
def test_a_difference_is_found(run: Path, tmp_path: Path) -> None:
    # a child that rewinds nothing repeats lines; the comparison must see it, or it compares nothing
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import runpy, sys\n"
        "from posttrain.runs.run import Run\n"
        "Run.rewind = lambda self, position: None\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    command = [sys.executable, str(broken), "6", "--seed", "3", "--model", str(run / "checkpoints" / "sft" / "final")]
    environment = Cli(cache_of(run)).environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "metrics.jsonl differs" in done.stdout
