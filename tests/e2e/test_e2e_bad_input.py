"""Every mistake a user can make ends in one line that says what to do, a non-zero exit, and nothing lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_cli import Cli, cache_of, ladder, last_error, reference, tree

ANSWERED = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
COMPLETED = {"prompt": "hi", "completion": "hello"}
Refused = Callable[..., str]
PRACTISE = ["train", "rl", "--model", "{run}:sft", "--task", "arithmetic"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)


@pytest.fixture
def refused(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Call the command line; it must fail with one line, which is returned."""

    def call(*arguments: object) -> str:
        code = Cli(cache_of(run)).call(monkeypatch, *map(str, arguments))
        shown = capsys.readouterr()
        assert code == 2, shown.err
        assert shown.out == ""
        return last_error(shown.err)

    return call


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ladder", "--set", "grpo.sibling=4"], "unknown key 'grpo.sibling'; did you mean 'grpo.siblings'?"),
        (["ladder", "--set", "grpo.lr=1e-4"], "unknown key 'grpo.lr'; did you mean 'grpo"),
        (["ladder", "--set", "sft.optim.lr=fast"], "sft.optim.lr = 'fast': Input should be a valid number"),
        (["ladder", "--set", "seed"], "'seed' is not an assignment; write key=value, e.g. seed=1"),
        (["ladder", "--set", "grpo.prompts=4", "--set", "grpo.minibatches=3"], "4 prompts do not divide into 3 minibatches"),
        (["ladder", "--set", "grpo.siblings=0"], "grpo.siblings = 0: Input should be greater than or equal to 1"),
        (["ladder", "--set", "grpo.siblings=1"], "compares siblings, and 1 completion per prompt has none"),
        (["ladder", "--set", "algorithm=gpso"], "unknown algorithm 'gpso'; did you mean 'gspo'?"),
        (["ladder", "--set", "algorithm=rloo", "--set", "grpo.epochs=2"], "ratio=none is on-policy, and 2 updates per sampling phase"),
        (["ladder", "--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
        (["ladder", "--set", "measure.arithmetic=1000000"], "arithmetic: 1000000 held_out tasks asked for"),
        (["ladder", "--resume"], "is not a run (it has no manifest.json); give the directory that was --out"),
        (["train", "sfft"], "unknown recipe 'sfft'; did you mean 'sft'?"),
        (["train", "sft"], "train sft needs --model"),
        (["train", "dpo"], "train dpo needs --model and --data"),
        (["train", "sft", "--model", "x"], "sft needs rows to imitate: set data=FILE, or task=NAME"),
        (["train", "grpo"], "'grpo' is an objective: posttrain train rl --set objective=grpo"),
        (["train", "rl", "--model", "x"], "rl needs tasks: set task=NAME"),
        (["train", "rl", "--model", "x", "--task", "arithmetc"], "unknown task source 'arithmetc'; did you mean 'arithmetic'?"),
        ([*PRACTISE, "--set", "rl.siblings=1"], "compares siblings, and 1 completion per prompt has none"),
        ([*PRACTISE, "--set", "objective=gpso"], "unknown algorithm 'gpso'; did you mean 'gspo'?"),
        ([*PRACTISE, "--set", "objective.limit.hihg=0.3"], "unknown key 'objective.limit.hihg'; did you mean 'objective.limit.high'?"),
        ([*PRACTISE, "--set", "objective.kl.estimator=k1"], "KL estimator k1 in the loss: its expected gradient is zero"),
        ([*PRACTISE, "--set", "objective=gspo", "--set", "objective.limit.high=0.3"], "the limit would be inert; use bounds near 3e-4"),
        ([*PRACTISE, "--set", "objective=dapo", "--set", "objective.advantage=teacher"], "advantage=teacher needs a teacher; give one"),
        ([*PRACTISE, "--set", "objective=reinforce", "--set", "rl.epochs=2"], "ratio=none is on-policy, and 2 updates per sampling phase"),
        (["train", "sft", "--config", "absent.yaml"], "settings file 'absent.yaml' cannot be read"),
        (["train", "sft", "--model", "no/such/model", "--data", "{rows}"], "model 'no/such/model' cannot be loaded"),
        (["train", "sft", "--model", "{run}:drop", "--data", "{rows}"], "has no rung 'drop'; finished are base, sft, dpo, grpo"),
        (["recipes", "smolm2"], "unknown recipe 'smolm2'; did you mean 'smollm2'?"),
    ],
)
def test_settings(refused: Refused, run: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    rows = write(tmp_path / "rows.jsonl", ANSWERED)
    filled = [word.format(rows=rows, run=run) for word in arguments]
    out = [] if arguments[0] == "recipes" else ["--out", tmp_path / "out"]
    assert says in refused(*filled, *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "rows.jsonl: holds no rows; give a file with at least one"),
        ([ANSWERED, '{"messages": ['], "rows.jsonl:2: is not JSON"),
        ([ANSWERED, "[1]"], "rows.jsonl:2: holds a list, not an object; write one object per line"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], "rows.jsonl:1: field 'messages': has no assistant turn"),
        ([ANSWERED, {"messages": [{"role": "bot", "content": "hi"}]}], "rows.jsonl:2: field 'messages[0].role': is 'bot'; use one of"),
        ([ANSWERED, {"messages": [{"role": "user"}]}], "rows.jsonl:2: field 'messages[0]': must be an object with role and content"),
        ([COMPLETED, {"prompt": "hi", "completion": 5}], "rows.jsonl:2: field 'completion': is int, not text"),
        ([COMPLETED, {"prompt": "hi"}], "rows.jsonl:2: field 'completion': is missing; the row has ['prompt']"),
        ([{"text": "a"}, {"txt": "b"}], "rows.jsonl:2: field 'text': is missing; the row has ['txt']"),
        ([{"instruction": "a", "output": "b"}], "rows.jsonl:1: has fields ['instruction', 'output']; accepted are: messages |"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "holds preference rows; sft needs messages, prompt/completion or text rows"),
    ],
)
def test_supervised_rows_name_file_line_and_field(refused: Refused, run: Path, tmp_path: Path, rows: list[object], says: str) -> None:
    data = write(tmp_path / "rows.jsonl", *rows)
    assert says in refused("train", "sft", "--model", f"{run}:base", "--data", data, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists(), "the corrected command must be able to use the same directory"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}], "rows.jsonl:2: field 'rejected': is missing"),
        ([{"prompt": "a", "chosen": "b", "rejected": "b"}], "rows.jsonl:1: field 'rejected': equals chosen"),
    ],
)
def test_preference_rows_name_file_line_and_field(refused: Refused, run: Path, tmp_path: Path, rows: list[object], says: str) -> None:
    data = write(tmp_path / "rows.jsonl", *rows)
    assert says in refused("train", "dpo", "--model", f"{run}:sft", "--data", data, "--out", tmp_path / "out")


def test_task_rows_and_sampling_of_rl(refused: Refused, run: Path, tmp_path: Path) -> None:
    given = ["train", "rl", "--model", f"{run}:sft", "--out", tmp_path / "out", "--data"]
    data = write(tmp_path / "rows.jsonl", {"prompt": "2 + 2?", "answer": "4"}, {"prompt": "2 + 3?", "answer": True})
    assert "rows.jsonl:2: field 'answer': must be a text or a number, is True" in refused(*given, data)
    few = write(tmp_path / "few.jsonl", {"prompt": "2 + 2?", "answer": "4"})
    assert "; give at least about 30" in refused(*given, few)
    many = write(tmp_path / "many.jsonl", *({"prompt": f"{n} + 1?", "answer": n + 1} for n in range(60)))
    assert "sampling.temperature = 0 draws identical siblings" in refused(*given, many, "--set", "sampling.temperature=0")
    assert "no such file" in refused(*given, tmp_path / "absent.jsonl")


def test_model_without_chat_template(refused: Refused, run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(run / "checkpoints" / "sft" / "final", model)
    (model / "chat_template.jinja").unlink()
    data = write(tmp_path / "rows.jsonl", ANSWERED)
    error = refused("train", "sft", "--model", model, "--data", data, "--out", tmp_path / "out")
    assert "chat template" in error
    assert not (tmp_path / "out").exists()
    assert "chat template" in refused("eval", model, "--items", "4", "--set", "processes=1")


def test_an_existing_directory_is_refused_and_untouched(refused: Refused, run: Path, tmp_path: Path) -> None:
    before = tree(run)
    assert f"{run} exists and is not empty; continue it with --resume or choose another --out" in refused(*ladder(run))
    assert tree(run) == before
    write(tmp_path / "mine" if (tmp_path / "mine").mkdir() else tmp_path / "mine" / "notes.txt", "keep me")
    assert "exists and is not empty; choose another --out" in refused(*ladder(tmp_path / "mine"))
    assert tree(tmp_path / "mine") == {"notes.txt": b"keep me\n"}
    file = write(tmp_path / "file", "keep me")
    assert "choose another --out" in refused(*ladder(file))
    assert file.read_text() == "keep me\n"


def test_measuring_and_comparing(refused: Refused, run: Path, tmp_path: Path) -> None:
    record = run / "evals" / "sft.arithmetic.json"
    assert "unknown key 'sampling.max_token'; did you mean 'sampling.max_tokens'?" in refused("eval", run, "-s", "sampling.max_token=8")
    assert "exists already; choose another file" in refused("eval", run, "--out", record)
    assert "unknown task source 'gsm9k'" in refused("eval", run, "--task", "gsm9k")
    assert "no such file" in refused("compare", record, tmp_path / "absent.json")
    assert "summary.json: evaluation record has schema 1" in refused("compare", record, run / "summary.json")
    error = refused("compare", record, run / "evals" / "sft.arithmetic_greedy.json")
    assert "cannot compare" in error
    assert "suite is 'arithmetic' against 'arithmetic_greedy'" in error


def test_runs_and_chat(refused: Refused, run: Path, tmp_path: Path) -> None:
    for command in ("show", "verify", "report"):
        assert "is not a run (it has no manifest.json)" in refused("runs", command, tmp_path)
    assert "has no rung 'ppo'; finished are base, sft, dpo, grpo" in refused("chat", run, "--rung", "ppo")
    assert "cannot be loaded" in refused("chat", tmp_path / "nothing")


def test_a_failure_in_a_real_process_is_one_line_without_traceback(run: Path, tmp_path: Path) -> None:
    done = Cli(cache_of(run)).run(ladder(tmp_path / "out", "--set", "mine.promts=4"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: unknown key 'mine.promts'; did you mean 'mine.prompts'?\n"
