"""Claims: what gets in, what becomes of them, and what the check says when the evidence is read again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from posttrain.cli.claims import claims_app
from posttrain.core.errors import ConfigError, DataError, EvidenceError, RunError
from posttrain.runs.claim import Claim, draft, equal_as_printed, figure, grade, mismatch
from posttrain.runs.claims import Claims
from posttrain.runs.claims_check import check, verdict_lines
from posttrain.runs.claims_collect import collect, table
from posttrain.runs.claims_draft import add_drafts
from posttrain.runs.evidence import Measured, link, recompute
from posttrain.runs.ledger import append
from posttrain.stats.intervals import Interval, wilson
from posttrain.stats.power import SigmaEstimate


def put_record(root, name, right, n, **conditions):
    """An evaluation record with `right` of `n` items solved."""
    items = [{"id": f"i{at}", "outcomes": [[float(at < right), "scored", "end", 3]]} for at in range(n)]
    (root / name).write_text(json.dumps({"conditions": {"suite": "sums"} | conditions, "items": items, "label": "x"}))


def enter(root, name="a", right=300, n=500, file=None, **changes):
    """A claim on a score, with three digits."""
    file = file or f"{name}.json"
    put_record(root, file, right, n)
    evidence = link(root, "score", {"file": file}, {}, "posttrain eval")
    template = Claim(name, "pass@1 is {figure}", "pass@1 on sums", changes.pop("subject", name), "0", **changes)
    return Claims.read(root / "claims.jsonl").add(draft(template, recompute(root, evidence), 3), evidence)


def read(root) -> Claims:
    return Claims.read(root / "claims.jsonl")


def outcomes(root) -> dict[str, str]:
    return {verdict.id: verdict.outcome for verdict in check(read(root))}


def test_the_number_comes_from_the_evidence(tmp_path):
    held = enter(tmp_path, right=300, n=500)
    # Wilson at 300 of 500: [0.5565, 0.6420]
    assert (held.claim.value, held.claim.interval, held.claim.n) == ("0.600", ("0.556", "0.642"), 500)
    assert held.claim.text == "pass@1 is 0.600 [0.556, 0.642]"
    assert (held.claim.grade, held.status) == ("defensible", "supported")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"value": "0.610"}, "claims 0.610, the evidence gives 0.600"),
        ({"interval": ("0.500", "0.642")}, r"claims the interval \[0.500, 0.642\], the evidence gives \[0.556, 0.642\]"),
        ({"n": 1000}, "claims n 1000, the evidence has 500"),
    ],
)
def test_a_number_that_does_not_follow_is_refused(tmp_path, change, problem):
    put_record(tmp_path, "a.json", 300, 500)
    evidence = link(tmp_path, "score", {"file": "a.json"}, {}, "posttrain eval")
    claim = Claim("a", "0.600 and 0.610", "pass@1", "a", "0.600", interval=("0.556", "0.642"), n=500)
    with pytest.raises(EvidenceError, match=problem):
        read(tmp_path).add(replace(claim, **change), evidence)
    assert read(tmp_path).held == {}


def test_rounding_of_the_printed_digits():
    assert equal_as_printed("0.96", 0.9649)
    assert equal_as_printed("0.96", 0.965)
    assert not equal_as_printed("0.96", 0.9651)
    assert equal_as_printed("-3", -2.6)
    assert not equal_as_printed("96.4", 96.46)
    claim = Claim("a", "96.4", "m", "s", "96.4", "%", ("94.4", "97.7"), 500)
    assert figure(claim) == "96.4 % [94.4, 97.7]"
    assert mismatch(claim, Measured(0.964, wilson(482, 500), 500)) is None
    assert mismatch(claim, Measured(0.966, wilson(483, 500), 500)) == "claims 96.4 %, the evidence gives 96.6"


def graded(n, value=0.5, low=0.4, high=0.6, p=None, sigma=None, transcribed=False, **claim) -> str:
    found = Measured(value, Interval(low, high, 0.95, "x"), n, p, sigma)
    return grade(Claim("a", "0", "m", "s", "0", **claim), found, transcribed)


def test_grades():
    assert [graded(n) for n in (99, 100, 499, 500, 999, 1000)] == ["anecdote", "weak", "weak", "defensible", "defensible", "strong"]
    assert graded(1000, transcribed=True) == "suggestive"
    assert grade(Claim("a", "0", "m", "s", "0"), Measured(0.5, None, 500)) == "anecdote"
    # a paired change, as stats/grade.py has it
    assert graded(500, 0.06, 0.02, 0.1, p=0.004, null="0") == "defensible"
    assert graded(500, 0.01, -0.02, 0.04, p=0.5, null="0") == "underpowered"
    # over seeds: +5 points at sigma 0.05 takes 16 seeds
    sigma = SigmaEstimate("seed_to_seed", 0.05, 32)
    assert [graded(n, 0.05, 0.01, 0.09, sigma=sigma, basis="seeds", null="0") for n in (3, 15, 16)] == [
        "suggestive",
        "underpowered",
        "defensible",
    ]
    assert [graded(n, basis="seeds") for n in (2, 3, 8)] == ["weak", "suggestive", "defensible"]
    # a ratio over rounds: half-width 0.2; 1.28 lies 1.4 half-widths from 1, short of (1.96 + 0.84) / 1.96 = 1.43 of them
    assert graded(7, 1.28, 1.08, 1.48, basis="rounds", null="1") == "defensible"
    assert graded(7, 1.29, 1.09, 1.49, basis="rounds", null="1") == "strong"
    assert graded(7, 1.1, 0.9, 1.3, basis="rounds", null="1") == "underpowered"
    assert graded(2, 1.5, 1.4, 1.6, basis="rounds", null="1") == "anecdote"


def test_the_check_reads_the_evidence_again(tmp_path):
    enter(tmp_path)
    assert outcomes(tmp_path) == {"a": "survived"}
    put_record(tmp_path, "a.json", 301, 500)
    (verdict,) = check(read(tmp_path))
    assert (verdict.outcome, verdict.detail.split(":")[0]) == ("broken", "a.json has changed since it was entered")
    (tmp_path / "a.json").unlink()
    assert outcomes(tmp_path) == {"a": "broken"}


def test_a_number_that_was_entered_by_hand_is_broken(tmp_path):
    put_record(tmp_path, "a.json", 300, 500)
    evidence = link(tmp_path, "score", {"file": "a.json"}, {}, "posttrain eval")
    claim = Claim("a", "pass@1 is 0.700", "pass@1", "a", "0.700", grade="strong")
    append(tmp_path / "claims.jsonl", [("claim", claim.to_json()), ("evidence", {"claim": "a", **evidence.to_json()})])
    (verdict,) = check(read(tmp_path))
    assert (verdict.outcome, verdict.detail) == ("broken", "claims 0.700, the evidence gives 0.600")
    append(tmp_path / "claims.jsonl", [("claim", replace(claim, id="b").to_json())])
    assert outcomes(tmp_path)["b"] == "broken"  # no evidence at all


@pytest.mark.parametrize(("entered", "outcome"), [("strong", "weakened"), ("weak", "strengthened"), ("defensible", "survived")])
def test_a_grade_that_the_evidence_no_longer_carries(tmp_path, entered, outcome):
    put_record(tmp_path, "a.json", 300, 500)
    evidence = link(tmp_path, "score", {"file": "a.json"}, {}, "posttrain eval")
    claim = Claim("a", "pass@1 is 0.600", "pass@1", "a", "0.600", grade=entered)
    append(tmp_path / "claims.jsonl", [("claim", claim.to_json()), ("evidence", {"claim": "a", **evidence.to_json()})])
    assert outcomes(tmp_path) == {"a": outcome}


def test_a_retraction_stays_visible(tmp_path):
    enter(tmp_path)
    enter(tmp_path, "b", 200)
    held = read(tmp_path).retract("a", "one seed; it does not survive the variance budget")
    assert held.status == "retracted"
    assert held.claim.value == "0.600"
    assert outcomes(tmp_path) == {"a": "retracted", "b": "survived"}
    (tmp_path / "a.json").unlink()  # what is withdrawn needs no evidence any more
    assert outcomes(tmp_path) == {"a": "retracted", "b": "survived"}
    for again in (lambda claims: claims.retract("a", "again"), lambda claims: claims.mark("a", "supported", "no")):
        with pytest.raises(EvidenceError, match="'a' is retracted since"):
            again(read(tmp_path))


def test_a_successor_points_back_with_its_scope(tmp_path):
    # The book's own case: parity was retracted, then upheld at another size with four seeds.
    enter(tmp_path, "parity", 300)
    read(tmp_path).retract("parity", "one seed")
    enter(tmp_path, "parity-32b", 310)
    read(tmp_path).supersede("parity", "parity-32b", "four seeds", scope="32B only")
    claims = read(tmp_path)
    assert [change.status for change in claims.get("parity").changes] == ["retracted", "superseded"]
    assert (claims.get("parity").changes[-1].by, claims.get("parity").changes[-1].scope) == ("parity-32b", "32B only")
    assert claims.get("parity-32b").supersedes == ("parity",)
    with pytest.raises(EvidenceError, match="'parity' is superseded and cannot take another's place"):
        claims.supersede("parity-32b", "parity", "back")
    with pytest.raises(EvidenceError, match="cannot take its own place"):
        claims.supersede("parity-32b", "parity-32b", "self")


def test_two_claims_on_one_model_that_disagree_are_unresolved(tmp_path):
    # 30.8 against 23.1 % of 500: apart by 7.7 points, the two intervals explain 5.5
    enter(tmp_path, "april", 154, subject="step 250")
    assert read(tmp_path).status("april") == "supported"
    enter(tmp_path, "again", 116, subject="step 250")
    enter(tmp_path, "other", 116, subject="step 300")
    claims = read(tmp_path)
    assert [claims.status(name) for name in ("april", "again", "other")] == ["unresolved", "unresolved", "supported"]
    assert outcomes(tmp_path) == {"april": "unresolved", "again": "unresolved", "other": "survived"}
    claims.retract("april", "another tool description")
    assert outcomes(tmp_path) == {"april": "retracted", "again": "survived", "other": "survived"}


def test_two_claims_within_their_noise_agree(tmp_path):
    enter(tmp_path, "a", 300, subject="m")
    enter(tmp_path, "b", 310, subject="m")  # 2 points apart, half-widths 4.3 each
    assert outcomes(tmp_path) == {"a": "survived", "b": "survived"}


def test_a_second_record_that_disagrees_makes_the_claim_unresolved(tmp_path):
    enter(tmp_path, "a", 154)
    put_record(tmp_path, "again.json", 160, 500)
    put_record(tmp_path, "other.json", 116, 500)
    agreeing, disagreeing = (link(tmp_path, "score", {"file": name}, {}, "posttrain eval") for name in ("again.json", "other.json"))
    assert read(tmp_path).link("a", agreeing).status == "supported"
    assert outcomes(tmp_path) == {"a": "survived"}
    held = read(tmp_path).link("a", disagreeing)
    assert held.status == "unresolved"
    assert held.changes[-1].reason == "two records disagree: 0.308 [0.269, 0.350] against 0.232"
    assert outcomes(tmp_path) == {"a": "unresolved"}


def test_the_counts(tmp_path):
    enter(tmp_path, "a")
    assert verdict_lines(check(read(tmp_path)), read(tmp_path))[-1].startswith("every claim survived: a check that only ever confirms")
    enter(tmp_path, "b", 200)
    read(tmp_path).retract("b", "a bug in the grader")
    claims = read(tmp_path)
    assert verdict_lines(check(claims), claims) == [
        "retracted    b: a bug in the grader",
        f"2 claims: survived 1, retracted 1  (head {claims.head})",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": "A b"}, "cannot be a claim's id"),
        ({"value": "1e3"}, "value of 'a' is '1e3', not a decimal number"),
        ({"text": "nothing"}, "does not contain its number"),
        ({"text": "0.600\n## forged"}, "text of 'a' holds a line end"),
        ({"subject": ""}, "must say what was measured"),
        ({"basis": "moons"}, "basis 'moons'"),
    ],
)
def test_a_claim_of_the_wrong_form(tmp_path, change, problem):
    put_record(tmp_path, "a.json", 300, 500)
    evidence = link(tmp_path, "score", {"file": "a.json"}, {}, "posttrain eval")
    claim = replace(Claim("a", "0.600", "pass@1", "a", "0.600"), **change)
    with pytest.raises(EvidenceError, match=problem) as caught:
        read(tmp_path).add(claim, evidence)
    assert "\n" not in str(caught.value)
    append(tmp_path / "claims.jsonl", [("claim", claim.to_json())])
    with pytest.raises(RunError, match=rf"claims.jsonl:1: .*{problem}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        ("claim", {"id": "a"}, "'text' of a claim is None"),
        ("evidence", {"claim": "b"}, "speaks of the claim 'b', which was never made"),
        ("status", {"claim": "a", "status": "true", "reason": "x", "by": None, "scope": ""}, "not a change of status"),
        ("status", {"claim": "a", "status": "superseded", "reason": "x", "by": "a", "scope": ""}, "not a change of status"),
        ("status", {"claim": "a", "status": "superseded", "reason": "x", "by": [], "scope": ""}, "not a change of status"),
        ("status", {"claim": "a", "status": "retracted", "reason": "x\n## y", "by": None, "scope": ""}, "control character"),
        (
            "evidence",
            {"claim": "a", "how": "score", "files": {"file": "x"}, "pointers": {}, "command": "", "transcribed": False},
            "a path and a digest",
        ),
        ("gossip", {}, "'gossip' is no kind of entry"),
    ],
)
def test_entries_that_make_no_sense(tmp_path, kind, body, problem):
    enter(tmp_path)
    append(tmp_path / "claims.jsonl", [(kind, body)])
    with pytest.raises(RunError, match=rf"claims.jsonl:3: .*{problem}"):
        read(tmp_path)


def test_no_claim_is_made_twice_or_found_under_a_wrong_name(tmp_path):
    enter(tmp_path, "ladder")
    with pytest.raises(EvidenceError, match="'ladder' was claimed before"):
        enter(tmp_path, "ladder")
    with pytest.raises(EvidenceError, match="no claim 'lader' in .*; did you mean 'ladder'?"):
        read(tmp_path).get("lader")


DRAFT = """
- id: a
  text: "{figure} of the sums are right (n {n})"
  metric: pass@1 on sums
  subject: model a
  unit: "%"
  digits: 1
  evidence: {how: score, files: {file: a.json}, command: posttrain eval a}
"""


def test_a_draft_names_everything_but_the_number(tmp_path):
    put_record(tmp_path, "a.json", 300, 500)
    (tmp_path / "draft.yaml").write_text(DRAFT)
    (held,) = add_drafts(tmp_path / "claims.jsonl", tmp_path / "draft.yaml")
    assert held.claim.text == "60.0 % [55.6, 64.2] of the sums are right (n 500)"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("digits: 1", "digits: many", "digits must be a count"),
        ("digits: 1", "digit: 1", "a claim has no 'digit'"),
        ("id: a", "id: 5", "'id' is 5; a text is needed"),
        ("{how: score, files: {file: a.json}, command: posttrain eval a}", "none", "evidence must be a mapping, not 'none'"),
        ("how: score", "how: [", "not readable as YAML"),
    ],
)
def test_drafts_that_cannot_be_entered(tmp_path, old, new, problem):
    put_record(tmp_path, "a.json", 300, 500)
    (tmp_path / "draft.yaml").write_text(DRAFT.replace(old, new))
    with pytest.raises(DataError, match=problem) as caught:
        add_drafts(tmp_path / "claims.jsonl", tmp_path / "draft.yaml")
    assert "\n" not in str(caught.value)


@pytest.fixture
def run(tmp_path):
    """A run with two rungs on one suite."""
    root = tmp_path / "run"
    (root / "evals").mkdir(parents=True)
    (root / "manifest.json").write_text(
        json.dumps({"created": "2026-01-01T00:00:00+00:00", "seeds": {"seed": 0}, "command": ["posttrain"]})
    )
    (root / "summary.json").write_text(json.dumps({"rungs": [{"rung": rung, "suites": {"sums": {}}} for rung in ("base", "sft")]}))
    put_record(root / "evals", "base.sums.json", 100, 500)
    put_record(root / "evals", "sft.sums.json", 400, 500)
    return root


def test_a_run_is_collected_with_its_records(tmp_path, run):
    ledger = tmp_path / "evidence" / "claims.jsonl"
    made = collect(ledger, run, "ladder", "posttrain ladder")
    assert made == ["ladder.base.sums", "ladder.sft.sums", "ladder.sft.sums.change"]
    claims = Claims.read(ledger)
    # 300 of 500 gained and none lost: +0.6, sd sqrt(.24 * 500/499), t(499) 1.9647: -+ 0.043
    assert figure(claims.get("ladder.sft.sums.change").claim) == "+0.600 [+0.557, +0.643]"
    lines = table(claims, "ladder").splitlines()
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        "sft", "sums", "0.800 [0.763, 0.833]", "+0.600 [+0.557, +0.643] vs base", "<0.001", "100.0%", "0.0%", "500", "defensible",
    ]  # fmt: skip
    claims.retract("ladder.sft.sums", "wrong template")
    assert "(no figure)" in table(Claims.read(ledger), "ladder")
    assert "0.800" not in table(Claims.read(ledger), "ladder")
    assert "+0.600" in table(Claims.read(ledger), "ladder")
    Claims.read(ledger).mark("ladder.sft.sums.change", "unresolved", "the records disagree")
    assert "+0.600" not in table(Claims.read(ledger), "ladder")
    with pytest.raises(RunError, match="exists already"):
        collect(ledger, run, "ladder", "posttrain ladder")


@pytest.mark.parametrize(("name", "rung"), [("../x", "base"), ("ladder", "../../base"), ("ladder", 5)])
def test_names_that_lead_elsewhere_are_not_collected(tmp_path, run, name, rung):
    (run / "summary.json").write_text(json.dumps({"rungs": [{"rung": rung, "suites": {"sums": {}}}]}))
    with pytest.raises(EvidenceError, match="cannot be a part of a claim's id"):
        collect(tmp_path / "evidence" / "claims.jsonl", run, name, "posttrain ladder")


def test_the_command_line(tmp_path):
    put_record(tmp_path, "a.json", 300, 500)
    (tmp_path / "draft.yaml").write_text(DRAFT)
    ledger, shell = str(tmp_path / "claims.jsonl"), CliRunner()

    def call(*arguments: str):
        return shell.invoke(claims_app, [*arguments, "--ledger", ledger])

    assert (
        call("add", str(tmp_path / "draft.yaml")).stdout
        == "a: 60.0 % [55.6, 64.2] of the sums are right (n 500)  (defensible, supported)\n"
    )
    assert "survived 1" in call("check").stdout
    assert call("show", "--status", "retracted").stdout == f"no claims are retracted in {ledger}\n"
    shown = call("show", "a").stdout
    assert "score of a.json; made by: posttrain eval a" in shown
    put_record(tmp_path, "b.json", 302, 500)
    linked = call("link", "a", "--how", "score", "--file", "file=b.json", "--command", "posttrain eval again")
    assert "score of b.json; made by: posttrain eval again" in linked.stdout
    assert isinstance(call("link", "a", "--how", "score", "--file", "b.json", "--command", "x").exception, ConfigError)
    assert call("mark", "a", "weak", "--reason", "one prompt only").exit_code == 0
    assert call("retract", "a", "--reason", "wrong items").stdout.splitlines()[-1].endswith("retracted: wrong items")
    assert len(call("history", "a").stdout.splitlines()) == 3
    assert "wrong items" in call("show", "--status", "retracted").stdout
    (tmp_path / "a.json").write_text("{}")
    assert call("check").exit_code == 0  # what is withdrawn does not have to hold
    assert isinstance(call("supersede", "a", "b", "--reason", "x").exception, EvidenceError)
    assert isinstance(shell.invoke(claims_app, ["check", "--ledger", str(tmp_path / "none.jsonl")]).exception, RunError)


def test_a_broken_claim_is_exit_code_1(tmp_path):
    enter(tmp_path)
    (tmp_path / "a.json").unlink()
    done = CliRunner().invoke(claims_app, ["check", "--ledger", str(tmp_path / "claims.jsonl")])
    assert done.exit_code == 1
    assert done.stdout.startswith("broken       a: ")
