"""A comparison answers in under a second, so the statistics must not pull in anything slow."""

import pkgutil
import subprocess
import sys

import posttrain.stats

SLOW = ("torch", "scipy.stats", "scipy.optimize", "pandas", "matplotlib", "transformers")


def test_statistics_import_neither_torch_nor_scipy_stats():
    names = [f"posttrain.stats.{module.name}" for module in pkgutil.iter_modules(posttrain.stats.__path__)]
    assert {"posttrain.stats.intervals", "posttrain.stats.paired", "posttrain.stats.lag"} <= set(names)
    code = f"import sys, {', '.join(names)}\nprint([name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
