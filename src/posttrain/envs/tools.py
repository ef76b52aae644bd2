"""Tools, and the world in which an assistant may call them: calls are answered, a turn without a call is the answer."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.tasks import Message
from posttrain.render.tool_calls import BadCall, ToolCall, parse

LONGEST_RESULT = 2000
"""Characters of a tool's result; what is longer is cut, and says so."""
DIGITS = 50
"""The calculator refuses numbers that are longer."""


class ToolError(Exception):
    """A tool cannot do what it was asked; its message is the result that the assistant reads."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an assistant may call.

    Example: Tool("clock", "The time of day.", {}, lambda arguments: "12:00")
    """

    name: str
    description: str
    parameters: Mapping[str, str]
    """Name and meaning of each argument; all are required texts."""
    run: Callable[[Mapping[str, str]], str]
    """From the arguments to the result. Raises ToolError."""

    def schema(self) -> dict[str, Any]:
        """What a model is told about it."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


class ToolLoop:
    """The world of one episode: an `Env` that answers every call of a turn in order.

    Args:
        tools: what may be called.
        calls: most calls answered in the episode; later ones are told that there are none left.
    """

    def __init__(self, tools: Sequence[Tool], calls: int = 16):
        self.tools = {tool.name: tool for tool in tools}
        self.left = calls

    def reply(self, text: str) -> tuple[Message, ...]:
        """One tool message per call, malformed ones included; none when the turn calls nothing."""
        return tuple(Message("tool", self._answer(call)) for call in parse(text))

    def _answer(self, call: ToolCall | BadCall) -> str:
        if self.left < 1:
            return "error: no calls left; answer now"
        self.left -= 1
        if isinstance(call, BadCall):
            return f"error: {call.problem}"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: unknown tool {call.name[:40]!r}; known: {', '.join(self.tools)}"
        if call.arguments.keys() != tool.parameters.keys() or not all(isinstance(value, str) for value in call.arguments.values()):
            return f"error: {tool.name} takes the text argument(s) {', '.join(tool.parameters) or 'none'}"
        try:
            result = tool.run(call.arguments)
        except ToolError as error:
            return f"error: {error}"
        return result if len(result) <= LONGEST_RESULT else f"{result[:LONGEST_RESULT]} [cut, {len(result)} characters]"


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression over numbers with + - * / // % and brackets. Raises ToolError.

    >>> calculate("12 * (7 + 1)")
    '96'
    """
    if len(expression) > 200:
        raise ToolError("the expression is longer than 200 characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"cannot read {expression[:40]!r} as arithmetic") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(str(error)) from None


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _small(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _small(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("not arithmetic")


def _small(value: int | float) -> int | float:
    if abs(value) >= 10**DIGITS:
        raise OverflowError(f"a number has more than {DIGITS} digits")
    return value


CALCULATOR = Tool(
    "calculator",
    "Computes an arithmetic expression.",
    {"expression": "numbers, + - * / // % and brackets"},
    lambda arguments: calculate(arguments["expression"]),
)
