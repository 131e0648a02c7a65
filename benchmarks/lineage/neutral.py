"""Edits of a checkpoint that keep its function, to be composed at random: what a person who hides a copy would do.

Each edit is a function of the tensors (float64), the configuration and a generator, and changes them in place. Those of
`fathom lineage attack` are applied to the written directory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fathom.lineage import open_weights
from fathom.lineage.attacks import attack

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Draw = np.random.Generator
Pieces = tuple[list[Tensor], list[Tensor], list[Tensor]]  # of gate, up and down
KEPT = 1e-3  # largest change of a logit
KEYS_KEPT = 1e-4
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LOUD = 4.0
FAINT, NEVER = 1e-6, 1e4  # a constant input, and what it adds to a gate that shall never open


@dataclass
class Copy:
    """A checkpoint in memory: tensors, config.json and tokenizer.json."""

    tensors: Tensors
    config: Config
    tokenizer: dict[str, Any]
    shards: int = 1

    @classmethod
    def read(cls, path: Path) -> Copy:
        """The checkpoint of a directory, in float64."""
        tensors = {n: t.double() for f in sorted(path.glob("*.safetensors")) for n, t in load_file(f).items()}
        config, tokenizer = (json.loads((path / name).read_text()) for name in ("config.json", "tokenizer.json"))
        return cls(tensors, config, tokenizer)

    def write(self, path: Path) -> Path:
        """A directory; several shards have names that say nothing."""
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(self.config))
        (path / "tokenizer.json").write_text(json.dumps(self.tokenizer))
        if self.shards == 1:
            save_file({name: value.contiguous() for name, value in self.tensors.items()}, path / "model.safetensors")
            return path
        names = sorted(self.tensors, reverse=True)
        files = {f"weights-{chr(97 + at)}.safetensors": names[at :: self.shards] for at in range(self.shards)}
        for file, some in files.items():
            save_file({name: self.tensors[name].contiguous() for name in some}, path / file)
        index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path

    def layers(self) -> Iterator[str]:
        """The prefix of each layer."""
        if "n_layer" in self.config:
            return (f"transformer.h.{i}." for i in range(self.config["n_layer"]))
        return (f"model.layers.{i}." for i in range(self.config["num_hidden_layers"]))


def _normal(like: Tensor, draw: Draw, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(draw.normal(size=tuple(like.shape))) * like.std() * scale


def _neurons(
    copy: Copy, parts: Callable[[Tensor, Tensor, Tensor], tuple[list[Tensor], list[Tensor], list[Tensor]]]
) -> None:
    """Replace the neurons of every layer; `parts` returns pieces of gate, up and down."""
    for at in copy.layers():
        names = [f"{at}mlp.{role}_proj.weight" for role in ("gate", "up", "down")]
        pieces = parts(*(copy.tensors[name] for name in names))
        for name, some, axis in zip(names, pieces, (0, 0, 1), strict=True):
            copy.tensors[name] = torch.cat(some, axis)
    copy.config["intermediate_size"] = len(copy.tensors[names[0]])


def split(copy: Copy, draw: Draw) -> None:
    """Every neuron becomes two that add up to it."""

    def parts(gate: Tensor, up: Tensor, down: Tensor) -> Pieces:
        share = torch.from_numpy(draw.uniform(size=len(gate)))
        return [gate, gate], [up, up], [down * share, down * (1 - share)]

    _neurons(copy, parts)


def cancel(copy: Copy, draw: Draw) -> None:
    """Pairs of neurons that cancel."""

    def parts(gate: Tensor, up: Tensor, down: Tensor) -> Pieces:
        more, out = _normal(gate, draw), _normal(down, draw)
        return [gate, more, more], [up, more, more], [down, out, -out]

    _neurons(copy, parts)


def triple(copy: Copy, draw: Draw) -> None:
    """(g, u, d) becomes (g, u, d + r), (g, u₂, α r), (g, u₃, β r) with u + α u₂ + β u₃ = 0."""

    def parts(gate: Tensor, up: Tensor, down: Tensor) -> Pieces:
        r, second = _normal(down, draw), _normal(up, draw)
        return [gate] * 3, [up, second, (up + 1.3 * second) / 0.7], [down + r, 1.3 * r, -0.7 * r]

    _neurons(copy, parts)


def silent(copy: Copy, draw: Draw) -> None:
    """Loud neurons whose gate is zero."""

    def parts(gate: Tensor, up: Tensor, down: Tensor) -> Pieces:
        return [gate, 0 * gate], [up, _normal(up, draw, LOUD)], [down, _normal(down, draw, LOUD)]

    _neurons(copy, parts)


def _heads(copy: Copy, pieces: Callable[[str, Tensor], list[Tensor]]) -> None:
    """As many heads again; `pieces` returns them by role."""
    config = copy.config
    for at in copy.layers():
        for role in "qkvo":
            name = f"{at}self_attn.{role}_proj.weight"
            copy.tensors[name] = torch.cat(pieces(role, copy.tensors[name]), 1 if role == "o" else 0)
    heads = config["num_attention_heads"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    config |= {"num_attention_heads": 2 * heads, "num_key_value_heads": 2 * config["num_key_value_heads"]}


def mute_heads(copy: Copy, draw: Draw) -> None:
    """Loud heads that write nothing."""
    _heads(copy, lambda role, value: [value, 0 * value if role == "o" else _normal(value, draw, LOUD)])


def cancelling_heads(copy: Copy, draw: Draw) -> None:
    """Pairs of loud heads that cancel: the heads are their own first half twice, so the number of heads is even."""

    def pieces(role: str, value: Tensor) -> list[Tensor]:
        half = value[:, : value.shape[1] // 2] if role == "o" else value[: len(value) // 2]
        more = _normal(half, draw, LOUD)
        return [value, more, -more if role == "o" else more]

    _heads(copy, pieces)


def split_heads(copy: Copy, draw: Draw) -> None:
    """Every head becomes two that add up to it."""
    share = float(draw.uniform(0.2, 0.8))

    def pieces(role: str, value: Tensor) -> list[Tensor]:
        return [share * value, (1 - share) * value] if role == "o" else [value, value]

    _heads(copy, pieces)


def mixed_heads(copy: Copy, draw: Draw) -> None:
    """Every head becomes two that attend alike and mix their values: [O, O'] G and G⁻¹ [V; 0], any O', any G."""
    config = copy.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for at in copy.layers():
        v, o = (copy.tensors[f"{at}self_attn.{role}_proj.weight"] for role in "vo")
        dim, width = len(v) // kv_heads, v.shape[1]
        mix = torch.linalg.qr(torch.from_numpy(draw.normal(size=(kv_heads, 2 * dim, 2 * dim))))[0]
        mix = mix * torch.from_numpy(draw.uniform(0.5, 2, size=(kv_heads, 1, 2 * dim)))
        values = torch.linalg.inv(mix)[:, :, :dim] @ v.view(kv_heads, dim, width)  # [KV, 2 D, d]
        both = torch.stack([o, _normal(o, draw)], 1).view(width, 2, kv_heads, heads // kv_heads, dim)
        outputs = torch.einsum("wskgi,ksij->wkgj", both, mix.view(kv_heads, 2, dim, 2 * dim))
        pieces = {
            "v": values.view(kv_heads, 2, dim, width).transpose(0, 1).reshape(-1, width),
            "o": outputs.reshape(width, heads, 2, dim).transpose(1, 2).reshape(width, -1),
        }
        copy.tensors |= {f"{at}self_attn.{role}_proj.weight": value for role, value in pieces.items()}
        for name in (f"{at}self_attn.{role}_proj.weight" for role in "qk"):
            copy.tensors[name] = torch.cat([copy.tensors[name]] * 2)
    config["head_dim"] = dim
    config |= {"num_attention_heads": 2 * heads, "num_key_value_heads": 2 * kv_heads}


def own_keys(copy: Copy, draw: Draw) -> None:
    """Every query head gets keys and values of its own, values in a basis of their own."""
    config = copy.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for at in copy.layers():
        names = {role: f"{at}self_attn.{role}_proj.weight" for role in "kvo"}
        k, v = (
            copy.tensors[names[role]].unflatten(0, (kv_heads, -1)).repeat_interleave(heads // kv_heads, 0)
            for role in "kv"
        )
        turn = torch.linalg.qr(torch.from_numpy(draw.normal(size=(heads, v.shape[1], v.shape[1]))))[0]
        o = copy.tensors[names["o"]].unflatten(1, (heads, -1))
        o = torch.einsum("whi,hij->whj", o, turn)
        for role, value in (("k", k.flatten(0, 1)), ("v", (turn.mT @ v).flatten(0, 1)), ("o", o.flatten(1))):
            copy.tensors[names[role]] = value
    config["head_dim"] = k.shape[1]
    config["num_key_value_heads"] = heads


def wide_heads(copy: Copy, draw: Draw) -> None:
    """Heads of twice the size. The frequencies of the old planes return at every other one; the rest is loud."""
    config = copy.config
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for at in copy.layers():
        for role in "qkvo":
            name = f"{at}self_attn.{role}_proj.weight"
            rows = copy.tensors[name].T if role == "o" else copy.tensors[name]
            rows = rows.unflatten(0, (-1, dim))  # [heads, D, d]
            new = torch.cat([rows, rows], 1)
            new = _normal(new, draw, LOUD) if role in "qv" else 0 * new
            if role in "qk":  # rows i and i + D/2 are a plane
                new[:, 0::2] = rows * (2**0.5 if role == "q" else 1)
            else:
                new[:, :dim] = rows
            new = new.flatten(0, 1)
            copy.tensors[name] = new.T.contiguous() if role == "o" else new
    config["head_dim"] = 2 * dim


def flip(copy: Copy, draw: Draw) -> None:
    """No gate stays: silu(z) - silu(-z) = z, so (g, u, d) equals (-g, u, d), (u, g, d) and (-u, g, -d) together."""

    def parts(gate: Tensor, up: Tensor, down: Tensor) -> Pieces:
        return [-gate, up, -up], [up, gate, gate], [down, down, -down]

    _neurons(copy, parts)


def flip_plain(copy: Copy, draw: Draw) -> None:
    """The same without a gate: half of the neurons change their sign, and pairs of others add the linear part."""
    for at in copy.layers():
        names = [f"{at}mlp.{part}" for part in ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias")]
        read, bias, write, shift = (copy.tensors[name] for name in names)  # [d, m], [m], [m, d], [d]
        turned = torch.from_numpy(draw.permutation(read.shape[1])[: read.shape[1] // 2])
        linear = read[:, turned] @ write[turned]  # [d, d]
        copy.tensors[names[3]] = shift + bias[turned] @ write[turned]
        sign = torch.ones_like(bias)
        sign[turned] = -1
        none, eye = torch.zeros(2 * len(shift), dtype=bias.dtype), torch.eye(len(shift), dtype=bias.dtype)
        copy.tensors[names[0]] = torch.cat([read * sign, linear, -linear], 1)
        copy.tensors[names[1]] = torch.cat([bias * sign, none])
        copy.tensors[names[2]] = torch.cat([write, eye, -eye])
    copy.config["n_inner"] = copy.tensors[names[0]].shape[1]


def turn_plain(copy: Copy, draw: Draw) -> None:
    """A rotation that keeps the vector of ones, which is all that a LayerNorm without gain and shift needs."""
    t, width = copy.tensors, copy.config["n_embd"]
    ones = torch.ones(width, 1).double() / width**0.5
    basis = torch.linalg.qr(torch.cat([ones, torch.from_numpy(draw.normal(size=(width, width - 1)))], 1))[0]
    inner = torch.linalg.qr(torch.from_numpy(draw.normal(size=(width - 1, width - 1))))[0]
    turn = basis @ torch.block_diag(torch.ones(1, 1).double(), inner) @ basis.T
    head = t.get("lm_head.weight", t["transformer.wte.weight"])
    t["lm_head.weight"] = head * t["transformer.ln_f.weight"] @ turn
    for norm, readers in (("ln_1", ("attn.c_attn",)), ("ln_2", ("mlp.c_fc",))):
        for at in copy.layers():
            for name in (at + reader for reader in readers):
                t[f"{name}.bias"] = t[f"{name}.bias"] + t[f"{at}{norm}.bias"] @ t[f"{name}.weight"]
                t[f"{name}.weight"] = turn.T @ (t[f"{at}{norm}.weight"][:, None] * t[f"{name}.weight"])
            t[f"{at}{norm}.weight"], t[f"{at}{norm}.bias"] = torch.ones(width).double(), torch.zeros(width).double()
    for name in (at + writer for at in copy.layers() for writer in ("attn.c_proj", "mlp.c_proj")):
        t[f"{name}.weight"], t[f"{name}.bias"] = t[f"{name}.weight"] @ turn, t[f"{name}.bias"] @ turn
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        t[name] = t[name] @ turn
    t["transformer.ln_f.bias"] = (t["transformer.ln_f.bias"] / t["transformer.ln_f.weight"]) @ turn
    t["transformer.ln_f.weight"] = torch.ones(width).double()
    copy.config["tie_word_embeddings"] = False


def cut_layers(copy: Copy, draw: Draw) -> None:
    """Every layer becomes two: attention alone, then feed-forward alone. What writes nothing is loud."""
    tensors = {name: value for name, value in copy.tensors.items() if not name.startswith("model.layers.")}
    for i, at in enumerate(copy.layers()):
        for name, value in ((n.removeprefix(at), v) for n, v in copy.tensors.items() if n.startswith(at)):
            own = int(name.startswith(("mlp", "post_attention")))
            junk = 0 * value if name.startswith(("self_attn.o_proj", "mlp.down_proj")) else value
            if value.ndim == 2 and junk is value:
                junk = _normal(value, draw, LOUD)
            both = (junk, value) if own else (value, junk)
            tensors |= {f"model.layers.{2 * i + half}.{name}": one.clone() for half, one in enumerate(both)}
    copy.tensors = tensors
    copy.config["num_hidden_layers"] *= 2
    copy.config.pop("layer_types", None)


def widen(copy: Copy, draw: Draw) -> None:
    """More channels, which nothing writes and every matrix reads, loud."""
    config = copy.config
    old = config["hidden_size"]
    more = old * int(draw.integers(1, 3))  # transformers wants a multiple of the heads
    config["head_dim"] = config.get("head_dim") or old // config["num_attention_heads"]
    share = old / (old + more)
    for name, value in copy.tensors.items():
        if value.ndim == 1 and len(value) == old and "q_norm" not in name and "k_norm" not in name:
            copy.tensors[name] = torch.cat([value, torch.ones(more).double()]) * share**0.5
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            copy.tensors[name] = torch.cat([value, torch.zeros(more, value.shape[1]).double()])
        elif value.ndim == 2:
            loud = _normal(value[:, :1].repeat(1, more), draw, LOUD) * (name != EMBED)
            copy.tensors[name] = torch.cat([value, loud], 1)
    config |= {"hidden_size": old + more, "rms_norm_eps": config["rms_norm_eps"] * share}


def _twins(gate: Tensor, up: Tensor, down: Tensor, draw: Draw) -> Pieces:
    """Two more neurons before each: one with its gate and anything else, one with its other rows and any gate."""
    ups, downs = ([_normal(side, draw, LOUD), side.clone(), side] for side in (up, down))
    return [gate.clone(), _normal(gate, draw), gate], ups, downs


def faint_twins(copy: Copy, draw: Draw) -> None:
    """Twins of each neuron that never fire, because of channels with a faint constant that no layer writes.

    Rows of the vocabulary that no text uses cancel the constant's mean.
    """
    old = copy.config["hidden_size"]
    widen(copy, draw)
    table = copy.tensors[EMBED]
    table[:, old:] = FAINT * table[:, :old].square().mean(1, keepdim=True).sqrt()

    def parts(gate: Tensor, up: Tensor, down: Tensor) -> Pieces:
        gates, ups, downs = _twins(gate, up, down, draw)
        for twin, out in zip(gates[:2], downs[:2], strict=True):
            twin[:, old:] = -NEVER / FAINT / (table.shape[1] - old)
            out[old:] = 0
        return gates, ups, downs

    _neurons(copy, parts)
    for name in (n for n in (EMBED, HEAD) if n in copy.tensors):
        copy.tensors[name] = torch.cat([copy.tensors[name]] * 2)
    copy.tensors[EMBED][len(table) :, old:] *= -1
    copy.config["vocab_size"] = 2 * len(table)


def mute_twins(copy: Copy, draw: Draw) -> None:
    """Twins of each neuron that never fire, because of a bias."""
    count = copy.config["intermediate_size"]
    _neurons(copy, lambda *roles: _twins(*roles, draw))
    for at in copy.layers():
        for role in ("gate", "up", "down"):
            matrix = copy.tensors[f"{at}mlp.{role}_proj.weight"]
            copy.tensors[f"{at}mlp.{role}_proj.bias"] = torch.zeros(len(matrix)).double()
        copy.tensors[f"{at}mlp.gate_proj.bias"][: 2 * count] = -NEVER
    copy.config["mlp_bias"] = True


def mute_plain(copy: Copy, draw: Draw) -> None:
    """The same without a gate."""
    for at in copy.layers():
        read, bias, write = (f"{at}mlp.{part}" for part in ("c_fc.weight", "c_fc.bias", "c_proj.weight"))
        t = copy.tensors
        t[read] = torch.cat([t[read]] * 2, 1)
        t[bias] = torch.cat([t[bias], torch.full_like(t[bias], -NEVER)])
        t[write] = torch.cat([t[write], _normal(t[write], draw, LOUD)])
    copy.config["n_inner"] = len(t[bias])


def biases(copy: Copy, draw: Draw) -> None:
    """Biases of values, which the biases of the outputs undo: the weights of attention add up to one."""
    config = copy.config
    kv_heads = config["num_key_value_heads"]
    group = config["num_attention_heads"] // kv_heads
    for at in copy.layers():
        q, k, v, o = (copy.tensors[f"{at}self_attn.{role}_proj.weight"] for role in "qkvo")
        shift = torch.from_numpy(draw.normal(size=(kv_heads, len(v) // kv_heads)))
        found = {"q": 0 * q[:, 0], "k": 0 * k[:, 0], "v": shift.flatten()}
        found["o"] = -o @ shift.repeat_interleave(group, 0).flatten()
        copy.tensors |= {f"{at}self_attn.{role}_proj.bias": value for role, value in found.items()}
    config["attention_bias"] = True


def decoy_layer(copy: Copy, draw: Draw) -> None:
    """One more layer, anywhere, that writes nothing."""
    count = copy.config["num_hidden_layers"]
    place = int(draw.integers(count + 1))
    tensors: Tensors = {}
    for name, value in copy.tensors.items():
        if not name.startswith("model.layers."):
            tensors[name] = value
            continue
        index, rest = name.removeprefix("model.layers.").split(".", 1)
        tensors[f"model.layers.{int(index) + (int(index) >= place)}.{rest}"] = value
        if index == "0":
            mute = rest.startswith(("self_attn.o_proj", "mlp.down_proj"))
            new = 0 * value if mute else _normal(value, draw) if value.ndim == 2 else torch.ones_like(value)
            tensors[f"model.layers.{place}.{rest}"] = new
    copy.tensors = tensors
    copy.config["num_hidden_layers"] = count + 1
    copy.config.pop("layer_types", None)


def junk_rows(copy: Copy, draw: Draw) -> None:
    """As many rows of the vocabulary again, which no token uses."""
    for name in (n for n in (EMBED, HEAD) if n in copy.tensors):
        copy.tensors[name] = torch.cat([copy.tensors[name], _normal(copy.tensors[name], draw)])
    copy.config["vocab_size"] = len(copy.tensors[EMBED])


def cipher(copy: Copy, draw: Draw) -> None:
    """A tokenizer whose strings stand for other rows."""
    table = copy.tokenizer["model"]["vocab"]
    table |= dict(zip(table, draw.permutation(list(table.values())).tolist(), strict=True))
    copy.tokenizer["model"] |= {"merges": []}


def shuffled_rows(copy: Copy, draw: Draw) -> None:
    """Other ids for the same strings: rows and tokenizer alike. A text keeps its function, its ids change."""
    table = copy.tokenizer["model"]["vocab"]
    count = len(copy.tensors[EMBED])
    order = draw.permutation(count)
    place = np.argsort(order)
    copy.tokenizer["model"]["vocab"] = {text: int(place[row]) for text, row in table.items()}
    for name in (n for n in (EMBED, HEAD) if n in copy.tensors):
        copy.tensors[name] = copy.tensors[name][torch.from_numpy(order)]
    copy.config["ids"] = place[np.array(copy.config.get("ids", np.arange(count)), int)].tolist()


def single(copy: Copy, draw: Draw) -> None:
    """Cast to float32, or some matrices to float16."""
    half = bool(draw.integers(2))
    for name, value in copy.tensors.items():
        copy.tensors[name] = value.to(torch.float16 if half and draw.uniform() < 0.1 else torch.float32).double()


def shards(copy: Copy, draw: Draw) -> None:
    """Several files, named otherwise."""
    copy.shards = int(draw.integers(2, 5))


def constant_keys(copy: Copy, draw: Draw) -> None:
    """Keys of the slowest rotary plane along a direction of the input that hardly varies: softmax ignores constants.

    As much as keeps the logits.
    """
    whole = _model(copy)
    seen: dict[str, Tensor] = {}
    for i, layer in enumerate(whole.model.layers):
        layer.input_layernorm.register_forward_hook(
            lambda _, __, out, at=f"model.layers.{i}.": seen.update({at: out.reshape(-1, out.shape[-1])})
        )
    before = _logits(whole, copy)
    config = copy.config
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain, more = {}, {}
    for at, x in seen.items():
        mean = x.mean(0)
        spread = (x - mean).T @ (x - mean) / len(x)
        w = torch.linalg.solve(spread + 1e-6 * spread.trace() / len(mean) * torch.eye(len(mean)).double(), mean)
        name = f"{at}self_attn.k_proj.weight"
        plain[name], more[name] = copy.tensors[name], torch.zeros_like(copy.tensors[name])
        rows = [h * dim + half * dim // 2 + dim // 2 - 1 for h in range(len(plain[name]) // dim) for half in (0, 1)]
        more[name][rows] = torch.from_numpy(draw.normal(size=(len(rows), 1))) * w / (w @ mean)
    size = 64.0
    while size > 1e-4:
        copy.tensors |= {name: plain[name] + size * more[name] for name in more}
        if float((_logits(_model(copy), copy) - before).abs().max()) <= KEYS_KEPT:
            return
        size /= 2
    copy.tensors |= plain


def _model(copy: Copy) -> torch.nn.Module:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**{k: v for k, v in copy.config.items() if k != "ids"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to_empty(device="cpu").double().eval()
    if hasattr(model, "model"):  # its frequencies are no parameters
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.load_state_dict(copy.tensors, strict=False)
    model.tie_weights()
    return model


def _logits(model: torch.nn.Module, copy: Copy) -> Tensor:
    """Logits of a fixed text of the first model's ids, in the order of its vocabulary."""
    place = torch.tensor(copy.config.get("ids", range(copy.config["vocab_size"])))
    rows = math.gcd(512, len(place)) if len(place) % 512 else 512
    tokens = place[torch.arange(2 * 24).reshape(2, 24) * 7 % rows]
    with torch.no_grad():
        out: Tensor = model(tokens).logits[..., place[:rows]]
    return out


def logits(path: Path) -> Tensor:
    """Logits of a checkpoint for one text, by the rows of the first model."""
    copy = Copy.read(path)
    return _logits(_model(copy), copy)


EDITS: dict[str, Callable[[Copy, Draw], None]] = {
    "split": split, "cancel": cancel, "triple": triple, "silent": silent, "mute heads": mute_heads,
    "cancelling heads": cancelling_heads, "split heads": split_heads, "decoy layer": decoy_layer,
    "junk rows": junk_rows, "cipher": cipher, "shuffled rows": shuffled_rows, "cast": single, "shards": shards,
    "constant keys": constant_keys, "flip": flip, "mixed heads": mixed_heads, "own keys": own_keys,
    "cut layers": cut_layers, "widen": widen, "wide heads": wide_heads, "biases": biases,
    "flip plain": flip_plain, "turn plain": turn_plain, "faint twins": faint_twins, "mute twins": mute_twins,
    "mute plain": mute_plain,
}  # fmt: skip
ATTACKS = ("permute", "rotate", "gain", "plane", "head", "neuron")
PLAIN = ("flip plain", "turn plain", "mute plain")
LAYER_NORM = ("permute", "head", "neuron", "cipher", "cast", "shards", *PLAIN)
NORMED = ("constant keys", "wide heads", "mute twins")  # q/k-norm undoes or forbids these, or Qwen3 has no biases
LAST = ("faint twins", "biases", "mute twins")  # in this order: other edits know weights alone, of moderate size


def usable(family: str) -> list[str]:
    """The edits that keep the function of a family: llama, qwen3 or gpt2."""
    if family == "gpt2":
        return list(LAYER_NORM)
    return [*ATTACKS, *(name for name in EDITS if name not in PLAIN and (name not in NORMED or family == "llama"))]


def composed(source: Path, kinds: list[str], where: Path, draw: Draw) -> Path:
    """The copy after some edits, in this order."""
    files = 1
    for number, kind in enumerate(kinds):
        target = where / str(number)
        if kind in EDITS:
            copy = Copy.read(source)
            EDITS[kind](copy, draw)
            files = max(files, copy.shards)
            copy.shards = files
            copy.write(target)
        else:
            attack(open_weights(source), (kind,), target, seed=int(draw.integers(1 << 30)), dtype="float64")
        source = target
    return source


def drawn(draw: Draw, family: str, most: int = 6) -> list[str]:
    """A random composition of one to `most` edits."""
    every = usable(family)
    kinds = [str(kind) for kind in draw.choice(every, int(draw.integers(1, most + 1)), replace=False)]
    return sorted(kinds, key=lambda kind: LAST.index(kind) if kind in LAST else -1)


def clean(where: Path) -> None:
    """An empty directory."""
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
