"""What a run optimises, read off its settings: aggregation and normalisation are two fields."""

from __future__ import annotations

import hashlib

import pytest

from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.objective import Objective
from posttrain.runs.method import BASELINES, method_of


def test_the_default_of_the_ladder_is_spelled_out():
    method = method_of({"algorithm": "default"})
    assert method["aggregation"] == "token_mean"
    assert method["advantage_normalisation"] == {"baseline": "group mean", "scale": "group standard deviation (ddof 0) + 1e-06"}
    assert method["kl"] == {
        "estimator": "k2",
        "placement": "loss",
        "coef": 0.005,
        "target": None,
        "dtype": "float32",
        "descends": "KL(policy || reference)",
    }
    assert method["surrogate"] is None


def test_one_field_changes_without_the_other():
    base = method_of({"objective": {"kind": "grpo"}})
    other = method_of({"objective": {"kind": "grpo", "aggregation": "prompt_mean"}})
    assert {name for name in base if base[name] != other[name]} == {"aggregation"}
    other = method_of({"objective": {"kind": "grpo", "advantage": {"kind": "mean_std", "ddof": 1}}})
    assert {name for name in base if base[name] != other[name]} == {"advantage_normalisation"}


def test_a_name_is_resolved_to_the_same_method_as_its_axes():
    named = method_of({"algorithm": "gspo"})
    spelled = method_of({"objective": Objective.load("gspo").model_dump(mode="json")})
    assert named == spelled
    assert named["ratio"] == {"level": "sequence", "against": "old"}


def test_without_a_kl_term_nothing_is_claimed_about_one():
    kl = method_of({"objective": {"kind": "grpo", "kl": {"estimator": "k3", "coef": 0.0}}})["kl"]
    assert (kl["estimator"], kl["placement"], kl["coef"], kl["dtype"], kl["descends"]) == ("none", None, 0.0, None, None)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_has_a_baseline_in_words(name):
    method = method_of({"algorithm": name})
    assert method["algorithm"] == name
    assert method["advantage"] in BASELINES or method["advantage"] == "batch"


@pytest.mark.parametrize("config", [{}, {"sft": {}}, {"objective": 3}, {"algorithm": "no-such"}, {"objective": {"kind": ["x"]}}])
def test_settings_without_a_policy_gradient_have_no_method(config):
    assert method_of(config) == {}


def test_a_users_own_loss_is_known_by_what_its_file_holds(tmp_path):
    file = tmp_path / "gate.py"
    file.write_text("def f(s): ...\n")
    method = method_of({"objective": {"kind": "grpo", "surrogate": f"{file}:f", "ratio": "none", "limit": "none"}})
    assert method["surrogate"] == {"name": f"{file}:f", "digest": hashlib.sha256(b"def f(s): ...\n").hexdigest()[:16]}
