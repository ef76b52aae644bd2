"""Injected faults are named by their own id: the cheap ones here, all of them over three seeds in test_matrix_slow.py."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.matrix import checks_faults, live, live_records  # noqa: E402
from tests.matrix.catalog_matrix import Row, inject, line, main, report, row_of  # noqa: E402
from tests.matrix.faults import FAULTS, HEALTHY  # noqa: E402
from tests.matrix.injection import Fault, Named, beyond_metrics, by_run  # noqa: E402
from tests.matrix.live_runs import Play, played  # noqa: E402

from posttrain.core.files import read_json  # noqa: E402
from posttrain.doctor.catalog import CATALOG  # noqa: E402

REAL = (*live.FAULTS, *live_records.FAULTS, *checks_faults.FAULTS)
QUICK = [fault for fault in REAL if fault.seconds <= 0.6]


def fault_of(id: str = "F1") -> Fault:
    """A fault that only carries its id."""
    return Fault(id, "run", "made up", make=lambda folder, seed: folder, name=lambda path: Named((), None))


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: f"{fault.id}-{fault.how}")
def test_a_cheap_fault_is_named(fault, tmp_path):
    named = fault.name(fault.make(tmp_path, 0))
    assert fault.id in (*named.ids, *named.notes)
    assert named.disagree == ()


def test_there_are_enough_of_them():
    assert len({fault.id for fault in FAULTS}) >= 45
    assert len({fault.id for fault in REAL}) >= 45
    assert len({fault.id for fault in live.FAULTS}) >= 30
    assert {fault.id for fault in FAULTS} <= CATALOG.keys()
    assert len(QUICK) >= 20
    assert {fault.id for fault in HEALTHY} == {"healthy"}
    assert len({(fault.id, fault.how, fault.what) for fault in REAL}) == len(REAL)


def test_metric_entries_that_are_injected_can_be_raised_while_a_run_trains():
    blind = {fault.id for fault in live.FAULTS if beyond_metrics(CATALOG[fault.id])}
    assert blind <= {"F12", "S2", "S4", "S44", "S53", "S71", "S75", "S150"}  # they also look at records and events


def test_a_run_without_the_fault_is_not_named(tmp_path):
    # the same run as S70 and S35, with a sound sampler and a sound grader
    named = by_run(played(tmp_path, 0, Play(rl={"steps": 8})))
    assert named.ids == ()
    assert named.disagree == ()


def test_a_row_counts_notes_as_detected_and_keeps_the_others():
    found = [Named(("S8", "F1"), "S8", leads={"F1": 7}), Named(("S8",), "S8", notes=("F1",)), Named(("S8",), "S8")]
    row = row_of(fault_of(), range(3), found, 1.0)
    assert row.detected == [True, True, False]
    assert row.share == pytest.approx(2 / 3)
    assert row.lead == [7, None, None]
    assert line(row).split() == ["F1", "run", "2/3", "made", "up", "lead", "7", "to", "7", "also", "S8"]


def test_a_healthy_run_is_right_when_nothing_is_named():
    row = row_of(fault_of("healthy"), range(2), [Named((), None, notes=("S4",)), Named(("F1",), "F1")], 1.0)
    assert row.detected == [True, False]
    found = report([row])
    assert (found["healthy_runs"], found["false_alarms"], found["detected_under_own_id"]) == (2, 1, None)


def test_the_share_is_over_faults_and_the_live_alarms_are_compared(tmp_path):
    rows = [
        row_of(fault_of("F1"), range(2), [Named(("F1",), "F1"), Named((), None)], 1.0),  # one half
        row_of(fault_of("S2"), range(2), [Named(("S2",), "S2"), Named(("S2",), "S2", disagree=("S8",))], 1.0),  # all
    ]
    found = report(rows)
    assert (found["faults"], found["injections"], found["detected_under_own_id"]) == (2, 4, 0.75)
    assert found["live_and_replay_differ"] == 1


def test_every_injection_has_a_folder_of_its_own():
    seen = []

    def make(folder: Path, seed: int) -> Path:
        seen.append((folder, seed, list(folder.iterdir())))
        return folder

    row = inject(Fault("F1", "run", "nothing", make, lambda path: Named((), None)), range(3))
    assert isinstance(row, Row)
    assert Counter(seed for _, seed, _ in seen) == {0: 1, 1: 1, 2: 1}
    assert len({folder for folder, _, _ in seen}) == 3
    assert all(held == [] for _, _, held in seen)
    assert not any(folder.exists() for folder, _, _ in seen)


def test_the_command_prints_a_line_per_fault_and_writes_the_matrix(tmp_path, capsys):
    out = tmp_path / "made" / "matrix.json"
    assert main(["--only", "U2", "U64", "--seeds", "2", "--out", str(out)]) == 0
    found = read_json(out)
    assert (found["faults"], found["injections"], found["detected_under_own_id"]) == (2, 4, 1.0)
    assert [row["id"] for row in found["rows"]] == ["U64", "U2"]
    said = capsys.readouterr().out
    assert "2 faults, 4 injections, detected under their own id: 1.0" in said
    assert "U2       check      2/2 a denominator that counts masked slots" in said


def test_runs_that_were_made_elsewhere_are_judged_as_healthy_ones(tmp_path, capsys):
    played(tmp_path / "well", 0, Play(rl={"steps": 8}))
    played(tmp_path / "ill", 0, Play(sampling={"max_tokens": 1}, rl={"steps": 8}))
    out = tmp_path / "matrix.json"
    runs = [str(tmp_path / name / "run") for name in ("well", "ill")]
    assert main(["--only", "nothing", "--elsewhere", *runs, "--out", str(out)]) == 1
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["detected"] for row in rows] == [[True, False]]
    assert "S42" in rows[0]["named"][1]
    assert "2 healthy runs, 1 with a false alarm" in capsys.readouterr().out
