"""The matrix of real runs, records and checks: every fault on three seeds under its own id, and healthy runs of five kinds in silence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.matrix import checks_faults, healthy, live, live_records  # noqa: E402
from tests.matrix.catalog_matrix import inject  # noqa: E402

SEEDS = range(3)
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "fault", [*live.FAULTS, *live_records.FAULTS, *checks_faults.FAULTS], ids=lambda fault: f"{fault.id}-{fault.what[:40]}"
)
def test_a_fault_is_named_by_its_own_id(fault):
    row = inject(fault, SEEDS)
    assert row.share == 1.0, (row.named, row.notes)
    assert row.disagree == [[] for _ in SEEDS]


@pytest.mark.parametrize("fault", healthy.HEALTHY, ids=lambda fault: fault.what)
def test_a_healthy_run_is_named_nothing(fault):
    row = inject(fault, SEEDS)
    assert row.share == 1.0, row.named
    assert row.disagree == [[] for _ in SEEDS]
