"""The cached base is only taken for what would be trained again."""

import pytest

from posttrain.envs.arithmetic import Arithmetic
from posttrain.recipes.base import TinyBase, base_key

SETTINGS, SUMS = TinyBase(), Arithmetic(ops=("+",))


@pytest.mark.parametrize(
    "change",
    [
        {"held_out_percent": 16},  # 500 lines of text might not show it, yet a held-out pair could be read
        {"prompt": "Add up {a} {op} {b}."},  # only the tokenizer sees it
        {"high": 98},
        {"ops": ("+", "-")},
    ],
)
def test_other_tasks_are_another_base(change):
    assert base_key(SETTINGS, Arithmetic(**({"ops": ("+",)} | change))) != base_key(SETTINGS, SUMS)


@pytest.mark.parametrize("change", ["lr=0.001", "lines=100", "shape.hidden=64", "vocab=300", "batch=64"])
def test_other_settings_are_another_base(change):
    assert base_key(SETTINGS.override([change]), SUMS) != base_key(SETTINGS, SUMS)


def test_what_the_base_never_sees_does_not_matter():
    assert base_key(TinyBase(), Arithmetic(ops=("+",), harder_high=300)) == base_key(SETTINGS, SUMS)
