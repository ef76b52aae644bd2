"""Tool calls as text: what is written is read back, and what cannot be read says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.render.tool_calls import BadCall, ToolCall, describe_tools, parse, write

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6
)
CALLS = st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=4))


@given(CALLS)
def test_a_written_call_is_read_back(call):
    assert parse(write(call)) == [call]


@given(st.lists(CALLS, max_size=3), st.text(alphabet="abc \n{}", max_size=20))
def test_calls_keep_their_order_between_words(calls, words):
    assert parse(words.join(["", *map(write, calls), ""])) == calls


def test_an_argument_that_holds_the_closing_mark_does_not_close_the_call():
    call = ToolCall("say", {"text": "a</tool_call>b<tool_call>c"})
    assert parse(write(call)) == [call]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "a"}', "not closed"),
        ("<tool_call>calculator(1)</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", '"name"'),
        ('<tool_call>{"name": 3}</tool_call>', '"name"'),
        ('<tool_call>{"name": "a", "arguments": "1"}</tool_call>', "JSON object"),
        ("<tool_call>" + "[" * 20000 + "</tool_call>", "not JSON"),
    ],
)
def test_an_unreadable_call_says_what_is_wrong(text, problem):
    (bad,) = parse(text)
    assert isinstance(bad, BadCall)
    assert problem in bad.problem


def test_text_without_a_call_calls_nothing():
    assert parse("#### 5 </tool_call>") == []


def test_missing_arguments_are_none():
    assert parse('<tool_call>{"name": "clock"}</tool_call>') == [ToolCall("clock", {})]


def test_the_description_names_every_tool():
    text = describe_tools([{"name": "clock", "description": "The time.", "parameters": {}}])
    assert '"clock"' in text
    assert parse(text)  # it shows the form
