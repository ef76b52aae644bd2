"""docs/catalog.md is what the catalog says, and can be read."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.combined import AllOf, OneOf, Setting
from posttrain.doctor.entries import Layer
from posttrain.doctor.page import FOUND, LAYERS, PREFIXES, STATUS, catalog_page
from posttrain.doctor.signals import Bound, Change, Level

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = DOCS / "catalog.md"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_catalog", DOCS / "update_catalog.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
TEXT = catalog_page(CATALOG.values())


def entry_text(id: str) -> str:
    """The part of the page about one entry."""
    return TEXT.split(f"\n### {id} ", 1)[1].split("\n##", 1)[0]


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == TEXT, "run python docs/update_catalog.py"


def test_the_script_writes_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(GENERATOR, "PAGE", tmp_path / "catalog.md")
    assert GENERATOR.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert GENERATOR.main([]) == 0
    assert GENERATOR.main(["--check"]) == 0
    (tmp_path / "catalog.md").write_text(TEXT.replace("entropy collapse", "entropy collaps"), encoding="utf-8")
    assert GENERATOR.main(["--check"]) == 1


def test_every_entry_has_one_heading_and_one_line_in_the_contents():
    headings = re.findall(r"^### (\w+) (.+)$", TEXT, re.MULTILINE)
    assert sorted(id for id, _ in headings) == sorted(CATALOG)
    assert dict(headings) == {entry.id: entry.name for entry in CATALOG.values()}
    assert sorted(re.findall(r"^- \[(\w+)\]\(#", TEXT, re.MULTILINE)) == sorted(CATALOG)


def test_links_lead_to_headings():
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#{2,3} (.+)$", TEXT, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors
    assert len(re.findall(r"^#{2,3} .+$", TEXT, re.MULTILINE)) == len(anchors)


def test_layers_come_in_the_order_of_the_doctor():
    shown = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert shown == ["Contents", *(layer.value.capitalize() for layer in Layer)]


def test_words_for_everything_that_is_counted():
    assert set(LAYERS) == set(Layer)
    assert {entry.found_by for entry in CATALOG.values()} <= set(FOUND)
    assert {entry.status for entry in CATALOG.values()} <= set(STATUS)
    assert {id[0] for id in CATALOG} <= set(PREFIXES)
    counts = {letter: int(n) for letter, n in re.findall(r"^\| ([A-Z])\.\.\. \| (\d+) \|", TEXT, re.MULTILINE)}
    assert counts == {letter: sum(id[0] == letter for id in CATALOG) for letter in counts}
    assert sum(counts.values()) == len(CATALOG)


def test_what_an_entry_says():
    shown = entry_text("C1")
    assert shown.startswith("too few siblings to compare\n\nMost groups agree, or their baseline is one other answer.\n\n")
    assert "- Verdict: drifting; status: external; found by: settings; in rl, distill; action: warn\n" in shown
    assert "- Suspected when\n  - `objective.advantage.kind` is one of mean, `mean_std`, `leave_one_out`" in shown
    assert "  - fewer than 4 siblings\n" in shown
    assert "- Another name for **P29 k3 in the loss descends another divergence**, which is what is reported." in entry_text("U25")


@pytest.mark.parametrize("id", CATALOG)
def test_an_entry_can_be_read(id: str):
    shown = entry_text(id)
    outside = re.sub(r"`[^`\n]*`|\*\*[^*\n]+\*\*", "", shown)
    outside = re.sub(r"(Not to be confused with \w+ )\*[^*\n]+\*:", r"\1", outside)
    assert "`" not in outside  # every code mark is closed
    assert not re.search(r"\S\*|\*\S", outside)  # a star that is no emphasis
    assert not re.search(r"(?<![\w\[])_|_(?![\w\]])", outside)
    for line in shown.splitlines():
        assert not re.search(r"\s{2,}\S", line.lstrip())
        assert not line.endswith(("..", ". ."))


def test_signs_made_of_signs_are_told_briefly_and_without_ambiguity():
    rising = OneOf((Change("reward_mean", ">=", 0.02, over=15), Change("reward_mean", ">=", 0.02, over=45)))
    low = Level("entropy", "<", Bound("entropy_floor", 0.1), last=3)
    assert rising.words() == "reward_mean rises by 0.02 or more over 15 or 45 values, beyond its noise"
    assert OneOf((rising, low)).words() == f"{rising.words()} or entropy < 0.1 [entropy_floor] (mean of the last 3)"
    assert OneOf((AllOf((low, Setting("finished", "==", True))), Setting("steps", ">", 3))).words() == (
        "(entropy < 0.1 [entropy_floor] (mean of the last 3) and finished) or steps > 3"
    )
    assert Setting("a", "in", ("b", "c")).words() == "a is one of b, c"
    assert (Setting("a", "==", "b").words(), Setting("a", "==", False).words()) == ("a = b", "not a")
