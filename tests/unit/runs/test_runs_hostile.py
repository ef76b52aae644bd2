"""Corrupt, truncated, foreign and adversarial run directories: clear lines, never an exception, nothing read outside the run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.cli.runs import diff_lines, list_lines, show_lines, verify_lines
from posttrain.core.config import Config
from posttrain.core.digest import file_digest
from posttrain.core.errors import RunError
from posttrain.core.files import write_json
from posttrain.runs.diff import explain
from posttrain.runs.listing import list_runs
from posttrain.runs.run import Run
from posttrain.runs.verify import verify

SECRET = "posttrain-test-secret"
WATCHED: list[list[str]] = []
"""Paths opened, in the last of its lists; while there is none, nobody watches."""

ODD_TEXT = st.one_of(
    st.sampled_from(
        ["../../../etc/passwd", "/etc/passwd", f"../{SECRET}", "up/" + SECRET, "a\0b", "x\u2028y", "\x1b[2J", "\ud800", "", "."]
    ),
    st.text(max_size=20),
)
NUMBERS = st.one_of(st.integers(), st.just(10**400), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none())
VALUES = st.recursive(
    st.one_of(NUMBERS, ODD_TEXT), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXT, inner, max_size=3), max_leaves=8
)
FILES = (
    "manifest.json",
    "config.yaml",
    "metrics.jsonl",
    "alarms.jsonl",
    "summary.json",
    "stages/grpo.json",
    "evals/grpo.held_out.json",
    "rollouts/grpo.jsonl",
    "code.diff",
)


class Settings(Config):
    seed: int = 0
    algorithm: str = "grpo"
    processes: int = 1


def build(path: Path) -> Path:
    run = Run.create(path, config=Settings(), command=["posttrain", "x"], seeds={"seed": 0}, digests={"model": "m"}, stages=["grpo"])
    for step in range(3):
        run.metric("grpo", step, {"loss": 1.0 / (step + 1), "entropy": 0.5}, {"step": 0.1})
    run.rollout("grpo", {"step": 0, "completion": "x\u2028y"})
    run.alarm("grpo", 1, "spike", "loss jumped", {"loss": 2.0})
    run.note("detected", {"actor": {"dtype": "float32", "quantisation": "none"}})
    kept = run.checkpoint_root("grpo") / "final" / "w.bin"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"w")
    digests = {"checkpoints/grpo/final/w.bin": file_digest(kept)}
    run.finish_stage("grpo", {"seconds": 1.5, "position": run.position(), "digests": digests})
    figures = {"n_items": 2, "samples_per_item": 1, "pass_at_1": 0.5, "interval": [0.1, 0.9], "interval_method": "wilson"}
    figures |= {"parse_rate": 1.0, "truncation_rate": 0.0, "error_rate": 0.0, "mean_tokens": 3.0, "paired_change": None}
    run.save_eval("grpo.held_out", {"summary": figures, "conditions": {"n_items": 2}, "items": [{"id": "a"}, {"id": "b"}]})
    write_json(run.path / "summary.json", {"schema": 1, "rungs": [{"rung": "grpo", "suites": {"held_out": figures}}]})
    run.finish()
    run.close()
    return run.path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = build(tmp_path_factory.mktemp("hostile") / "whole")
    assert verify(run) == []
    outputs(run, run)  # whatever is imported late is imported now
    return run


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and WATCHED and isinstance(arguments[0], str | bytes | Path):
        WATCHED[-1].append(str(arguments[0]))


sys.addaudithook(watch)


def attempt(lines: Callable[[], list[str]]) -> list[str]:
    """What a command says; its one permitted failure is one line too."""
    try:
        return lines()
    except RunError as error:
        return [str(error)]


def outputs(run: Path, whole: Path) -> list[str]:
    return [
        *attempt(lambda: list_lines(list_runs(run.parent), run.parent)),
        *attempt(lambda: show_lines(run)),
        *attempt(lambda: verify_lines(verify(run), run)),
        *attempt(lambda: diff_lines(explain(run, whole), run, whole)),
        *attempt(lambda: diff_lines(explain(whole, run), whole, run)),
    ]


def check(whole: Path, damage: Callable[[Path], None]) -> None:
    """Damage a copy and ask everything about it."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / SECRET
        secret.write_text("s")
        run = Path(shutil.copytree(whole, Path(folder) / "runs" / "run"))
        (run / "up").symlink_to("..")
        (run.parent / SECRET).write_text("s")
        damage(run)
        WATCHED.append([])
        lines = outputs(run, whole)
        opened = WATCHED.pop()
    assert opened
    for line in lines:
        assert line == line.encode("utf-8").decode()
        assert len(line) < 2000
        assert not [c for c in line if not c.isprintable()], line
    assert not [path for path in opened if SECRET in path or path.startswith("/etc/passwd")]


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths_of(inner, (*at, key))


def placed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    value[at[0]] = placed(value[at[0]], at[1:], new)
    return value


def any_value_in_a_record(whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in FILES if name.endswith(".json")]))
    record = json.loads((whole / name).read_text())
    at = data.draw(st.sampled_from(list(paths_of(record))))
    new = data.draw(VALUES)
    check(whole, lambda run: void((run / name).write_text(json.dumps(placed(record, at, new)))))


def any_value_in_a_line(whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["metrics.jsonl", "alarms.jsonl", "rollouts/grpo.jsonl"]))
    lines = [json.loads(line) for line in (whole / name).read_text().splitlines()]
    at = data.draw(st.sampled_from(list(paths_of(lines))))
    changed = placed(lines, at, data.draw(VALUES))
    rows = changed if isinstance(changed, list) else [changed]
    check(whole, lambda run: void((run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))))


def any_bytes_in_a_file(whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    before = (whole / name).read_bytes() if (whole / name).exists() else b""
    start = data.draw(st.integers(0, len(before)))
    end = data.draw(st.integers(start, len(before)))
    ugly = st.sampled_from([b"", b"NaN", b"1e999", b"\n", b"\xe2\x80\xa8", b"[" * 5000, b"\xff\xfe", b"&a [*a]", b"!!int ''", b"\0" * 9])
    middle = data.draw(st.one_of(st.binary(max_size=30), ugly))
    check(whole, lambda run: void((run / name).write_bytes(before[:start] + middle + before[end:])))


def any_settings(whole: Path, data: st.DataObject) -> None:
    keys, values = ODD_TEXT, st.recursive(NUMBERS, st.lists, max_leaves=5)
    config = data.draw(st.dictionaries(keys, values, max_size=4))
    check(whole, lambda run: void((run / "config.yaml").write_text(json.dumps(config))))


HARM = (any_value_in_a_record, any_value_in_a_line, any_bytes_in_a_file, any_settings)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_harm_is_answered_in_lines(whole: Path, data: st.DataObject) -> None:
    data.draw(st.sampled_from(HARM))(whole, data)


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_lot_of_harm_is_answered_in_lines(whole: Path, harm: Callable[..., None], data: st.DataObject) -> None:
    harm(whole, data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["gone", "folder", "link out", "link to itself", "pipe"])
def test_any_file_gone_or_no_file(whole: Path, name: str, how: str) -> None:
    def damage(run: Path) -> None:
        place = run / name
        place.unlink(missing_ok=True)
        if how == "folder":
            place.mkdir()
        elif how == "link out":
            place.symlink_to(Path("..") / ".." / SECRET if name.count("/") == 0 else Path("..") / ".." / ".." / SECRET)
        elif how == "link to itself":
            place.symlink_to(place.name)
        elif how == "pipe":
            os.mkfifo(place)

    if (name, how) != ("manifest.json", "link out"):  # that one file is what makes a directory a run
        check(whole, damage)


def test_empty_and_foreign_folders(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a run" in outputs(tmp_path / "empty", whole)[-1]
    assert outputs(tmp_path / "nowhere", whole)[1] == (
        f"{tmp_path / 'nowhere'} is not a run (it has no manifest.json); give the directory that was --out"
    )
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "app", "start_url": "/"}')  # a web app's
    (foreign / "metrics.jsonl").write_text('{"epoch": 1, "val_loss": 0.1}\n')
    assert any("metrics.jsonl:1: has schema None, this version reads 1" in line for line in outputs(foreign, whole))


def void(_: Any) -> None:
    """For lambdas that write."""
