"""Chat templates that behave like well-known ones, on a byte tokenizer without merges (byte b of ASCII text has id b - 24)."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from posttrain.models.tokenizer import build_tokenizer

IM_START, IM_END, HEADER, HEADER_END, EOT = range(265, 270)
MARKERS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes a default system prompt, as SmolLM2 and Qwen2 do."""

HEADERS = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
"""Trims content, as Llama 3 does."""

THINKING = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Drops the thinking of earlier answers, as Qwen3 does."""


def text_ids(text: str) -> tuple[int, ...]:
    """Ids of ASCII text: '!' is byte 33 and id 9; the space and the line break come after all printable bytes (ids 229 and 207)."""
    return tuple({" ": 229, "\n": 207}.get(letter, ord(letter) - 24) for letter in text)


def byte_tokenizer(template: str | None, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """The merge-free tokenizer with the five markers above as ids 265 to 269; pad is the same token as eos."""
    tokenizer = build_tokenizer([], 265)
    tokenizer.add_tokens(MARKERS, special_tokens=True)
    tokenizer.eos_token = tokenizer.pad_token = eos
    tokenizer.chat_template = template  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer
