"""Demonstrations, text and preference pairs to Samples: the rows that are trained. Scored groups: credit.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerFast

from posttrain.core.errors import DataError
from posttrain.core.trajectory import TRAINED_OWNERS, Group, Owner, Rollout, Sample, StopReason, Tokens
from posttrain.models.tokenizer import control_id


def supervised_sample(tokens: Tokens, key: str) -> Sample:
    """A demonstration as one row: everything before the first trained token is its prompt."""
    first = next((i for i, owner in enumerate(tokens.owners) if owner in TRAINED_OWNERS), None)
    if first is None:
        raise DataError(f"row '{key}' has no assistant token to train; every row needs an assistant turn")
    first = max(first, 1)  # the very first token has nothing to be predicted from
    last = max(i for i, owner in enumerate(tokens.owners) if owner in TRAINED_OWNERS) + 1
    return Sample(Tokens(tokens.ids[:first], tokens.owners[:first]), Tokens(tokens.ids[first:last], tokens.owners[first:last]), key)


def text_sample(tokenizer: PreTrainedTokenizerFast, text: str, key: str) -> Sample:
    """Plain text as one row: every token is trained, the end of the text included. Control tokens written in the text stay text."""
    bos, eos = control_id(tokenizer, "bos"), control_id(tokenizer, "eos")
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) + ([eos] if eos is not None else [])
    first = ids.pop(0) if bos is None else bos
    if not ids:
        raise DataError(f"row '{key}' has no text to train")
    return Sample(Tokens((first,), (Owner.TEMPLATE,)), Tokens(tuple(ids), (Owner.DEMONSTRATED,) * len(ids)), key)


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference between two responses to one prompt, as the very ids that were sampled (or rendered from data).

    Example: Pair("add-2-3", prompt, chosen=Tokens((40, 2), ...), rejected=Tokens((41, 2), ...))
    """

    id: str
    prompt: Tokens
    chosen: Tokens
    rejected: Tokens

    def samples(self) -> tuple[Sample, Sample]:
        """Chosen, then rejected; both share the prompt."""
        return Sample(self.prompt, self.chosen, self.id), Sample(self.prompt, self.rejected, self.id)


Tie = Literal["drawn", "shorter"]
"""How the miner chooses among siblings with the same primary score."""


@dataclass(frozen=True, slots=True)
class Mined:
    """Pairs, and why the other groups gave none: generated = pairs + tied + incomplete."""

    pairs: tuple[Pair, ...]
    tied: int
    """All complete siblings had the same primary score."""
    incomplete: int
    """Fewer than two siblings ended their turn and were scored."""


def mine_pairs(groups: Sequence[Group], tie: Tie = "drawn") -> Mined:
    """The best against the worst complete sibling of each group.

    The discrete primary score decides; `tie` only chooses among equals, so that no continuous term creates a preference where the primary
    sees none (spec/ladder-at-100m.md H-11). "drawn" takes the first drawn and favours nothing; "shorter" prefers the shorter answer, which
    makes the rejected side systematically longer: a length preference that the task may not want. A truncated sample is no response:
    training on it with a closing token appended would teach a cut that never happened.
    """
    pairs, tied, incomplete = [], 0, 0
    for place, group in enumerate(groups):
        complete = [r for r in group.rollouts if r.trajectory.stop is StopReason.END and r.score.value is not None]
        if len(complete) < 2:
            incomplete += 1
            continue
        best = max(complete, key=lambda rollout: _quality(rollout, tie, sign=1))
        worst = min(complete, key=lambda rollout: _quality(rollout, tie, sign=-1))
        if worst.score.value == best.score.value:
            tied += 1
            continue
        pairs.append(Pair(f"{place}:{group.task.id}", best.trajectory.prompt, _response(best), _response(worst)))
    return Mined(tuple(pairs), tied, incomplete)


def _quality(rollout: Rollout, tie: Tie, sign: int) -> tuple[float, int, int]:
    """Primary score, then length if it counts, then order of drawing; `sign` lets both ends of the order prefer the first drawn."""
    value = rollout.score.value
    length = len(rollout.trajectory.ids) if tie == "shorter" else 0
    return (0.0 if value is None else value, -length, -sign * rollout.trajectory.index)


def _response(rollout: Rollout) -> Tokens:
    return rollout.trajectory.completion
