"""Tool calls as text, in the form that Hermes and Qwen models are taught: JSON between <tool_call> marks.

    Let me compute that. <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>

A call that cannot be read is data, not an exception: the policy is told what was wrong and may try again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Example: ToolCall("calculator", {"expression": "12 * 7"})"""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that cannot be read. Example: BadCall("the call is not closed by </tool_call>")"""

    problem: str


def write(call: ToolCall) -> str:
    """The call as an assistant writes it; `parse` gives it back.

    >>> write(ToolCall("clock", {}))
    '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    """
    # An argument may hold the closing mark itself; inside a JSON string "<" can be written as an escape.
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False).replace(CLOSE, "\\u003c/tool_call>")
    return f"{OPEN}{body}{CLOSE}"


def parse(text: str) -> list[ToolCall | BadCall]:
    """Every call in an assistant's turn, in order; empty when the turn calls nothing.

    >>> parse('<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    [ToolCall(name='clock', arguments={})]
    """
    found: list[ToolCall | BadCall] = []
    rest = text
    while OPEN in rest:
        body, closed, rest = rest.partition(OPEN)[2].partition(CLOSE)
        found.append(_read(body) if closed else BadCall(f"the call is not closed by {CLOSE}"))
    return found


def _read(body: str) -> ToolCall | BadCall:
    try:
        value = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        return BadCall(f"not JSON: {str(error).partition(':')[0]}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return BadCall('"arguments" must be a JSON object')
    return ToolCall(value["name"], arguments)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system prompt that tells a model which tools there are; each is {"name", "description", "parameters"}."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = '{"name": ..., "arguments": {...}}'
    return f"You can call these tools:\n{lines}\nTo call one, write {OPEN}{example}{CLOSE} and end your turn; its result follows."
