"""docs/algorithms.md says what the code does: its generated parts are up to date, and hold the numbers of the sources."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.axes import Aggregation

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "algorithms.md"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_tables", DOCS / "update_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


def cells(name: str) -> dict[str, list[str]]:
    """A generated table by its first column."""
    rows = [line.strip("| ").split(" | ") for line in GENERATOR.body(name).splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_no_part_is_out_of_date():
    assert GENERATOR.stale(PAGE.read_text(encoding="utf-8")) == [], "run python docs/update_tables.py"


def test_every_table_and_every_axis_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for name in GENERATOR.TABLES:
        assert text.count(f"<!-- generated: {name} -->") == 1
    for file in (
        "advantages",
        "credit",
        "ratios",
        "limits",
        "corrections",
        "aggregate",
        "kl",
        "shaping",
        "controllers",
        "policy",
        "covariance",
    ):
        assert f"<!-- generated: code {file}." in text
    assert text.count("<!-- generated: ") == text.count("<!-- end -->") == len(GENERATOR.BLOCK.findall(text))
    assert text.count("\n## Parity with TRL\n") == 1
    assert text.count("(*) TRL forms n / (n - 1) in float32") == 1


def test_a_changed_cell_and_a_changed_line_of_code_are_noticed():
    text = GENERATOR.updated(PAGE.read_text(encoding="utf-8"))
    assert GENERATOR.stale(text.replace("65.6%", "65.5%")) == ["weights"]
    assert GENERATOR.stale(text.replace("1.0 + limit.high) * advantage_BT\n", "1.0 + limit.high)\n")) == ["code limits.clip"]
    assert GENERATOR.updated(text.replace("65.6%", "65.5%")) == text


def test_a_part_that_nobody_can_write_is_an_error():
    with pytest.raises(ValueError, match="no generated part is called 'wieghts'"):
        GENERATOR.updated("<!-- generated: wieghts -->\n<!-- end -->")


def test_the_script_checks_and_writes(tmp_path, capsys):
    page = tmp_path / "algorithms.md"
    page.write_text("before\n<!-- generated: weights -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    assert GENERATOR.main(["--check"], page) == 1
    assert "'weights' is out of date" in capsys.readouterr().out
    assert GENERATOR.main([], page) == 0
    assert GENERATOR.main(["--check"], page) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- generated: weights -->\n| aggregation |")
    assert text.endswith(" |\n<!-- end -->\nafter\n")


def test_source_is_shown_without_its_docstring():
    shown = GENERATOR.code("limits", "cispo")
    assert shown.splitlines()[0].startswith("def cispo(")
    assert '"""' not in shown
    assert shown.splitlines()[-1].lstrip().startswith("return ")


def test_a_bar_in_a_cell_does_not_end_it():
    assert GENERATOR.table(("a",), [("x | y",)]) == "| a |\n| --- |\n| x \\| y |"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        # spec/recipes-of-the-labs.md T46 for ratios 1.3, 0.7, 1, 2.5: A = +1, then A = -1
        ("ppo", "0 -0.7 -1 0 1.3 0 1 2.5"),
        ("dapo", "0 -0.7 -1 0 1.3 0 1 2.5"),
        ("reinforce", "-1 -1 -1 -1 1 1 1 1"),
        ("mai", "0 -0.7 -1 0 1.3 0 1 0"),
        ("kimi_k2.5", "-1.2475 -0.7713 -1 0 1.3525 0.6287 1 0"),
        ("sao", "0 0 -1 0 0 0 1 0"),
        # geometric mean (1.3 * 0.7 * 1 * 2.5)^(1/4) = 1.2281; T46 shows 0.307, a quarter of it, for the mean over the response
        ("gspo", "0 0 0 0 1.2281 1.2281 1.2281 1.2281"),
        # the cap of 5 is not reached
        ("cispo", "-1.3 -0.7 -1 -2.5 1.3 0.7 1 2.5"),
        # 0.2 -> 0.5 is 0.3 of probability, beyond 0.15, and away only where A > 0
        ("dppo", "-1.3 -0.7 -1 0 1.3 0.7 1 2.5"),
        # log pi - log pi_old = ln 2.275 = 0.822; 1 - 0.1 * 0.822 = 0.9178
        ("kimi_k1.5", "-0.9178 -0.9178 -0.9178 -0.9178 1.0822 1.0822 1.0822 1.0822"),
    ],
)
def test_gradients_of_the_sources(name, row):
    rows = {name: values for names, values in cells("gradients").items() for name in names.split(", ")}
    assert set(rows) == set(ALGORITHMS)
    assert rows[name] == row.split()


@pytest.mark.parametrize(
    ("member", "row"),
    [
        ("none", "1 1 1 1 -"),
        ("truncate (cap 2, level token)", "1.3 0.7 1 2 -"),
        ("truncate (cap 2, level sequence)", "2 2 2 2 -"),  # the product 2.275, capped
        ("mask (lower 0.5, upper 2, weight ratio)", "1.3 0.7 1 0 mismatched"),  # T46, IcePop with band [0.5, 2]
        ("decoupled", "1.3 0.7 1 2.5 -"),
        # KL(0.2 || 0.08) = 0.2 ln 2.5 + 0.8 ln(0.8 / 0.92) = 0.1833 - 0.1118 = 0.0715, beyond 0.05
        ("binary_kl (threshold 0.05)", "1 1 1 0 mismatched"),
    ],
)
def test_weights_of_the_corrections(member, row):
    assert cells("corrections")[member] == row.split()


def test_who_decides_per_aggregation():
    rows = cells("weights")
    assert list(rows) == list(get_args(Aggregation))
    assert rows["token_mean"][1:] == ["65.6%, 19.7%, 14.8%", "1.00, 1.00, 1.00", "1/10, 1/10"]
    assert rows["seq_mean_token_mean"][1:] == ["33.3%, 33.3%, 33.3%", "1.00, 3.33, 4.44", "1/6, 1/14"]  # T11


def test_what_each_kl_descends():
    rows = cells("placements")
    assert rows["k3"][0] == "descends KL(reference \\|\\| policy)"
    assert rows["k2"][0] == rows["k1"][1] == "descends KL(policy \\|\\| reference)"
    assert rows["k1"][0].startswith("refused: its expected gradient is zero")


def test_every_algorithm_has_a_row():
    assert list(cells("axes")) == list(cells("methods")) == list(ALGORITHMS)
    assert cells("axes")["gspo"] == ["mean_std (ddof 0, eps 1e-6)", "sequence", "clip (low 0.0003, high 0.0004)", "none"] + [
        "seq_mean_token_mean", "none", "minibatches 4",
    ]  # fmt: skip


def test_energy_of_a_group():
    # mean_std gives 8 whether 1, 4 or 7 of 8 succeed; the mean alone 7/8, 2 and 7/8
    rows = cells("advantages")
    assert rows["mean_std"][2] == "8, 8, 8"
    assert rows["mean"][2] == "0.88, 2, 0.88"
