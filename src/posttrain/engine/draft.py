"""The small model behind speculative decoding: what may serve as one, how its proposals fare, and when that is an alarm."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from posttrain.core.errors import ConfigError
from posttrain.engine.decoder import config_of

ALARM_SHARE = 0.5
"""An acceptance rate below this share of its baseline is an alarm: a draft that no longer fits its engine fails silently, by being slow."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How proposals fared at one temperature.

    Example: two passes of 4 proposals; the first keeps 2 and refuses the third, the second keeps all 4. passes 2, proposed 8, judged 7
    (the fourth of the first pass was never looked at), accepted 6: rate 6/7, mean accepted length 3.
    """

    passes: int = 0
    """Passes of the model, per row."""
    proposed: int = 0
    judged: int = 0
    """Proposals that were looked at: up to and with the first refusal, and no further than the end of the completion."""
    accepted: int = 0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.passes + other.passes, self.proposed + other.proposed, self.judged + other.judged, self.accepted + other.accepted
        )

    @property
    def rate(self) -> float | None:
        """Share of the judged proposals that were kept; None before the first."""
        return self.accepted / self.judged if self.judged else None

    @property
    def mean_length(self) -> float | None:
        """Proposals kept per pass; None before the first."""
        return self.accepted / self.passes if self.passes else None

    def as_record(self) -> dict[str, float | int | None]:
        """Counts and both figures."""
        counts = {name: getattr(self, name) for name in self.__slots__}
        return {**counts, "rate": self.rate, "mean_length": self.mean_length}


def acceptance_alarm(now: Acceptance, baseline: float, share: float = ALARM_SHARE) -> str | None:
    """A sentence when the rate has fallen below `share` of the recorded baseline, else None."""
    if now.rate is None or now.rate >= share * baseline:
        return None
    return (
        f"draft acceptance is {now.rate:.4f} over {now.judged} proposals, below {share:g} x the recorded {baseline:.4f}: the draft no "
        "longer fits the model or the engine; measure it again (posttrain contract speculative MODEL) or train without it"
    )


def check_draft(
    model: nn.Module, draft: nn.Module, vocabulary: dict[str, int] | None = None, drafted: dict[str, int] | None = None
) -> None:
    """Refuse a draft that cannot speak for `model`.

    Args:
        vocabulary, drafted: token to id of both tokenizers, when they are known.

    Raises:
        ConfigError: the vocabularies differ in size or in meaning, or one of the models forgets (sliding window, recurrent layers), in
            which case a refused token cannot be taken back.
    """
    sizes = [config_of(m).get_text_config().vocab_size for m in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"the draft has {sizes[1]} tokens and the model {sizes[0]}; a draft must share the model's tokenizer")
    if vocabulary is not None and drafted is not None and vocabulary != drafted:
        pairs = sorted(vocabulary.items() ^ drafted.items(), key=lambda pair: (pair[1], pair[0]))
        token, place = pairs[0]
        raise ConfigError(
            f"the draft's tokenizer is another one: id {place} is {_said(drafted, place)} to the draft and {_said(vocabulary, place)} to "
            f"the model (first of {len(pairs)} entries that differ, {token!r}); a draft must share the model's tokenizer"
        )
    for which, m in (("model", model), ("draft", draft)):
        config = config_of(m).get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            raise ConfigError(f"the {which} has layers that forget ({', '.join(sorted(kinds))}); speculative decoding needs full attention")


def _said(vocabulary: dict[str, int], place: int) -> str:
    return next((repr(token) for token, number in vocabulary.items() if number == place), "no token")


def first_layers(model: nn.Module, layers: int) -> nn.Module:
    """A draft made of the model itself: its first `layers` blocks, its norm and its head, over the same live weights.

    Raises ConfigError when that is no proper part of the model, or its blocks are not where those of the Llama family are.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    trunk = getattr(whole, "model", None)
    blocks = getattr(trunk, "layers", None)
    if not isinstance(trunk, nn.Module) or not isinstance(blocks, nn.ModuleList):
        raise ConfigError(f"{type(whole).__name__} has no model.layers to take the first {layers} of; give a draft model instead")
    if not 1 <= layers < len(blocks):
        raise ConfigError(f"a draft of {layers} layers out of {len(blocks)} is none; choose between 1 and {len(blocks) - 1}")
    config = copy.deepcopy(config_of(whole))
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    short = _twin(trunk, layers=nn.ModuleList(list(blocks)[:layers]))
    short.config = config  # type: ignore[assignment]
    draft = _twin(whole, model=short)
    draft.config = config  # type: ignore[assignment]
    return draft


def _twin(module: nn.Module, **children: nn.Module) -> nn.Module:
    """A module over the same parameters with some children exchanged."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    return twin
