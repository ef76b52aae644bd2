"""Whatever a frame holds, the doctor answers: no exception, no warning, printable lines, finite JSON, and figures it did see."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import EvidenceError
from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.diagnose import diagnose
from posttrain.doctor.difference import compare_runs, difference_json, difference_lines
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.frame import Frame, frame_of
from posttrain.doctor.postmortem import postmortem_of
from posttrain.doctor.postmortem_file import parse_postmortem, postmortem_text
from posttrain.doctor.replay import replay, replay_json, replay_lines
from posttrain.doctor.text import diagnosis_json, diagnosis_lines

NAMES = (
    "reward_mean", "reward_std", "zero_variance", "mixed", "all_right", "all_wrong", "entropy", "heldout_mean", "heldout_n", "kl", "length",
    "grad_norm", "lr", "loss", "clip_fraction", "ratio_max", "truncated", "unparseable", "seconds.sample", "mismatch_max",
)  # fmt: skip
VALUES = st.one_of(
    st.floats(0, 1), st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1.0, -1e308, 1e308, 5e-324]), st.integers(-9, 9)
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """A stage of up to 60 rows; each metric is a constant, or values that change from row to row, or is missing now and then."""
    rows = draw(st.integers(0, 60))
    columns = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=8)):
        few = draw(st.lists(st.one_of(VALUES, st.none()), min_size=1, max_size=5))
        columns[name] = [few[row * len(few) // max(1, rows)] if draw(st.booleans()) else few[row % len(few)] for row in range(rows)]
    start, stride = draw(st.integers(0, 10**9)), draw(st.integers(1, 1000))
    lines = [
        (start + row * stride, {name: values[row] for name, values in columns.items() if values[row] is not None}) for row in range(rows)
    ]
    kind = draw(st.sampled_from(["rl", "sft", "preference", "distill", "other"]))
    return frame_of(draw(st.sampled_from(["a", "\x1b[2J", "grpo"])), kind, lines, settings=draw(SETTINGS), facts=draw(SETTINGS))


SETTINGS = st.dictionaries(
    st.sampled_from(["steps", "siblings", "optim.lr", "optim.schedule", "eval.parse_rate", "problems", "last_line_cut"]),
    st.one_of(st.integers(0, 9), st.floats(0, 1), st.text(max_size=3), st.booleans()),
)


def run(*stages: Frame) -> Evidence:
    return Evidence(Path("runs/a"), frames={stage.stage: stage for stage in stages}, evals={"x": {}})


def check(lines: list[str], value: object) -> None:
    assert all(line.isprintable() for line in lines)
    json.dumps(value, allow_nan=False)


@settings(max_examples=25, deadline=None)
@given(st.lists(frames(), max_size=2), frames())
def test_every_frame_gets_an_answer(stages, other):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evidence = run(*stages)
        found = diagnose(evidence, CATALOG)
        check(diagnosis_lines(found), diagnosis_json(found))
        again = replay(evidence, CATALOG)
        check(replay_lines(again), replay_json(again))
        parsed = parse_postmortem(postmortem_text(postmortem_of(evidence, CATALOG)))
        assert parsed is not None
        assert parsed[1]
        try:
            apart = compare_runs(evidence, run(other), CATALOG)
        except EvidenceError:
            return
        check(difference_lines(apart), difference_json(apart))


@settings(max_examples=25, deadline=None)
@given(frames())
def test_confirmed_suspects_quote_steps_of_the_stage(stage):
    for suspect in diagnose(run(stage), CATALOG).suspects:
        assert 0 <= suspect.confidence <= 1
        if suspect.confirmed:
            assert suspect.first_step in stage.steps
            assert suspect.last_step in stage.steps
            assert suspect.evidence_for
        else:
            assert suspect.unknown
            assert not suspect.decides
