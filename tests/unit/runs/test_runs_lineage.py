"""Parents, changed keys, bundles: one variable per run, or the run is called a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.runs.lineage import Parent, find_parent, label_of, origin, own_inputs, parent_of_model
from posttrain.runs.manifest import differences, identity_digest
from posttrain.runs.run import Run


class Optim(Config):
    lr: float = 1e-3
    warmup: float = 0.1


class Settings(Config):
    model: str = "base"
    seed: int = 0
    processes: int = 1
    save_every: int = 50
    data: str = "a.jsonl"
    optim: Optim = Optim()


DIGESTS = {"model": "m1", "tokenizer": "t1", "template": "c1", "data": "d1"}


def create(path: Path, settings: Config, digests=DIGESTS, stages=("sft",), **more) -> Run:
    return Run.create(path, config=settings, command=["posttrain"], seeds={}, digests=digests, stages=stages, **more)


@pytest.fixture
def first(tmp_path) -> Run:
    return create(tmp_path / "a", Settings())


def child(first: Run, settings: Config, digests=DIGESTS, via="config", **more) -> dict:
    run = create(first.path.parent / "b", settings, digests, parent=Parent(first.path, via), **more)
    return run.manifest["parent"]


def test_the_config_that_a_command_names_names_the_parent(first):
    config = str(first.path / "config.yaml")
    assert find_parent({}, ["posttrain", "train", "sft", "--config", config]) == Parent(first.path, "config")
    assert find_parent({}, ["posttrain", f"--config={config}"]) == Parent(first.path, "config")
    assert find_parent({}, ["posttrain", "--config", "settings.yaml"]) is None
    assert find_parent({"model": str(first.path)}, ["posttrain", "--config", config]) == Parent(first.path, "config")
    assert find_parent({}, ["posttrain", "--config"]) is None


def test_a_model_of_a_run_names_the_parent(first):
    final = first.checkpoint_root("sft") / "final"
    assert parent_of_model(str(first.path)) == Parent(first.path, "model")
    assert parent_of_model(f"{first.path}:sft") == Parent(first.path, "model", "sft")
    assert parent_of_model(str(final)) == Parent(first.path, "model", "sft")
    for other in ("smollm2", "org/name", "", None, 3, "a\0b", "/nowhere/checkpoints/sft/final"):
        assert parent_of_model(other) is None


def test_one_changed_setting_is_one_variable(first):
    parent = child(first, Settings(optim=Optim(lr=3e-3)))
    assert parent["label"] == "one variable"
    assert parent["changed"] == {"optim.lr": [0.001, 0.003]}
    assert (parent["id"], parent["path"], parent["digest"]) == (first.manifest["id"], str(first.path), identity_digest(first.manifest))
    assert parent["neutral"] == {}


def test_two_changed_settings_are_a_bundle(first):
    parent = child(first, Settings(optim=Optim(lr=3e-3, warmup=0.0)))
    assert parent["label"] == "bundle"
    assert sorted(parent["changed"]) == ["optim.lr", "optim.warmup"]


def test_a_seed_is_a_variable_and_the_number_of_processes_is_none(first):
    parent = child(first, Settings(seed=1, processes=4, save_every=9))
    assert (parent["label"], parent["changed"]) == ("one variable", {"seed": [0, 1]})
    assert parent["neutral"] == {"processes": [1, 4], "save_every": [50, 9]}


def test_nothing_changed_is_a_repeat(first):
    assert child(first, Settings())["label"] == "repeat"


def test_another_model_and_its_tokenizer_are_one_change(first):
    digests = {"model": "m2", "tokenizer": "t2", "template": "c2", "data": "d1"}
    parent = child(first, Settings(model="other"), digests)
    assert (parent["label"], list(parent["changed"])) == ("one variable", ["model"])


def test_data_that_changed_under_its_name_is_a_variable(first):
    parent = child(first, Settings(), {**DIGESTS, "data": "d2"})
    assert parent["changed"] == {"data": ["d1", "d2"]}
    assert parent["label"] == "one variable"


def test_inputs_that_a_changed_setting_explains_are_not_counted_again():
    found = differences({"held_out": "1", "data": "1", "tokenizer": "1"}, {"held_out": "2", "data": "2", "tokenizer": "2"})
    assert [name for name, _, _ in own_inputs(found, ["data"])] == ["tokenizer"]
    assert [name for name, _, _ in own_inputs(found, ["model"])] == ["data", "held_out"]
    assert [name for name, _, _ in own_inputs(found, [], apart=("tokenizer",))] == ["data", "held_out"]


def test_a_run_that_goes_on_from_a_model_is_compared_without_it(first):
    model = str(first.checkpoint_root("sft") / "final")
    digests = {**DIGESTS, "model": "m9", "tokenizer": "t9"}
    parent = child(first, Settings(model=model, optim=Optim(lr=3e-3)), digests, via="model")
    assert (parent["label"], list(parent["changed"])) == ("one variable", ["optim.lr"])


def test_another_recipe_on_a_model_has_nothing_to_compare(first):
    parent = child(first, Settings(), via="model", stages=("eval.before", "rl", "eval.after"))
    assert (parent["label"], parent["changed"]) == ("another stage", {})
    settings = Settings(seed=1)
    run = create(first.path.parent / "c", settings, parent=Parent(first.path, "model"), stages=("eval.before", "sft", "eval.after"))
    assert run.manifest["parent"]["label"] == "one variable"


def test_a_bundle_is_refused_where_one_variable_is_asked_for(first, tmp_path):
    with pytest.raises(ConfigError, match=r"2 variables differ from .*/a: optim\.lr, seed; change one at a time") as caught:
        child(first, Settings(seed=1, optim=Optim(lr=3e-3)), one_variable=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b").exists()
    assert child(first, Settings(seed=1, processes=2), one_variable=True)["label"] == "one variable"


def test_one_variable_cannot_be_judged_without_a_parent_of_the_same_recipe(first, tmp_path):
    with pytest.raises(ConfigError, match="one variable at a time needs a run to compare with"):
        create(tmp_path / "b", Settings(), one_variable=True)
    with pytest.raises(ConfigError, match="it is another recipe, with other settings"):
        child(first, Settings(), via="model", stages=("rl",), one_variable=True)
    (first.path / "config.yaml").write_text("[")
    with pytest.raises(ConfigError, match=r"cannot be said: it cannot be read \(not readable as YAML"):
        child(first, Settings(), one_variable=True)


def test_a_parent_that_cannot_be_read_is_recorded_as_such(first):
    (first.path / "manifest.json").write_text("{")
    parent = child(first, Settings())
    assert (parent["label"], parent["id"]) == ("unknown", None)
    assert "not readable as JSON" in parent["problem"]


def test_a_parent_resumed_with_other_settings_is_compared_as_it_ended(first):
    Run.resume(first.path, config=Settings(seed=5), ignore=["seed"])
    assert child(first, Settings(seed=5))["label"] == "repeat"


def test_other_packages_are_drift_and_no_variable(first):
    manifest = json.loads((first.path / "manifest.json").read_text())
    manifest["packages"]["torch"] = "1.0"
    manifest["code"]["revision"] = "0" * 40
    del manifest["gpus"], manifest["cpu"]["usable"]  # what the parent did not record is no difference
    (first.path / "manifest.json").write_text(json.dumps(manifest))
    parent = child(first, Settings(seed=1))
    assert (parent["label"], parent["drift"]) == ("one variable", ["code.revision", "packages.torch"])
    assert origin({"parent": parent}) == f"one variable from {first.manifest['id']}: seed (and other code, packages or machine)"


@pytest.mark.parametrize(
    ("parent", "text"),
    [
        (None, None),
        (3, None),
        ("runs/base", "from runs/base"),
        ({"id": "ab", "rung": "sft", "label": "another stage", "changed": {}}, "another stage from ab:sft"),
        (
            {"id": "ab", "label": "bundle", "changed": {f"k{i}": [0, 1] for i in range(8)}},
            "bundle from ab: k0, k1, k2, k3, k4, k5 and 2 more",
        ),
    ],
)
def test_where_a_run_comes_from_in_a_few_words(parent, text):
    assert origin({"parent": parent}) == text


def test_labels():
    assert [label_of(n) for n in range(4)] == ["repeat", "one variable", "bundle", "bundle"]
