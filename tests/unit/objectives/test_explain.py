"""What `posttrain explain` says is read off the objectives themselves, and needs no torch."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from typing import get_args

import pytest

from posttrain.cli.methods import show_comparison, show_explanation
from posttrain.core.errors import ConfigError
from posttrain.objectives import algorithms, explain
from posttrain.objectives.algorithms import ALGORITHMS, algorithm
from posttrain.objectives.axes import Limit
from posttrain.objectives.explain import MEANINGS, choices, command, compare, differences, explain_all
from posttrain.objectives.objective import Objective

GRPO = Objective.load({"kind": "grpo"})


def of(kind: str, **changes) -> Objective:
    return Objective.load({"kind": kind, **changes})


def page(name: str, size: int | None = None) -> str:
    return "\n".join(explain.explain(name, size))


def part(name: str, heading: str) -> list[str]:
    """The lines under a heading, without their indent."""
    lines = explain.explain(name)
    start = lines.index(heading) + 1
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    return [line.strip() for line in lines[start:end]]


def test_dapo_is_told_by_its_differences():
    assert part("dapo", "Difference from GRPO") == [
        "limit.high 0.2 -> 0.28",
        "aggregation token_mean instead of seq_mean_token_mean",
        "kl none instead of k3 in loss x 0.04",
        "overlong ramp (buffer 0.2, scale 1) instead of none",
        "loop: tries 3",
    ]
    assert part("grpo", "Difference from GRPO") == ["none: this is GRPO"]


def test_differences_are_read_off_the_objectives_whatever_their_name():
    changed = of("grpo", limit={"high": 0.9}, ratio="sentence", entropy={"coef": 0.01}, correction="truncate", advantage={"ddof": 1})
    assert differences(GRPO, changed) == [
        "advantage.ddof 0 -> 1",
        "ratio sentence instead of token",
        "limit.high 0.2 -> 0.9",
        "correction truncate (cap 2, level token) instead of none",
        "entropy on (coef 0.01, step 0.0005, highest 0.01) instead of off",
    ]
    assert differences(changed, changed) == []


def test_a_kl_that_is_not_used_differs_from_nothing():
    # coefficient 0.04 stays behind in the settings when the estimator is none
    assert differences(of("dapo"), of("dapo", kl={"estimator": "none", "coef": 0.7})) == []
    assert differences(of("dapo"), of("dapo", kl={"estimator": "k3", "coef": 0.0})) == []
    assert differences(GRPO, of("grpo", kl={"coef": 0.1})) == ["kl k3 in loss x 0.1 instead of k3 in loss x 0.04"]
    before, after = (of("grpo", kl={"estimator": "top_k", "k": k}) for k in (8, 16))
    assert differences(before, after) == ["kl.k 8 -> 16"]
    assert differences(GRPO, of("grpo", kl={"dtype": "float64"})) == ["kl.dtype float32 -> float64"]


def test_a_loss_of_your_own_is_named():
    own = of("dapo", surrogate="mine.py:loss")
    assert differences(of("dapo"), own) == ["surrogate mine.py:loss instead of none"]
    (choice,) = (c for c in choices(own) if c.axis == "surrogate")
    assert choice.meaning == "in place of ratio, limit and correction"


def test_a_text_that_cannot_be_seen_is_quoted():
    assert differences(GRPO, of("s_grpo")) == [r"drawing early_exit (cuts 4, cue '\n#### ') instead of siblings"]


def test_nested_and_optional_settings_are_shown_when_they_are_set():
    assert differences(GRPO, of("mai"))[:2] == ["limit.cap none -> 2", "limit.steer none -> [entropy 0.3, step 0.01, highest 0.5]"]
    limit = {c.axis: c.short for c in choices(GRPO)}["limit"]
    assert limit == "clip (low 0.2, high 0.2)"  # `outer` says what happens beyond `cap`, and there is none


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_whole_page(name):
    text = page(name)
    entry = ALGORITHMS[name]
    for needed in (entry.title, entry.targets, entry.source, *entry.avoid, f"--set objective={name}"):
        assert needed in text
    for choice in choices(of(name)):
        assert choice.meaning
        assert f"{choice.axis:12} {choice.short}" in text
    assert "None" not in text


def test_every_axis_of_the_objective_is_explained():
    assert [choice.axis for choice in choices(GRPO)] == [name for name in Objective.model_fields if name != "kind"]


@pytest.mark.parametrize("axis", MEANINGS)
def test_every_member_of_a_plain_axis_has_a_meaning(axis):
    assert set(MEANINGS[axis]) == set(get_args(Objective.model_fields[axis].annotation))


def test_a_class_says_what_it_means_in_the_first_line_of_its_docstring():
    union, *_ = get_args(Limit)
    for member in get_args(union):
        (limit,) = (c for c in choices(Objective.model_construct(**{**dict(GRPO), "limit": member()})) if c.axis == "limit")
        assert limit.meaning == (inspect.getdoc(member) or "").splitlines()[0].rstrip(".")


def test_the_divergence_named_is_the_one_that_is_descended():
    assert part("grpo", "KL") == ["k3 in loss x 0.04: descends KL(reference || policy)"]
    assert part("default", "KL") == ["k2 in loss x 0.005: descends KL(policy || reference)"]
    assert part("rloo", "KL") == ["k1 in reward x 0.05: descends KL(policy || reference)"]
    assert part("dapo", "KL") == ["none: nothing pulls back to a reference"]
    assert any("k3 in the loss descends KL(reference || policy)" in line for line in part("grpo", "Watch"))


def test_what_the_advantage_climbs_with_the_numbers_of_the_estimator():
    # 1 of 8, population std sqrt(7)/8: A = (7/8) / (sqrt(7)/8) = sqrt(7) = 2.646, and the squares sum to 8
    lines = part("grpo", "What the expected gradient climbs, 8 siblings")
    assert lines[0].startswith("no objective in general")
    assert [line.split()[-4:] for line in lines[1:4]] == [
        ["1", "2", "4", "7"],
        ["2.646", "1.732", "1.000", "2.646"],
        ["8.000", "8.000", "8.000", "8.000"],
    ]
    # mean only: every gradient is (G - 1) / G = 0.875 too small, and no more
    assert part("dr_grpo", "What the expected gradient climbs, 8 siblings")[-1] == (
        "weight of grad p: 0.875 at p = 0.1, 0.875 at p = 0.5, 0.875 at p = 0.9"
    )
    assert "What the expected gradient climbs, 5 siblings" in page("mc_grpo")  # its own group size
    assert "What the expected gradient climbs, 5 siblings" in page("s_grpo")  # one chain and 4 cuts
    assert "What the expected gradient climbs, 4 siblings" in page("grpo", 4)
    assert part("ppo", "Advantage") == ["Generalised advantage estimation with a learned value function (PPO)"]


def test_numbers_are_those_of_the_settings():
    # 1 of 8 with eps 1: (7/8) / (sqrt(7)/8 + 1) = 0.875 / 1.3307 = 0.658
    heading, lines = explain._expected(of("grpo", advantage={"eps": 1.0}), 8)
    assert heading == "What the expected gradient climbs, 8 siblings"
    assert lines[2].split()[2] == "0.658"
    # ddof 1: 2.646 * sqrt(7/8) = 2.475
    assert explain._expected(of("grpo", advantage={"ddof": 1}), 8)[1][2].split()[2] == "2.475"


def test_who_decides_at_40_12_and_9_tokens():
    heading = "Who decides, responses of 40 / 12 / 9 tokens"
    assert part("dapo", heading)[0].split()[-3:] == ["65.6%", "19.7%", "14.8%"]
    assert part("dapo", heading)[1].split()[-3:] == ["1.00", "1.00", "1.00"]
    assert part("grpo", heading)[0].split()[-3:] == ["33.3%", "33.3%", "33.3%"]
    assert part("grpo", heading)[1].split()[-3:] == ["1.00", "3.33", "4.44"]  # 40/12, 40/9
    assert part("mimo", heading)[0].split()[-3:] == ["38.5%", "11.5%", "50.0%"]  # 40/52 and 12/52 of a half, and the other half
    assert part("mimo", heading)[2] == "the first two of one prompt, the third of another"


def test_a_group_that_the_advantage_cannot_work_with_is_refused():
    with pytest.raises(ConfigError, match=r"advantage=mean_std compares siblings.*siblings >= 2"):
        explain.explain("grpo", 1)
    with pytest.raises(ConfigError, match="k = 4 needs more than 4 siblings"):
        explain.explain("passk", 4)
    assert "E[R], exactly" in page("reinforce", 1)


@pytest.mark.parametrize(
    ("spelled", "name"), [("Dr. GRPO", "dr_grpo"), ("GRPO++", "grpo++"), ("Kimi K2.5 / K3", "kimi_k2.5"), ("mis-po", "mis_po")]
)
def test_a_name_in_any_spelling(spelled, name):
    assert algorithm(spelled).name == name
    assert explain.explain(spelled) == explain.explain(name)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown algorithm 'gsop'; did you mean 'gspo'"):
        explain.explain("gsop")
    with pytest.raises(ConfigError, match="known: default, grpo"):
        compare("grpo", "zzzzzz")


def test_one_line_per_algorithm():
    lines = explain_all()
    assert [line.split()[0] for line in lines] == list(ALGORITHMS)
    assert all(entry.targets in line for line, entry in zip(lines, ALGORITHMS.values(), strict=True))


def test_comparison_shows_only_what_differs():
    lines = compare("gspo", "cispo")
    assert [line.split() for line in lines[:5]] == [
        ["gspo", "cispo"],
        ["ratio", "sequence", "token"],
        ["limit", "clip", "(low", "0.0003,", "high", "0.0004)", "cispo", "(high", "4)"],
        ["aggregation", "seq_mean_token_mean", "token_mean"],
        ["loop", "minibatches", "4", "-"],
    ]
    assert lines[5:] == [
        "",
        "gspo was made for",
        f"  {ALGORITHMS['gspo'].targets}",
        "",
        "cispo was made for",
        f"  {ALGORITHMS['cispo'].targets}",
    ]
    assert ["limit", "clip", "(low", "0.2,", "high", "0.2)", "clip", "(low", "0.2,", "high", "0.28)"] in [
        line.split() for line in compare("grpo", "dapo")
    ]
    assert compare("grpo", "GRPO") == ["grpo and grpo are the same on every axis"]


def test_command_line_carries_what_the_objective_does_not():
    assert command(ALGORITHMS["ppo"]) == "posttrain train rl --set objective=ppo --set critic.warmup=10"
    assert command(ALGORITHMS["cispo"]) == "posttrain train rl --set objective=cispo"
    # 5 minibatches need a number of prompts that divides by 5
    assert command(ALGORITHMS["mai"]).endswith("--set rl.siblings=128 --set rl.minibatches=5 --set rl.prompts=20")


def test_the_command_prints_a_page_a_list_or_two_columns(capsys):
    show_explanation("gspo")
    assert capsys.readouterr().out == page("gspo") + "\n"
    show_explanation("grpo", siblings=4)
    assert capsys.readouterr().out == page("grpo", 4) + "\n"
    show_comparison("gspo", "cispo")
    assert capsys.readouterr().out == "\n".join(compare("gspo", "cispo")) + "\n"
    show_explanation()
    assert capsys.readouterr().out.startswith("\n".join(explain_all()))


def test_nothing_of_it_needs_torch():
    script = (
        "import sys; from posttrain.cli.methods import show_explanation, show_recommendation; show_explanation('gspo'); "
        "show_recommendation({'model': 'moe'}); sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "GSPO" in done.stdout


def test_each_algorithm_is_a_few_lines_of_data():
    tree = ast.parse(inspect.getsource(algorithms))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Algorithm"]
    assert len(calls) == len(ALGORITHMS)
    for call in calls:
        assert call.end_lineno is not None
        assert call.end_lineno - call.lineno + 1 < 30, ast.unparse(call.args[0])


@pytest.mark.parametrize("entry", ALGORITHMS.values(), ids=lambda entry: entry.name)
def test_each_algorithm_says_what_it_is_for_and_where_it_comes_from(entry):
    assert entry.targets.strip()
    assert entry.source.strip()
    assert entry.title.strip()
