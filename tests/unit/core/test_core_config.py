"""Settings: one readable line for every mistake, typed overrides, and a record of what was read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, ValidationError

from posttrain.core.config import Config, field_names
from posttrain.core.errors import ConfigError


class Inner(Config):
    lr: float = Field(default=1e-3, gt=0)
    steps: int = Field(default=5, ge=1)


class Outer(Config):
    seed: int = 0
    name: str = "a"
    sft: Inner = Inner()
    grpo: Inner = Inner(lr=1e-4)


def test_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown key 'sft\.stepz'; did you mean 'sft\.steps'\?"):
        Outer().override(["sft.stepz=3"])
    with pytest.raises(ConfigError, match=r"unknown key 'sed'; did you mean 'seed'\?"):
        Outer.load({"sed": 1})


def test_right_leaf_under_the_wrong_parent():
    with pytest.raises(ConfigError, match=r"did you mean 'sft\.lr'\?"):
        Outer().override(["preference_stage_of_the_run.lr=1"])


def test_hopeless_key_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'; known keys: seed, name, sft"):
        Outer().override(["zzz=1"])


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("seed=7", lambda c: c.seed == 7),
        ("sft.lr=3e-5", lambda c: c.sft.lr == 3e-5),
        ("name=b c", lambda c: c.name == "b c"),
        ("grpo.steps=9", lambda c: c.grpo.steps == 9),
    ],
)
def test_overrides_are_typed(assignment, read):
    changed = Outer().override([assignment])
    assert read(changed)
    assert changed.sft.steps == 5


def test_later_overrides_win_and_the_original_stays():
    base = Outer()
    assert base.override(["seed=1", "seed=2"]).seed == 2
    assert base.seed == 0


@pytest.mark.parametrize("assignment", ["seed", "=3", ""])
def test_not_an_assignment(assignment):
    with pytest.raises(ConfigError, match="is not an assignment; write key=value"):
        Outer().override([assignment])


@pytest.mark.parametrize(
    ("assignment", "message"),
    [("sft.lr=0", r"sft\.lr = 0: .*greater than 0"), ("sft.steps=two", r"sft\.steps = 'two'"), ("seed=1.5", r"seed = 1\.5")],
)
def test_bad_value_is_shown_with_its_key(assignment, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Outer().override([assignment])
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_counted():
    with pytest.raises(ConfigError, match=r"\(and 1 more\)"):
        Inner.load({"lr": -1, "steps": 0})


def test_frozen():
    with pytest.raises(ValidationError):
        Outer().seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_unread_keys_are_named_with_their_path():
    settings = Outer()
    assert settings.unread() == ["seed", "name", "sft", "grpo"]
    assert settings.seed == 0
    assert settings.sft.lr == 1e-3
    assert settings.unread() == ["name", "sft.steps", "grpo"]


def test_equality_and_hash_ignore_what_was_read():
    one, other = Outer(), Outer()
    assert one.sft.lr == 1e-3
    assert one == other
    assert hash(one) == hash(other)
    assert one != Outer(seed=1)
    assert Inner() != Outer()
    assert len({Inner(), Inner(lr=2.0), Inner()}) == 2  # pyright: ignore[reportUnhashable]


def test_field_names_reach_nested_settings():
    assert list(field_names(Outer)) == ["seed", "name", "sft", "sft.lr", "sft.steps", "grpo", "grpo.lr", "grpo.steps"]


def test_dump_and_load_round_trip():
    changed = Outer().override(["grpo.lr=0.5", "seed=3"])
    assert Outer.load(changed.model_dump(mode="json")) == changed


def _named(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class Circle(Config):
    kind: Literal["circle"] = "circle"
    radius: float = Field(default=1.0, gt=0)


class Box(Config):
    kind: Literal["box"] = "box"
    width: float = 2.0
    height: float = 3.0


class Drawing(Config):
    shape: Annotated[Circle | Box, BeforeValidator(_named), Field(discriminator="kind")] = Circle()
    colour: str = "red"


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["shape.radius=4"], Circle(radius=4.0)),
        (["shape=box"], Box()),
        (["shape.kind=box"], Box()),
        (["shape=box", "shape.width=5"], Box(width=5.0)),  # a choice written by its name takes settings of its own afterwards
        (["shape.kind=box", "shape.height=7"], Box(height=7.0)),
        (["shape.radius=4", "shape=box"], Box()),  # another choice has other settings: those of the old one go
        (["shape.radius=4", "shape.kind=box"], Box()),
        (["shape=box", "shape.width=5", "shape=circle"], Circle()),
    ],
)
def test_a_choice_is_overridden_by_name_and_by_setting(assignments, expected):
    changed = Drawing().override(assignments)
    assert changed.shape == expected
    assert changed.colour == "red"


def test_a_setting_of_another_choice_is_refused_with_its_name():
    with pytest.raises(ConfigError, match=r"^shape\.width: shape=circle has no 'width'; another shape has$"):
        Drawing().override(["shape.width=5"])
    with pytest.raises(ConfigError, match=r"unknown key 'shape\.edge'; did you mean"):
        Drawing().override(["shape.edge=5"])
    with pytest.raises(ConfigError, match=r"unknown key 'shape\.widht'; did you mean 'shape\.width'"):
        Drawing().override(["shape.widht=5"])
    with pytest.raises(ConfigError, match="'ball'"):
        Drawing().override(["shape=ball"])


def test_fields_of_every_choice_are_known():
    assert set(field_names(Drawing)) == {"shape", "shape.kind", "shape.radius", "shape.width", "shape.height", "colour"}


def test_a_choice_survives_dump_and_load():
    changed = Drawing().override(["shape=box", "shape.width=5"])
    assert Drawing.load(changed.model_dump(mode="json")) == changed


class Switched(Config):
    policy: Literal["stop", "off"] = "stop"
    active: bool = True


def test_a_word_that_yaml_takes_for_a_boolean_stays_a_word_where_one_is_wanted():
    changed = Switched().override(["policy=off", "active=off"])
    assert (changed.policy, changed.active) == ("off", False)
    assert Switched(active=False).override(["active=yes"]).active is True
    with pytest.raises(ConfigError, match="policy = False"):
        Switched().override(["policy=false"])
