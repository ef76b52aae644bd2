"""The selector: each answer leads where its source says, and what it recommends can be run."""

from __future__ import annotations

import io
from functools import cache
from itertools import product
from typing import get_args

import pytest

from posttrain.cli import methods
from posttrain.core.errors import ConfigError
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.explain import command
from posttrain.objectives.objective import Objective, check_siblings
from posttrain.objectives.recommend import RULES, SYMPTOMS, Answers, Recommendation, Symptom, recommend
from posttrain.recipes.single import RLRun


def ask(**given) -> Recommendation:
    return recommend(Answers.load(given))


@cache
def everything() -> list[tuple[Answers, Recommendation]]:
    """Answers over the whole grid, with no symptom, one, or two, and what is recommended."""
    pairs = [(), *((one,) for one in SYMPTOMS), ("entropy_collapse", "zero_variance"), ("mismatch", "stale_rollouts")]
    grid = product(
        ("dense", "moe"), ("verifier", "preferences"), ("never", "sometimes", "often"), (1, 2, 4, 8), ("short", "long", "subtraces"),
        ("enough", "tight"), pairs,
    )  # fmt: skip
    names = ("model", "signal", "success", "siblings", "responses", "memory", "symptoms")
    answers = [Answers.load(dict(zip(names, values, strict=True))) for values in grid]
    return [(given, recommend(given)) for given in answers]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # spec/book-2 item 72, from the top
        ({"symptoms": ["length_creep"]}, "dr_grpo"),
        ({"model": "moe"}, "gspo"),
        ({"signal": "preferences"}, "dpo"),
        ({"memory": "tight"}, "rloo"),
        ({"symptoms": ["entropy_collapse", "zero_variance"]}, "dapo"),
        ({}, "default"),
        # spec/book-6 1.M.5
        ({"symptoms": ["entropy_collapse"]}, "grpo++"),
        ({"responses": "long"}, "grpo++"),
        ({"success": "never"}, "sft"),
        # the failures that the other methods target
        ({"responses": "subtraces"}, "sao"),
        ({"responses": "subtraces", "memory": "tight"}, "reinforce++"),
        ({"siblings": 1}, "ppo"),
        ({"siblings": 1, "memory": "tight"}, "reinforce++"),
        ({"siblings": 4}, "rloo"),
        ({"symptoms": ["mismatch"]}, "icepop"),
        ({"symptoms": ["stale_rollouts"]}, "areal"),
        ({"symptoms": ["stale_rollouts"], "responses": "long"}, "mimo"),
        ({"symptoms": ["grad_spikes"]}, "mai"),
        ({"symptoms": ["entropy_explosion"]}, "mai"),
        ({"symptoms": ["zero_variance"]}, "dapo"),
        ({"symptoms": ["rare_tokens_clipped"]}, "cispo"),
        ({"symptoms": ["pass_at_k_falls"]}, "passk"),
        ({"symptoms": ["overthinking"]}, "s_grpo"),
        ({"symptoms": ["noisy_small_groups"], "siblings": 3}, "mc_grpo"),
        # first yes wins
        ({"symptoms": ["length_creep"], "model": "moe"}, "dr_grpo"),
        ({"symptoms": ["entropy_collapse"], "model": "moe"}, "gspo"),
        ({"symptoms": ["length_creep"], "success": "never"}, "sft"),
        ({"symptoms": ["length_creep"], "signal": "preferences", "success": "never"}, "dpo"),
    ],
)
def test_where_an_answer_leads(given, expected):
    assert ask(**given).algorithm == expected


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_the_reason_names_the_symptom_and_its_source(symptom):
    found = ask(symptoms=[symptom])
    assert symptom in found.reasons[0]
    assert "(" in found.reasons[0]
    assert found.check


def test_every_rule_has_a_reason_a_source_and_a_check():
    for rule in RULES:
        assert rule.because
        assert rule.source
        assert rule.check
        for name, why in rule.instead:
            assert name in ALGORITHMS or name in ("easier tasks", "distillation")
            assert why


def test_every_method_can_be_reached_or_is_named_beside_another():
    reached, named = set(), set()
    for _, found in everything():
        reached.add(found.algorithm)
        named |= {other.name for other in found.not_chosen}
    assert set(ALGORITHMS) - {"gdpo", "reinforce"} <= reached | named
    assert {rule.algorithm for rule in RULES} <= reached  # no rule stands behind another that always fits before it
    assert not {"gdpo", "reinforce"} & (reached | named)


def test_whatever_is_recommended_can_be_run():
    for answers, found in everything():
        settings = dict(change.split("=", 1) for change in found.changes)
        assert len(settings) == len(found.changes), found.changes  # no setting twice
        if found.algorithm not in ALGORITHMS:
            assert found.command == f"posttrain train {found.algorithm}"
            continue
        assert settings.pop("objective") == found.algorithm
        axes = {key.removeprefix("objective."): value for key, value in settings.items() if key.startswith("objective.")}
        objective = Objective.load({"kind": found.algorithm, **axes})
        check_siblings(objective, int(settings["rl.siblings"]))
        if answers.memory == "tight" and not answers.symptoms and answers.success != "never" and answers.signal == "verifier":
            assert not objective.needs_critic


def test_every_command_line_is_one_that_the_recipe_takes():
    lines = {found.command for _, found in everything() if found.algorithm in ALGORITHMS}
    for line in lines | {command(entry) for entry in ALGORITHMS.values()}:
        start, *changes = line.split(" --set ")
        assert start == "posttrain train rl"
        run = RLRun.load({"model": "m"}).override(changes)
        assert f"objective={run.objective.kind}" in changes


def test_what_was_not_chosen_is_told_once_and_never_the_choice_itself():
    for _, found in everything():
        names = [other.name for other in found.not_chosen]
        assert len(names) == len(set(names))
        assert found.algorithm not in names


def test_a_later_rule_that_fits_is_reported_not_mixed_in():
    found = ask(symptoms=["length_creep", "rare_tokens_clipped"])
    (cispo,) = (other for other in found.not_chosen if other.name == "cispo")
    assert cispo.why.startswith("fits as well: rare_tokens_clipped")
    assert "objective.limit" not in " ".join(found.changes)
    assert not ask(success="never", symptoms=["length_creep"]).not_chosen[2:]  # nothing to reinforce: no method is an alternative


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ({"symptoms": ["length_creep"], "siblings": 1}, "objective.advantage=batch"),
        ({"model": "moe", "siblings": 1}, "objective.advantage=batch"),
        ({"symptoms": ["length_creep"], "model": "moe"}, "rl.minibatches=1"),
        ({"model": "moe"}, "rl.minibatches=4"),
        ({"symptoms": ["pass_at_k_falls"], "siblings": 4}, "rl.siblings=8"),
        ({"symptoms": ["pass_at_k_falls"], "siblings": 5}, "rl.siblings=5"),
        ({"symptoms": ["noisy_small_groups"], "siblings": 2}, "rl.siblings=3"),
        ({"symptoms": ["noisy_small_groups"], "siblings": 4}, "rl.siblings=5"),
        ({"symptoms": ["noisy_small_groups"], "siblings": 3}, "rl.siblings=3"),
        ({"siblings": 1}, "rl.siblings=1"),
        ({"siblings": 1}, "critic.warmup=10"),
        ({"responses": "long"}, "rl.optim.schedule=cosine"),
        ({"symptoms": ["zero_variance"]}, "rl.tries=3"),
    ],
)
def test_settings_fit_the_answers(given, change):
    assert change in ask(**given).changes


def test_a_task_that_is_nearly_solved_is_said_to_be():
    assert any("near 100 %" in reason for reason in ask(success="often").reasons)
    assert not any("near 100 %" in reason for reason in ask().reasons)


def test_answers_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match=r"symptoms.0 = 'lenght_creep'.*'length_creep'"):
        Answers.load({"symptoms": ["lenght_creep"]})
    with pytest.raises(ConfigError, match="siblings"):
        Answers.load({"siblings": 0})
    assert Answers.load({"symptoms": ["none"]}) == Answers()


def test_every_symptom_is_described():
    assert set(SYMPTOMS) == set(get_args(Symptom))


# --- the command -----------------------------------------------------------------------------------------------------------------------


def test_every_field_is_asked_for_with_all_its_choices():
    assert [question.field for question in methods.QUESTIONS] == list(Answers.model_fields)
    for question in methods.QUESTIONS:
        if question.choices and not question.many:
            assert set(question.choices) == set(get_args(Answers.model_fields[question.field].annotation))
            assert next(iter(question.choices)) == getattr(Answers(), question.field)  # the first choice is the default


def test_flags_are_answered_with_method_reason_check_command_and_alternatives(capsys):
    methods.show_recommendation({"model": "moe", "symptoms": ["none"]})
    text = capsys.readouterr().out
    assert text.startswith("GSPO  (gspo)\n  why:    mixture of experts")
    for needed in ("  first:  ratio_max", "  run:    posttrain train rl --set objective=gspo", "\nnot chosen\n  lpo: ", "symptoms none\n"):
        assert needed in text


def test_without_flags_and_terminal_the_questions_are_printed_as_flags(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="posttrain recommend --model dense --symptom none"):
        methods.show_recommendation({})
    text = capsys.readouterr().out
    for question in methods.QUESTIONS:
        assert f"\n{question.flag} " in f"\n{text}"
    assert "length_creep         answers grow longer" in text


def test_at_a_terminal_each_question_is_put_with_numbers(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    # moe, verifier, sometimes, 6 siblings, long after one answer that does not exist, enough, entropy_collapse and zero_variance
    monkeypatch.setattr("sys.stdin", Terminal("2\n\n\n6\n9\n2\n1\n5, 8\n"))
    methods.show_recommendation({})
    text = capsys.readouterr().out
    assert "'9' is none of 1 to 3" in text
    assert "answers: model moe, signal verifier, success sometimes, siblings 6, responses long, memory enough" in text
    assert "symptoms entropy_collapse+zero_variance" in text
    assert "GSPO  (gspo)" in text
