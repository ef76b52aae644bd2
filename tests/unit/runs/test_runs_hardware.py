"""Facts about the machine and the process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

from posttrain.runs import hardware


def test_the_cores_that_may_be_used_are_counted():
    found = hardware.cpu()
    assert found["usable"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 1 << 20


def test_every_installed_package_has_its_version_under_one_spelling():
    found = hardware.installed()
    assert found["numpy"] == metadata.version("numpy")
    assert list(found) == sorted(found)
    assert all(name == name.lower() and "_" not in name for name in found)
    assert hardware.packages(("numpy", "no-such-package")) == {"numpy": metadata.version("numpy"), "no-such-package": None}


def test_kernels_are_those_of_this_process(monkeypatch):
    import torch

    found = hardware.kernels()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    monkeypatch.delitem(sys.modules, "torch")
    assert hardware.kernels() == {}


def test_asking_for_kernels_does_not_load_torch():
    code = "import sys\nfrom posttrain.runs.hardware import kernels\nassert kernels() == {}\nsys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_gpus_are_asked_of_the_driver(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.1'\necho 'NVIDIA H200, 143771 MiB, 580.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    hardware.gpus.cache_clear()
    assert hardware.gpus() == ({"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "580.1"},) * 2
    tool.write_text("#!/bin/sh\nexit 9\n")
    hardware.gpus.cache_clear()
    assert hardware.gpus() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    hardware.gpus.cache_clear()
    assert hardware.gpus() == ()
    hardware.gpus.cache_clear()
