"""What a model's name stands for today: digests of its weights, its tokenizer and its chat template, from the files alone.

A run may only be resumed with the model, the tokenizer and the template it was started with; a folder or a hub id does not say whether it
still holds them. Nothing is loaded here: hashing the weights of a 135M model takes a third of a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from posttrain.core.digest import digest, file_digest
from posttrain.models.loading import resolve

WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZER = (
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
SETTINGS = "tokenizer_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def identity(source: str) -> dict[str, str]:
    """Digests of what `source` names: {"model": ..., "tokenizer": ..., "template": ...}; "none" where there is no such file.

    Of a hub id the weights are identified by its revision, which the hub derives from their content. {} when `source` is neither a folder
    nor can be found on the hub: loading it will say why.
    """
    where = resolve(source)
    if Path(where).is_dir():
        folder = Path(where)
        weights = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
        model = _files([folder / "config.json", *weights])
        return {"model": model, **_words(lambda name: folder / name if (folder / name).is_file() else None)}
    config = _hub_file(where, "config.json")
    if config is None:
        return {}
    return {"model": digest([where, config.parent.name]), **_words(lambda name: _hub_file(where, name))}


def _words(find: Callable[[str], Path | None]) -> dict[str, str]:
    """Tokenizer and template apart: the settings of a tokenizer may carry the template."""
    found = find(SETTINGS)
    settings: dict[str, Any] = json.loads(found.read_bytes()) if found else {}
    inline = settings.pop("chat_template", None)
    files = [file for name in TOKENIZER if (file := find(name)) is not None]
    templates = [file for name in TEMPLATES if (file := find(name)) is not None]
    tokenizer = digest([settings, _files(files)]) if files or found else "none"
    template = "none" if inline is None and not templates else digest([inline, _files(templates)])
    return {"tokenizer": tokenizer, "template": template}


def _files(files: Iterable[Path]) -> str:
    return digest([[file.name, file_digest(file)] for file in files if file.is_file()])


def _hub_file(repository: str, name: str) -> Path | None:
    """A file of a hub repository in the local cache, fetched if need be; None when there is none."""
    from transformers.utils.hub import cached_file  # slow import, needed only here

    try:
        found = cached_file(
            repository,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):  # no such repository, or no name of one
        return None
    return Path(found) if isinstance(found, str) else None
