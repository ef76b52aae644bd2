"""The report of a made-up run directory: complete, self-contained, well formed, and safe against what a model writes."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from posttrain.core.errors import RunError
from posttrain.runs.charts import Series, line_chart, ticks_between
from posttrain.runs.report import panel_of, write_report

VOID = {"meta"}
LEAVES = {"line", "path", "polyline", "polygon"}
ATTACK = "</pre><script>alert('owned')</script><img src=x onerror=alert(1)>"


class Checker(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in LEAVES  # "/>" closes nothing outside SVG
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def jsonl(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def figures(rate: float, change: dict | None) -> dict:
    return {
        "n_items": 200,
        "samples_per_item": 4,
        "pass_at_1": rate,
        "interval": [rate - 0.05, rate + 0.05],
        "interval_method": "cluster-t",
        "parse_rate": 0.975,
        "truncation_rate": 0.01,
        "error_rate": 0.0,
        "mean_tokens": 9.5,
        "paired_change": change,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    root = tmp_path / "ladder-quick"
    change = {"delta": 0.42, "interval": [0.35, 0.49], "p_value": 1e-9, "against": "base"}
    rungs = [
        {"rung": "base", "suites": {"sums": figures(0.051, None), "hard": figures(0.06, None)}},
        {"rung": "sft", "suites": {"sums": figures(0.471, change), "hard": figures(0.12, change)}},
    ]
    summary = {"schema": 1, "preset": "quick", "seed": 0, "rungs": rungs, "seconds_per_stage": {"sft": 75.0, "grpo": 12.0}}
    root.mkdir()
    (root / "manifest.json").write_text(json.dumps({"created": "2025-01-02T03:04:05+00:00", "note": ATTACK}))
    (root / "config.yaml").write_text("seed: 0\nname: <b>bold</b>\n")
    (root / "summary.json").write_text(json.dumps(summary))
    (root / "stages").mkdir()
    (root / "stages" / "sft.json").write_text(json.dumps({"seconds": 75.0, "batch_equation": "8 rows x 2 micro-batches = 16 < 32"}))
    metrics = [
        {
            "schema": 1,
            "stage": "sft",
            "step": i,
            "loss": 2.0 - i / 100,
            "lr": 1e-4,
            "seconds": {"forward": 0.5, "optimizer": 0.25, "idle": None, "peak_mib": 1000.0 + i},
        }
        for i in range(1, 101)
    ]
    metrics += [
        {"schema": 1, "stage": "grpo", "step": i, "reward_mean": i / 10, "entropy": 1.0, "kl": 0.01, "zero_variance": None, "seconds": {}}
        for i in range(1, 6)
    ]
    jsonl(root / "metrics.jsonl", metrics)
    rollout = {"task": "t-1", "prompt": "Compute 1 + 1 & more.", "gold": "2", "parsed": None, "status": "unparseable", "stop": "length"}
    rollouts = [rollout | {"completion": f"answer {i} {ATTACK} \x00\ud83d", "value": [0.0, 1.0, None][i % 3]} for i in range(20)]
    jsonl(root / "rollouts" / "sft.jsonl", rollouts)
    jsonl(
        root / "alarms.jsonl", [{"schema": 1, "stage": "grpo", "step": 4, "name": "entropy", "detail": ATTACK, "evidence": {"floor": 0.1}}]
    )
    return root


def parse(path: Path) -> tuple[str, Checker]:
    html = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return html, checker


def test_the_page_is_well_formed_and_self_contained(run_dir):
    path = write_report(run_dir)
    html, page = parse(path)
    assert path == run_dir / "report.html"
    assert not re.search(r"https?://", html)
    assert not re.search(r"url\(|@import", html)
    assert {"script", "img", "link", "iframe"}.isdisjoint(page.tags)
    assert all(name not in ("src", "href") and not name.startswith("on") for _, name, _ in page.attributes)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme:dark" in html


def test_what_a_model_wrote_is_shown_not_obeyed(run_dir):
    html, page = parse(write_report(run_dir))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert page.text.count("alert('owned')") == 8 + 1 + 1  # shown rollouts, the alarm, the manifest
    assert "<b>bold</b>" in page.text
    assert "\x00" not in html
    assert "\u2400" in html


def test_figures_of_the_run_are_there(run_dir):
    _, page = parse(write_report(run_dir))
    for wanted in (
        "ladder-quick",
        "preset quick · seed 0",
        "47.1%",
        "[0.421, 0.521], 200 items; 5.1% at base",
        "+0.420 [+0.350, +0.490] vs base",
        "<0.001",
        "97.5%",
        "8 rows x 2 micro-batches = 16 < 32",
        "1 min 15 s",
        "1 min 27 s",
        "forward 50.0 s, optimizer 25.0 s, idle 0.0 s, peak 1,100 MiB",
        "8 of 20",
        "not scored",
        "More metrics (1)",
        "read nothing",
        "(floor 0.1)",
    ):
        assert wanted in page.text, wanted


def test_every_chart_is_described(run_dir):
    _, page = parse(write_report(run_dir))
    labels = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == page.tags.count("svg") == 1 + 2 + 3  # rungs; loss and lr; reward, entropy, KL
    assert "pass@1 per rung, with 95% intervals. sums: 0.051 at base to 0.471 at sft; hard: 0.06 at base to 0.12 at sft" in labels
    assert "Loss. loss: 1.99 at step 1 to 1 at step 100" in labels


def test_an_unfinished_run_gives_a_shorter_page(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    _, page = parse(write_report(tmp_path))
    assert "No evaluation has been summarised yet." in page.text
    assert "Training" not in page.text


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"no manifest\.json"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_panels_follow_the_words_of_a_name():
    assert panel_of("dpo/chosen_reward") == "Reward of chosen and rejected"
    assert panel_of("chosen_logp") is None  # nats of another magnitude would flatten the rewards
    assert panel_of("reward_mean") == "Reward"
    assert panel_of("zero_variance") == "Groups without signal"
    assert panel_of("length_mean") == "Completion length"
    assert panel_of("clip_fraction") is None  # no "kl" inside another word


def test_points_land_where_the_axis_says():
    chart = line_chart("t", [Series("a", ((0.0, 0.0), (10.0, 1.0)))], "step")
    # x from 52 to 520 - 12 = 508; y from 250 - 38 = 212 up to 10
    assert 'points="52.0,212.0 508.0,10.0"' in chart


def test_error_bars_reach_both_ends():
    chart = line_chart("t", [Series("a", ((0.0, 0.5),), ((0.25, 0.75),))], "rung", categories=["base"], y_range=(0.0, 1.0))
    # centre x = 280; y(.25) = 212 - .25 * 202 = 161.5, y(.75) = 60.5
    assert "M280.0 161.5V60.5" in chart
    band = line_chart("t", [Series("a", ((0.0, 0.5), (1.0, 0.5)), ((0.0, 1.0), (0.0, 1.0)))], "step")
    assert '<polygon class="band" points="52.0,10.0 508.0,10.0 508.0,212.0 52.0,212.0"/>' in band


def test_charts_of_nothing_of_one_value_and_of_many():
    assert line_chart("t", [Series("a", ())], "step") == ""
    assert line_chart("t", [Series("a", ((1.0, float("nan")),))], "step") == ""
    assert "<polyline" in line_chart("t", [Series("a", ((3.0, 0.0),))], "step")
    many = line_chart("t", [Series("a", tuple((float(i), 1.0) for i in range(10_000)))], "step")
    assert len(many) < 20_000
    assert 'class="faint"' in many


def test_titles_and_names_are_escaped():
    chart = line_chart("<t>", [Series('"a" & <b>', ((0.0, 1.0), (1.0, 2.0))), Series("c", ((0.0, 1.0),))], "<x>")
    for raw in ("<t>", "<b>", "<x>"):
        assert raw not in chart
    assert "&quot;a&quot; &amp; &lt;b&gt;" in chart


def test_ticks_cover_the_range_with_round_steps():
    assert ticks_between(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks_between(0.4, 2.1) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert ticks_between(0.0, 3e-7)[-1] >= 3e-7
