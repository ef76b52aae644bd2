"""An evaluation killed at every single write, resumed, and compared byte for byte with one that nobody killed."""

from pathlib import Path

import pytest
from scripted_suites import CharRenderer, CharSampler, suite

from posttrain.core import files
from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.core.files import read_jsonl
from posttrain.evals.partial import Partial, parts_of, require_free
from posttrain.evals.runner import conditions_of, items_in_batches, record_of
from posttrain.rollout.episodes import play

SUITE = suite(samples=2, n=7, allow_truncation=True)


def answer(prompt: str, seed: int) -> str:
    """Right, wrong, or a crash of the grader, by the seed."""
    return ("crash", "nine", str(int(prompt.split("+")[0]) + 1))[seed % 3]


def measured(target: Path, resume: bool = False, batch: int = 2, sampler: CharSampler | None = None, **other: str) -> Path:
    """What the recipe does, without a model."""
    sampler, renderer = sampler or CharSampler(answer), CharRenderer()
    who = {"label": "m", "model_digest": "w"} | other
    kept = Partial(target, conditions_of(SUITE, renderer, 4), **who, resume=resume)
    if kept.finished is not None:
        return target
    items = list(kept.done)
    for part in items_in_batches(SUITE, renderer, 4, batch, lambda openings: play(sampler, renderer, openings), kept.done):
        items += part
        kept.append(part)
    kept.complete(record_of(SUITE, items, renderer, seed=4, **who))
    return target


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing is cleaned up behind it."""


class Reaper:
    """Dies at one of the file operations: before it, half-way through it, or right after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int):
        self.left, self.dead = at, False
        monkeypatch.setattr(files.JsonlWriter, "append", self.around(files.JsonlWriter.append, self.half_a_line))
        monkeypatch.setattr(files, "write_atomic", self.around(files.write_atomic, self.half_a_file))
        monkeypatch.setattr("posttrain.evals.partial.remove", self.around(files.remove, lambda *_: None))

    def around(self, operation, half):
        def with_death(*arguments):
            for moment in (None, half, operation):
                if moment is not None and not (moment is half and self.left > 0):
                    moment(*arguments)
                if self.left == 0:
                    raise Killed
                self.left -= 1

        return with_death

    def half_a_line(self, writer, value):
        line = files.encode_line(value)
        writer._handle.write(line[: len(line) // 2])

    def half_a_file(self, path, data):
        Path(path).with_name(f".{Path(path).name}.tmp-0123abcd").write_bytes(bytes(data)[: len(data) // 2])


def test_a_kill_at_every_write_leaves_what_is_resumed_to_the_same_bytes(tmp_path):
    wanted = measured(tmp_path / "whole.json").read_bytes()
    deaths = 0
    for at in range(100):
        target = tmp_path / f"{at}.json"
        with pytest.MonkeyPatch.context() as patch:
            Reaper(patch, at)
            try:
                measured(target)
            except Killed:
                deaths += 1
            else:
                break
        assert measured(target, resume=True).read_bytes() == wanted, at
        assert not parts_of(target).exists()
    # a head, four batches, the record and the removal of the parts: seven operations of three moments each
    assert deaths == 7 * 3


def test_many_kills_in_a_row(tmp_path):
    wanted = measured(tmp_path / "whole.json").read_bytes()
    target, starts = tmp_path / "x.json", 0
    for at in [1, 0, 2, 1, 0, 2, 1, 1, 2, 0, 2]:
        with pytest.MonkeyPatch.context() as patch:
            Reaper(patch, at)
            try:
                measured(target, resume=starts > 0)
            except Killed:
                starts += 1
    assert starts == 11
    assert parts_of(target).exists()
    assert measured(target, resume=True).read_bytes() == wanted


def test_only_what_is_missing_is_played_again(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        Reaper(patch, 3 * 3 - 1)  # right after the head and two batches
        with pytest.raises(Killed):
            measured(tmp_path / "x.json")
    sampler = CharSampler(answer)
    measured(tmp_path / "x.json", resume=True, sampler=sampler)
    assert [len(call) for call in sampler.calls] == [4, 2]  # items 4 and 5, then item 6, of two samples each
    record = (tmp_path / "x.json").read_text()
    assert record.count('"error"') == sum(seed % 3 == 0 for seed in CharSeeds.of(SUITE))


class CharSeeds:
    """The seeds that an evaluation of the suite asks with."""

    @staticmethod
    def of(wanted) -> list[int]:
        sampler = CharSampler(answer)
        list(items_in_batches(wanted, CharRenderer(), 4, 100, lambda openings: play(sampler, CharRenderer(), openings)))
        return sampler.seeds


def test_another_batch_size_resumes_to_the_same_bytes(tmp_path):
    wanted = measured(tmp_path / "whole.json", batch=7).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        Reaper(patch, 7)
        with pytest.raises(Killed):
            measured(tmp_path / "x.json", batch=2)
    assert measured(tmp_path / "x.json", resume=True, batch=3).read_bytes() == wanted


def test_a_finished_record_is_left_alone(tmp_path):
    target = measured(tmp_path / "x.json")
    before = target.stat().st_mtime_ns
    sampler = CharSampler(answer)
    measured(target, resume=True, sampler=sampler)
    assert (target.stat().st_mtime_ns, sampler.calls) == (before, [])


def test_nothing_is_overwritten_without_being_asked(tmp_path):
    target = measured(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="x.json exists already; choose another file"):
        measured(target)
    with pytest.MonkeyPatch.context() as patch:
        Reaper(patch, 5)
        with pytest.raises(Killed):
            measured(tmp_path / "y.json")
    with pytest.raises(ConfigError, match="y.json.partial.jsonl holds an unfinished evaluation; add --resume"):
        require_free(tmp_path / "y.json")


@pytest.mark.parametrize(
    ("other", "said"),
    [({"model_digest": "v"}, "model_digest is 'w' against 'v'"), ({"label": "n"}, "label is 'm' against 'n'")],
)
def test_another_evaluation_is_not_continued(tmp_path, other, said):
    finished = measured(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=f"x.json belongs to another evaluation: {said}"):
        measured(finished, resume=True, **other)
    with pytest.MonkeyPatch.context() as patch:
        Reaper(patch, 5)
        with pytest.raises(Killed):
            measured(tmp_path / "y.json")
    with pytest.raises(ConfigError, match=f"y.json.partial.jsonl belongs to another evaluation: {said}"):
        measured(tmp_path / "y.json", resume=True, **other)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[0], '{"start": 0}'],
        lambda lines: ["7", *lines[1:]],
        lambda lines: [lines[0], lines[1].replace("sums-0", "sums-9"), *lines[2:]],
        lambda lines: [lines[0], lines[1].replace('"start": 0', '"start": "0"')],
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(tmp_path, damage):
    target = tmp_path / "x.json"
    with pytest.MonkeyPatch.context() as patch:
        Reaper(patch, 3 * 3 - 1)
        with pytest.raises(Killed):
            measured(target)
    assert len(read_jsonl(parts_of(target))) == 3
    lines = parts_of(target).read_text().splitlines()
    parts_of(target).write_text("".join(f"{line}\n" for line in damage(lines)))
    with pytest.raises(EvidenceError, match="cannot be resumed|are not its first") as raised:
        measured(target, resume=True)
    assert len(str(raised.value).splitlines()) == 1
