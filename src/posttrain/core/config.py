"""Base of every config: frozen, no unknown keys, errors that name the nearest key, and a record of which keys were read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from posttrain.core.errors import ConfigError


class Config(BaseModel):
    """A frozen settings record. Class defaults are the vetted setting; `load` turns any mistake into one readable line."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    _read: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name in type(self).__pydantic_fields__:
            private = object.__getattribute__(self, "__pydantic_private__")
            if private is not None:
                private["_read"].add(name)
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        """Same class, same field values; which fields have been read is no part of a setting's identity."""
        return type(self) is type(other) and object.__getattribute__(self, "__dict__") == object.__getattribute__(other, "__dict__")

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(str(value) for value in object.__getattribute__(self, "__dict__").values())))

    @classmethod
    def load(cls, data: Mapping[str, Any] | str) -> Self:
        """Validate `data`; raises ConfigError naming the field, the value and the remedy. A choice may be given by its name."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None

    def override(self, assignments: Sequence[str]) -> Self:
        """Apply dotted `key=value` assignments (values are YAML), e.g. `["grpo.optim.lr=3e-5", "sft.epochs=2"]`."""
        data = self.model_dump(mode="json")
        for assignment in assignments:
            key, separator, text = assignment.partition("=")
            if not separator or not key:
                raise ConfigError(f"'{assignment}' is not an assignment; write key=value, e.g. seed=1")
            _assign(type(self), data, key.strip(), _scalar(text))
        return type(self).load(data)

    def unread(self, prefix: str = "") -> list[str]:
        """Dotted names of fields that nothing has read: settings that had no effect on this run."""
        read = object.__getattribute__(self, "__pydantic_private__")["_read"]
        names = []
        for name in type(self).__pydantic_fields__:
            value = object.__getattribute__(self, "__dict__")[name]
            if name not in read:
                names.append(prefix + name)
            elif isinstance(value, Config):
                names += value.unread(f"{prefix}{name}.")
        return names


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, bool) and text.strip().lower() not in ("true", "false"):  # YAML 1.1 reads off as false; a switch accepts the word
        return text.strip()
    if isinstance(value, str):  # YAML 1.1 reads 3e-5 as a string
        try:
            return float(value)
        except ValueError:
            return value
    return value


def field_names(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted field names reachable from a config class."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        for nested in (field.annotation, *get_args(field.annotation)):  # an optional part (`LoRA | None`) has settings too
            if isinstance(nested, type) and issubclass(nested, BaseModel):
                yield from field_names(nested, f"{prefix}{name}.")


def _assign(cls: type[BaseModel], data: dict[str, Any], key: str, value: Any) -> None:
    known = list(field_names(cls))
    if key not in known:
        raise ConfigError(f"unknown key '{key}'{_nearest(key, known)}")
    *parents, leaf = key.split(".")
    for parent in parents:
        held = data.get(parent)
        data[parent] = {"kind": held} if isinstance(held, str) else held or {}  # a choice may have been written by its name alone
        data = data[parent]
    if leaf == "kind":
        data.clear()  # another choice has other settings
    data[leaf] = value


def _nearest(key: str, known: Sequence[str]) -> str:
    parent, _, leaf = key.rpartition(".")
    beside = [name for name in known if name.rpartition(".")[0] == parent]
    misspelt = difflib.get_close_matches(key, beside, n=1, cutoff=0.8)  # one letter off, in the right place
    if misspelt:
        return f"; did you mean '{misspelt[0]}'?"
    same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == leaf]  # the right leaf under the wrong parent is the common slip
    close = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0) or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(known[:12])}"


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = list(field_names(cls))
        parts = [str(part) for part in first["loc"]]
        plain = ".".join([*parts[:-2], parts[-1]])
        if key not in names and plain in names:  # the place before last is the choice that was made
            return f"{plain}: {parts[-3]}={parts[-2]} has no '{parts[-1]}'; another {parts[-3]} has"
        return f"unknown key '{key}'{_nearest(key, list(field_names(cls)))}"
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    shown = f" = {first['input']!r}" if key and not isinstance(first["input"], dict) else ""
    return f"{key}{shown}: {message}{more}" if key else f"{message}{more}"
