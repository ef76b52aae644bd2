"""The calculator and the world that answers calls."""

from __future__ import annotations

import pytest

from posttrain.core.tasks import Message
from posttrain.envs.calculator import Calculator
from posttrain.envs.sources import source
from posttrain.envs.tools import CALCULATOR, LONGEST_RESULT, Tool, ToolError, ToolLoop, calculate
from posttrain.envs.types import env_of
from posttrain.render.tool_calls import ToolCall, write
from posttrain.rewards.types import Grader


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 * (7 + 1)", "96"), ("-3 - -5", "2"), ("7 // 2", "3"), ("7 % 4", "3"), ("1 / 4", "0.25"), (" 613 * 88 ", "53944")],
)
def test_the_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "2 ** 9",
        "abs(-1)",
        "__import__('os')",
        "x",
        "1 +",
        "",
        "1 / 0",
        "True + 1",
        "'a' * 3",
        "1" * 201,
        "(" * 90 + "1" + ")" * 90 + "+",
        "9" * 40 + "*" + "9" * 40,
        "1e308 * 1e308",
        "1 if 1 else 2",
        "[1][0]",
        "1; 2",
    ],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(ToolError):
        calculate(expression)


def call(expression: object, name: str = "calculator") -> str:
    return write(ToolCall(name, {"expression": expression}))


def test_every_call_of_a_turn_is_answered_in_order():
    world = ToolLoop((CALCULATOR,))
    assert world.reply(f"First {call('2 + 3')} then {call('4 * 5')}") == (Message("tool", "5"), Message("tool", "20"))
    assert world.reply("#### 20") == ()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("1", name="search"), "unknown tool 'search'; known: calculator"),
        (call(5), "takes the text argument(s) expression"),
        (write(ToolCall("calculator", {})), "takes the text argument(s) expression"),
        (write(ToolCall("calculator", {"expression": "1", "base": "2"})), "takes the text argument(s) expression"),
        ("<tool_call>nothing</tool_call>", "not JSON"),
        (call("1 / 0"), "division by zero"),
    ],
)
def test_a_bad_call_is_answered_not_fatal(text, answer):
    (message,) = ToolLoop((CALCULATOR,)).reply(text)
    assert message.content.startswith("error: ")
    assert answer in message.content


def test_calls_are_limited_over_the_whole_episode():
    world = ToolLoop((CALCULATOR,), calls=2)
    contents = [message.content for _ in range(3) for message in world.reply(call("1 + 1"))]
    assert contents == ["2", "2", "error: no calls left; answer now"]


def test_a_long_result_is_cut_and_says_so():
    loud = Tool("loud", "Shouts.", {}, lambda arguments: "a" * (LONGEST_RESULT + 5))
    (message,) = ToolLoop((loud,)).reply(write(ToolCall("loud", {})))
    assert message.content == "a" * LONGEST_RESULT + f" [cut, {LONGEST_RESULT + 5} characters]"


def test_siblings_do_not_share_their_world():
    chosen = Calculator(calls=1)
    task = chosen.tasks("train", 1, 0)[0]
    first, second = chosen.env(task), chosen.env(task)
    first.reply(call("1 + 1"))
    assert second.reply(call("1 + 1"))[0].content == "2"


def test_the_calculator_source_shows_a_call_and_its_result():
    chosen = Calculator(describe=False)
    (task,) = chosen.tasks("held_out", 1, 0)
    messages = chosen.demonstration(task).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert chosen.env(task).reply(messages[1].content) == (messages[2],)
    assert messages[2].content == task.answer
    grader: Grader = chosen.grader
    assert grader(task, messages[3].content).value == 1.0
    assert task.id.startswith("calculator-")


def test_a_described_tool_stands_in_the_system_message():
    (task,) = source("calculator").tasks("train", 1, 0)
    assert [message.role for message in task.prompt] == ["system", "user"]
    assert "calculator" in task.prompt[0].content


def test_only_sources_with_a_world_have_one():
    assert env_of(source("calculator")) is not None
    assert env_of(source("arithmetic")) is None
