"""The postmortem: filled from the records, read back, never written over a person's words; and the chain of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctor_traces import LOW, entry, evidence, frame, groups, ramp, step

from posttrain.core.errors import RunError
from posttrain.doctor.chain import Member, chain_json, chain_lines, chain_of, outcome, parent_link
from posttrain.doctor.entries import Layer
from posttrain.doctor.postmortem import postmortem_of
from posttrain.doctor.postmortem_file import parse_postmortem, postmortem_text, read_postmortem, write_postmortem
from posttrain.doctor.signals import Level
from posttrain.runs.manifest import identity_digest

N = 120
CATALOG = {one.id: one for one in (entry("F1", LOW), entry("F8", Level("mismatch_max", ">", 0.5)))}
SPLIT = groups(mixed=0.7, zero_variance=0.3, all_right=0.1, all_wrong=0.2)
COLUMNS = {"reward_mean": step(0.6, 0.1, 60), "entropy": step(0.5, 0.02, 40, 0.0), "seconds.sample": 2.0, "seconds.train": 1.0, **SPLIT}
PARENT = {"id": "aaaa0001", "label": "one variable", "changed": {"optim.lr": [0.1, 0.2]}, "drift": ["code"], "digest": "d", "rung": None}
MANIFEST = {"id": "bbbb0002", "created": "2026-01-01", "config_digest": "c", "seeds": {"seed": 0}, "digests": {}, "parent": PARENT}


def sick(**fields):
    return postmortem_of(evidence(frame(N, **COLUMNS), manifest=MANIFEST, **fields), CATALOG)


def test_it_is_filled_from_the_records():
    found = sick()
    assert (found.run, found.name, found.verdict, found.status) == ("bbbb0002", "a", "collapsed", "open")
    assert found.failures == ("F1",)
    assert found.root_cause == "F1"
    assert (found.fix, found.reached) == ("the fix of F1", {"grpo": 119})
    assert found.symptom.startswith("the symptom of F1 Here: reward_mean fell from 0.6")
    assert found.guard == "F1: let its alarm pause the run: entropy < 0.1 for 3 steps in a row"
    assert found.parent["changed"] == {"optim.lr": [0.1, 0.2]}
    assert found.manifest["identity"] == identity_digest(MANIFEST)


def test_first_metric_and_time_to_symptom():
    found = sick()
    assert found.first == {"metric": "entropy", "stage": "grpo", "step": 42, "id": "F1"}
    time = dict(found.time_to_symptom)
    assert time.pop("what").startswith("reward_mean 0.6 -> 0.1")
    assert time == {"stage": "grpo", "step": 60, "rows": 60, "seconds": 183.0}  # rows 0 to 60 at 2 s and 1 s


def test_a_healthy_run_has_nothing_to_explain():
    found = postmortem_of(evidence(frame(N, reward_mean=ramp(0.2, 0.7, N), entropy=0.5, **SPLIT)), CATALOG)
    assert (found.status, found.failures, found.root_cause, found.guard) == ("nothing to explain", (), None, "none")
    assert found.first == {}
    assert found.time_to_symptom == {}
    assert "Nothing to explain." in postmortem_text(found)


def test_an_unsure_suspect_is_no_root_cause():
    unsure = entry("F1", LOW, against=(Level("kl", ">", 9),), confused={"F2": "how"})
    alike = entry("F2", LOW, layer=Layer.DATA, confused={"F1": "how"})
    found = postmortem_of(evidence(frame(N, **COLUMNS)), {"F1": unsure, "F2": alike})
    assert (found.failures, found.root_cause) == (("F2", "F1"), "F2")  # 0.85 for a look-alike that fits as well
    blind = entry("F2", LOW, layer=Layer.DATA, against=(Level("kl", ">", 9),), confused={"F1": "how"})
    assert postmortem_of(evidence(frame(N, **COLUMNS)), {"F1": unsure, "F2": blind}).root_cause is None  # 0.85 * 0.9 is below 0.8


def test_the_file_reads_back():
    text = postmortem_text(sick())
    parsed = parse_postmortem(text)
    assert parsed is not None
    front, untouched = parsed
    assert untouched
    assert (front["run"], front["failure_ids"], front["root_cause"], front["status"]) == ("bbbb0002", ["F1"], "F1", "open")
    assert front["hypotheses"][0] == {
        "id": "F1", "stage": "grpo", "first_step": 42, "last_step": 119, "still": True, "confidence": 1.0, "decides": True,
    }  # fmt: skip
    for title in (
        "What changed",
        "Symptom",
        "First metric to move",
        "Time to symptom",
        "Root cause",
        "Fix",
        "Guard to add",
        "Status",
        "Manifest",
    ):
        assert f"\n## {title}\n" in text
    assert "- `optim.lr`: 0.1 -> 0.2" in text


def test_a_bundle_is_called_one():
    changed = {"optim.lr": [0.1, 0.2], "siblings": [8, 16]}
    manifest = {**MANIFEST, "parent": {**PARENT, "label": "bundle", "changed": changed}}
    text = postmortem_text(postmortem_of(evidence(frame(N, **COLUMNS), manifest=manifest), CATALOG))
    assert "bundle from aaaa0001: 2 variables at once, so no single one can be blamed or credited." in text


@pytest.mark.parametrize(
    "edit", [lambda t: t + "more\n", lambda t: t.replace('"open"', '"resolved"'), lambda t: t.replace("the fix", "my fix")]
)
def test_an_edited_file_is_not_written_over(tmp_path, edit):
    text = postmortem_text(sick())
    place = write_postmortem(tmp_path, text)
    assert write_postmortem(tmp_path, text) == place  # as generated: may be written again
    place.write_text(edit(text))
    with pytest.raises(RunError, match="edited by hand.*--out.*--force"):
        write_postmortem(tmp_path, text)
    assert place.read_text() == edit(text)
    write_postmortem(tmp_path, text, force=True)
    assert place.read_text() == text


def test_a_file_of_another_kind_is_kept(tmp_path):
    (tmp_path / "postmortem.md").write_text("my notes")
    with pytest.raises(RunError):
        write_postmortem(tmp_path, postmortem_text(sick()))
    other = write_postmortem(tmp_path, postmortem_text(sick()), tmp_path / "elsewhere.md")
    assert other.is_file()
    assert (tmp_path / "postmortem.md").read_text() == "my notes"


def test_a_log_has_no_directory_to_write_into(tmp_path):
    (tmp_path / "log.csv").write_text("")
    with pytest.raises(RunError, match="say where the postmortem goes with --out FILE"):
        write_postmortem(tmp_path / "log.csv", "text")


def test_a_link_out_of_the_run_is_neither_read_nor_followed(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside.md"
    run.mkdir()
    text = postmortem_text(sick())
    outside.write_text(text)
    (run / "postmortem.md").symlink_to(outside)
    assert read_postmortem(run) is None
    write_postmortem(run, postmortem_text(sick(), "../p/postmortem.md"), force=True)
    assert outside.read_text() == text  # the link was replaced, not what it led to


def test_texts_of_the_manifest_stay_text():
    parent = {**PARENT, "changed": {"a](http://x)<b>\n---\n`": ["\x1b[2J", "\n# title"]}}
    text = postmortem_text(postmortem_of(evidence(frame(N, **COLUMNS), manifest={**MANIFEST, "parent": parent}), CATALOG))
    body = text.partition("\n---\n")[2]
    assert "\x1b" not in text
    assert "<b>" not in body
    assert "](http" not in body
    assert "\n# title" not in text
    parsed = parse_postmortem(text)
    assert parsed is not None
    assert parsed[1]


@pytest.mark.parametrize(
    "text", ["", "---\n", "---\n{}\n---\nx", "---\n[1]\n---\n", '---\n{"postmortem": 2}\n---\n', "# title", "---\n{\n---\n"]
)
def test_what_is_no_postmortem_is_none(text):
    assert parse_postmortem(text) is None


# --- the chain -------------------------------------------------------------------------------------------------------------------------


def run_directory(root: Path, name: str, id: str, parent: Path | None, label: str = "one variable", **columns: Any) -> Path:
    """A run of one stage on the disk, which names its parent by id and digest."""
    folder = root / name
    (folder / "stages").mkdir(parents=True)
    manifest: dict[str, Any] = {"schema_version": 2, "id": id, "created": name, "config_digest": "c", "digests": {}, "seeds": {"seed": 0}}
    if parent is not None:
        above = json.loads((parent / "manifest.json").read_text())
        changed = {"optim.lr": [0.1, 0.2]} | ({"siblings": [8, 16]} if label == "bundle" else {})
        manifest["parent"] = {
            "id": above["id"], "digest": identity_digest(above), "label": label, "changed": changed, "path": "/nowhere", "drift": [],
        }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps({**manifest, "stages": ["grpo"]}))
    (folder / "config.yaml").write_text("seed: 0\n")
    made = frame(columns.pop("rows", N), **{**COLUMNS, **columns})
    lines = []
    for row, at in enumerate(made.steps):
        values = {name: float(column.values[row]) for name, column in made.columns.items() if not name.startswith("seconds.")}
        lines.append(json.dumps({"schema": 1, "stage": "grpo", "step": at, **values, "seconds": {"sample": 1.0}}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "stages" / "grpo.json").write_text("{}")
    return folder


CURED = {"reward_mean": ramp(0.2, 0.7, N), "entropy": 0.5}


def test_a_fix_that_worked(tmp_path):
    first = run_directory(tmp_path, "a", "aaaa0001", None)
    second = run_directory(tmp_path, "b", "bbbb0002", first, **CURED)
    found = chain_of(second, CATALOG)
    assert [member.run for member in found.members] == ["aaaa0001", "bbbb0002"]
    assert [(link.change, link.outcome) for link in found.links] == [("one variable: optim.lr 0.1 -> 0.2", "fix worked: gone F1")]
    lines = chain_lines(found)
    assert lines[0] == "a  aaaa0001  collapsed: F1 (grpo step 42)  [open]"
    assert lines[-1] == "b  bbbb0002  healthy: no failure  [nothing to explain]"
    assert chain_json(found)["links"][0]["outcome"] == "fix worked: gone F1"


def test_a_fix_that_was_wrong_and_one_that_revealed_the_next_wall(tmp_path):
    first = run_directory(tmp_path, "a", "aaaa0001", None)
    second = run_directory(tmp_path, "b", "bbbb0002", first)
    third = run_directory(tmp_path, "c", "cccc0003", second, mismatch_max=2.0, **CURED)
    found = chain_of(third, CATALOG)
    assert [link.outcome for link in found.links] == [
        "fix was wrong: still there F1",
        "fix worked and revealed the next wall: gone F1; new F8",
    ]


def test_a_postmortem_that_a_person_corrected_counts(tmp_path):
    first = run_directory(tmp_path, "a", "aaaa0001", None)
    text = postmortem_text(postmortem_of(evidence(frame(N, **COLUMNS), manifest=MANIFEST), CATALOG))
    (first / "postmortem.md").write_text(text.replace('"open"', '"resolved"').replace('"F1"\n ]', '"F8"\n ]'))
    second = run_directory(tmp_path, "b", "bbbb0002", first)
    found = chain_of(second, CATALOG)
    assert (found.members[0].status, list(found.members[0].failures), found.members[0].written) == ("resolved", ["F8"], True)
    assert found.links[0].outcome == "fix worked and revealed the next wall: gone F8; new F1"
    assert parent_link(second) == "../a/postmortem.md"


def member(*failures: str, verdict: str = "collapsed", reached: int = 200, label: str = "one variable") -> Member:
    at = dict.fromkeys(failures, ("grpo", 120))
    return Member(Path("x"), "x", verdict, at, {"grpo": reached}, {"label": label, "changed": {}}, "open", written=False)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (member("F1"), member("F1", "F8"), "fix was wrong: still there F1; new F8"),
        (member("F1", "F8"), member("F8"), "fix was wrong: still there F8; gone F1"),
        (member("F1"), member(verdict="healthy"), "fix worked: gone F1"),
        (member("F1"), member("F8"), "fix worked and revealed the next wall: gone F1; new F8"),
        (
            member("F1"),
            member(verdict="healthy", reached=80),
            "too early to tell: F1 came at grpo step 120, and the next run got to step 80",
        ),
        (member(verdict="healthy"), member("F1"), "it broke: new F1"),
        (member(verdict="healthy"), member(verdict="healthy"), "nothing failed before or after"),
        (member("F1"), member(verdict="inconclusive"), "not to be told: one of the two has no verdict"),
        (
            member("F1"),
            member(verdict="healthy", label="bundle"),
            "fix worked: gone F1; several variables changed, so which one did it is not known",
        ),
    ],
)
def test_what_a_change_did(before, after, expected):
    assert outcome(before, after) == expected


def test_a_parent_is_found_beside_the_run_only(tmp_path):
    first = run_directory(tmp_path / "here", "a", "aaaa0001", None)
    second = run_directory(tmp_path / "there", "b", "bbbb0002", first)
    found = chain_of(second, CATALOG)
    assert len(found.members) == 1
    assert found.problem == "the parent aaaa0001 does not lie beside it"
    assert parent_link(second) is None


def test_another_run_with_the_same_id_is_not_the_parent(tmp_path):
    first = run_directory(tmp_path / "x", "a", "aaaa0001", None)
    second = run_directory(tmp_path, "b", "bbbb0002", first)
    run_directory(tmp_path, "other", "aaaa0001", None)  # created differs, and so does its identity
    assert len(chain_of(second, CATALOG).members) == 1


def test_runs_that_name_each_other_end_the_chain(tmp_path):
    first = run_directory(tmp_path, "a", "aaaa0001", None)
    second = run_directory(tmp_path, "b", "bbbb0002", first)
    manifest = json.loads((first / "manifest.json").read_text())
    above = json.loads((second / "manifest.json").read_text())
    manifest["parent"] = {"id": "bbbb0002", "digest": identity_digest(above), "label": "repeat", "changed": {}}
    (first / "manifest.json").write_text(json.dumps(manifest))
    found = chain_of(second, CATALOG)
    assert len(found.members) == 2
    assert found.problem is not None
    assert "comes back" in found.problem


def test_an_unreadable_run_of_the_chain_is_inconclusive(tmp_path):
    first = run_directory(tmp_path, "a", "aaaa0001", None)
    (first / "metrics.jsonl").write_text("{broken\n")
    second = run_directory(tmp_path, "b", "bbbb0002", first)
    found = chain_of(second, CATALOG)
    assert found.members[0].verdict == "inconclusive"
    assert all(line.isprintable() for line in chain_lines(found))


def test_a_chain_starts_at_a_run(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        chain_of(tmp_path, CATALOG)
