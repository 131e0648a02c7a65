"""Open a checkpoint directory that was checked: model and tokenizer, ready for use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from fathom.checkpoints.check import check_checkpoint
from fathom.checkpoints.origin import Refused
from fathom.checkpoints.runs import find_model
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.published import is_published

DTYPES = ("auto", "float32", "bfloat16", "float16")


def open_checkpoint(
    path: str | Path,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    into_fathom: bool = False,
) -> tuple[Any, Any]:
    """Model, ready for inference, and tokenizer of a model directory, a run or a comparison.

    Args:
        path: An exported directory, any Hugging Face directory, a run, or a comparison (its best arm).
        device: `cpu`, `cuda`, ...; by default cuda where there is one.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        trust_remote_code: Let transformers run Python files of the directory, for architectures that neither it nor
            Fathom knows. Those that they know never need it.
        into_fathom: Open a stock Qwen3 as `FathomForCausalLM` too, the same to the last bit; the lens needs it.
    """
    if dtype not in DTYPES:
        raise Refused(f"dtype {dtype!r}: allowed: {', '.join(DTYPES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    directory = find_model(path)
    config = check_checkpoint(directory)
    logging.disable_progress_bar()  # a second's work on a local disk, and not all standard errors are terminals
    kind = config.get("model_type")
    ours = kind == FathomConfig.model_type or is_published(config) or (into_fathom and kind == "qwen3")
    trust = {} if ours else {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
        model = (FathomForCausalLM if ours else AutoModelForCausalLM).from_pretrained(
            directory, dtype=dtype, local_files_only=True, use_safetensors=True, **trust
        )
        return model.eval().to(device), tokenizer
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        hint = "; --trust-remote-code allows it" if "trust_remote_code" in str(error) else ""
        raise Refused(f"{directory}: {' '.join(str(error).split())}{hint}") from error
