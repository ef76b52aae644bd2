"""What was decided before a comparison: written once, checked when read, and every departure from it named."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from posttrain.cli.claims import prereg_app
from posttrain.core.errors import ConfigError, EvidenceError, PosttrainError, RunError
from posttrain.runs.preregistration import Conduct, Prereg, differing, new_prereg, power_line, read_prereg, register

PLAN = Prereg("2026-01-01T00:00:00+00:00", "pass@1", True, "sums", {"steps": 100.0}, ("gspo", "cispo"), seeds=3, min_effect=0.02)
DONE = Conduct(
    "pass@1",
    "sums",
    {"gspo": {"steps": 100.0, "tokens": 5e6}, "cispo": {"steps": 100.0}},
    {"gspo": (0, 1, 2), "cispo": (0, 1, 2)},
    started="2026-01-01T00:00:01+00:00",
)


def test_a_registration_is_written_once_and_read_back(tmp_path):
    file = tmp_path / "plans" / "a.json"
    register(file, PLAN)
    assert read_prereg(file) == PLAN
    assert os.stat(file).st_mode & 0o222 == 0  # nobody may write
    assert json.loads(file.read_text())["digest"] == PLAN.digest
    with pytest.raises(RunError, match="a.json exists; what was registered stays"):
        register(file, replace(PLAN, metric="max reward_mean"))
    assert read_prereg(file) == PLAN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metric", "max reward_mean"),
        ("higher", False),
        ("seeds", 1),
        ("min_effect", 0.01),
        ("at", "2025-01-01T00:00:00+00:00"),
        ("arms", ["a", "b"]),
    ],
)
def test_an_edited_registration_is_noticed(tmp_path, field, value):
    file = register_at(tmp_path)
    stored = json.loads(file.read_text())
    file.chmod(0o644)
    file.write_text(json.dumps(stored | {field: value}))
    with pytest.raises(RunError, match="changed after it was registered"):
        read_prereg(file)


def register_at(tmp_path):
    register(tmp_path / "a.json", PLAN)
    return tmp_path / "a.json"


def test_a_comparison_that_follows_its_registration():
    assert differing(PLAN, DONE) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"metric": "max reward_mean", "suite": ""}, "metric: pass@1 on sums registered, max reward_mean used"),
        ({"seeds": {"gspo": (0, 1, 2)}, "spent": {"gspo": {"steps": 100.0}}}, "arms: cispo registered, not run"),
        (
            {"seeds": {"gspo": (0, 1, 2), "cispo": (0, 1, 2), "dapo": (0, 1, 2)}},
            "arms: dapo run, not registered",
        ),
        ({"seeds": {"gspo": (0, 1, 2), "cispo": (0, 0, 0)}}, "seeds of cispo: 3 registered, 1 run"),
        ({"spent": {"gspo": {"steps": 80.0}, "cispo": {"steps": 100.0}}}, "budget steps of gspo: 100 registered, 80 spent"),
        ({"spent": {"gspo": {}, "cispo": {"steps": 100.0}}}, "budget steps of gspo: 100 registered, not recorded"),
        (
            {"started": "2025-12-31T23:59:59+00:00"},
            "time: registered 2026-01-01T00:00:00+00:00, the first run began 2025-12-31T23:59:59+00:00",
        ),
        ({"started": ""}, "time: registered 2026-01-01T00:00:00+00:00, the first run began at an unknown time"),
    ],
)
def test_every_departure_is_named(change, problem):
    assert differing(PLAN, replace(DONE, **change)) == [problem]


def test_whether_the_budget_can_see_the_effect():
    assert power_line(PLAN).startswith("whether the budget can see the effect is unknown")
    # sigma 0.05: 99 seeds for 2 points; 3 seeds see 2.8016 * .05 * sqrt(2/3) = 0.1144
    planned = replace(PLAN, sigma=0.05, sigma_runs=4)
    assert power_line(planned) == (
        "3 seed(s) per arm cannot see an effect of 0.02 (80 % power, 95 %): it takes 99; 3 see 0.114, with sigma 0.05 from 4 runs"
    )
    assert "99 seed(s) per arm can see" in power_line(replace(planned, seeds=99))


def test_texts_of_the_command_line():
    made = new_prereg("pass@1", True, "steps=100, tokens=5e6", "a, b", "0.02:0.05:4", seeds=2, suite="sums")
    assert (dict(made.budget), made.arms, made.sigma, made.sigma_runs) == ({"steps": 100.0, "tokens": 5e6}, ("a", "b"), 0.05, 4)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"budget": "steps"}, "budget 'steps' is not KEY=NUMBER"),
        ({"budget": "steps=few"}, "budget 'few' is not a number"),
        ({"budget": ""}, "needs a budget above 0"),
        ({"budget": "steps=-1"}, "needs a budget above 0"),
        ({"arms": "a"}, "two or more different arms"),
        ({"arms": "a,a"}, "two or more different arms"),
        ({"effect": "0"}, "must both be above 0"),
        ({"effect": "nan"}, "min-effect 'nan' is not a number"),
        ({"effect": "0.02:0.05"}, "is not EFFECT or EFFECT:SIGMA:RUNS"),
        ({"effect": "0.02:0.05:1"}, "sigma from 1 run"),
        ({"effect": "0.02:0:4"}, "sigma of 0.0 cannot plan anything"),
        ({"metric": ""}, "needs a metric"),
    ],
)
def test_what_cannot_be_registered(given, problem):
    texts = {"metric": "pass@1", "budget": "steps=100", "arms": "a,b", "effect": "0.02"} | given
    with pytest.raises((ConfigError, EvidenceError), match=problem):
        new_prereg(texts["metric"], True, texts["budget"], texts["arms"], texts["effect"], seeds=1)


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.lists(st.text(max_size=3), max_size=3)
    | st.just(10**400)
)
FIELDS = st.sampled_from([*PLAN.to_json(), "digest"])


@settings(deadline=None, max_examples=80)
@given(st.dictionaries(FIELDS, VALUES | st.dictionaries(st.text(max_size=3), VALUES, max_size=2), max_size=4), st.integers(0, 20))
def test_whatever_stands_in_the_file_is_one_line(tmp_path_factory, changes, cut):
    file = tmp_path_factory.mktemp("prereg") / "a.json"
    raw = json.dumps(PLAN.to_json() | {"digest": PLAN.digest} | changes).encode()
    file.write_bytes(raw[: len(raw) - cut])
    said = ""
    try:
        read_prereg(file)
    except PosttrainError as error:
        said = str(error)
    assert bool(said) or (not cut and read_prereg(file) == PLAN)
    assert "\n" not in said


def test_the_command_line(tmp_path):
    file, shell = str(tmp_path / "a.json"), CliRunner()
    given = ["new", file, "--metric", "pass@1", "--suite", "sums", "--budget", "steps=100", "--arms", "gspo,cispo", "--seeds", "3"]
    done = shell.invoke(prereg_app, [*given, "--min-effect", "0.02:0.05:4", "--higher"])
    assert done.exit_code == 0
    assert "decided by pass@1 on sums, higher is better; the smallest effect that matters is 0.02" in done.stdout
    assert "3 seed(s) per arm cannot see" in done.stdout
    assert shell.invoke(prereg_app, ["show", file]).stdout == done.stdout.partition("\n")[2]
    assert isinstance(shell.invoke(prereg_app, [*given, "--min-effect", "0.1"]).exception, RunError)
