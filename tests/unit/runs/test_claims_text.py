"""Numbers in texts come from the ledger: a hand-edited one is noticed, and what was withdrawn is shown as such. README.md and docs/ too."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.runs.claim import Claim, draft
from posttrain.runs.claims import Claims
from posttrain.runs.claims_check import check
from posttrain.runs.claims_text import claim_lines, claims_page, fill, stale
from posttrain.runs.evidence import link, recompute

REPOSITORY = Path(__file__).resolve().parents[3]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_claims", REPOSITORY / "docs" / "update_claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


@pytest.fixture
def claims(tmp_path) -> Claims:
    (tmp_path / "numbers.json").write_text(json.dumps({"a": 1.26, "b": 0.5, "low": 1.23, "high": 1.49, "n": 7}))
    for name, value, unit in (("speed", "a", ""), ("share", "b", "%")):
        ends = {"low": "/low", "high": "/high"} if name == "speed" else {}
        evidence = link(tmp_path, "pointer", {"file": "numbers.json"}, {"value": f"/{value}", "n": "/n", **ends}, "make bench")
        template = Claim(name, "it is {figure} | so", "m", name, "0", unit, basis="rounds", scope="this machine")
        made = draft(template, recompute(tmp_path, evidence), 2 if name == "speed" else 0)
        Claims.read(tmp_path / "claims.jsonl").add(made, evidence)
    return Claims.read(tmp_path / "claims.jsonl")


def mark(name: str, text: str = "?") -> str:
    return f"<!-- claim:{name} -->{text}<!-- /claim -->"


def test_every_part_of_a_claim(claims):
    parts = {"speed": "1.26 [1.23, 1.49]", "speed:value": "1.26", "speed:interval": "[1.23, 1.49]", "speed:n": "7", "share": "50 %"}
    for name, text in parts.items():
        assert fill(f"a {mark(name)} b", claims) == f"a {mark(name, text)} b"
    text = f"{mark('speed')} and {mark('share')}, not {mark('speed:n')}"
    assert fill(fill(text, claims), claims) == fill(text, claims)


def test_a_number_changed_by_hand_is_stale(claims):
    good = fill(f"{mark('speed')} {mark('share')}", claims)
    assert stale(good, claims) == []
    assert stale(good.replace("1.26", "1.36"), claims) == ["speed"]
    assert stale(good.replace("50 %", "51 %"), claims) == ["share"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n\n<!-- claim:sped -->1<!-- /claim -->", "page.md:3: no claim 'sped' in .*; did you mean 'speed'"),
        ("<!-- claim:speed:mood -->1<!-- /claim -->", "page.md:1: a claim has no part 'mood'"),
        ("one\n<!-- claim:speed -->1", "page.md:2: '<!-- claim:speed -->' is not a pair"),
        ("1<!-- /claim -->", "page.md:1: '<!-- /claim -->' is not a pair"),
        ("<!-- claim:speed -->\n<!-- claim:share -->1<!-- /claim -->", "page.md:1: '<!-- claim:speed -->' is not a pair"),
    ],
)
def test_markers_that_cannot_be_filled(claims, text, problem):
    with pytest.raises(EvidenceError, match=problem):
        fill(text, claims, "page.md")


def test_what_was_retracted_is_struck_through(claims):
    claims.retract("speed", "one <b> round | only")
    text = fill(mark("speed"), Claims.read(claims.path))
    assert text == mark("speed", "~~1.26 [1.23, 1.49]~~ (retracted: one &lt;b> round \\| only)")


def test_what_is_unresolved_shows_no_number(claims):
    claims.mark("speed", "unresolved", "two machines disagree")
    text = fill(mark("speed") + mark("speed:value"), Claims.read(claims.path))
    assert "1.26" not in text
    assert text.count("(unresolved: speed)") == 2


def test_what_was_superseded_names_its_successor(claims):
    claims.supersede("speed", "share", "measured again", scope="idle machine")
    now = Claims.read(claims.path)
    assert fill(mark("speed:value"), now) == mark("speed:value", "~~1.26~~ (superseded by share, see docs/claims.md)")
    page = claims_page(now)
    assert "| `speed` | ~~it is 1.26 [1.23, 1.49] \\| so~~ | 7 rounds | defensible | superseded |" in page
    assert "`speed` superseded by `share`: measured again (holds for: idle machine)" in page
    assert "- `share` stands in the place of `speed`" in page
    assert "  in place of: speed" in claim_lines(now, now.get("share"))


def test_the_page_counts_and_groups(claims):
    page = claims_page(claims)
    assert "2 claims: supported 1, weak 1." in page  # a ratio of 7 rounds with an interval; a number without one
    assert "- this machine: `speed`, `share`" in page
    assert page.endswith(f"Entries end with `{claims.head}`.\n")


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what the script reads and writes."""
    root = tmp_path / "project"
    shutil.copytree(REPOSITORY / "evidence", root / "evidence")
    (root / "docs").mkdir()
    shutil.copy(REPOSITORY / "README.md", root / "README.md")
    shutil.copy(REPOSITORY / "docs" / "claims.md", root / "docs" / "claims.md")
    return root


def test_the_numbers_of_the_project_are_those_of_its_ledger():
    claims = Claims.read(REPOSITORY / "evidence" / "claims.jsonl")
    old = SCRIPT.outdated(REPOSITORY, claims)
    assert [page.name for page in old] == [], "run python docs/update_claims.py"


def test_every_claim_of_the_project_still_holds():
    verdicts = check(Claims.read(REPOSITORY / "evidence" / "claims.jsonl"))
    assert len(verdicts) >= 20
    assert [f"{verdict.id}: {verdict.detail}" for verdict in verdicts if verdict.outcome in ("broken", "weakened")] == []


def test_a_hand_edited_number_of_the_readme_fails(project, capsys):
    assert SCRIPT.main(["--check"], project) == 0
    readme = project / "README.md"
    marked = SCRIPT.fill.__globals__["MARKER"].search(readme.read_text())
    assert marked is not None
    good = readme.read_text()
    readme.write_text(good[: marked.start("body")] + "9.9" + good[marked.end("body") :])
    assert SCRIPT.main(["--check"], project) == 1
    assert "README.md is out of date" in capsys.readouterr().out
    assert SCRIPT.main([], project) == 0
    assert readme.read_text() == good


def test_a_table_of_a_run_is_written_from_the_ledger(project):
    readme = project / "README.md"
    readme.write_text("before\n<!-- claims-table:ladder -->\nold\n<!-- /claims-table -->\nafter\n")
    assert SCRIPT.main([], project) == 0
    lines = readme.read_text().splitlines()
    assert lines[2].startswith("| Rung | Suite ")
    assert len(lines) == 2 + 2 + 16 + 2  # head and rule, 4 rungs of 4 suites
    readme.write_text("<!-- claims-table:nothing -->\n<!-- /claims-table -->")
    assert SCRIPT.main([], project) == 1


def test_a_page_is_not_written_from_broken_claims(project, capsys):
    (project / "evidence" / "benchmarks.json").unlink()
    (project / "README.md").write_text("nothing marked\n")
    (project / "docs" / "claims.md").write_text("old\n")
    assert SCRIPT.main([], project) == 1
    assert "benchmarks.json: no such file" in capsys.readouterr().out
    assert (project / "docs" / "claims.md").read_text() == "old\n"
