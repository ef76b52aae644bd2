"""Digests of a model's files: weights, tokenizer and chat template apart, by content and not by name."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from posttrain.models import identity as identities
from posttrain.models.identity import identity
from posttrain.models.loading import save


@pytest.fixture
def folder(toy, tmp_path):
    save(toy.model(265), toy.tokenizer, tmp_path / "a")
    return tmp_path / "a"


def changed(folder, before) -> list[str]:
    now = identity(str(folder))
    assert now.keys() == before.keys()
    return [name for name in now if now[name] != before[name]]


def test_a_copy_elsewhere_is_the_same_and_a_digest_is_short(folder, tmp_path):
    found = identity(str(folder))
    assert sorted(found) == ["model", "template", "tokenizer"]
    assert all(len(value) == 16 for value in found.values())
    assert identity(str(shutil.copytree(folder, tmp_path / "b"))) == found


def test_each_file_moves_its_own_digest_only(folder):
    before = identity(str(folder))
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert changed(folder, before) == ["model"]
    weights.write_bytes(content)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text + " ")
    assert changed(folder, before) == ["template"]
    template.write_text(text)
    words = folder / "tokenizer.json"
    words.write_text(words.read_text().replace("<|end|>", "<|fin|>"))
    assert changed(folder, before) == ["tokenizer"]


def test_a_template_inside_the_tokenizers_settings_is_the_template(folder):
    settings = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink()
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | {"chat_template": "a"}))
    before = identity(str(folder))
    settings.write_text(json.dumps(content | {"chat_template": "b"}))
    assert changed(folder, before) == ["template"]
    settings.write_text(json.dumps(content | {"chat_template": "a", "padding_side": "left"}))
    assert changed(folder, before) == ["tokenizer"]


def test_a_model_without_template_or_tokenizer_says_so(folder):
    for name in os.listdir(folder):
        if name.startswith(("tokenizer", "special", "chat")):
            (folder / name).unlink()
    found = identity(str(folder))
    assert (found["tokenizer"], found["template"]) == ("none", "none")


def test_of_a_hub_id_the_revision_stands_for_the_weights(folder, tmp_path, monkeypatch):
    snapshots = {name: shutil.copytree(folder, tmp_path / "snapshots" / name) for name in ("1111", "2222")}
    found = []
    for snapshot in snapshots.values():
        monkeypatch.setattr(identities, "_hub_file", lambda _, name, at=snapshot: at / name if (at / name).is_file() else None)
        found.append(identity("somebody/model"))
    local = identity(str(folder))
    assert found[0]["model"] != found[1]["model"]
    assert [(one["tokenizer"], one["template"]) for one in found] == [(local["tokenizer"], local["template"])] * 2


@pytest.mark.parametrize("source", ["nobody/nothing-of-the-kind", "/no/such/folder", "nothing here"])
def test_what_cannot_be_found_has_no_identity(source, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert identity(source) == {}
