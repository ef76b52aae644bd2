"""Signs over a frame: hand-computed rows, and what a finished run shows is what the live one saw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.doctor.combined import AllOf, Early, Event, Ever, Lasting, Late, Not, OneOf, Setting
from posttrain.doctor.frame import Frame, frame_of
from posttrain.doctor.signals import Bound, Change, Flat, Gap, Jump, Level, Signal, Versus
from posttrain.doctor.trends import Channel, Sawtooth, Score, Steady


def series(**columns: list[float | None]) -> Frame:
    """A frame with one row per value; None is a row without the metric."""
    rows = max(map(len, columns.values()))
    return frame_of("rl", "rl", [(i, {k: v[i] for k, v in columns.items() if v[i] is not None}) for i in range(rows)])


def rows(sign: Signal, frame: Frame) -> list[int]:
    """Rows at which a sign holds."""
    return np.flatnonzero(sign.holds(frame)).tolist()


def test_level_every_needs_all_of_the_last_values():
    frame = series(entropy=[0.2, 0.05, 0.05, 0.2, 0.05, 0.04, 0.03])
    assert rows(Level("entropy", "<", 0.1, last=3, stat="every"), frame) == [6]  # rows 4, 5, 6


def test_level_mean_of_last_two():
    frame = series(x=[0.0, 2.0, 4.0, 0.0])
    assert rows(Level("x", ">", 1.5, last=2), frame) == [2, 3]  # means 1, 3, 2


def test_a_sparse_metric_keeps_its_last_value():
    frame = series(heldout_mean=[0.5, None, None, 0.2, None], x=[1.0] * 5)
    assert rows(Level("heldout_mean", "<", 0.3), frame) == [3, 4]


def test_calibrated_bound_replaces_the_default():
    sign = Level("entropy", "<", Bound("entropy_floor", 0.1))
    assert rows(sign, series(entropy=[0.05])) == [0]
    frame = series(entropy=[0.05])
    frame.bounds = {"entropy_floor": 0.01}
    assert rows(sign, frame) == []


def test_change_is_beyond_its_noise():
    steady = [float(i) for i in range(9)]  # thirds 0,1,2 and 6,7,8: 1 -> 7, se sqrt(2/3) = .82
    assert rows(Change("x", ">=", 6.0, over=9), series(x=steady)) == [8]
    assert rows(Change("x", ">=", 6.1, over=9), series(x=steady)) == []
    noisy = [0.0, 30.0, -30.0, 0, 0, 0, 40.0, -20.0, 1.0]  # 0 -> 7, each third's spread is about 30
    assert rows(Change("x", ">=", 6.0, over=9), series(x=noisy)) == []


def test_versus_starts_after_its_baseline():
    frame = series(turns=[2.0] * 10 + [2.0, 3.5, 3.5, 3.5])
    assert rows(Versus("turns", ">", 1.5), frame) == [12, 13]  # rows 10-12 are the first window after the baseline: median 3.5 > 3
    assert rows(Versus("turns", ">", 1.5), series(turns=[2.0] * 9 + [3.5, 3.5, 3.5])) == []


def test_jump_and_gap():
    frame = series(kl=[0.1, 0.11, 0.09, 0.1, 0.1, 0.9], a=[1.0] * 6, b=[0.0, 0.0, 0.0, 0.0, 0.9, 0.9])
    assert rows(Jump("kl", ">", z=5, over=5, least=0.1), frame) == [5]
    assert rows(Gap("a", "b", ">", 0.5, last=2), frame) == [1, 2, 3, 4]  # at row 4: 1 - .45


def test_settings_events_and_combinations():
    frame = series(x=[0.0, 1.0, 1.0, 0.0])
    frame.settings = {"optim.schedule": "constant"}
    frame.events["boom"] = 2
    assert rows(Setting("optim.schedule", "==", "constant"), frame) == [0, 1, 2, 3]
    assert rows(Setting("optim.lr", "<", 1.0), frame) == []
    assert rows(Event("boom"), frame) == [2, 3]
    assert rows(Lasting(Level("x", ">", 0.5), rows=2), frame) == [2]
    assert rows(Lasting(Level("x", ">", 0.5), rows=2, some=True), frame) == [1, 2, 3]
    assert rows(Early(Level("x", ">", 0.5), rows=2), frame) == [1]
    assert rows(OneOf((Event("boom"), Level("x", ">", 0.5))), frame) == [1, 2, 3]
    assert rows(Not(Level("x", ">", 0.5, last=2)), frame) == [1, 3]  # row 0 cannot be told
    assert rows(Not(Level("never", ">", 0.5)), frame) == []


def test_early_late_ever_and_all():
    frame = series(x=[1.0, 0.0, 1.0, 0.0], y=[0.0, 0.0, 1.0, 1.0])
    high = Level("x", ">", 0.5)
    assert rows(Late(high, rows=1), frame) == [2]
    assert rows(Ever(Level("y", ">", 0.5)), frame) == [2, 3]
    assert rows(Not(Ever(Level("y", ">", 0.5))), frame) == [0, 1]
    assert rows(AllOf((high, Level("y", ">", 0.5))), frame) == [2]
    assert Ever(Level("y", ">", 0.5)).holds(frame, 3).tolist() == [True]  # row 2 lies before the rows asked for


def test_steady_needs_every_part_to_rise():
    up = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]  # thirds 1, 2, 3
    assert rows(Steady("m", ">=", 2.0, over=6, blocks=3), series(m=up)) == [5]
    assert rows(Steady("m", ">=", 2.1, over=6, blocks=3), series(m=up)) == []
    assert rows(Steady("m", ">=", 1.0, over=6, blocks=3), series(m=[1.0, 1.0, 3.0, 3.0, 3.0, 3.0])) == []  # a level, then another: no leak
    assert rows(Steady("m", ">=", 2.0, over=6, blocks=3, relative=True), series(m=up)) == [5]  # 1 -> 3 is +200 %


def test_sawtooth_is_not_a_step():
    assert rows(Sawtooth("s", factor=4, over=6, turns=4), series(s=[1.0, 9, 1, 9, 1, 9])) == [5]  # five crossings
    assert rows(Sawtooth("s", factor=4, over=6, turns=4), series(s=[1.0, 1, 1, 9, 9, 9])) == []  # one crossing


def test_a_score_of_few_items_has_not_fallen():
    scores: list[float | None] = [0.27, 0.27, 0.24, 0.24, 0.20, 0.20]
    few, many = series(heldout_mean=scores, heldout_n=[36.0] * 6), series(heldout_mean=scores, heldout_n=[500.0] * 6)
    sign = Score("heldout_mean", "<=", -0.03, over=6)
    assert rows(sign, few) == []  # 3 sqrt(2 * .2367 * .7633 / 72) = .213 > .07
    assert rows(sign, many) == [5]  # 3 sqrt(2 * .2367 * .7633 / 1000) = .057 < .07
    assert rows(sign, series(heldout_mean=scores)) == [5]  # items unknown: the scatter decides, here none


def test_channel_reads_all_but_correctness():
    frame = series(channel_accuracy_share=[0.9, 0.9], channel_format_share=[0.1, 0.7])
    assert rows(Channel("share", ">", 0.5, last=1), frame) == [1]
    assert rows(Channel("mean", ">", 0.5, last=1), frame) == []
    named = series(reward_primary=[0.2], channel_tests_mean=[0.2], channel_tests_share=[0.9], channel_style_mean=[0.5])
    assert rows(Channel("share", ">", 0.5, last=1), named) == []  # tests is the primary channel: its mean says so
    assert rows(Channel("mean", ">", 0.1, last=1), named) == [0]  # style is not


SIGNS: list[Signal] = [
    Level("x", "<", 0.3, last=4, stat="every"),
    Level("x", ">", 0.5, last=3, stat="p95"),
    Change("x", ">=", 0.2, over=6),
    Change("y", "<=", -0.2, over=6, relative=True),
    Flat("x", within=0.3, over=6),
    Versus("y", ">", 1.2, baseline=5, last=3),
    Jump("x", ">", z=3, over=5, least=0.1),
    Gap("x", "y", ">", 0.1, last=2),
    Lasting(Level("x", ">", 0.4), rows=3),
    Lasting(Level("y", ">", 0.4), rows=3, some=True),
    Not(Change("x", ">=", 0.2, over=6)),
    Early(Level("x", ">", 0.5), rows=4),
    OneOf((Level("x", ">", 0.8), Not(Level("y", "<", 0.5, last=2)))),
    AllOf((Level("x", ">", 0.3), Not(Level("y", "<", 0.5, last=2)))),
    Late(Level("x", ">", 0.5), rows=4),
    Ever(Level("x", ">", 0.8, last=2)),
    Not(Ever(Level("y", ">", 0.8))),
    Steady("x", ">=", 0.1, over=6, blocks=3),
    Steady("y", "<=", -0.2, over=6, relative=True, blocks=2),
    Sawtooth("x", factor=1.5, over=6, turns=3),
    Score("x", ">=", 0.1, over=4, items="y"),
    Channel("share", ">", 0.4, last=2),
]


@pytest.mark.parametrize("sign", SIGNS, ids=lambda s: s.words())
@settings(max_examples=60, deadline=None)
@given(data=st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1)), st.one_of(st.none(), st.floats(0, 1))), min_size=1, max_size=30))
def test_live_equals_replay(sign: Signal, data: list[tuple[float | None, float | None]]):
    live = Frame("rl", "rl")
    seen = []
    for step, (x, y) in enumerate(data):
        live.append(step, {"x": x, "y": y, "channel_a_share": x})
        seen.append(bool(sign.holds(live, len(live) - 1)[0]))
        sign.said(live, len(live) - 1)
    assert sign.holds(live).tolist() == seen
