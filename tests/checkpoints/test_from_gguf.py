"""Which GGUF files open as a model: transformers leaves out what it does not know, and Fathom then refuses the file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from fathom.checkpoints.from_gguf import require_read
from fathom.checkpoints.gguf_rope import write_rope
from fathom.errors import ModelError

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
TENSORS = ["token_embd.weight", "output_norm.weight", *(f"blk.0.{part}.weight" for part in PARTS)]

LLAMA3 = np.array([1.0, 1.0, 2.6945300102233887, 8.0], np.float32)
"""What llama.cpp's converter writes for a Llama 3.1 with heads of 8 channels."""


def metadata(kind: str, further: Mapping[str, object]) -> dict[str, object]:
    """A file's, as llama.cpp's converter writes it."""
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    own = {**sizes, **heads, "rope.freq_base": 1e4, "vocab_size": 97, "rope.dimension_count": 8, **further}
    return {"general.architecture": kind, "general.file_type": 1, **{f"{kind}.{key}": one for key, one in own.items()}}


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 64},
        {"attention.sliding_window": 64, "expert_count": 0, "attention.key_length": 8, "attention.value_length": 8},
    ],
)
def test_what_says_nothing_is_let_through(further: Mapping[str, object]) -> None:
    assert require_read(metadata("llama", further), [*TENSORS, "output.weight"]) == {}


def test_each_architecture_has_its_tensors_and_qwen3_its_width_of_heads() -> None:
    assert require_read(metadata("qwen2", {}), [*TENSORS, "blk.0.attn_k.bias"]) == {}
    wide = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    assert require_read(metadata("qwen3", wide), [*TENSORS, "blk.0.attn_k_norm.weight"]) == {"head_dim": 16}


@pytest.mark.parametrize(
    ("further", "tensors", "says"),
    [
        ({"rope.scaling.factor": 0.5}, [], r"^rope\.scaling\.factor=0\.5: .* at least 1; open the checkpoint"),
        ({"rope.scaling.type": "longrope"}, [], r"^llama\.rope\.scaling\.type='longrope': "),
        ({"rope.scaling.yarn_beta_fast": 16.0}, [], r"^llama\.rope\.scaling\.yarn_beta_fast=16\.0: "),
        ({"rope.scaling.type": "none", "rope.scaling.attn_factor": 2.0}, [], r"^llama\.rope\.scaling\.attn_factor="),
        ({"attention.sliding_window": 5}, [], r"^llama\.attention\.sliding_window=5: "),
        ({"expert_count": 8}, [], r"^llama\.expert_count=8: "),
        ({"a_later_key": True}, [], r"^llama\.a_later_key=True: "),
        ({"rope.dimension_count": 4}, [], r"^llama\.rope\.dimension_count=4: .* a head of 8 channels"),
        ({}, ["rope_factors_long.weight"], r"^rope_factors_long\.weight: not a tensor of a plain llama"),
        ({}, ["blk.0.attn_q.bias"], r"^blk\.0\.attn_q\.bias: not a tensor of a plain llama; open the checkpoint"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    further: Mapping[str, object], tensors: list[str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        require_read(metadata("llama", further), [*TENSORS, *tensors])


@pytest.mark.parametrize(
    ("further", "wanted"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 2.5, "finetuned": True}, {"rope_type": "linear", "factor": 2.5}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 32.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaled_rope_is_translated(further: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    keys = {key if "." in key else f"rope.scaling.{key}": value for key, value in further.items()}
    assert require_read(metadata("qwen2", keys), TENSORS) == {"rope_parameters": {"rope_theta": 1e4, **wanted}}


def test_only_llama_3s_factors_are_translated() -> None:
    """The converter writes them in float32, and no parameters from which they were made."""
    given, tensors = metadata("llama", {"rope.freq_base": 5e5}), [*TENSORS, "rope_freqs.weight"]
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted = {"rope_parameters": {**rope, "original_max_position_embeddings": 8192}}
    assert require_read(given, tensors, LLAMA3) == wanted
    says = r"^rope_freqs\.weight: RoPE is scaled by these factors, which are not .*; open the checkpoint"
    for factors in (LLAMA3 * np.array([1, 1, 1.001, 1], np.float32), LLAMA3[1:], LLAMA3[:0], LLAMA3 * np.nan):
        with pytest.raises(ValueError, match=says):
            require_read(given, tensors, factors)
    with pytest.raises(ValueError, match=says):
        require_read({**given, "llama.rope.scaling.factor": 2.0}, tensors, LLAMA3)
    with pytest.raises(ValueError, match=r"^rope_freqs\.weight: not a tensor of a plain qwen2"):
        require_read(metadata("qwen2", {}), tensors, LLAMA3)


@pytest.mark.parametrize("change", [{"beta_fast": 16}, {"attention_factor": 1.0}, {"rope_type": "dynamic"}])
def test_rope_that_a_file_cannot_hold_is_not_written(change: Mapping[str, object]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
    assert write_rope({**yarn, "beta_fast": 32, "truncate": True}, 8) == write_rope(yarn, 8)
    with pytest.raises(ModelError, match="cannot write RoPE with"):
        write_rope({**yarn, **change}, 8)
