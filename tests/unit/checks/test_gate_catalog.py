"""Every failure that a gate names is in the catalog."""

import re
from pathlib import Path

import posttrain
from posttrain.doctor.catalog import CATALOG

ROOT = Path(posttrain.__file__).parent
FILES = [*ROOT.glob("checks/pr*.py"), ROOT / "evals" / "handover.py", ROOT / "recipes" / "preflight.py"]


def test_gates_name_failures_that_the_catalog_knows():
    named = {name for path in FILES for name in re.findall(r'"([FPS]\d+)"', path.read_text(encoding="utf-8"))}
    assert {"F2", "F12", "P5", "P12", "P13", "P17", "P25"} <= named
    assert sorted(named - set(CATALOG)) == []
