"""Scaled RoPE in a GGUF file: `to_gguf.py` writes it, and `from_gguf.py` reads it.

llama.cpp computes the same as transformers for three types of RoPE:

- `linear`: `rope.scaling.factor` divides all frequencies.
- `yarn`: the file has its factor and original context. Everything else must be transformers' default, as in llama.cpp.
- `llama3`, of a `llama`: the file has no parameters, but a tensor whose entries divide the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fathom.checkpoints.tensors import Array
from fathom.errors import ModelError

FACTORS = "rope_freqs.weight"
"""The tensor by whose entries llama.cpp divides the frequencies."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of Llama 3.1 to 3.3, beside the factor. llama.cpp's converter knows no other original context."""
FIXED = {
    **{"attention_factor": None, "beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None},
    **{"truncate": True, "partial_rotary_factor": 1.0},
}
"""Parameters that a file does not have, with the values that llama.cpp uses: YaRN's and the rotated part of a head."""


def read_rope(given: Mapping[str, Any], head_dim: int, factors: Array | None) -> dict[str, object] | None:
    """The `rope_parameters` of a file with scaled RoPE; None if RoPE is not scaled. Raises a `ValueError` if
    transformers cannot compute the same.

    Args:
        given: The metadata, without the architecture in the keys.
        head_dim: The width of a head.
        factors: The tensor `rope_freqs.weight`, if the file has it.
    """
    kind = given.get("rope.scaling.type", "linear")
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 0.0)) or 1.0
    if not (isinstance(factor, int | float) and 1 <= factor < math.inf):
        raise ValueError(f"rope.scaling.factor={factor!r:.40}: a scaling factor is at least 1")
    theta = given.get("rope.freq_base", 10000.0)
    if factors is not None:
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max(initial=1.0)), **LLAMA3}
        theirs = llama3_factors(rope, head_dim)
        if factor != 1 or factors.shape != theirs.shape or not np.allclose(factors, theirs, rtol=1e-5, atol=0):
            raise ValueError(f"{FACTORS}: RoPE is scaled by these factors, which are not those of Llama 3.1 to 3.3")
        return rope
    if kind == "none" or factor == 1:
        return None
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        context = given.get("rope.scaling.original_context_length") or given["context_length"]
        rope["original_max_position_embeddings"] = context
    return rope


def write_rope(rope: Mapping[str, Any], head_dim: int) -> tuple[dict[str, str | int | float], Array | None]:
    """The metadata and the tensor `rope_freqs.weight` from which `read_rope` reads these `rope_parameters`. Raises a
    `ModelError` if there are none."""
    kind = rope["rope_type"]
    given: dict[str, str | int | float] = {"rope.freq_base": float(rope["rope_theta"])}
    if kind in ("linear", "yarn"):
        given |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"] or 0.0)}
    if kind == "yarn":
        given["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    factors = llama3_factors(rope, head_dim) if kind == "llama3" else None
    meant = {key: value for key, value in rope.items() if key not in FIXED or value != FIXED[key]}
    try:
        read = read_rope(given, head_dim, factors) or {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    except ValueError:
        read = {}
    if read != meant:
        only = "plain, linear, Llama 3's, and YaRN's with its default parameters"
        raise ModelError(f"`form=gguf` cannot write RoPE with {dict(rope)}, only {only}")
    return given, factors


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Array:
    """The numbers by which RoPE of type `llama3` divides the frequencies of a head."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (unscaled + (1 - unscaled) / rope["factor"])).astype(np.float32)
