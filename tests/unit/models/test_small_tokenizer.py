"""The from-scratch tokenizer: ids written out by hand, and the same after saving and loading."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from posttrain.core.errors import ConfigError
from posttrain.models.tokenizer import SPECIALS, build_tokenizer

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "1 2"},
    {"role": "tool", "content": "ok"},
]


def test_special_tokens_are_ids_0_to_8():
    tokenizer = build_tokenizer(["some text"])
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIALS] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_golden_ids_of_the_template():
    # no merges: printable ASCII byte b has id 9 + (b - 33); the space is the 221st of the byte letters, so 9 + 220 = 229
    tokenizer = build_tokenizer([], 265)
    assert len(tokenizer) == 265
    turns = [3, 91, 6] + [4, 80, 81, 6] + [5, 25, 229, 26, 6] + [8, 87, 83, 6]
    assert tokenizer.apply_chat_template(CHAT, return_dict=False) == [1, *turns, 2]
    assert tokenizer.apply_chat_template(CHAT, return_dict=False, add_generation_prompt=True) == [1, *turns, 5]


def test_assistant_mask_covers_content_and_end():
    tokenizer = build_tokenizer([], 265)
    rendered = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert rendered["assistant_masks"] == [0] * 9 + [1, 1, 1, 1] + [0] * 5


def test_digits_are_never_merged():
    tokenizer = build_tokenizer(["12345 12345 12345"] * 50, 400)
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]


def test_every_byte_encodes_and_text_comes_back():
    tokenizer = build_tokenizer(["only a little ascii"], 300)
    text = "  Straße\t\u0000 \U0001f9ea , .\n\n don 't "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    # UTF-8 of \u00ff is c3 bf. Letters: 94 up to 126, 12 from 161 to 172, then 174 on: c3 = 195 has id 9 + 94 + 12 + 21, bf = 191 four less
    assert build_tokenizer([], 265).encode("\u00ff", add_special_tokens=False) == [136, 132]


def test_same_corpus_gives_the_same_tokenizer():
    corpus = ["the cat sat on the mat", "a cat and a hat", "that is that"]
    first, second = build_tokenizer(corpus, 280), build_tokenizer(list(corpus), 280)
    assert len(first) == 280
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_saved_and_loaded_gives_the_same_ids(tmp_path):
    tokenizer = build_tokenizer(["the cat sat on the mat"] * 3, 290)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.apply_chat_template(CHAT, return_dict=False) == tokenizer.apply_chat_template(CHAT, return_dict=False)
    text = "the cat , the mat. <|end|> 42"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert set(loaded.all_special_ids) == set(range(9))
    assert loaded.clean_up_tokenization_spaces is False


def test_unknown_role_is_refused():
    with pytest.raises(Exception, match="roles are system, user, assistant and tool"):
        build_tokenizer([], 265).apply_chat_template([{"role": "bos", "content": ""}])


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=264 .* at least 265"):
        build_tokenizer([], 264)
