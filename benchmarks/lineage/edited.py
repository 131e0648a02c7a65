"""Models made from others without training: quantised, pruned, merged, cut, stitched together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints import Checkpoint, in_layers, layer_of, matrix, renumbered, seeded

GROUP = 32
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")


def quantised(model: Checkpoint, bits: int) -> Checkpoint:
    """Round to nearest in groups of 32 along the input, layer matrices only; 8 bits means int8, 4 means int4."""
    top = 2 ** (bits - 1) - 1

    def rounded(name: str, weight: Tensor) -> Tensor:
        if not matrix(name, weight):
            return weight
        groups = weight.reshape(-1, GROUP)
        scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-12) / top
        return ((groups / scale).round().clamp(-top, top) * scale).reshape(weight.shape)

    return model.map(rounded)


def float8(model: Checkpoint) -> Checkpoint:
    """There and back through E4M3 with one scale a matrix."""

    def rounded(name: str, weight: Tensor) -> Tensor:
        if not matrix(name, weight):
            return weight
        scale = weight.abs().max() / 448
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale

    return model.map(rounded)


def sparse(model: Checkpoint, share: float) -> Checkpoint:
    """Magnitude pruning: the smallest `share` of every layer matrix becomes zero."""

    def pruned(name: str, weight: Tensor) -> Tensor:
        if not matrix(name, weight):
            return weight
        return torch.where(
            weight.abs() > weight.abs().flatten().kthvalue(int(share * weight.numel())).values, weight, 0.0
        )

    return model.map(pruned)


def two_of_four(model: Checkpoint) -> Checkpoint:
    """2:4 sparsity: of every four inputs the two largest stay."""

    def pruned(name: str, weight: Tensor) -> Tensor:
        if not matrix(name, weight):
            return weight
        fours = weight.reshape(-1, 4)
        kept = torch.zeros_like(fours).scatter_(1, fours.abs().topk(2, 1).indices, 1.0)
        return (fours * kept).reshape(weight.shape)

    return model.map(pruned)


def kept_layers(model: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """Some layers, in this order; a layer may come twice."""
    tensors = {name: tensor for name, tensor in model.tensors.items() if not in_layers(name)}
    for new, old in enumerate(layers):
        tensors |= {renumbered(n, new): t for n, t in model.tensors.items() if in_layers(n) and layer_of(n) == old}
    config = {**model.config, "num_hidden_layers": len(layers)}
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][old] for old in layers]
    return Checkpoint(config, tensors, model.tokenizer)


def kept_channels(model: Checkpoint, width: int) -> Checkpoint:
    """Width pruning: the residual channels with the largest embedding norm, in their old order."""
    norms = model.tensors["model.embed_tokens.weight"].abs().sum(0)
    kept = norms.topk(width).indices.sort().values

    def cut(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return tensor
        if tensor.ndim == 1:
            return tensor[kept]
        return tensor[:, kept] if any(reader in name for reader in READERS) else tensor[kept]

    out = model.map(cut)
    out.config["hidden_size"] = width
    return out


def kept_neurons(model: Checkpoint, share: float) -> Checkpoint:
    """Feed-forward pruning: the neurons with the largest ‖up‖·‖down‖."""
    count = int(share * model.config["intermediate_size"])
    out = Checkpoint({**model.config, "intermediate_size": count}, dict(model.tensors), model.tokenizer)
    for index in range(model.layers):
        names = {role: f"model.layers.{index}.mlp.{role}_proj.weight" for role in ("gate", "up", "down")}
        size = model.tensors[names["up"]].norm(dim=1) * model.tensors[names["down"]].norm(dim=0)
        kept = size.topk(count).indices.sort().values
        for role, name in names.items():
            out.tensors[name] = model.tensors[name][:, kept] if role == "down" else model.tensors[name][kept]
    return out


def padded_neurons(model: Checkpoint, share: float) -> Checkpoint:
    """Zero neurons behind the others, as where a quantiser wants widths that are multiples of its group."""
    more = int(share * model.config["intermediate_size"])

    def wider(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            return torch.cat([tensor, tensor.new_zeros(more, tensor.shape[1])])
        return (
            torch.cat([tensor, tensor.new_zeros(len(tensor), more)], 1) if name.endswith("down_proj.weight") else tensor
        )

    out = model.map(wider)
    out.config["intermediate_size"] += more
    return out


def stored_head(model: Checkpoint) -> Checkpoint:
    """A tied model that stores its embedding a second time, as the head."""
    tensors = model.tensors | {"lm_head.weight": model.tensors["model.embed_tokens.weight"].clone()}
    return Checkpoint(dict(model.config), tensors, model.tokenizer)


def kept_heads(model: Checkpoint, kv_heads: int) -> Checkpoint:
    """Head pruning: the first `kv_heads` key heads and the query heads that meet them."""
    dim, group = model.config["head_dim"], model.config["num_attention_heads"] // model.config["num_key_value_heads"]
    rows = {"q_proj": kv_heads * group * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}

    def cut(name: str, tensor: Tensor) -> Tensor:
        role = name.split(".")[-2]
        if role in rows:
            return tensor[: rows[role]]
        return tensor[:, : rows["q_proj"]] if role == "o_proj" else tensor

    out = model.map(cut)
    out.config |= {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    return out


def pooled_keys(model: Checkpoint, kv_heads: int) -> Checkpoint:
    """Fewer key heads by averaging neighbours: MHA to GQA."""
    dim = model.config["head_dim"]

    def pooled(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            return tensor.reshape(kv_heads, -1, dim, tensor.shape[1]).mean(1).reshape(-1, tensor.shape[1])
        return tensor

    out = model.map(pooled)
    out.config["num_key_value_heads"] = kv_heads
    return out


def merged(models: Sequence[Checkpoint], shares: Sequence[float]) -> Checkpoint:
    """A weighted mean of models of one shape."""
    return models[0].map(lambda name, _: sum(s * m.tensors[name] for s, m in zip(shares, models, strict=True)))  # type: ignore[misc]


def stitched(host: Checkpoint, donor: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """A model with some layers of another."""
    taken = {n: t for n, t in donor.tensors.items() if in_layers(n) and layer_of(n) in layers}
    return Checkpoint(dict(host.config), {**host.tensors, **taken}, host.tokenizer)


def transplanted(host: Checkpoint, donor: Checkpoint, part: str) -> Checkpoint:
    """A model with all tensors of another whose names contain `part`."""
    return host.map(lambda name, tensor: donor.tensors[name] if part in name else tensor)


def new_embedding(model: Checkpoint, seed: int) -> Checkpoint:
    """Embedding and head drawn anew, as a replaced tokenizer leaves them."""
    draw = seeded(seed)

    def drawn(name: str, tensor: Tensor) -> Tensor:
        if in_layers(name) or tensor.ndim < 2:
            return tensor
        return torch.randn(tensor.shape, generator=draw) * tensor.std()

    return model.map(drawn)


def noised(model: Checkpoint, size: float, seed: int) -> Checkpoint:
    """Gaussian noise of `size` times each matrix's own standard deviation."""
    draw = seeded(seed)

    def moved(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        return tensor + size * tensor.std() * torch.randn(tensor.shape, generator=draw)

    return model.map(moved)


def reward_model(model: Checkpoint, seed: int) -> Checkpoint:
    """The output head replaced by one scalar."""
    tensors = {name: tensor for name, tensor in model.tensors.items() if name != "lm_head.weight"}
    tensors["score.weight"] = torch.randn(1, model.config["hidden_size"], generator=seeded(seed)) * 0.02
    return Checkpoint(dict(model.config), tensors, model.tokenizer)


def with_ids_shuffled(model: Checkpoint, seed: int, path: Path) -> None:
    """The same strings at other rows: embedding, head and tokenizer.json reordered alike. Writes the directory."""
    order = torch.randperm(model.config["vocab_size"], generator=seeded(seed))
    place = torch.argsort(order).tolist()  # old row -> new row
    table: dict[str, Any] = json.loads(model.tokenizer.read_text(encoding="utf-8"))
    table["model"]["vocab"] = {piece: place[row] for piece, row in table["model"]["vocab"].items()}
    for added in table.get("added_tokens", []):
        added["id"] = place[added["id"]]
    changed = path.with_name(f".{path.name}.json")
    changed.write_text(json.dumps(table), encoding="utf-8")
    edited = model.map(lambda name, tensor: tensor if in_layers(name) or tensor.ndim < 2 else tensor[order])
    Checkpoint(edited.config, edited.tensors, changed).write(path)
    changed.unlink()
