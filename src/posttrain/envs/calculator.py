"""Arithmetic that is hard in the head and easy with a calculator: the smallest world in which an agent has something to call."""

from __future__ import annotations

from typing import Any

from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.envs.arithmetic import Arithmetic, Op
from posttrain.envs.tools import CALCULATOR, ToolLoop, calculate
from posttrain.envs.types import Env
from posttrain.render.tool_calls import ToolCall, describe_tools, write


class Calculator(Arithmetic):
    """`a op b` over larger numbers than `Arithmetic`, with a calculator to call; the answer is the integer after '####'.

    Example of an episode: Compute 613 * 88. -> <tool_call>{"name": "calculator", ...}</tool_call> -> 53944 -> #### 53944
    """

    ops: tuple[Op, ...] = ("+", "-", "*")
    high: int = 999
    harder_low: int = 1000
    harder_high: int = 1999
    describe: bool = True
    """Put a system message in front that says which tools there are. A model that was taught the form does without."""
    calls: int = 4
    """Most calls answered in one episode."""

    @property
    def name(self) -> str:
        return "calculator"

    def env(self, task: Task) -> Env:
        """The world of one episode."""
        return ToolLoop((CALCULATOR,), self.calls)

    def demonstration(self, task: Task) -> Demonstration:
        """Call the tool, read its result, answer."""
        expression = f"{task.meta['a']} {task.meta['op']} {task.meta['b']}"
        call = write(ToolCall(CALCULATOR.name, {"expression": expression}))
        turns = (Message("assistant", call), Message("tool", calculate(expression)), Message("assistant", self.gold(task)))
        return Demonstration(task.id, (*task.prompt, *turns))

    def _task(self, a: int, b: int, op: Op) -> Task:
        task = super()._task(a, b, op)
        system = (Message("system", describe_tools([CALCULATOR.schema()])),) if self.describe else ()
        meta: dict[str, Any] = task.meta
        return Task(task.id.replace("arithmetic", self.name), (*system, *task.prompt), task.answer, meta)
