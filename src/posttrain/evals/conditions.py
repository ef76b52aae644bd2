"""Everything besides the model that a score depends on, stated in full: a number without it is not a measurement.

There are no defaults. A field that is missing, empty or of the wrong type cannot be built, whether in Python or from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.core.sampling import Sampling

Mode = Literal["greedy", "sampled"]
MODES: tuple[Mode, ...] = get_args(Mode)
Thinking = Literal["on", "off", "none"]
"""Whether the prompt lets the model think before it answers; "none" for templates that know no thinking."""

_LEAST = {"n_items": 1, "samples_per_item": 1, "seed": 0, "turns": 1}
_OTHER = frozenset({*_LEAST, "sampling", "thinking"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What was asked, how it was decoded, read and judged.

    Example: Conditions(suite="arithmetic", dataset="arithmetic", split="held_out", split_digest="51d0...", items_digest="9f2c...",
        n_items=500, samples_per_item=4, sampling=Sampling(max_tokens=24), thinking="none", extractor="hash/1", verifier="hash-marker/1",
        template_digest="77ab...", tokenizer_digest="02c4...", seed=0, turns=1)
    """

    suite: str
    """Name of the measurement; part of the seed of every sample."""
    dataset: str
    split: str
    """Which part of the dataset the items come from; "given" when the caller handed them over and did not say."""
    split_digest: str
    """Identity of what the items were drawn from: the dataset with its settings, and the split."""
    items_digest: str
    """Identity of the items themselves, in order: ids, prompts, answers."""
    n_items: int
    samples_per_item: int
    sampling: Sampling
    """Temperature, top-p, top-k, min-p, and the cap on a completion's tokens."""
    thinking: Thinking
    extractor: str
    """Version of the rule that finds the answer in a completion."""
    verifier: str
    """Version of the rule that judges it."""
    template_digest: str
    """Identity of template, tokenizer and system prompt together: equal digests give equal prompts."""
    tokenizer_digest: str
    seed: int
    turns: int
    """Most assistant turns of an episode."""

    def __post_init__(self) -> None:
        where = f"evaluation '{self.suite}'"
        if not isinstance(self.sampling, Sampling):
            raise EvidenceError(f"{where} does not state its sampling; a score means nothing without it")
        if self.thinking not in get_args(Thinking):
            raise EvidenceError(f"{where}: thinking is {self.thinking!r}; say on, off or none")
        for name in (field.name for field in fields(self) if field.name not in _OTHER):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise EvidenceError(f"{where} does not state its {name} ({value!r}); a score means nothing without it")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise EvidenceError(f"{where}: {name} is {value!r}; it must be a whole number from {least} up")

    @property
    def mode(self) -> Mode:
        """Decoding mode: a comparison is valid within one only."""
        return "greedy" if self.sampling.greedy else "sampled"

    @property
    def digest(self) -> str:
        """Identity of the conditions."""
        return digest(self.flat())

    def flat(self) -> dict[str, Any]:
        """Field names to plain values, sampling fields dotted."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sampling"}
        return plain | {f"sampling.{name}": value for name, value in self.sampling.model_dump(mode="json").items()}

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; the mode is spelled out for readers without this code."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"sampling": {"mode": self.mode, **self.sampling.model_dump(mode="json")}}

    @classmethod
    def from_json(cls, data: Any) -> Conditions:
        """The conditions that `to_json` wrote; EvidenceError names the field that is missing, unknown, of the wrong type or false."""
        if not isinstance(data, Mapping) or not isinstance(data.get("sampling"), Mapping):
            raise EvidenceError("its conditions are missing or no mapping; evaluate again")
        given = dict(data)
        decoding = dict(given.pop("sampling"))
        mode = decoding.pop("mode", None)
        names = {field.name for field in fields(cls)} - {"sampling"}
        if wrong := sorted(names ^ given.keys()):
            raise EvidenceError(f"its conditions {'lack' if wrong[0] in names else 'have an unknown field'} '{wrong[0]}'; evaluate again")
        if lacking := sorted(Sampling.model_fields.keys() - decoding.keys()):
            raise EvidenceError(f"its conditions lack 'sampling.{lacking[0]}'; evaluate again")
        try:
            made = cls(sampling=Sampling.load(decoding), **given)
        except ConfigError as error:
            raise EvidenceError(f"its sampling is malformed ({error}); evaluate again") from None
        if mode != made.mode:
            raise EvidenceError(f"its decoding mode says {mode!r}, but temperature {made.sampling.temperature:g} is {made.mode}")
        return made


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that two evaluations do not share. Example: Difference("sampling.temperature", 0.0, 1.0)"""

    name: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.name} is {self.a!r} against {self.b!r}"


def differences(a: Conditions, b: Conditions, ignore: frozenset[str] = frozenset()) -> list[Difference]:
    """Every field in which two conditions differ, in the order of the fields."""
    theirs = b.flat()
    pairs = ((name, value, theirs[name]) for name, value in a.flat().items() if name not in ignore)
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]
