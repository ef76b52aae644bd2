"""Run directories as evidence: good ones, killed ones, damaged ones."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.errors import RunError
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.lines import Limits
from posttrain.doctor.reading import read_evidence

CONFIG = "seed: 3\nsampling:\n  temperature: 1.0\n  max_tokens: 16\nrl:\n  steps: 4\n  siblings: 8\n  minibatches: 2\n  epochs: 1\n"
MANIFEST = {"kind": "rlrun", "seeds": {"seed": 3}, "packages": {"torch": "2.9"}, "stages": ["eval.before", "rl", "eval.after"]}


def line(step: int, stage: str = "rl", **values: Any) -> str:
    return json.dumps({"schema": 1, "stage": stage, "step": step, **values}) + "\n"


def write(root: Path, **files: str | bytes) -> Path:
    """A run directory; `metrics_jsonl="..."` is metrics.jsonl, `evals__a_json` is evals/a.json."""
    for name, text in {"manifest_json": json.dumps(MANIFEST), "config_yaml": CONFIG, **files}.items():
        stem, _, ending = name.rpartition("_")
        path = root / f"{stem.replace('__', '/')}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return root


def columns(found: Evidence, stage: str = "rl") -> dict[str, list[float]]:
    return {name: column.values.tolist() for name, column in found.frames[stage].columns.items()}


def test_metrics_become_columns_with_seconds_under_their_own_prefix(tmp_path: Path):
    metrics = line(0, reward_mean=0.5, note="x", seconds={"sample": 2.0, "rss_mib": None}) + line(1, reward_mean=0.25, kl=None)
    found = read_evidence(write(tmp_path, metrics_jsonl=metrics))
    assert columns(found) == {"reward_mean": [0.5, 0.25], "seconds.sample": [2.0]}
    frame = found.frames["rl"]
    assert (frame.kind, frame.steps, frame.settings["siblings"], found.problems, found.source) == ("rl", [0, 1], 8, [], "posttrain")


def test_derived_columns_are_added_to_every_row(tmp_path: Path):
    found = read_evidence(write(tmp_path, metrics_jsonl=line(0, unparseable=0.125, truncated=0.25)))
    assert columns(found)["parsed"] == [0.625]  # 1 - 0.125 - 0.25


def test_records_are_found_under_their_names(tmp_path: Path):
    rollouts = "".join(json.dumps({"step": i, "completion": "a\u2028b"}, ensure_ascii=False) + "\n" for i in range(5))
    root = write(
        tmp_path,
        metrics_jsonl=line(0, reward_mean=0.5),
        evals__before_sums_json='{"summary": {"pass_at_1": 0.5}}',
        stages__rl_json='{"stage": "rl"}',
        gates__launch_json='{"verdict": "passed"}',
        rollouts__rl_jsonl=rollouts,
        alarms_jsonl=json.dumps({"stage": "rl", "step": 0, "name": "no_signal", "detail": "d", "evidence": {"steps": 5}}) + "\n",
    )
    (root / "evals/before_sums.json").rename(root / "evals/before.sums.json")
    (root / "rollouts/rl.schedule.jsonl").write_text("{}\n")
    found = read_evidence(root, limits=Limits(rollouts=2))
    assert found.evals["before.sums"]["summary"] == {"pass_at_1": 0.5}
    assert (list(found.finished), list(found.gates), found.frames["rl"].events) == (["rl"], ["launch"], {"no_signal": 0})
    assert [row["step"] for row in found.rollouts["rl"]] == [3, 4]
    assert found.rollouts["rl"][0]["completion"] == "a\u2028b"
    assert found.problems == []
    assert found.alarms[0]["evidence"] == {"steps": 5}


def test_alarms_lie_on_the_row_of_their_step_and_those_of_an_evaluation_at_the_end(tmp_path: Path):
    alarms = [("rl", 2, "late"), ("rl", 9, "later"), ("eval.rl", 0, "forgot"), ("gate.rl", 0, "probe"), ("rl", 0, "late")]
    text = "".join(json.dumps({"stage": s, "step": n, "name": a, "detail": ""}) + "\n" for s, n, a in alarms)
    found = read_evidence(write(tmp_path, metrics_jsonl=line(0, loss=1) + line(2, loss=1) + line(4, loss=1), alarms_jsonl=text))
    # Steps 0, 2, 4 are rows 0, 1, 2. The first alarm of a name counts.
    assert found.frames["rl"].events == {"late": 1, "later": 2, "forgot": 2, "probe": 0}


def test_a_line_cut_by_a_kill_is_one_problem_and_the_rest_is_read(tmp_path: Path):
    found = read_evidence(write(tmp_path, metrics_jsonl=line(0, loss=2.0) + line(1, loss=1.0)[:-9]))
    assert columns(found)["loss"] == [2.0]
    assert found.problems == ["metrics.jsonl: the last line is cut; ignored"]
    assert found.frames["rl"].facts["last_line_cut"] is True
    assert found.frames["rl"].facts["log.unreadable"] == 0


def test_steps_that_go_back_replace_what_was_written_before(tmp_path: Path):
    metrics = line(0, loss=5.0) + line(1, loss=4.0, kl=1.0) + line(2, loss=3.0, kl=2.0) + line(1, loss=9.0)
    found = read_evidence(write(tmp_path, metrics_jsonl=metrics))
    assert (found.frames["rl"].steps, columns(found)) == ([0, 1], {"loss": [5.0, 9.0], "kl": []})
    assert found.problems == ["metrics.jsonl: line 4 of rl goes back from step 2 to 1; the later lines hold"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            '{"stage": "rl", "step": 1, "loss": NaN}',
            "line 2 holds NaN, Infinity or a number that no float can hold; it counts as not known (loss)",
        ),
        ('{"stage": "rl", "step": 1, "loss": -Infinity}', "line 2 holds NaN"),
        ('{"stage": "rl", "step": 1, "loss": 1e999}', "line 2 holds NaN"),
        ('{"stage": "rl", "step": 1, "loss": ' + "9" * 400 + "}", "line 2 holds NaN"),
        ('{"stage": "rl", "step": 1, "loss": [1]}', "line 2 holds a value that is no number; it counts as not known (loss)"),
        ('{"stage": "rl", "step": 1, "loss": true}', "line 2 holds a value that is no number"),
        ('{"stage": "rl", "step": -1}', "line 2 has no usable step; skipped"),
        ('{"stage": "rl", "step": 1e300}', "line 2 has no usable step; skipped"),
        ('{"stage": "rl", "step": "1"}', "line 2 has no usable step; skipped"),
        ('{"stage": "rl", "step": true}', "line 2 has no usable step; skipped"),
        ('{"stage": "../../etc/passwd", "step": 1}', "line 2 has no usable stage; skipped"),
        ('{"stage": 7, "step": 1}', "line 2 has no usable stage; skipped"),
        ("[1, 2]", "line 2 is no JSON object; skipped"),
        ('{"stage": "rl", "st', "line 2 is no JSON value; skipped"),
        ("[" * 100_000, "line 2 is nested too deeply; skipped"),
        ('{"x": ' + "1" * 5000 + "}", "line 2 is no JSON value; skipped"),
        ('{"x": "' + "y" * 2_000_000 + '"}', "line 2 is longer than 1024 KiB; skipped"),
        ("\udcff", "line 2 is not UTF-8; skipped"),
    ],
)
def test_a_bad_line_is_one_problem_and_its_neighbours_are_read(tmp_path: Path, bad: str, said: str):
    text = (line(0, loss=2.0) + bad + "\n" + bad + "\n" + line(7, loss=1.0)).encode("utf-8", "surrogateescape")
    found = read_evidence(write(tmp_path, metrics_jsonl=text))
    first, last = columns(found)["loss"][0], columns(found)["loss"][-1]
    assert (first, last, len(columns(found)["loss"])) == (2.0, 1.0, 2)
    problems = [problem for problem in found.problems if "goes back" not in problem]  # a line that is read is there twice
    assert len(problems) == 1
    assert problems[0].startswith(f"metrics.jsonl: {said}")
    assert problems[0].endswith("(1 more like it)")


@pytest.mark.parametrize("size", [1 << 28, pytest.param(1 << 31, marks=pytest.mark.slow)])
def test_a_line_of_gigabytes_is_skipped_without_being_held(tmp_path: Path, size: int):
    root = write(tmp_path)
    with open(root / "metrics.jsonl", "wb") as handle:  # a sparse file: the hole takes no space
        handle.write(line(0, loss=2.0).encode())
        handle.seek(size)
        handle.write(b"\n" + line(1, loss=1.0).encode())
    tracemalloc.start()
    try:
        found = read_evidence(root)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.frames["rl"].steps, found.problems) == ([0, 1], ["metrics.jsonl: line 2 is longer than 1024 KiB; skipped"])
    assert held < 32 << 20


def test_reading_needs_neither_torch_nor_pydantic(tmp_path: Path):
    root = write(tmp_path, metrics_jsonl=line(0, reward_mean=0.5))
    program = "import sys\nfrom posttrain.doctor.reading import read_evidence\nread_evidence(sys.argv[1])\n"
    program += "sys.stdout.write(str([name for name in ('torch', 'pydantic', 'scipy') if name in sys.modules]))\n"
    ran = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]"


def test_too_many_metrics_stages_and_alarms_are_bounded(tmp_path: Path):
    many = {f"m{i}": i for i in range(9)}
    metrics = "".join(line(0, stage, **many) for stage in ("a", "b", "c"))
    alarms = "".join(json.dumps({"stage": "a", "step": 0, "name": f"n{i}", "detail": ""}) + "\n" for i in range(5))
    found = read_evidence(write(tmp_path, metrics_jsonl=metrics, alarms_jsonl=alarms), limits=Limits(columns=4, stages=2, alarms=3))
    assert (list(found.frames), len(found.frames["a"].columns), len(found.alarms)) == (["a", "b"], 4, 3)
    assert found.problems == [
        "metrics.jsonl: line 3 begins a stage beyond the 2 that are read; skipped",
        "metrics.jsonl: a has more than 4 metrics; the others are left out",
        "metrics.jsonl: b has more than 4 metrics; the others are left out",
        "alarms.jsonl: the first 3 alarms are read, the others left out",
    ]


def test_links_folders_and_foreign_files_in_the_place_of_records(tmp_path: Path):
    outside = tmp_path / "secret.json"
    outside.write_text('{"a": 1}')
    root = write(tmp_path / "run", metrics_jsonl=line(0, loss=1.0), gates="no folder", evals__list_json="[1]", evals__half_json="{")
    (root / "evals" / "out.json").symlink_to(outside)
    (root / "evals" / "loop.json").symlink_to(root / "evals" / "loop.json")
    (root / "evals" / "folder.json").mkdir()
    (root / "stages").symlink_to(root / "stages")
    (root / "rollouts").mkdir()
    (root / "rollouts" / "rl.jsonl").write_bytes(b"x" * 3_000_000)
    found = read_evidence(root)
    assert (found.evals, found.finished, found.rollouts, columns(found)["loss"]) == ({}, {}, {}, [1.0])
    text = "\n".join(found.problems)
    for said in (
        "out.json: leads out of the run",
        "loop.json: ",
        "folder.json: not a file",
        "list.json: must hold",
        "half.json: not ",
        "stages: a link",
    ):
        assert said in text
    assert "rollouts/rl.jsonl: no line ends within its last 2048 KiB; ignored" in text


def test_a_damaged_manifest_or_config_costs_only_itself(tmp_path: Path):
    found = read_evidence(write(tmp_path, metrics_jsonl=line(0, loss=1.0), manifest_json=b"\xff\x00{", config_yaml="a: &a [*a, *a]"))
    assert (found.manifest, found.config, columns(found)["loss"]) == ({}, {}, [1.0])
    assert [problem.partition(":")[0] for problem in found.problems] == ["manifest.json", "config.yaml"]


def test_control_characters_never_reach_problems_names_or_events(tmp_path: Path):
    alarm = json.dumps({"stage": "rl", "step": 0, "name": "bad\x1b[2J", "detail": "a\nb\x07"}) + "\n"
    metrics = line(0, **{"loss\x1b]0;x\x07": 1.0, "odd\x1b": [1]})
    root = write(tmp_path, metrics_jsonl=metrics, alarms_jsonl=alarm)
    (root / "evals").mkdir()
    (root / "evals" / "a\x1b[31m.json").write_text("[]")
    found = read_evidence(root)
    shown = [*found.problems, *found.frames["rl"].columns, *found.frames["rl"].events, found.alarms[0]["name"], found.alarms[0]["detail"]]
    assert all(text.isprintable() for text in shown)
    assert len(shown) == 6


@pytest.mark.parametrize("what", ["missing", "empty", "binary", "damaged"])
def test_where_nothing_can_be_read_one_line_says_so(tmp_path: Path, what: str):
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "binary":
        path.write_bytes(b"\x00\x01")
    elif what == "damaged":
        write(path, manifest_json="[", config_yaml="[", metrics_jsonl="\x00")
    with pytest.raises(RunError) as caught:
        read_evidence(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_history_of_the_manifest_changes_the_config_in_force(tmp_path: Path):
    manifest = {
        **MANIFEST,
        "history": [{"settings": {"rl.siblings": [8, 16], "new.key": [None, 1]}}, "junk", {"settings": {"seed.x": [0, 1]}}],
    }
    found = read_evidence(write(tmp_path, metrics_jsonl=line(0, reward_mean=1.0), manifest_json=json.dumps(manifest)))
    assert (found.frames["rl"].settings["siblings"], found.config["new"], found.config["seed"]) == (16, {"key": 1}, 3)


def test_a_stage_that_was_asked_to_end_saved_first(tmp_path: Path):
    root = write(tmp_path, metrics_jsonl=line(0, loss=1.0) + line(1, loss=1.0))
    assert read_evidence(root).frames["rl"].facts["ended_silently"] is True
    (root / "checkpoints/rl/step_000001").mkdir(parents=True)  # a checkpoint of one step, and two were recorded
    assert read_evidence(root).frames["rl"].facts["ended_silently"] is True
    (root / "checkpoints/rl/step_000002").mkdir()
    facts = read_evidence(root).frames["rl"].facts
    assert (facts["ended_silently"], facts["interrupted"], facts["checkpoints.kept"]) == (False, True, 2)


def test_a_value_that_is_not_finite_is_an_event_of_its_row(tmp_path: Path):
    metrics = line(0, loss=1.0) + line(1, loss=1.0) + '{"stage": "rl", "step": 2, "loss": NaN}\n' + line(3, loss=1.0)
    assert read_evidence(write(tmp_path, metrics_jsonl=metrics)).frames["rl"].events == {"non_finite": 2}


def test_rollouts_are_read_from_the_end_without_the_line_that_the_reading_begins_in(tmp_path: Path):
    rows = "".join(json.dumps({"step": step, "completion": "x" * 80}) + "\n" for step in range(100))
    found = read_evidence(write(tmp_path, metrics_jsonl=line(0, loss=1.0), rollouts__rl_jsonl=rows), limits=Limits(rollout_bytes=350))
    assert [row["step"] for row in found.rollouts["rl"]] == [97, 98, 99]  # 350 bytes hold three lines of 109 or so
    assert found.problems == []
