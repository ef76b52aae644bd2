"""Episodes of several turns: what is sampled is trained, what the world says is only read."""

from __future__ import annotations

import pytest

from posttrain.core.errors import DataError, RenderError
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, StopReason
from posttrain.engine.scripted import Answer, ScriptedSampler
from posttrain.engine.types import Request
from posttrain.envs.tools import CALCULATOR, ToolLoop
from posttrain.models.tokenizer import build_tokenizer
from posttrain.render.renderer import ChatRenderer
from posttrain.render.tool_calls import ToolCall, write
from posttrain.rollout.episodes import Opening, play

CALL = write(ToolCall("calculator", {"expression": "2 + 3"}))


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(build_tokenizer(["Compute 2 + 3.", CALL, "#### 5"], 400))


def scripted(renderer: ChatRenderer, *lines: str) -> ScriptedSampler:
    """Says the next line at each turn of every episode, and closes it."""

    def script(prompt: tuple[int, ...], request: Request) -> Answer:
        ids = renderer.tokenizer.encode(lines[sampler.calls - 1], add_special_tokens=False)
        return Answer((*ids, renderer.tokenizer.convert_tokens_to_ids("<|end|>")), (-0.5,) * (len(ids) + 1))

    sampler = ScriptedSampler(script, renderer.stop_ids, version=4)
    return sampler


def opening(renderer: ChatRenderer, turns: int = 4, tokens: int = 200, calls: int = 4) -> Opening:
    task = Task("t", (Message("user", "Compute 2 + 3."),), "5")
    return Opening(task, 0, renderer.prompt(task.prompt), Sampling(max_tokens=tokens), 7, lambda _: ToolLoop((CALCULATOR,), calls), turns)


def test_a_call_is_answered_and_the_answer_ends_the_episode(renderer):
    sampler = scripted(renderer, CALL, "#### 5")
    (done,) = play(sampler, renderer, [opening(renderer)])
    assert (done.stop, done.text) == (StopReason.END, "#### 5")
    assert done.transcript == f"assistant: {CALL}\ntool: 5\nassistant: #### 5"
    said = [renderer.decode([i]) for i, owner in zip(done.ids, done.owners, strict=True) if owner is Owner.TOOL]
    assert "".join(said) == "5"


def test_the_second_turn_reads_exactly_what_was_sampled_and_said(renderer):
    sampler = scripted(renderer, CALL, "#### 5")
    start = opening(renderer)
    (done,) = play(sampler, renderer, [start])
    first, second = sampler.asked
    assert second.prompt[: len(first.prompt)] == first.prompt == start.prompt.ids
    assert start.prompt.ids + done.ids[: len(second.prompt) - len(first.prompt)] == second.prompt
    # the same conversation rendered as a whole gives the same ids: nothing was lost or doubled at the seams
    chat = [Message("user", "Compute 2 + 3."), Message("assistant", CALL), Message("tool", "5")]
    assert second.prompt == renderer.prompt(chat).ids


def test_only_sampled_tokens_are_trained_and_every_token_has_an_owner(renderer):
    (done,) = play(scripted(renderer, CALL, "#### 5"), renderer, [opening(renderer)])
    assert len(done.ids) == len(done.owners) == len(done.logps)
    trained = [logp for logp, owner in zip(done.logps, done.owners, strict=True) if owner is Owner.SAMPLED]
    assert set(trained) == {-0.5}
    assert {logp for logp, owner in zip(done.logps, done.owners, strict=True) if owner is not Owner.SAMPLED} == {0.0}
    assert done.completion.trained == len(trained) == 2 + len(renderer.tokenizer.encode(CALL)) + len(renderer.tokenizer.encode("#### 5"))


def test_turns_are_limited(renderer):
    sampler = scripted(renderer, CALL, CALL, CALL)
    (done,) = play(sampler, renderer, [opening(renderer, turns=2)])
    assert (sampler.calls, done.stop) == (2, StopReason.TURNS)
    assert done.owners[-1] is Owner.SAMPLED


def test_the_token_budget_covers_all_turns(renderer):
    one = len(renderer.tokenizer.encode(CALL)) + 1
    sampler = scripted(renderer, CALL, CALL, CALL)
    (done,) = play(sampler, renderer, [opening(renderer, tokens=one + 5)])
    assert (done.completion.trained, done.stop, done.truncated) == (one + 5, StopReason.LENGTH, True)
    (exact,) = play(scripted(renderer, CALL, CALL), renderer, [opening(renderer, tokens=one)])
    assert (exact.completion.trained, exact.stop) == (one, StopReason.LENGTH)


def test_each_turn_draws_from_its_own_stream(renderer):
    sampler = scripted(renderer, CALL, CALL, "#### 5")
    play(sampler, renderer, [opening(renderer)])
    seeds = [request.seed for request in sampler.asked]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_without_a_world_one_turn_is_the_whole_episode(renderer):
    sampler = scripted(renderer, CALL)
    task = Task("t", (Message("user", "x"),), "5")
    ticks: list[int] = []
    (done,) = play(sampler, renderer, [Opening(task, 0, renderer.prompt(task.prompt), Sampling(max_tokens=99), 7)], ticks.append)
    assert (done.stop, done.text, done.owners, done.transcript) == (StopReason.END, CALL, (), "")


def test_progress_counts_episodes(renderer):
    ticks: list[int] = []
    play(scripted(renderer, CALL, "#### 5"), renderer, [opening(renderer)] * 3, ticks.append)
    assert ticks == [3]


def test_a_reply_continues_the_template(renderer):
    before = [Message("user", "x"), Message("assistant", "y")]
    prompt, closing = renderer.prompt(before[:1]), renderer.tokenizer.convert_tokens_to_ids("<|end|>")
    said = renderer.reply(before, [Message("tool", "5"), Message("tool", "6")])
    whole = renderer.prompt([*before, Message("tool", "5"), Message("tool", "6")])
    assert prompt.ids + (*renderer.tokenizer.encode("y"), closing) + said.ids == whole.ids
    assert said.trained == 0
    assert [owner for owner in said.owners if owner is not Owner.TEMPLATE] == [Owner.TOOL, Owner.TOOL]


def test_a_reply_needs_a_turn_before_it_and_something_to_say(renderer):
    with pytest.raises(DataError, match="assistant's turn before"):
        renderer.reply([Message("user", "x")], [Message("tool", "5")])
    with pytest.raises(DataError, match="needs messages"):
        renderer.reply([Message("user", "x"), Message("assistant", "y")], [])


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = build_tokenizer(["a b c"], 300)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ '<|bos|>' }}", "{{ '<|bos|>' }}{{ messages | length }}")
    with pytest.raises(RenderError, match="only appends"):
        ChatRenderer(tokenizer).reply([Message("user", "x"), Message("assistant", "y")], [Message("tool", "5")])
