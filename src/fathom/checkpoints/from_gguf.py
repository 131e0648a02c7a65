"""A GGUF file opened as a Fathom model: llama.cpp's Llama, Qwen2 or Qwen3, with quantised weights unpacked.

`gguf.py` reads the tensors of a GGUF file for `fathom lineage`, and `to_gguf.py` writes one.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fathom.checkpoints.families import FAMILIES, to_ours
from fathom.errors import ModelError, to_install
from fathom.models import FathomConfig, FathomForCausalLM

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def open_gguf(path: Path, dtype: str = "auto", **changes: object) -> tuple[FathomForCausalLM, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file.

    Args:
        path: FILE.gguf.
        dtype: `auto` and `float32` use float32, which represents every quantised weight exactly; or another dtype.
        changes: Keys of the configuration, such as `mixer`.
    """
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    try:
        stock: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=wanted, local_files_only=True, **_unpacked()
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError:
        raise ModelError(f"{path}: reading GGUF needs gguf and accelerate: {to_install('gguf')}") from None
    except (ValueError, OSError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from error
    # What transformers notes for itself is no key of a config.json.
    theirs = {key: value for key, value in stock.config.to_dict().items() if not key.startswith("_")}
    kind = theirs.get("model_type")
    if kind not in FAMILIES or FAMILIES[kind].rules:
        raise ModelError(f"{path} is a {kind} model; of GGUF files, Fathom opens only llama, qwen2 and qwen3")
    theirs.pop("quantization_config", None)
    config = FathomConfig.from_dict(to_ours(FAMILIES[kind], theirs), **changes)
    warnings.warn(f"{path.name}: its weights are unpacked to {str(wanted).removeprefix('torch.')}", stacklevel=2)
    model = FathomForCausalLM.from_pretrained(None, config=config, state_dict=stock.state_dict(), dtype=wanted)
    model.generation_config = stock.generation_config
    return model, tokenizer


def _unpacked() -> dict[str, object]:
    """The argument that makes transformers dequantise weights; empty for versions of transformers that always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
