"""The task sources by name."""

from __future__ import annotations

import difflib

from posttrain.core.errors import ConfigError
from posttrain.envs.arithmetic import Arithmetic
from posttrain.envs.calculator import Calculator
from posttrain.envs.countdown import Countdown
from posttrain.envs.gsm8k import GSM8K
from posttrain.envs.gym import Gym
from posttrain.envs.instruct import Instruct
from posttrain.envs.types import TaskSource
from posttrain.envs.word_problems import WordProblems

SOURCES: dict[str, type[Arithmetic | Calculator | Countdown | GSM8K | Gym | Instruct | WordProblems]] = {
    "arithmetic": Arithmetic,
    "calculator": Calculator,
    "word_problems": WordProblems,
    "instruct": Instruct,
    "countdown": Countdown,
    "gsm8k": GSM8K,
    "gym": Gym,
}


def source(name: str, **settings: object) -> TaskSource:
    """The source called `name` with its settings, e.g. source("arithmetic", high=9).

    Raises ConfigError for an unknown name or setting, with the nearest one.
    """
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(SOURCES)}"
        raise ConfigError(f"unknown task source '{name}'; {hint}")
    return SOURCES[name].load(settings)
