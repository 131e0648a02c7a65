"""Very small decoders, trained many at a time: strangers, and runs from one public seed.

Models of one shape train together: every parameter has a leading axis of models, so that one process trains a dozen
in the time of two. They are written as Hugging Face checkpoints (llama, qwen3 or gpt2) with a tokenizer.
"""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder."""

    family: str = "llama"  # llama | qwen3 (q/k-norm) | gpt2 (LayerNorm, learned positions, no gate)
    width: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 160
    vocab: int = 512
    tied: bool = False
    length: int = 64

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.family != "gpt2"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Run:
    """How one model trains."""

    seed: int  # of the initial weights
    tokens: Tensor  # what it reads, [N]
    order: int = 0  # seed of the batches
    lr: float = 3e-3


Parameters = dict[str, Tensor]  # name -> [models, ...]


def initial(shape: Shape, seed: int) -> Parameters:
    """The weights that a seed gives."""
    draw = torch.Generator().manual_seed(seed)
    d, kv = shape.width, shape.kv_heads * shape.head_dim

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(size, generator=draw) * std

    out = {"embed": normal(shape.vocab, d), "final_norm": torch.ones(d)}
    if shape.family == "gpt2":
        out |= {"positions": normal(shape.length, d), "final_norm_bias": torch.zeros(d)}
    if not shape.tied:
        out["head"] = normal(shape.vocab, d)
    deep = 0.02 / math.sqrt(2 * shape.layers)
    for i in range(shape.layers):
        sizes = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d), "up": (shape.ffn, d), "down": (d, shape.ffn)}
        sizes |= {"gate": (shape.ffn, d)} if shape.gated else {}
        for role, size in sizes.items():
            out[f"{i}.{role}"] = normal(*size, std=deep if role in {"o", "down"} else 0.02)
            if shape.family == "gpt2":
                out[f"{i}.{role}_bias"] = torch.zeros(size[0])
        for norm in ("attn_norm", "ffn_norm"):
            out[f"{i}.{norm}"] = torch.ones(d)
            if shape.family == "gpt2":
                out[f"{i}.{norm}_bias"] = torch.zeros(d)
        if shape.family == "qwen3":
            out |= {f"{i}.q_norm": torch.ones(shape.head_dim), f"{i}.k_norm": torch.ones(shape.head_dim)}
    return out


def _linear(x: Tensor, p: Parameters, name: str) -> Tensor:
    """x [M, n, in] through W [M, out, in]."""
    out = torch.bmm(x, p[name].transpose(1, 2))
    return out + p[f"{name}_bias"][:, None] if f"{name}_bias" in p else out


def _normed(x: Tensor, p: Parameters, name: str) -> Tensor:
    """RMSNorm, or LayerNorm where there is a shift; gains [M, d]."""
    if f"{name}_bias" in p:
        return layer_norm(x, x.shape[-1:], eps=1e-5) * p[name][:, None] + p[f"{name}_bias"][:, None]
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * p[name][:, None]


def _turned(x: Tensor, length: int) -> Tensor:
    """Rotary positions on [..., T, D], half layout."""
    half = x.shape[-1] // 2
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def logits(p: Parameters, shape: Shape, ids: Tensor) -> Tensor:
    """Next-token scores [M, rows·T, V] of ids [M, rows, T]."""
    return scores(p, shape, hidden(p, shape, ids)[-1])


def scores(p: Parameters, shape: Shape, last: Tensor) -> Tensor:
    """Next-token scores [M, rows·T, V] of the last hidden states."""
    return torch.bmm(_normed(last, p, "final_norm"), p["embed" if shape.tied else "head"].transpose(1, 2))


def hidden(p: Parameters, shape: Shape, ids: Tensor) -> list[Tensor]:
    """The embeddings and the states after each layer, [M, rows·T, d]."""
    models, rows, length = ids.shape
    x = torch.stack([table[index] for table, index in zip(p["embed"], ids, strict=True)])  # [M, rows, T, d]
    if "positions" in p:
        x = x + p["positions"][:, None, :length]
    x = x.reshape(models, rows * length, -1)
    out = [x]
    for i in range(shape.layers):
        x = x + _attention(_normed(x, p, f"{i}.attn_norm"), p, shape, i, rows, length)
        y = _normed(x, p, f"{i}.ffn_norm")
        up = _linear(y, p, f"{i}.up")
        inner = silu(_linear(y, p, f"{i}.gate")) * up if shape.gated else gelu(up, approximate="tanh")
        x = x + _linear(inner, p, f"{i}.down")
        out.append(x)
    return out


def _attention(y: Tensor, p: Parameters, shape: Shape, i: int, rows: int, length: int) -> Tensor:
    models = len(y)
    q, k, v = (
        _linear(y, p, f"{i}.{role}").reshape(models, rows, length, -1, shape.head_dim).transpose(2, 3) for role in "qkv"
    )
    if shape.family == "qwen3":
        q, k = (
            z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-5) * p[f"{i}.{n}"][:, None, None, None]
            for z, n in ((q, "q_norm"), (k, "k_norm"))
        )
    if shape.family != "gpt2":
        q, k = _turned(q, length), _turned(k, length)
    group = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    mixed = scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_causal=True)
    mixed = mixed.reshape(models, rows, shape.heads, length, -1).transpose(2, 3).reshape(models, rows * length, -1)
    return _linear(mixed, p, f"{i}.o")


@dataclass(frozen=True)
class How:
    """What differs from plain training."""

    decay: float = 0.1
    frozen: frozenset[str] = frozenset()
    loss: Callable[[Parameters, Tensor], Tensor] | None = None  # of parameters and ids [M, rows, T + 1]: [M]


def trained(
    shape: Shape,
    runs: Sequence[Run],
    steps: int,
    start: Parameters | None = None,
    rows: int = 8,
    how: How | None = None,
) -> tuple[Parameters, list[float]]:
    """Train models of one shape together with AdamW; from their seeds, or on from `start`. Returns the last losses."""
    if start is None:
        each = [initial(shape, run.seed) for run in runs]
        start = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    how = how or How()
    p = {name: value.clone().requires_grad_(name not in how.frozen) for name, value in start.items()}
    free = [value for value in p.values() if value.requires_grad]
    rates = torch.tensor([run.lr for run in runs])
    optimiser = torch.optim.AdamW(
        [
            {"params": [v for v in free if v.ndim > 2], "weight_decay": how.decay},
            {"params": [v for v in free if v.ndim <= 2], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=(0.9, 0.95),
    )
    draws = [np.random.default_rng([7, run.order]) for run in runs]
    assert len(set(rates.tolist())) == 1, "models that train together share a learning rate"
    losses: list[float] = []
    for step in range(steps):
        rate = min((step + 1) / max(1, steps // 10), 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = float(rates[0]) * rate
        ids = torch.stack([_batch(run.tokens, draw, rows, shape.length) for run, draw in zip(runs, draws, strict=True)])
        each = plain_loss(shape, p, ids) if how.loss is None else how.loss(p, ids)
        each.sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        losses = each.tolist()
    return {name: value.detach() for name, value in p.items()}, losses


def plain_loss(shape: Shape, p: Parameters, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each model, [M]."""
    found = logits(p, shape, ids[..., :-1]).flatten(0, 1)
    each = torch.nn.functional.cross_entropy(found, ids[..., 1:].flatten(), reduction="none")
    return each.reshape(len(ids), -1).mean(1)


def _batch(tokens: Tensor, draw: np.random.Generator, rows: int, length: int) -> Tensor:
    starts = draw.integers(0, len(tokens) - length - 1, rows)
    return torch.stack([tokens[s : s + length + 1] for s in starts])


LLAMA = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
}  # fmt: skip
GPT2 = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj", "attn_norm": "ln_1", "ffn_norm": "ln_2"}
ENDS = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
GPT2_ENDS = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}


def tensors_of(p: Parameters, shape: Shape, at: int) -> dict[str, Tensor]:
    """One model's tensors under their Hugging Face names."""
    own = {name: value[at].clone() for name, value in p.items()}
    out: dict[str, Tensor] = {}
    gpt2 = shape.family == "gpt2"
    for name, value in own.items():
        layer, _, role = name.rpartition(".")
        kind = "bias" if role.endswith("_bias") else "weight"
        bare = role.removesuffix("_bias")
        if not layer:
            out[f"{(GPT2_ENDS if gpt2 else ENDS)[bare]}.{kind}"] = value
        elif not gpt2:
            out[f"model.layers.{layer}.{LLAMA[bare]}.{kind}"] = value
        elif bare not in "qkv":
            out[f"transformer.h.{layer}.{GPT2[bare]}.{kind}"] = value.T.contiguous() if value.ndim == 2 else value
    if gpt2:
        for i in range(shape.layers):
            fused = torch.cat([own[f"{i}.{role}"] for role in "qkv"])
            out[f"transformer.h.{i}.attn.c_attn.weight"] = fused.T.contiguous()
            out[f"transformer.h.{i}.attn.c_attn.bias"] = torch.cat([own[f"{i}.{role}_bias"] for role in "qkv"])
    return out


def config_of(shape: Shape) -> dict[str, object]:
    """The config.json of a shape."""
    if shape.family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": shape.width, "n_layer": shape.layers,
            "n_head": shape.heads, "n_inner": shape.ffn, "vocab_size": shape.vocab, "n_positions": shape.length,
            "activation_function": "gelu_new", "tie_word_embeddings": shape.tied,
        }  # fmt: skip
    kind = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.family]
    return {
        "architectures": [kind], "model_type": shape.family, "hidden_size": shape.width, "rms_norm_eps": 1e-5,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.ffn, "vocab_size": shape.vocab, "hidden_act": "silu",
        "max_position_embeddings": shape.length, "tie_word_embeddings": shape.tied, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip


def write(path: Path, shape: Shape, tensors: dict[str, Tensor], tokenizer: Path | None) -> Path:
    """A checkpoint directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(shape)))
    if tokenizer is not None:
        (path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    return path


def texts(limit: int = 6 << 20) -> str:
    """The Python standard library, as one text."""
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts.append(text)
        total += len(text)
        if total >= limit:
            break
    return "\n".join(parts)


def tokenised(directory: Path, vocab: int) -> tuple[Tensor, Path]:
    """All text as token ids, and the tokenizer that made them; kept in a directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    file, ids = directory / f"tokenizer-{vocab}.json", directory / f"tokens-{vocab}.npy"
    if not ids.exists():
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator([texts()], trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet))
        tokenizer.save(str(file))
        np.save(ids, np.array(tokenizer.encode(texts()).ids, np.int32))
    return torch.from_numpy(np.load(ids).astype(np.int64)), file


def with_vocab(shape: Shape, vocab: int) -> Shape:
    """The same shape over another vocabulary."""
    return replace(shape, vocab=vocab)
