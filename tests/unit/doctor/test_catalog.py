"""The catalog of failures: complete, well-formed, and each entry tells its sick frame from healthy ones and from its look-alikes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from catalog_cases import CASES, COLLAPSE, LATE, SHARPENS, SOLVED, SPARSE, Case
from catalog_frames import BOOK, HEALTHY, RL, around, fired, frame, ramp, seldom, wave

from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.catalog.facts import FACTS
from posttrain.doctor.combined import AllOf, Early, Ever, Lasting, Late, Not, OneOf, Setting
from posttrain.doctor.entries import Action, Entry, Status, Verdict, checked, suspected
from posttrain.doctor.frame import Frame, Kind
from posttrain.doctor.signals import Signal
from posttrain.doctor.vocabulary import METRICS

LOST = (2, 4, 6, 7, 9, 11, 14, 15, 18, 28)
"""Pitfalls of whose row only the number survives."""
WANTED = [f"F{n}" for n in range(1, 22)] + [f"P{n}" for n in range(1, 38) if n not in LOST]
ENTRIES = list(CATALOG.values())
WATCHED = [entry for entry in BOOK.values() if entry.signs]


def inner(sign: Signal) -> list[Signal]:
    """A sign and all that it is made of."""
    if isinstance(sign, OneOf | AllOf):
        return [sign, *(part for one in sign.signs for part in inner(one))]
    if isinstance(sign, Not | Early | Late | Ever | Lasting):
        return [sign, *inner(sign.sign)]
    return [sign]


def every_sign(entry: Entry) -> list[Signal]:
    return [part for sign in (*entry.signs, *entry.against) for part in inner(sign)]


@pytest.mark.parametrize("id", WANTED)
def test_every_numbered_failure_that_survives_is_there(id: str):
    assert id in CATALOG


def test_pitfalls_without_content_are_not_made_up():
    assert not {f"P{n}" for n in LOST} & set(CATALOG)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_says_everything(entry: Entry):
    for text in (entry.name, entry.symptom, entry.onset, entry.cause, entry.fix, entry.check, entry.source):
        assert text == text.strip()
        assert len(text) > 3
        assert "\n" not in text
    assert len(entry.name) <= 60
    assert entry.kinds
    assert len(set(entry.kinds)) == len(entry.kinds)
    assert entry.id not in entry.confused
    assert all(len(how) > 10 for how in entry.confused.values())


@pytest.mark.parametrize("entry", WATCHED, ids=lambda entry: entry.id)
def test_signs_read_what_is_recorded(entry: Entry):
    for sign in every_sign(entry):
        assert set(sign.metrics) <= {*METRICS, "channel_format_mean"}
        assert sign.words()
        if isinstance(sign, Setting) and sign.where == "facts":
            assert sign.name in FACTS


def test_names_are_used_once():
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)


def test_ids_are_used_once_and_refer_to_entries():
    with pytest.raises(ValueError, match="two catalog entries are called F1"):
        checked([*ENTRIES, replace(CATALOG["F1"], name="another")])
    with pytest.raises(ValueError, match="refers to"):
        checked([CATALOG["F1"]])


def test_only_hard_failures_stop_a_run_and_only_hacking_pauses_it():
    assert {entry.id for entry in BOOK.values() if entry.action is Action.STOP} == {"S1", "F5", "F12", "S75"}
    assert {entry.id for entry in BOOK.values() if entry.action is Action.PAUSE} == {"S20", "F6"}  # F6: the same, with KL climbing


def test_nothing_healthy_warns():
    sound = {Verdict.HEALTHY, Verdict.BREAKOUT_LOADING}
    assert all(entry.action is Action.NOTE for entry in BOOK.values() if entry.verdict in sound)


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_fires_nothing(kind: Kind):
    assert fired(frame(kind), True, CATALOG) == set()


def ladder(t: int) -> float:
    """The course of the reward in the embedded ladder: 0.58 to 0.98 over 200 steps."""
    return 0.98 - 0.40 * float(np.exp(-t / 35)) + wave(t, 0.008)


def test_the_embedded_ladder_is_noted_at_most():
    """A healthy run: entropy 0.20 -> 0.027 at a constant rate, unanimous groups up to 0.8, answers of 6 tokens that equal siblings."""
    unanimous = ramp(0.04, 0.78, 0, 150, 0.03)
    course = frame(
        rows=200,
        settings={"optim.schedule": "constant", "steps": 200, "siblings": 16, "updates": 1},
        entropy=lambda t: 0.03 + 0.17 * float(np.exp(-t / 35)) + wave(t, 0.004),
        zero_variance=unanimous,
        all_right=unanimous,
        all_wrong=0.002,
        mixed=lambda t: 1 - unanimous(t),
        reward_mean=ladder,
        reward_std=lambda t: float(np.sqrt(max(0.0, ladder(t) * (1 - ladder(t))))),
        duplicates=ramp(0.6, 0.92, 0, 120, 0.01),
        length=around(6.5, 0.1),
        length_p50=7.0,
        kl=lambda t: 0.4 if t == 140 else 0.1 * min(1.0, t / 60) + abs(wave(t, 0.03)),
        clip_fraction=0.0,
        ratio_max=1.0,
        grad_norm=ramp(0.7, 1.7, 0, 200, 0.3),
        lr=1e-4,
        tries_per_kept=ramp(1.0, 4.3, 0, 150, 0.1),
        turns=1.0,
        calls=None,
        repeated_calls=None,
        malformed_calls=None,
        heldout_mean=seldom(lambda t: ladder(t) - 0.02 + 0.03 * float(np.cos(3.1 * t)), 10),
        heldout_n=seldom(64.0, 10),
    )
    assert fired(course, False, CATALOG) == set()
    assert {"S4", "S6", "S8"} <= fired(course, notes=True)


def test_the_ladders_imitation_is_healthy():
    """Its supervised stage begins with a loss of 15 and a gradient of 52, and ends with a rate of exactly 0."""
    course = frame(
        "sft",
        rows=200,
        loss=lambda t: 0.3 + 15.0 * float(np.exp(-t / 8)) + abs(wave(t, 0.06)),
        entropy=lambda t: 0.24 if t == 0 else 0.35 + 3.5 * float(np.exp(-t / 15)) + wave(t, 0.05),
        grad_norm=lambda t: 0.9 + 52.0 * float(np.exp(-t / 10)) + wave(t, 0.2),
        lr=lambda t: 2e-4 * (1 - t / 199),
    )
    assert fired(course, True, CATALOG) == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_fault_fires_its_own_id_and_no_look_alike(case: Case):
    id, also, make = case
    made = make()
    assert id in fired(made, notes=True)
    assert fired(made) - {id} <= also


def test_every_entry_with_signs_has_a_case():
    assert {entry.id for entry in WATCHED} - {id for id, _, _ in CASES} == {"S1"}  # the joint stop has tests of its own


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_fires_afterwards_is_what_fired_then(case: Case):
    id, _, make = case
    made = make()
    assert live([CATALOG[id]], made, every=1) == {(id, row) for row in np.flatnonzero(suspected(CATALOG[id], made))}


def live(entries: list[Entry], made: Frame, every: int) -> set[tuple[str, int]]:
    """Which entries are suspected at which rows, asked for while the same rows come in one at a time."""
    copy = Frame(made.stage, made.kind, made.settings, made.facts, bounds=made.bounds)
    known: list[dict[str, float]] = [{} for _ in made.steps]
    for name, column in made.columns.items():
        for row, value in zip(column.positions, column.values, strict=True):
            known[row][name] = value
    seen = set()
    for row, step in enumerate(made.steps):
        copy.append(step, known[row])
        copy.events.update({name: at for name, at in made.events.items() if at <= row})
        if row % every == 0:
            seen |= {(entry.id, row) for entry in entries if suspected(entry, copy, row)[0]}
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_live_equals_replay_on_arbitrary_series(seed: int):
    """Every metric jumps between levels that signs look for, with gaps."""
    draw = np.random.default_rng(seed)
    levels = np.array([0.0, 1e-9, 0.01, 0.05, 0.2, 0.5, 0.9, 1.0, 3.0, 200.0])
    read = {name for entry in WATCHED for sign in every_sign(entry) for name in sign.metrics}
    names = sorted(read | {"channel_style_share", "channel_style_mean"})
    made = Frame("rl", "rl")
    level = {name: levels[draw.integers(10)] for name in names}
    for row in range(100):
        level |= {name: levels[draw.integers(10)] for name in names if draw.random() < 0.06}
        made.append(row, {name: float(value * draw.uniform(0.95, 1.05)) for name, value in level.items() if draw.random() < 0.9})
    after = {(entry.id, row) for entry in WATCHED for row in np.flatnonzero(suspected(entry, made)) if row % 4 == 0}
    assert live(WATCHED, made, every=4) == after
    assert after


def test_collapse_and_starvation_are_told_apart_by_what_died():
    alive = {**COLLAPSE, "entropy": around(0.42, 0.01), "duplicates": around(0.1, 0.01)}
    assert fired(frame(**COLLAPSE)) == {"F1"}
    assert fired(frame(**alive)) == {"F2"}


def test_solved_is_no_collapse_and_stays_so_when_entropy_goes():
    """All that collapse shows is there, entropy, duplicates and unanimous groups, and the groups are right."""
    solved = {
        **SOLVED,
        "all_right": ramp(0.1, 0.97, 0, 40),
        "zero_variance": ramp(0.2, 0.97, 0, 40),
        "mixed": ramp(0.8, 0.03, 0, 40),
        "reward_std": ramp(0.5, 0.015, 0, 40),
        "entropy": ramp(0.42, 0.02, 5, 25, 0.001),
        "duplicates": 0.9,
    }
    assert fired(frame(**SOLVED)) == set()
    assert fired(frame(**solved)) == set()
    wrong = {
        **solved,
        "reward_mean": ramp(0.5, 0.3, 0, 40),
        "all_right": 0.3,
        "all_wrong": 0.67,
        "heldout_mean": seldom(around(0.3, 0.003)),
    }
    assert "F1" in fired(frame(**wrong))


def test_sparse_is_not_dead_until_nothing_is_mixed():
    assert "S2" not in fired(frame(**SPARSE))
    dead = {**SPARSE, "reward_mean": 0.0, "reward_std": 0.0, "zero_variance": 1.0, "mixed": 0.0, "all_wrong": 1.0, "heldout_mean": None}
    assert fired(frame(**dead)) == {"S2"}


@pytest.mark.parametrize("entropy", [0.09, 0.03, 0.001])
def test_low_entropy_alone_is_a_note(entropy: float):
    low = ramp(0.2, entropy, 0, 20, entropy / 20)
    assert fired(frame(entropy=low)) == set()
    assert "S8" in fired(frame(entropy=low), notes=True)


def test_productive_sharpening_is_a_note():
    assert fired(frame(**SHARPENS)) == set()
    assert "S6" in fired(frame(**SHARPENS), notes=True)


def joint(**change: object) -> bool:
    return bool(suspected(CATALOG["S1"], frame(**{**COLLAPSE, **change})).any())


def test_the_joint_stop_needs_all_three():
    assert joint()
    assert not joint(entropy=around(0.42, 0.01))
    assert not joint(zero_variance=around(0.4, 0.02), mixed=around(0.6, 0.02))
    assert not joint(heldout_mean=seldom(ramp(0.3, 0.6, 0, 70)))
    assert not joint(heldout_mean=None)  # not measured: F1 warns, nothing stops


def test_a_calibrated_floor_decides():
    made = frame(**COLLAPSE)
    made.bounds = {"entropy_floor": 0.01}
    assert fired(made) == {"F2"}  # for a family that lives at 0.03 the groups are unanimous, and entropy is alive


def test_a_fall_that_so_few_items_leave_open_does_not_pause():
    fall = seldom(ramp(0.27, 0.20, 10, 50, 0.002))
    assert "S20" not in fired(frame(reward_mean=around(0.5, 0.01), heldout_mean=fall, heldout_n=seldom(36.0)))
    assert "S20" in fired(
        frame(reward_mean=around(0.5, 0.01), heldout_mean=seldom(ramp(0.40, 0.20, 10, 50, 0.002)), heldout_n=seldom(2000.0))
    )


def test_late_and_early_collapse():
    assert "F13" not in fired(frame(**COLLAPSE, lr=1e-5))
    assert "F13" not in fired(frame(**{**LATE, "lr": lambda t: 1e-5 * (1 - t / 80)}))


def test_a_kind_of_training_sees_its_own_failures_only():
    assert "F1" not in fired(frame("sft", entropy=ramp(0.42, 0.01, 2, 10), reward_std=0.0, zero_variance=1.0))


def test_an_alarm_is_cheap_at_step_10_000():
    made = frame(rows=10_000)
    watched = [entry for entry in WATCHED if "rl" in entry.kinds]
    row = len(made) - 1
    taken = []
    for _ in range(5):
        begin = time.process_time()
        for entry in watched:
            suspected(entry, made, row)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.05  # 7.9 ms of processor time on a machine with every core busy


def test_tested_statuses():
    assert {entry.status for entry in BOOK.values()} == set(Status)
    assert set(RL) - {"lr"} <= set(METRICS)
