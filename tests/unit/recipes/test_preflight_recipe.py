"""Probe and preflight of a model in a folder, through their commands: verdicts, files, exit codes."""

import json
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from posttrain.cli import gates
from posttrain.core.errors import ConfigError
from posttrain.core.verdicts import GateVerdict
from posttrain.models.loading import save
from posttrain.models.lora import LoRA
from posttrain.models.tokenizer import CHAT_TEMPLATE, build_tokenizer
from posttrain.recipes.preflight import PreflightRun, preflight
from posttrain.recipes.probe import ProbeRun, probe


@pytest.fixture
def folder(toy, tmp_path) -> str:
    """A random model and its tokenizer in Hugging Face format."""
    place = tmp_path / "model"
    place.mkdir()
    save(toy.model(265), toy.tokenizer, place)
    return str(place)


def call(command, *arguments: object):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("extra", [{}, {"task": "arithmetic"}, {"task": "arithmetic", "lora": LoRA(rank=4, alpha=8)}])
def test_a_healthy_model_passes_everything_in_seconds(folder, tmp_path, extra):
    started = time.monotonic()
    found = preflight(PreflightRun(model=folder, **extra), tmp_path, tmp_path / "verdict.json")
    assert found.passed is True, found.reason
    names = {check.name for check in found.checks}
    assert names >= {
        "dtype",
        "tokenizer",
        "mask",
        "packing",
        "disk",
        "loss",
        "gradients",
        "moved",
        "agreement",
        "sync",
        "delivery",
        "reload",
    }
    assert ("answers" in names) is ("task" in extra)
    assert GateVerdict.from_record(json.loads((tmp_path / "verdict.json").read_text())) == found
    assert time.monotonic() - started < 20


def test_preflight_finds_a_model_without_room_for_its_tokenizer(toy, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    save(toy.model(264), toy.tokenizer, place)
    found = preflight(PreflightRun(model=str(place)), tmp_path)
    assert [check.name for check in found.failures] == ["tokenizer"]


def test_preflight_finds_a_cue_that_is_not_continued(toy, tmp_path):
    tokenizer = build_tokenizer([], 265)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}{% else %}", "{{ '<|assistant|>=' }}{% else %}")
    place = tmp_path / "odd"
    place.mkdir()
    save(toy.model(265), tokenizer, place)
    found = preflight(PreflightRun(model=str(place)), tmp_path)
    assert [check.name for check in found.failures] == ["template"]
    assert found.of("template").catalog == ("F12", "P25")


def test_the_commands_print_and_exit_by_the_verdict(folder, tmp_path):
    good = call(gates.preflight, folder, "--place", tmp_path)
    assert good.exit_code == 0, good.output
    assert good.output.splitlines()[0].startswith("preflight: ")
    assert good.output.splitlines()[0].endswith(": PASSED")
    toy_sized = ("--task", "arithmetic", "--siblings", 2, "--set", "sampling.max_tokens=8")
    bad = call(gates.probe, folder, *toy_sized, "--prompts", 40, "--out", tmp_path / "p.json")
    assert bad.exit_code == 1
    assert "the data is to this model: truncated" in bad.output
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["verdict"] == "failed"
    assert sum(record["figures"]["buckets"].values()) == 40
    as_json = call(gates.probe, folder, *toy_sized, "--prompts", 4, "--json")
    assert json.loads(as_json.output)["gate"] == "launch"


def test_a_probe_is_the_same_twice_and_of_other_seeds_another(folder):
    def drawn(seed: int) -> dict:
        settings = {"model": folder, "task": "arithmetic", "prompts": 6, "siblings": 3, "sampling": {"max_tokens": 8}, "seed": seed}
        return dict(probe(ProbeRun.load(settings)).figures)

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_a_probe_of_rows_in_a_file(folder, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {n} after ####.", "answer": n}) + "\n" for n in range(60)))
    settings = {"model": folder, "data": str(data), "prompts": 6, "siblings": 3, "sampling": {"max_tokens": 4}}
    assert probe(ProbeRun.load(settings)).figures["prompts"] == 6


@pytest.mark.parametrize("given", [{}, {"task": "arithmetic", "data": "x.jsonl"}])
def test_a_probe_takes_its_tasks_from_one_place(folder, given):
    with pytest.raises(ConfigError, match="--task NAME"):
        probe(ProbeRun(model=folder, **given))


def test_a_preflight_leaves_nothing_behind(folder, tmp_path):
    before = sorted(path.name for path in Path(tmp_path).rglob("*"))
    preflight(PreflightRun(model=folder), tmp_path)
    assert sorted(path.name for path in Path(tmp_path).rglob("*")) == before
