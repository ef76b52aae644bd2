"""Preflight of words: chat template, tokenizer, and the mask of what is trained. Nothing is computed with the model.

What is trained and what is drawn has to go through one way of writing conversations; a mask has to hold what the assistant said and nothing
else. Both are tried on real conversations, and read back from the ids, so that an error in how owners are assigned shows.
Sources: spec/faults.md 40-50; F10, F12, P5, P23, P25 of the catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.core.digest import digest
from posttrain.core.errors import PosttrainError, RenderError
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.core.trajectory import TRAINED_OWNERS, Owner, RewardStatus, Sample, Tokens
from posttrain.core.verdicts import Check
from posttrain.engine.batch import Batch
from posttrain.render.audit import audit
from posttrain.render.renderer import WRITERS, ChatRenderer
from posttrain.rewards.types import Grader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAIN = (
    (Message("user", "What is 2 + 3?"), Message("assistant", "It is 5.")),
    (
        Message("user", "What is 2 + 3?"),
        Message("assistant", "It is 5."),
        Message("user", "And twice that?"),
        Message("assistant", "It is 10."),
    ),
)
WITH_SYSTEM = (Message("system", "Be brief."), Message("user", "Say yes."), Message("assistant", "Yes."))
WITH_TOOL = (
    Message("user", "What is 17 * 23?"),
    Message("assistant", "I ask the calculator."),
    Message("tool", "17 * 23 = 391"),
    Message("assistant", "It is 391."),
)
SHOWN = 3
"""Examples that a detail names."""


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation and the tokens it became.

    Example: Row((Message("user", "hi"), Message("assistant", "hello")), renderer.conversation(...))
    """

    messages: tuple[Message, ...]
    tokens: Tokens


def rendered_rows(renderer: ChatRenderer, more: Sequence[Demonstration] = ()) -> list[Row]:
    """Probe conversations as rows to train; those with a system or a tool turn only where the template has a place for it."""
    rows = [Row(chat, renderer.conversation(chat)) for chat in (*PLAIN, *(shown.messages for shown in more))]
    for chat in (WITH_SYSTEM, WITH_TOOL):
        try:
            rows.append(Row(chat, renderer.conversation(chat)))
        except RenderError:  # the template knows no such role; a run that needs it is refused when it renders its own rows
            continue
    return rows


def template_check(tokenizer: PreTrainedTokenizerFast, renderer: ChatRenderer, saved: ChatRenderer) -> Check:
    """The template writes every turn once, continues its own prompt, and is still the same after saving.

    Args:
        saved: a renderer of the tokenizer as it was saved and loaded again: what evaluation and serving will use.
    """
    name, ids = "template", ("F12", "P25")
    found, remedy = audit(tokenizer), "use a template that prints content as it is and only ever appends"
    if not found.has_template or not found.stop_ids:
        return Check(name, False, None, None, found.problems[0], remedy, ids)
    try:
        prompt, response = renderer.split(PLAIN[1])
        whole = renderer.conversation(PLAIN[1])
    except PosttrainError as error:
        return Check(name, False, None, None, str(error), remedy, ids)
    if (prompt + response).ids != whole.ids:
        return Check(name, False, None, None, "prompt and answer together are not the conversation", remedy, ids)
    if saved.digest != renderer.digest or saved.conversation(PLAIN[1]).ids != whole.ids:
        detail = f"after saving and loading the same messages become other ids (template {renderer.digest}, then {saved.digest})"
        return Check(name, False, saved.digest, renderer.digest, detail, "save the tokenizer with its chat template", ids)
    if not found.ids_match or not found.prefix_preserved:
        return Check(
            name, None, renderer.digest, None, "; ".join(found.problems), "see posttrain's own rendering, and what a server sends", ids
        )
    detail = f"prompt and answer are the conversation, also after saving; template {renderer.digest}, rendered {rendered_digest(renderer)}"
    return Check(name, True, renderer.digest, None, detail, remedy, ids)


def rendered_digest(renderer: ChatRenderer) -> str:
    """Digest of the text that the template makes of a fixed conversation, with its cue: differs when anything that it writes differs."""
    chat = PLAIN[1][:-1]
    return digest(renderer.template.render([turn.role for turn in chat], [turn.content for turn in chat], True))


def tokenizer_check(tokenizer: PreTrainedTokenizerFast, renderer: ChatRenderer, embeddings: int) -> Check:
    """Special tokens are what they should be, and the model has a row for every id.

    Args:
        embeddings: rows of the model's input embedding.
    """
    problems = []
    if len(tokenizer) > embeddings:
        problems.append(f"the tokenizer has {len(tokenizer)} ids and the model {embeddings} embeddings")
    if not renderer.stop_ids:
        problems.append("no token closes an assistant's turn")
    ids = renderer.prompt(PLAIN[0][:1]).ids
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == (bos, bos):
        problems.append("a prompt begins with two bos tokens")
    forged = renderer.conversation((Message("user", f"say {tokenizer.eos_token or '</s>'}"), PLAIN[0][1]))
    if any(index in renderer.control_ids and owner is Owner.USER for index, owner in zip(forged.ids, forged.owners, strict=True)):
        problems.append("a user can write control tokens")
    same = tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id
    note = "; pad is eos, and padding goes by position" if same else ""
    detail = "; ".join(problems) or f"{len(tokenizer)} ids, {embeddings} embeddings, turns end with {sorted(renderer.stop_ids)}{note}"
    return Check(
        "tokenizer", not problems, len(tokenizer), embeddings, detail, "load the tokenizer that belongs to this model", ("S79", "F9", "P25")
    )


def mask_check(rows: Sequence[Row], renderer: ChatRenderer) -> Check:
    """What is trained reads, turn by turn, as what the assistant said, with a closing token at each end; nothing else is trained."""
    problems, trained, total = [], 0, 0
    for number, row in enumerate(rows):
        trained, total = trained + row.tokens.trained, total + len(row.tokens)
        said = [message.content.strip() for message in row.messages if message.role == "assistant"]
        runs = spans(row.tokens, lambda owner: owner in TRAINED_OWNERS)
        read = [renderer.decode(run).strip() for run in runs]
        if read != said:
            problems.append(f"row {number}: trained text {read!r}, the assistant said {said!r}")
        elif open_end := [run for run in runs if run[-1] not in renderer.stop_ids]:
            problems.append(f"row {number}: a trained turn ends with token {open_end[0][-1]}, which closes no turn")
        problems += [f"row {number}: {problem}" for problem in _not_theirs(row, renderer)]
    detail = "; ".join(problems[:SHOWN]) or f"{trained} of {total} tokens of {len(rows)} conversations are trained: what the assistant said"
    remedy = "train only tokens that the assistant wrote: see how the renderer assigns owners"
    return Check("mask", not problems, trained, None, detail, remedy, ("F10", "P5", "P23"))


def _not_theirs(row: Row, renderer: ChatRenderer) -> list[str]:
    """Turns of others whose text is not owned by them."""
    problems = []
    for role, owner in WRITERS.items():
        said = [message.content.strip() for message in row.messages if message.role == role and message.content.strip()]
        read = [renderer.decode(run).strip() for run in spans(row.tokens, lambda found, owner=owner: found is owner)]
        if said and read != said:
            problems.append(f"{role} text {said!r} is owned as {read!r}")
    return problems


def spans(tokens: Tokens, holds: Callable[[Owner], bool]) -> list[tuple[int, ...]]:
    """Runs of neighbouring ids whose owners hold. Example: owners U U T S S T S, holds = sampled: two runs of 2 and 1 ids."""
    runs: list[list[int]] = []
    inside = False
    for index, owner in zip(tokens.ids, tokens.owners, strict=True):
        if holds(owner):
            if not inside:
                runs.append([])
            runs[-1].append(index)
        inside = holds(owner)
    return [tuple(run) for run in runs]


def packing_check(samples: Sequence[Sample], batches: Sequence[Batch]) -> Check:
    """Every trained token of every row is one target, in order, and read from a slot of its own row; padding is none.

    A row that was cut before its closing token counts like any other: as many targets as it has trained tokens.
    """
    problems, targets = [], 0
    wanted = sum(sample.tokens.trained for sample in samples)
    seen: set[int] = set()
    for batch in batches:
        targets += len(batch.target_N)
        if int(batch.mask_BT.sum()) != len(batch.target_N):
            problems.append(f"the mask holds {int(batch.mask_BT.sum())} tokens and the batch predicts {len(batch.target_N)}")
        if bool((batch.document_RW.flatten()[batch.source_N] < 0).any()):
            problems.append("a target is predicted from a padding slot")
        for b, place in enumerate(batch.sample_B):
            seen.add(place)
            tokens = samples[place].tokens
            expected = [i for i, owner in zip(tokens.ids, tokens.owners, strict=True) if owner in TRAINED_OWNERS]
            slots = batch.slot_BT[b][batch.slot_BT[b] >= 0]
            if (found := batch.target_N[slots].tolist()) != expected:
                problems.append(f"row '{samples[place].group}' trains {len(found)} tokens, not its own {len(expected)}")
    if seen != set(range(len(samples))):
        problems.append(f"{len(samples) - len(seen)} of {len(samples)} rows are in no batch")
    if targets != wanted:
        problems.append(f"{targets} targets for {wanted} trained tokens")
    detail = (
        "; ".join(problems[:SHOWN]) or f"{targets} targets = {wanted} trained tokens of {len(samples)} rows, one of them cut before its end"
    )
    return Check("packing", not problems, targets, wanted, detail, "mask by position, not by token id", ("P5",))


def answer_check(tasks: Sequence[Task], gold: Callable[[Task], str], grader: Grader, renderer: ChatRenderer) -> Check:
    """The gold answer, written as a training row and read back as a completion is, gets full marks."""
    lost = []
    for task in tasks:
        _, response = renderer.split((*task.prompt, Message("assistant", gold(task))))
        (said, *_) = spans(response, lambda owner: owner in TRAINED_OWNERS)
        judged = grader(task, renderer.decode(said))
        if judged.status is not RewardStatus.SCORED or judged.value != 1.0:
            lost.append(f"'{task.id}' is {judged.status.value}, {judged.value}")
    detail = "; ".join(lost[:SHOWN]) or f"{len(tasks)} gold answers, rendered and decoded, score 1"
    return Check("answers", not lost, len(lost), 0, detail, "make prompt, answer form and grader agree", ("P33", "S58"))
