"""The generated part of the catalog matrix: faults name their own id, look-alikes are told apart, healthy training is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.matrix import records_faults, settings_faults, traces
from tests.matrix.injection import Fault, by_doctor
from tests.matrix.traces_healthy import state
from tests.matrix.traces_made import Trace, generator
from tests.matrix.traces_world import run_rows
from tests.matrix.traces_write import named

from posttrain.doctor.catalog import CATALOG
from posttrain.stats.intervals import wilson

MOST_FALSE = 0.03
"""Share of healthy runs that may be named anything, at the upper end of its interval over the 400 of the slow test."""


def seen(fault: Fault, path: Path, seed: int) -> tuple[str, ...]:
    """All ids that are named, notes included."""
    found = fault.name(fault.make(path, seed))
    return (*found.ids, *found.notes)


def of(id: str) -> Trace:
    """The first trace of an id."""
    return next(trace for trace in traces.TRACES if trace.id == id)


@pytest.mark.parametrize("twins", traces.PAIRS, ids="-".join)
def test_look_alikes_are_told_apart(twins: Sequence[str], tmp_path: Path):
    for id in twins:
        (tmp_path / id).mkdir()
        found = named(id, of(id).make(tmp_path / id, seed=0))
        assert id in (*found.ids, *found.notes)
        assert not set(found.ids) & (set(twins) - {id}), f"{id} is taken for {found.ids}"


@pytest.mark.parametrize("broken", settings_faults.BROKEN, ids=lambda broken: broken.id)
def test_the_linter_names_broken_settings_and_not_a_near_miss(broken: settings_faults.Broken, tmp_path: Path):
    assert broken.id in settings_faults.linted(broken.make(tmp_path, seed=1)).ids
    assert broken.id not in settings_faults.linted(broken.make(tmp_path, seed=1, near=True)).ids


def test_every_rule_of_the_linter_is_broken_by_some_settings():
    facts = {"P16"}  # out of memory: a fact of a run that has ended
    rules = {entry.id for entry in CATALOG.values() if entry.found_by == "settings" and entry.signs}
    assert rules - facts <= {broken.id for broken in settings_faults.BROKEN}


@pytest.mark.parametrize("fault", records_faults.FAULTS, ids=lambda fault: fault.id)
def test_records_name_their_fault(fault: Fault, tmp_path: Path):
    assert fault.id in seen(fault, tmp_path, seed=0)


def test_sound_records_name_nothing(tmp_path: Path):
    assert not records_faults.HEALTHY[0].name(records_faults.sound(tmp_path, seed=0)).ids


def test_damage_of_every_kind_is_noticed(tmp_path: Path):
    for seed in range(3):  # half a line, another program's lines, a lost block
        (tmp_path / str(seed)).mkdir()
        found = next(fault for fault in records_faults.FAULTS if fault.id == "S90")
        assert "S90" in seen(found, tmp_path / str(seed), seed)


@pytest.mark.parametrize("shape", traces.WELL)
def test_a_healthy_stream_is_left_alone(shape: str, tmp_path: Path):
    assert not by_doctor(traces.make_well(shape, tmp_path, seed=0)).ids


def test_groups_are_counts_that_add_up():
    rows = run_rows(state(generator("counts"), 20, prompts=24, siblings=8, tries=2.0, errors=0.05, unparseable=0.3), (), generator("rows"))
    names = ("mixed", "all_right", "all_wrong", "unanimous_partial", "unanimous_unparseable")
    for row in rows:
        assert sum(row[name] for name in names) == pytest.approx(1.0)
        assert all(row[name] * row["groups_generated"] == pytest.approx(round(row[name] * row["groups_generated"])) for name in names)
        assert 24 <= row["groups_generated"] <= 48


def test_siblings_coincide_as_their_entropy_says():
    s = state(generator("same"), 1, entropy=0.1, length=10.0, prompts=4000, siblings=8)
    row = run_rows(s, (), generator("rows"))[0]
    assert row["duplicates"] == pytest.approx(np.exp(-s.entropy * s.length) * 7 / 8, abs=0.01)  # e^-1 x 7 of 8: 0.32


@pytest.mark.slow
@pytest.mark.parametrize("trace", traces.TRACES, ids=lambda trace: f"{trace.id}-{trace.what}")
def test_a_generated_fault_names_its_own_id(trace: Trace, tmp_path: Path):
    for seed in range(10, 13):
        (tmp_path / str(seed)).mkdir()
        found = named(trace.id, trace.make(tmp_path / str(seed), seed))
        assert trace.id in (*found.ids, *found.notes)


@pytest.mark.slow
def test_an_alarm_of_what_leads_comes_before_the_reward_falls(tmp_path: Path):
    """Entropy and ways of working go first: over five seeds the median lead of S8 in a collapse, and of S10 in an agent's, is positive."""
    for id, alarm in (("F1", "S8"), ("S10", "S10"), ("S36", "S36")):
        leads = []
        for seed in range(5):
            (tmp_path / f"{id}{seed}").mkdir()
            found = named(alarm, of(id).make(tmp_path / f"{id}{seed}", seed))
            leads.append(found.lead)
        known = [lead for lead in leads if lead is not None]
        assert known
        assert np.median(known) > 0, f"{alarm} in {id}: {leads}"


@pytest.mark.slow
def test_false_alarms_over_four_hundred_healthy_streams(tmp_path: Path):
    wrong, runs = [], 0
    for place, shape in enumerate(traces.WELL):
        for seed in range(2000, 2029 if place < 8 else 2028):
            folder = tmp_path / f"{place}-{seed}"
            folder.mkdir()
            found = by_doctor(traces.make_well(shape, folder, seed))
            runs += 1
            wrong += [(shape, seed, found.ids)] if found.ids else []
    assert runs == 400
    assert wilson(len(wrong), runs).high < MOST_FALSE, wrong
