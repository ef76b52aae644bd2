"""What has to work without torch does, and the command line answers at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from arch_source import SRC, load

TORCH_FREE = [name for name in "core stats sandbox rewards render runs plan doctor".split() if (SRC / "posttrain" / name).is_dir()]
HELP = ["-m", "posttrain.cli.main", "--help"]
HELP_SECONDS = 1.0
"""Processor time allowed for --help: twice the aim of half a second, because a busy machine is slower."""

WITHOUT_TORCH = """
import importlib, sys
wanted = []
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            wanted.append(name)
            raise ImportError("torch is absent in this test")
sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    importlib.import_module(name)
    if wanted:
        sys.exit(f"importing {name} asks for {wanted[0]}")
"""


def python(*arguments: str, path: Path = SRC) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", TORCH_FREE)
def test_package_imports_with_torch_absent(package):
    names = [module.name for module in load() if module.package == package]
    assert names
    done = python("-c", WITHOUT_TORCH, *names)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["import torch\n", "try:\n    from torch import nn\nexcept ImportError:\n    nn = None\n"])
def test_a_module_that_asks_for_torch_is_found(tmp_path, text):
    (tmp_path / "harmless.py").write_text("def f():\n    import torch\n")
    (tmp_path / "hungry.py").write_text(text)
    assert python("-c", WITHOUT_TORCH, "harmless", path=tmp_path).returncode == 0
    done = python("-c", WITHOUT_TORCH, "harmless", "hungry", path=tmp_path)
    assert done.returncode != 0
    assert "torch" in done.stderr


def test_help_neither_imports_torch_nor_takes_long():
    done = python("-X", "importtime", *HELP)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "posttrain" in imported
    assert imported.isdisjoint({"torch", "transformers", "datasets", "peft", "scipy"})
    # The best of three: a process can be slowed by its neighbours but not sped up.
    assert min(processor_seconds(*HELP) for _ in range(3)) < HELP_SECONDS


def processor_seconds(*arguments: str) -> float:
    """User and system time of one Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_processor_time_counts_work_but_not_waiting():
    assert processor_seconds("-c", "import time; time.sleep(0.5)") < 0.4
    assert processor_seconds("-c", "sum(range(30_000_000))") > processor_seconds("-c", "") + 0.1
