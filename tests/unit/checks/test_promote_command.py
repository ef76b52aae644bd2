"""`posttrain promote`: judging a run, keeping the verdict in it, calibrating a family, exit codes."""

import json

import pytest
import typer
from promotion_records import HEALTHY, run_of, scored
from typer.testing import CliRunner

from posttrain.checks.promotion import Thresholds
from posttrain.cli.gates import promote
from posttrain.core.errors import ConfigError
from posttrain.core.files import write_json

PAIR = [scored("before", 300), scored("after", 360)]


def call(*arguments: object):
    app = typer.Typer()
    app.command()(promote)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def kept(run):
    write_json(run / "gates" / "thresholds.json", Thresholds().model_dump(mode="json"))
    return run


def test_calibrate_then_promote(tmp_path):
    stable = [run_of(tmp_path / f"s{n}", PAIR, [{**HEALTHY, "kl": 0.1 + n / 10}] * 12, seed=n) for n in range(3)]
    made = call(*stable, "--calibrate", "--family", tmp_path / "family.json")
    assert made.exit_code == 0
    assert "3 runs of one family" in made.output
    assert "final KL up to 0.5" in made.output  # 0.1, 0.2, 0.3: 0.2 + 3 * 0.1
    run = kept(run_of(tmp_path / "new", PAIR, [{**HEALTHY, "kl": 0.4}] * 12, seed=9))
    found = call(run, "--family", tmp_path / "family.json")
    assert found.exit_code == 0, found.output
    assert json.loads((run / "gates" / "promotion.json").read_text())["verdict"] == "passed"
    assert "held_out" in found.output


def test_without_a_family_it_is_not_shown_and_not_promoted(tmp_path):
    run = kept(run_of(tmp_path / "new", PAIR))
    found = call(run, "--json")
    assert found.exit_code == 1
    assert json.loads(found.output)["verdict"] == "not shown"


def test_a_loosened_threshold_fails(tmp_path):
    run = kept(run_of(tmp_path / "new", [scored("before", 358), scored("after", 360)]))
    assert "FAIL  held_out" in call(run).output
    loose = call(run, "--set", "min_effect=0.001", "--set", "level=0.6")
    assert loose.exit_code == 1
    assert "loosened after the run: min_effect 0.01 -> 0.001, level 0.95 -> 0.6" in loose.output


def test_against_another_record(tmp_path):
    run = kept(run_of(tmp_path / "new", PAIR))
    write_json(tmp_path / "control.json", scored("incumbent", 360).to_json())
    assert "FAIL  held_out" in call(run, "--against", tmp_path / "control.json").output


def test_what_cannot_be(tmp_path):
    runs = [run_of(tmp_path / f"s{n}", PAIR, seed=n) for n in range(2)]
    with pytest.raises(ConfigError, match="one run is promoted at a time"):
        call(*runs)
    with pytest.raises(ConfigError, match="--family FILE"):
        call(*runs, "--calibrate")
