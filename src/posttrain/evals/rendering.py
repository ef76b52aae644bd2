"""What an evaluation has to know of a renderer: whose words it speaks, and whether it lets the model think."""

from __future__ import annotations

import re
from typing import Any

from posttrain.core.digest import digest
from posttrain.evals.conditions import Thinking
from posttrain.render.types import Renderer

_KNOWS_THINKING = re.compile(r"enable_thinking|<think>")
_THOUGHT_IS_OVER = re.compile(r"</think>\s*\Z")


def tokenizer_digest(renderer: Renderer) -> str:
    """Identity of the tokenizer alone, from everything that it would save; of a renderer without one, the identity of the renderer."""
    backend: Any = getattr(getattr(renderer, "tokenizer", None), "backend_tokenizer", None)
    return digest(backend.to_str()) if backend is not None else renderer.digest


def thinking(renderer: Renderer) -> Thinking:
    """Whether the template's cue leaves room to think: "off" when it closes an empty thought, "none" when it knows of no thoughts.

    Example: a cue that ends in "<think>\\n\\n</think>\\n\\n" is "off"; a template that mentions <think> and leaves the cue open is "on".
    """
    template: Any = getattr(renderer, "template", None)
    if template is None:
        return "none"
    cue = template.layout(("user",), True).texts[-1]
    if _THOUGHT_IS_OVER.search(cue):
        return "off"
    return "on" if _KNOWS_THINKING.search(template.source) else "none"
