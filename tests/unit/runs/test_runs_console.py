"""Progress output and stop signals."""

from __future__ import annotations

import io
import os
import signal
import threading

import pytest

from posttrain.runs.console import Console, duration, short
from posttrain.runs.interrupt import StopSignal, resume_hint


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_come_at_most_every_interval_and_at_the_end():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, interval=10.0, clock=clock)
    with console.stage("sft", total=8, unit="step") as progress:
        for loss in (3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.25, 0.123456):
            clock.now += 4.0  # seconds 4, 8, 12 (a line), 16, 20, 24 (a line), 28, 32
            progress.advance(loss=loss)
    # After 3 steps in 12 s: 0.25 steps/s, so 5 steps left take 20 s. After 6 in 24 s: 2 left take 8 s.
    assert stream.getvalue().splitlines() == [
        "sft 3/8 steps  0.25 steps/s  0:00:20 left  loss 2",
        "sft 6/8 steps  0.25 steps/s  0:00:08 left  loss 0.5",
        "sft 8/8 steps  0.25 steps/s  took 0:00:32  loss 0.123",
    ]


def test_a_resumed_stage_counts_from_where_it_was_but_not_its_rate():
    stream, clock = io.StringIO(), Clock()
    with Console(stream, clock=clock).stage("sft", total=100, unit="step", done=90) as progress:
        clock.now += 20.0
        progress.advance(5)
    # 5 steps in 20 s are 0.25 per second, whatever an earlier process did.
    assert stream.getvalue().splitlines() == [
        "sft 95/100 steps  0.25 steps/s  0:00:20 left",
        "sft 95/100 steps  0.25 steps/s  took 0:00:20",
    ]


def test_the_last_unit_is_told_once():
    stream, clock = io.StringIO(), Clock()
    with Console(stream, clock=clock).stage("eval", total=4, unit="item") as progress:
        clock.now += 20.0
        progress.advance(4)
    # 4 items in 20 s are 0.2 per second.
    assert stream.getvalue() == "eval 4/4 items  0.2 items/s  took 0:00:20\n"


def test_plain_line_and_warn():
    stream = io.StringIO()
    console = Console(stream)
    console.line("[bold] stays as it is")
    console.warn("look here")
    assert stream.getvalue() == "[bold] stays as it is\nwarning: look here\n"


def test_quiet_shows_nothing(capfd):
    console = Console.quiet()
    console.line("x")
    console.warn("y")
    with console.stage("sft", total=1, unit="step") as progress:
        progress.advance(loss=1.0)
    assert capfd.readouterr() == ("", "")


def test_bar_shows_title_count_and_latest_numbers(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    stream = io.StringIO()
    console = Console(stream, mode="bar")
    with console.stage("grpo", total=2, unit="step") as progress:
        console.line("[red]between")
        progress.advance(reward=0.25)
        progress.advance(reward=0.751234)
    console.warn("at the end")
    text = stream.getvalue()
    assert "[red]between\n" in text
    last = text.strip().splitlines()[-2]
    assert last.startswith("grpo")
    for part in ("2/2", "steps/s", "left", "reward 0.751"):
        assert part in last
    assert text.endswith("warning: at the end\n")


def test_an_exception_inside_a_stage_comes_through():
    stream = io.StringIO()
    with pytest.raises(KeyError), Console(stream).stage("sft", total=1, unit="step"):
        raise KeyError
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "text"), [(0.123456, "0.123"), (3e-05, "3e-05"), (12345.6, "1.23e+04"), (7, "7"), (None, "-"), ("a", "a")]
)
def test_short(value, text):
    assert short(value) == text


def test_duration():
    # 1 h 2 min 3 s = 3600 + 120 + 3
    assert duration(3723.9) == "1:02:03"
    assert duration(None) == "-:--:--"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_second_interrupts_and_handlers_come_back(number):
    before = signal.getsignal(number)
    told: list[str] = []
    with StopSignal(told.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert len(told) == 1
        assert f"{number.name} received: finishing this step, then saving" in told[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert len(told) == 1


def test_by_default_the_user_is_told_on_stderr(capfd):
    with StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
    out, err = capfd.readouterr()
    assert out == ""
    assert "finishing this step" in err


def test_other_threads_install_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work():
        with StopSignal() as stop:
            seen.extend([signal.getsignal(signal.SIGINT), stop.requested])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, False]


def test_resume_hint_quotes_and_adds_resume_once():
    assert resume_hint(["posttrain", "ladder", "--out", "my runs"]) == "to continue: posttrain ladder --out 'my runs' --resume"
    assert resume_hint(["posttrain", "ladder", "--resume"]) == "to continue: posttrain ladder --resume"
