"""Which GGUF files open as a model: transformers leaves out what it does not know, and Fathom then refuses the file."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fathom.checkpoints.from_gguf import require_read

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
TENSORS = ["token_embd.weight", "output_norm.weight", *(f"blk.0.{part}.weight" for part in PARTS)]


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
        ({"rope.scaling.factor": 4.0}, [], r"^llama\.rope\.scaling\.factor=4\.0: "),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, [], r"^llama\.rope\.scaling\.type='yarn': "),
        ({"attention.sliding_window": 5}, [], r"^llama\.attention\.sliding_window=5: "),
        ({"expert_count": 8}, [], r"^llama\.expert_count=8: "),
        ({"a_later_key": True}, [], r"^llama\.a_later_key=True: "),
        ({"rope.dimension_count": 4}, [], r"^llama\.rope\.dimension_count=4: .* a head of 8 channels"),
        ({}, ["rope_freqs.weight"], r"^rope_freqs\.weight: RoPE is scaled"),
        ({}, ["blk.0.attn_q.bias"], r"^blk\.0\.attn_q\.bias: not a tensor of a plain llama; open the checkpoint"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    further: Mapping[str, object], tensors: list[str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        require_read(metadata("llama", further), [*TENSORS, *tensors])
