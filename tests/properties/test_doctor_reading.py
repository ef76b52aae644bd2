"""Whatever a directory holds, reading it gives evidence or one line, never another exception, and nothing that a terminal would obey."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.core.errors import RunError
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.lines import Limits
from posttrain.doctor.names import translated
from posttrain.doctor.reading import read_evidence

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD_TEXT = [
    "",
    "rl",
    "grpo",
    "../../etc",
    "a\x1b[2J",
    "\u2028",
    "\ud800",
    "x" * 300,
    "loss",
    "step",
    "eval.rl",
    "__class__",
    "{0}",
    "a.b.c",
]
texts = st.sampled_from(ODD_TEXT) | st.text(max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([10**400, -(10**30), 2**63, 1e308, math.nan, math.inf, -0.0])
    | st.floats()
    | texts
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


GOOD_LINE = {
    "schema": 1,
    "stage": "rl",
    "step": 0,
    "reward_mean": 0.5,
    "reward_std": 0.5,
    "unparseable": 0.1,
    "length": 3.0,
    "seconds": {"sample": 1.0},
}
GOOD_EVAL = {
    "label": "after",
    "conditions": {"suite": "s", "n_items": 2, "samples_per_item": 2, "sampling": {"temperature": 1.0}, "items_digest": "a"},
    "summary": {"pass_at_1": 0.5, "parse_rate": 1.0, "truncation_rate": 0.0},
    "items": [{"id": "1", "outcomes": [[1.0, "scored", "end", 3], [0.0, "scored", "end", 3]]}],
}
GOOD: dict[str, Any] = {
    "manifest.json": {
        "kind": "rlrun",
        "stages": ["eval.before", "rl", "eval.after"],
        "seeds": {"seed": 0},
        "history": [{"settings": {"rl.steps": [1, 2]}}],
    },
    "config.yaml": {
        "seed": 0,
        "rl": {"steps": 3, "minibatches": 1, "epochs": 1, "optim": {"lr": 0.1}},
        "objective": {"advantage": {"kind": "mean"}},
        "rows": {},
    },
    "metrics.jsonl": [GOOD_LINE, {**GOOD_LINE, "step": 1}, {**GOOD_LINE, "stage": "sft", "step": 0}],
    "alarms.jsonl": [{"stage": "rl", "step": 1, "name": "x", "detail": "d", "evidence": {"action": "stop"}}],
    "evals/before.s.json": GOOD_EVAL,
    "evals/after.s.json": GOOD_EVAL,
    "stages/rl.json": {"stage": "rl", "batch_equation": "= 3 optimizer steps"},
    "gates/launch.rl.json": {"verdict": "passed", "checks": [{"name": "a", "value": 1}], "figures": {"n": 1}},
    "rollouts/rl.jsonl": [{"step": 0, "completion": "x"}],
}


def encoded(name: str, value: Any) -> bytes:
    if name.endswith(".jsonl") and isinstance(value, list):
        return b"".join(dumped(row) + b"\n" for row in value)
    return dumped(value)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, bytes | None]:
    """A good run with a value somewhere replaced, then perhaps bytes cut, doubled or overwritten, and files missing."""
    files: dict[str, bytes | None] = {}
    for name, value in GOOD.items():
        if draw(st.booleans()):
            value = replaced(value, draw)
        data: bytes | None = encoded(name, value)
        match draw(st.sampled_from(["keep"] * 6 + ["cut", "twice", "overwrite", "gone", "folder"])):
            case "cut":
                data = data[: draw(st.integers(0, len(data)))]
            case "twice":
                data = data + data
            case "overwrite":
                at = draw(st.integers(0, len(data)))
                data = data[:at] + draw(st.binary(max_size=6)) + data[at + 3 :]
            case "gone":
                continue
            case "folder":
                data = None
            case _:
                pass
        files[name] = data
    return files


def replaced(value: Any, draw: st.DrawFn) -> Any:
    """A copy of a JSON value in which one place holds something else."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        other = draw(texts) if not draw(st.integers(0, 5)) else key
        return {**{k: v for k, v in value.items() if k != key}, other: replaced(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], replaced(value[at], draw), *value[at + 1 :]]
    return draw(values)


def laid_out(root: Path, files: dict[str, bytes | None]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)
    return root


def check(path: Path) -> Evidence | None:
    """Reading it is harmless, says the same twice, and what it says is well formed."""
    found = refused = None
    try:
        found = read_evidence(path, limits=Limits(columns=50, stages=5))
    except RunError as error:
        refused = str(error)
    if found is None:
        assert refused
        assert refused.isprintable()
        return None
    assert all(problem and problem.isprintable() for problem in found.problems)
    assert len(set(found.problems)) == len(found.problems)
    for name, frame in found.frames.items():
        assert name.isprintable()
        assert frame.steps == sorted(set(frame.steps))
        assert all(0 <= step < 1 << 53 for step in frame.steps)
        assert all(0 <= row < max(1, len(frame)) for row in frame.events.values())
        for column, known in frame.columns.items():
            assert column.isprintable()
            assert len(column) < 700
            assert all(map(math.isfinite, known.values))
            assert known.positions.tolist() == sorted(set(known.positions.tolist()))
            assert known.size == 0 or known.positions[-1] < len(frame)
    assert read_evidence(path, limits=Limits(columns=50, stages=5)).problems == found.problems
    return found


@FUZZ
@given(files=mutated())
def test_a_mutated_run_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes | None]):
    check(laid_out(tmp_path_factory.mktemp("run"), files))


@FUZZ
@given(data=st.dictionaries(st.sampled_from(sorted(GOOD)), st.binary(max_size=200), min_size=1))
def test_random_bytes_under_the_names_of_a_run(tmp_path_factory: pytest.TempPathFactory, data: dict[str, bytes]):
    check(laid_out(tmp_path_factory.mktemp("bytes"), {"manifest.json": b"{}", **data}))


NAMES = (
    "trainer_state.json",
    "wandb-history.jsonl",
    "a.jsonl",
    "a.csv",
    "a.json",
    "events.out.tfevents.1.h",
    "completions.jsonl",
    "completions_1.parquet",
)
row = st.dictionaries(
    st.sampled_from(["step", "_step", "loss", "reward", "eval_loss", "rewards/a/mean", "data", "log_history"]) | texts, values, max_size=5
)


@FUZZ
@given(
    name=st.sampled_from(NAMES),
    rows=st.lists(row, max_size=5),
    form=st.sampled_from(["lines", "list", "state", "series"]),
    tail=st.binary(max_size=9),
)
def test_logs_of_other_trainers(tmp_path_factory: pytest.TempPathFactory, name: str, rows: list[Any], form: str, tail: bytes):
    shapes: dict[str, Callable[[], bytes]] = {
        "lines": lambda: encoded("x.jsonl", rows),
        "list": lambda: dumped(rows),
        "state": lambda: dumped({"log_history": rows, "global_step": 3, "max_steps": 3}),
        "series": lambda: dumped({key: value for one in rows for key, value in one.items()}),
    }
    folder = laid_out(tmp_path_factory.mktemp("log"), {name: shapes[form]() + tail})
    for path in (folder, folder / name):
        check(path)


@FUZZ
@given(text=st.text(alphabet='a,;\t"\n\r1.5eNn\u2028\x00\x1b-', max_size=60))
def test_any_text_as_csv(tmp_path_factory: pytest.TempPathFactory, text: str):
    check(laid_out(tmp_path_factory.mktemp("csv"), {"a.csv": text.encode()}))


@FUZZ
@given(data=st.binary(max_size=120), length=st.integers(0, 60))
def test_any_bytes_as_an_event(tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int):
    framed = length.to_bytes(8, "little") + b"\0" * 4 + data[:length] + b"\0" * 4 + data[length:]
    check(laid_out(tmp_path_factory.mktemp("tb"), {"events.out.tfevents.1.h": framed}))


KNOWN = st.sampled_from(["reward", "train/reward", "critic/score/mean", "Reward", "kl", "eval_reward", "heldout_mean", "reward_mean", "x"])


@given(columns=st.lists(KNOWN | st.text(max_size=5)), user=st.dictionaries(KNOWN, KNOWN, max_size=3))
def test_no_two_columns_become_one(columns: list[str], user: dict[str, str]):
    found = translated(columns, user)
    assert set(found) == set(columns)
    assert len({ours.name for ours in found.values()}) == len(found)
