"""The arithmetic of the benchmark harness, and the page that shows its records."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes look their module up
    spec.loader.exec_module(module)
    return module


H = load("benchmarks", "harness")
PAGE = load("docs", "update_performance")


def measures(*seconds: float, tokens: int = 100, peak: float = 50.0) -> list:
    return [H.Measure(s, s / 2, {"tokens": tokens}, peak) for s in seconds]


def bench() -> H.Bench:  # type: ignore[name-defined]
    return H.Bench(3, False, "a machine", "grpo")


def test_interval_of_a_median_by_ranks():
    # n = 7: P(all on one side) = 2 / 128 = 1.6% <= 5%; leaving out one more on each side: 2 (1 + 7) / 128 = 12.5%
    assert H.median_interval([3, 1, 2, 7, 5, 6, 4]) == (1, 7)
    # n = 9: 2 (1 + 9) / 512 = 3.9%; n = 12: 2 (1 + 12 + 66) / 4096 = 3.9%
    assert H.median_interval(range(9)) == (1, 7)
    assert H.median_interval(range(12)) == (2, 9)
    assert H.median_interval([5.0]) == (5.0, 5.0)


def test_slope_of_a_line_and_of_noise():
    growth, low, high = H.slope_interval([1.0, 1.1, 1.2, 1.3, 1.4])
    assert growth == pytest.approx(0.4 / 1.2)
    assert low <= growth <= high
    flat, low, high = H.slope_interval([1.0, 1.2] * 20)
    assert flat == 0
    assert low <= 0 <= high
    assert H.slope_interval([1.0, 1.0, 9.0, 1.0, 1.0])[0] == 0  # one slow step is no growth


def test_ratio_is_how_many_times_better_ours_is():
    assert H.gains([1.0, 2.0], [3.0, 3.0], higher=False) == [3.0, 1.5]  # seconds
    assert H.gains([30.0], [10.0], higher=True) == [3.0]  # tokens per second
    assert H.rates(measures(2.0, tokens=100), "tokens") == [50.0]
    assert H.rates(measures(2.0), None, "cpu") == [1.0]


def test_record_pairs_rounds_before_it_takes_a_median(capsys):
    # Round by round 2, 2 and 8 times; the ratio of the medians would be 4 / 1 = 4.
    record = bench().compare("x", measures(1, 2, 1), measures(2, 4, 8), bar=2.0, conditions="c")
    assert (record.ratio, record.ratio_low, record.ratio_high) == (2.0, 2.0, 8.0)
    assert (record.ours, record.peer, record.unit, record.n) == (1.0, 4.0, "s", 3)
    assert record.holds is True
    assert record.cpu_ratio == 2.0
    assert "holds" in capsys.readouterr().out
    assert bench().compare("x", measures(1, 2, 1), measures(2, 4, 8), bar=2.1, conditions="c").holds is False


def test_per_token_comparison_counts_the_work(capsys):
    ours, peer = measures(1, 1, 1, tokens=100), measures(1, 1, 1, tokens=50)
    record = bench().compare("x", ours, peer, bar=None, conditions="c", per="tokens")
    assert (record.ratio, record.unit, record.holds) == (2.0, "tokens/s", None)


def test_memory_takes_the_last_peak(capsys):
    record = bench().memory("m", measures(1, 1, peak=40.0), measures(1, 1, peak=60.0), conditions="c")
    assert (record.ours, record.peer, record.ratio, record.holds) == (40.0, 60.0, 1.5, True)


def test_different_work_is_not_compared():
    H.same("tokens", 10, 10)
    H.same("loss", 0.5, 0.50005, 1e-4)
    with pytest.raises(H.NotTheSameWork, match="tokens: ours 10, the peer 11"):
        H.same("tokens", 10, 11)
    with pytest.raises(H.NotTheSameWork):
        H.same("loss", float("nan"), 0.5, 1e-4)


def test_a_new_run_replaces_its_own_records_only(tmp_path, capsys):
    path = tmp_path / "latest.json"
    first, second = bench(), H.Bench(3, True, "a machine", "dpo")
    first.compare("old", measures(1), measures(2), bar=None, conditions="c")
    second.compare("other", measures(1), measures(2), bar=None, conditions="c")
    H.write([*first.records, *second.records], path)
    again = bench()
    again.compare("new", measures(1), measures(2), bar=None, conditions="c")
    H.write(again.records, path)
    assert [(row["benchmark"], row["name"], row["quick"]) for row in json.loads(path.read_text())] == [
        ("grpo", "new", False),
        ("dpo", "other", True),
    ]


def test_every_benchmark_is_a_file_with_a_run_and_stands_on_the_page():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = [name for found in PAGE.BLOCK.finditer(text) for name in found["names"].split()]
    assert sorted(shown) == sorted(H.BENCHMARKS)
    for name in H.BENCHMARKS:
        assert "\ndef run(bench" in (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")


def test_page_shows_what_the_records_say_and_nothing_else(tmp_path, capsys):
    page, latest = tmp_path / "performance.md", tmp_path / "latest.json"
    page.write_text("before\n<!-- measured: grpo -->\nstale 9.99\n<!-- end -->\nafter\n", encoding="utf-8")
    record = bench().compare("GRPO step", measures(1, 1, 1), measures(2, 3, 4), bar=2.5, conditions="tiny", peer_name="TRL")
    latest.write_text(json.dumps([{**asdict(record), "series": [1.0, 2.0]}]), encoding="utf-8")
    assert PAGE.main(["--check"], page, latest) == 1
    assert PAGE.main([], page, latest) == 0
    assert PAGE.main(["--check"], page, latest) == 0
    text = page.read_text(encoding="utf-8")
    assert "9.99" not in text
    assert "| GRPO step | 1 s | 3 s (TRL) | 3 (2 to 4) | 3 | at least 2.5 | yes, interval crosses the bar | 3 |" in text
    assert "▅█" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_page_is_up_to_date():
    assert PAGE.main(["--check"]) == 0, "run python docs/update_performance.py"
