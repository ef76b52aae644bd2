"""A small byte-level tokenizer with a chat template, for models trained from nothing.

Turn markers are atomic from the start: they are reserved when the tokenizer is trained, so each is one id and none can be written with
ordinary text. Source: spec/ladder-at-100m.md H-1..H-3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from posttrain.core.errors import ConfigError

SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool_call|>", "<|tool_result|>")
"""Ids 0 to 8. <|end|> ends a turn, <|eos|> a conversation."""
BYTES = 256
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ '<|tool_result|>' }}"
    "{% elif message['role'] in ['system', 'user', 'assistant'] %}{{ '<|' + message['role'] + '|>' }}"
    "{% else %}{{ raise_exception('roles are system, user, assistant and tool') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|eos|>' }}{% endif %}"
)
"""No line breaks between turns: the markers separate them."""


def control_id(tokenizer: PreTrainedTokenizerFast, name: Literal["bos", "eos", "pad"]) -> int | None:
    """Id of a named control token, None when the tokenizer has none."""
    found = getattr(tokenizer, f"{name}_token_id")
    return found if isinstance(found, int) else None


def build_tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on `corpus`: any text encodes and decodes to itself, and each digit is a token of its own.

    `vocab_size` counts the 9 special tokens, the 256 bytes and the merges; a corpus with fewer pairs to merge gives a smaller vocabulary,
    so size models by `len(tokenizer)`. The same corpus gives the same tokenizer. Raises ConfigError if `vocab_size` is below 265.
    """
    smallest = len(SPECIALS) + BYTES
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size={vocab_size} cannot hold {len(SPECIALS)} special tokens and {BYTES} bytes; use at least {smallest}")
    tokenizer = Tokenizer(BPE())
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIALS[3:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
