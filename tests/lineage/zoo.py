"""Small random models with random gains, written by transformers and read by Fathom."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

SIZES = dict(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=160,
    vocab_size=512,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


COMMON = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=96,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
    tie_word_embeddings=False,
)
"""Of a still smaller model, of any family."""
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
    first_k_dense_replace=2,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
)
"""Of a model with latent attention."""


def tiny_config(kind: str = "llama", **changes):
    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**{**SIZES, **changes})


def randomised(model: torch.nn.Module, seed: int, gain: float = 0.3) -> torch.nn.Module:
    """Random weights with anisotropic channels and random gains, so that no invariance holds by accident."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
        parameter.data = torch.exp(gain * noise) if parameter.ndim == 1 else noise * 0.06
    return model


def taught(model: torch.nn.Module, seed: int, rank: int = 24) -> torch.nn.Module:
    """What training leaves: each matrix of a layer moved a good way along a few directions."""
    draw = torch.Generator().manual_seed(1000 + seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            out, inner = (torch.randn(size, rank, generator=draw, dtype=parameter.dtype) for size in parameter.shape)
            parameter.data += 0.06 * out @ inner.T
    return model


def build(config, seed: int, dtype: torch.dtype = torch.float64, trained: bool = False) -> torch.nn.Module:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    model = randomised(model, seed)
    model = taught(model, seed) if trained else model
    model.tie_weights()
    return model


def save(model: torch.nn.Module, path: Path, vocabulary: int | None = None) -> Path:
    model.save_pretrained(path)
    if vocabulary:
        write_tokenizer(path, vocabulary)
    return path


def edited(source: Path, target: Path, change=lambda tensors: None, **config) -> Path:
    """A copy of a checkpoint whose tensors went through `change`, in place; `config` joins its config.json."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model*.safetensors*"))
    tensors = {name: value for file in source.glob("*.safetensors") for name, value in load_file(file).items()}
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return target


def save_adapter(path: Path, tensors: dict[str, torch.Tensor] | int, **config) -> Path:
    """A LoRA adapter of rank 4 of the second layer's attention; by its width, random factors for the queries."""
    if isinstance(tensors, int):
        draw = torch.Generator().manual_seed(1)
        shapes = {"q_proj.lora_A": (4, tensors), "q_proj.lora_B": (tensors, 4)}
        tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    path.mkdir(exist_ok=True)
    names = {name: f"base_model.model.model.layers.1.self_attn.{name}.weight" for name in tensors}
    save_file({names[name]: value for name, value in tensors.items()}, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def write_tokenizer(path: Path, size: int, prefix: str = "Ġw") -> None:
    """A word-per-row byte-level tokenizer.json."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {prefix + "".join(letters[i // 26**p % 26] for p in range(3)): i for i in range(size)}
    table = {"model": {"type": "BPE", "vocab": words}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(table))


def logits(path: Path) -> torch.Tensor:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    tokens = torch.arange(2 * 24).reshape(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(tokens).logits
