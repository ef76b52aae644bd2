"""What an evaluation states of a renderer: the tokenizer's identity, and whether the cue lets the model think."""

from types import SimpleNamespace

import pytest
from scripted_suites import CharRenderer

from posttrain.evals.rendering import thinking, tokenizer_digest
from posttrain.models.tokenizer import build_tokenizer
from posttrain.render.renderer import ChatRenderer


@pytest.mark.parametrize(
    ("source", "cue", "expected"),
    [
        ("{{ messages }}", "<|assistant|>", "none"),
        ("{% if enable_thinking %}{% endif %}", "<|assistant|>\n", "on"),
        ("... <think> ...", "<|assistant|>\n<think>\n", "on"),
        ("... <think> ...", "<|assistant|>\n<think>\n\n</think>\n\n", "off"),
    ],
)
def test_thinking_follows_from_template_and_cue(source, cue, expected):
    renderer = CharRenderer()
    renderer.template = SimpleNamespace(source=source, layout=lambda roles, wanted: SimpleNamespace(texts=("<|user|>", cue)))
    assert thinking(renderer) == expected


def test_a_renderer_without_a_template_knows_no_thinking():
    assert (thinking(CharRenderer()), tokenizer_digest(CharRenderer())) == ("none", "chars")


def test_the_tokenizer_has_an_identity_of_its_own(toy):
    same, spoken, other = (
        toy.renderer,
        ChatRenderer(toy.tokenizer, system="Be brief."),
        ChatRenderer(build_tokenizer(["some words"] * 9, 267)),
    )
    assert tokenizer_digest(same) == tokenizer_digest(spoken) != tokenizer_digest(other)
    assert same.digest != spoken.digest
    assert thinking(same) == "none"
