"""The linter: each rule fires alone on settings that break it, is silent beside them, and nothing in a config can make it fall over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.entries import Action
from posttrain.doctor.frame import Frame
from posttrain.doctor.lint import Advice, lint, probe_facts, stages_of
from posttrain.doctor.rules import Missing, Rule, short
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.recipes.presets import PRESETS
from posttrain.recipes.single import DPORun, RLRun, SFTRun

RULES = {entry.id: entry for entry in CATALOG.values() if entry.found_by == "settings" and entry.signs}
CLEAN: dict[str, dict[str, Any]] = {
    "rl": RLRun.load({"model": "m", "task": "arithmetic", "held_out": 500}).model_dump(mode="json"),
    "sft": SFTRun.load({"model": "m", "task": "arithmetic", "held_out": 500}).model_dump(mode="json"),
    "dpo": DPORun.load({"model": "m", "data": "pairs.jsonl", "held_out": 500}).model_dump(mode="json"),
}
"""Settings that break no rule: the defaults, and enough items to measure on."""
ABSENT = object()
BREAKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # id: stage, what breaks the rule, and the nearest that does not
    "C1": ("rl", {"rl.siblings": 3}, {"rl.siblings": 4}),
    "C2": ("rl", {"rl.steps": 19}, {"rl.steps": 20}),
    "C3": ("rl", {"rl.optim.lr": 5e-4, "rl.optim.warmup": 0.0}, {"rl.optim.lr": 5e-4}),
    "C4": ("rl", {"rl.optim.lr": 1e-6}, {"rl.optim.lr": 1e-5}),
    "C6": (
        "rl",
        {"rl.steps": 500, "rl.optim.schedule": "cosine", "objective.kl.estimator": "none"},
        {"rl.steps": 499, "rl.optim.schedule": "cosine", "objective.kl.estimator": "none"},
    ),
    "C7": ("rl", {"objective.entropy.coef": 0.001}, {"objective.entropy.coef": 0.001, "objective.entropy.target": 0.3}),
    "C8": ("rl", {"guard.pulse_every": 0}, {"guard.pulse_every": 50}),
    "C9": ("rl", {"guard.alarms": "off"}, {"guard.alarms": "warn"}),
    "C10": ("rl", {"save_every": 100}, {"save_every": 99}),
    "C11": ("rl", {"asynchronous": {"bound": 2, "order": "due"}}, {"asynchronous": {"bound": 0, "order": "due"}}),
    "C12": ("rl", {"objective.overlong": {"kind": "drop"}}, {"objective.overlong": {"kind": "ramp"}}),
    "C13": ("rl", {"rl.epochs": 9, "objective.limit.kind": "band"}, {"rl.epochs": 8, "objective.limit.kind": "band"}),
    "C14": ("rl", {"sampling.temperature": 0.5}, {"sampling.temperature": 0.6}),
    "C15": ("sft", {"lora": {"rank": 8}, "sft.optim.lr": 2e-5}, {"lora": {"rank": 8}, "sft.optim.lr": 2e-4}),
    "C16": ("rl", {"rl.prompts": 3}, {"rl.prompts": 4}),
    "C17": ("rl", {"held_out": 499}, {"held_out": 500}),
    "C18": ("sft", {"sft.epochs": 5}, {"sft.epochs": 4}),
    "C19": ("dpo", {"dpo.beta": 0.02}, {"dpo.beta": 0.05}),
    "C20": ("rl", {"seed": ABSENT}, {"seed": 3}),
    "C21": ("rl", {"seeds": [0, 1]}, {"seeds": [0, 1, 2]}),
    "C22": ("rl", {"sampling.top_p": 0.9}, {"sampling.top_p": 1.0}),
    "C23": (
        "rl",
        {"asynchronous": {"bound": 1}, "objective.correction": {"kind": "mask", "sequence_lower": 0.996, "sequence_upper": 1.001}},
        {"asynchronous": {"bound": 1}, "objective.correction": {"kind": "mask", "sequence_lower": 0.9, "sequence_upper": 1.1}},
    ),
    "C24": ("rl", {"rl.prompts": 15, "rl.minibatches": 2}, {"rl.prompts": 16, "rl.minibatches": 2}),
    "C25": ("sft", {"processes": 33}, {"processes": 32}),
    "C26": ("rl", {"objective.kl.estimator": "k2", "objective.kl.coef": 1e-4}, {"objective.kl.estimator": "k2", "objective.kl.coef": 1e-3}),
    "C27": ("rl", {"objective.kl.estimator": "k1"}, {"objective.kl.estimator": "k1", "objective.kl.placement": "reward"}),
    "C28": ("dpo", {"dpo.epochs": 4}, {"dpo.epochs": 3}),
    "C29": ("dpo", {"dpo.beta": 0.5}, {"dpo.beta": 0.4}),
    "C30": ("dpo", {"dpo.optim.warmup": 0.5}, {"dpo.optim.warmup": 0.3}),
    "C31": ("rl", {"guard.gates": "off"}, {"guard.gates": "warn"}),
    "C32": (
        "rl",
        {"asynchronous": {"bound": 9}, "objective.against": "behaviour", "objective.limit.kind": "cispo"},
        {"asynchronous": {"bound": 8}, "objective.against": "behaviour", "objective.limit.kind": "cispo"},
    ),
    "C33": ("rl", {"rl.optim.lr": 3e-3}, {"rl.optim.lr": 2e-3}),
    "C34": ("rl", {"guard.pulse_items": 31}, {"guard.pulse_items": 31, "guard.pulse_every": 0}),
    "C35": ("sft", {"demonstrations": 600}, {"demonstrations": 640}),  # 600 / 32 = 19 steps, 640 / 32 = 20
    "C36": ("rl", {"rl.siblings": 1, "rl.prompts": 64}, {"rl.siblings": 1, "rl.prompts": 64, "objective.advantage": {"kind": "batch"}}),
    "C37": ("rl", {"sampling.temperature": 0.0}, {"sampling.temperature": 1.0}),
    "C38": ("rl", {"objective.aggregation": ABSENT}, {"objective.aggregation": "constant"}),
    "C39": (
        "rl",
        {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.8},
        {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.8, "vllm_enable_sleep_mode": True},
    ),
    "F14": (
        "rl",
        {"objective.ratio": "sequence"},
        {"objective.ratio": "sequence", "objective.limit.low": 3e-4, "objective.limit.high": 4e-4},
    ),
    "L8": ("rl", {"rl.epochs": 5, "objective.limit.cap": 3}, {"rl.epochs": 4, "objective.limit.cap": 3}),
    "L9": ("rl", {"rl.epochs": 4}, {"rl.epochs": 4, "objective.limit.dual": 3}),
    "L15": (
        "rl",
        {"asynchronous": {"bound": 1, "order": "arrival"}, "objective.against": "behaviour"},
        {"asynchronous": {"bound": 1, "order": "issue"}, "objective.against": "behaviour"},
    ),
    "L30": (
        "rl",
        {"objective.advantage": {"kind": "critic", "lam": 0.95}},
        {"objective.advantage": {"kind": "critic", "lam": 1.0}},
    ),
    "P29": ("rl", {"objective.kl.estimator": "k3"}, {"objective.kl.estimator": "k2"}),
    "S29": ("rl", {"objective.advantage": {"kind": "channels"}}, {"objective.advantage": {"kind": "mean"}}),
    "S100": ("rl", {"rl.steps": 301}, {"rl.steps": 300}),
}
WITH_FACTS = {"C5", "P16"}
"""Rules that settings alone do not tell."""


def changed(stage: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The clean settings of a stage with some values changed, whatever a recipe would say to them."""
    found = copy.deepcopy(CLEAN[stage])
    for name, value in changes.items():
        *parents, leaf = name.split(".")
        place = found
        for parent in parents:
            place = place[parent]
        if value is ABSENT:
            del place[leaf]
        else:
            place[leaf] = value
    return found


def ids(config: dict[str, Any], **facts: Any) -> set[str]:
    return {advice.id for advice in lint(config, CATALOG.values(), facts)}


@pytest.mark.parametrize("stage", CLEAN)
def test_clean_settings_break_nothing(stage: str):
    assert ids(CLEAN[stage]) == set()


def test_every_rule_has_a_case():
    assert set(BREAKS) | WITH_FACTS == set(RULES)


@pytest.mark.parametrize("id", BREAKS)
def test_a_rule_fires_alone(id: str):
    stage, broken, _ = BREAKS[id]
    assert ids(changed(stage, broken)) == {id}


@pytest.mark.parametrize("id", BREAKS)
def test_a_rule_is_silent_beside_it(id: str):
    stage, _, beside = BREAKS[id]
    assert id not in ids(changed(stage, beside))


def test_a_cap_is_compared_with_what_a_probe_saw():
    verdict = {"figures": {"lengths": {"p50": 60.0, "p99": 130.0}, "statuses": {"truncated": 0.02}, "sampling": {"max_tokens": 256}}}
    facts = probe_facts(verdict)
    assert facts == {"probe.length_p99": 130.0, "probe.truncated": 0.02, "probe.max_tokens": 256.0}
    assert ids(changed("rl", {"sampling.max_tokens": 128}), **facts) == {"C5"}
    assert ids(changed("rl", {"sampling.max_tokens": 192}), **facts) == set()
    assert ids(changed("rl", {"sampling.max_tokens": 192}), **facts | {"probe.truncated": 0.1}) == {"C5"}  # its 256 were too few as well
    assert ids(changed("rl", {"sampling.max_tokens": 512}), **facts | {"probe.truncated": 0.1}) == set()


def test_a_run_directory_says_whether_memory_ran_out():
    assert ids(CLEAN["rl"], out_of_memory=True) == {"P16"}
    assert ids(CLEAN["rl"], out_of_memory=False) == set()


@pytest.mark.parametrize("verdict", [{}, {"figures": 3}, {"figures": {"lengths": [1], "statuses": {"truncated": "x"}}}])
def test_a_probe_that_says_nothing_gives_no_facts(verdict: dict[str, Any]):
    assert probe_facts(verdict) == {}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_breaks_no_rule_above_a_note(name: str):
    assert [advice for advice in lint(PRESETS[name].model_dump(mode="json"), CATALOG.values()) if advice.action is not Action.NOTE] == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_with_default_settings_breaks_no_rule_above_a_note(name: str):
    config = RLRun.load({"model": "m", "task": "arithmetic", "objective": name}).model_dump(mode="json")
    found = {advice.id for advice in lint(config, CATALOG.values()) if advice.action is not Action.NOTE}
    assert found == ({"S29"} if name == "gdpo" else set())  # gdpo is shipped as the trap that it is


def test_the_gravest_comes_first_and_says_all_in_one_line():
    found = lint(changed("rl", {"held_out": 2, "rl.siblings": 2}), CATALOG.values())
    assert [(advice.id, advice.action) for advice in found] == [("C1", Action.WARN), ("C17", Action.NOTE)]
    assert found[0].sentence == (
        "C1 too few siblings to compare: objective.advantage.kind = 'mean_std'; fewer than 4 siblings: siblings = 2; "
        "siblings=8 or more; 16 where most groups are unanimous (posttrain doctor explain C1)"
    )


def test_every_stage_of_a_ladder_is_judged_by_its_own_section():
    config = PRESETS["tiny"].model_dump(mode="json")
    assert stages_of(config) == ["sft", "dpo", "grpo"]
    config["dpo"]["beta"] = 0.01
    config["grpo"]["siblings"] = 2
    assert {(advice.stage, advice.id) for advice in lint(config, CATALOG.values())} == {("dpo", "C19"), ("grpo", "C1")}
    assert {advice.stage for advice in lint(config, CATALOG.values(), stages=["dpo"])} == {"dpo"}


def test_a_method_may_be_named_without_its_axes():
    assert ids({"rl": {"siblings": 2, "prompts": 64}, "algorithm": "grpo"}) == {"C1", "P29"}  # grpo has k3 in its loss
    assert ids({"rl": {"siblings": 2, "prompts": 64}, "algorithm": "nobody knows"}) == set()


def test_what_is_missing_or_of_another_type_silences_only_what_reads_it():
    assert ids({}) == ids({"rl": {}}) == ids({"rl": 3}) == set()
    broken = changed("rl", {"rl.siblings": "many", "rl.optim.lr": None, "held_out": [1], "guard": "off", "rl.steps": float("nan")})
    broken["objective"]["kl"]["estimator"] = "k3"
    assert ids(broken) == {"P29"}
    assert ids({"sft": {"epochs": 1e308, "batch_size": 1}, "demonstrations": 1e308}) == {"C18"}


TRL = {"learning_rate": 1e-4, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "seed": 42, "max_steps": 200, "save_steps": 50}
GRPO = {**TRL, "num_generations": 8, "temperature": 1.0, "max_completion_length": 256, "beta": 0.0, "loss_type": "dapo"}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (GRPO, set()),
        ({**GRPO, "beta": 0.04}, {"P29"}),  # TRL's KL is k3 in the loss
        ({**GRPO, "num_generations": 2}, {"C1"}),
        ({**GRPO, "num_generations": 2, "scale_rewards": False}, {"C1"}),
        ({**GRPO, "temperature": 0.3, "top_p": 0.9}, {"C14", "C22"}),
        ({**GRPO, "importance_sampling_level": "sequence"}, {"F14"}),  # its epsilon of 0.2 is one of tokens
        ({**GRPO, "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}, set()),
        ({**GRPO, "num_iterations": 5}, {"L8", "L9"}),
        ({**GRPO, "num_iterations": 5, "loss_type": "cispo"}, set()),
        ({**GRPO, "lr_scheduler_type": "constant_with_warmup", "max_steps": 400}, {"S100"}),
        ({"learning_rate": 1e-6, "seed": 1, "num_generations": 8}, {"C4", "C38"}),
        ({"learning_rate": 1e-5, "seed": 1, "num_generations": 8, "use_peft": True}, {"C15", "C38"}),
        ({**GRPO, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.8}, {"C39"}),
        ({**TRL, "beta": 0.01}, {"C19"}),
        ({**TRL, "num_train_epochs": 6, "max_steps": -1}, {"C18"}),
        ({"learning_rate": 1e-4}, {"C20"}),
        ({"num_generations": "many", "learning_rate": [1], "epsilon": None, "beta": {}, "seed": 1}, {"C38"}),
        ({"unknown": 1}, set()),
    ],
)
def test_a_config_of_trl_is_judged_in_our_names(config: dict[str, Any], wanted: set[str]):
    assert ids(config) == wanted


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(values: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every place of nested settings."""
    found = []
    for key, value in values.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += places(value, (*before, key))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_at_any_place_is_answered_in_lines(data: st.DataObject):
    config = copy.deepcopy(CLEAN[data.draw(st.sampled_from(list(CLEAN)))])
    for place in data.draw(st.lists(st.sampled_from(places(config)), min_size=1, max_size=4)):
        inside: Any = config
        for key in place[:-1]:
            inside = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            inside[place[-1]] = data.draw(ANYTHING)
    for advice in lint(config, CATALOG.values(), data.draw(st.dictionaries(st.sampled_from(["probe.length_p99"]), ANYTHING))):
        assert isinstance(advice, Advice)
        assert advice.sentence.isprintable()


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*CLEAN, *GRPO, "grpo", "base", "objective", "algorithm", "lora", "rows", "epsilon", "x"]), ANYTHING)
)
def test_any_mapping_is_answered_in_lines(config: dict[str, Any]):
    assert all(advice.sentence.isprintable() for advice in lint(config, CATALOG.values()))


def test_a_rule_is_told_only_when_all_that_it_reads_is_known():
    few = Rule(("a", "b"), lambda s: s["a"] < s["b"], "a below b")
    assert [few.holds(Frame("rl", "rl", values, steps=[0]))[0] for values in ({"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": 1})] == [
        True, False, False,
    ]  # fmt: skip
    assert few.since(Frame("rl", "rl", {"a": 1}, steps=[0])) == 1
    assert few.said(Frame("rl", "rl", {"a": 1e-06, "b": "x\ny"}, steps=[0]), 0) == "a below b: a = 1e-06, b = 'x\\ny'"


def test_a_missing_setting_needs_its_neighbour():
    none = Missing(("cap", "dual"), beside="high")
    assert [none.holds(Frame("rl", "rl", values, steps=[0]))[0] for values in ({"high": 1}, {"high": 1, "dual": 3}, {"cap": None})] == [
        True, False, False,
    ]  # fmt: skip
    assert none.words() == "cap and dual not set"


def test_a_value_is_short():
    assert short(list(range(100))).endswith("...")
    assert len(short("x" * 500)) <= 64
