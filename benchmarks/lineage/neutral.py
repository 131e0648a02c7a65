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
    for at, x in seen.items():
        mean = x.mean(0)
        spread = (x - mean).T @ (x - mean) / len(x)
        w = torch.linalg.solve(spread + 1e-6 * spread.trace() / len(mean) * torch.eye(len(mean)).double(), mean)
        name = f"{at}self_attn.k_proj.weight"
        plain = copy.tensors[name]
        rows = [h * dim + half * dim // 2 + dim // 2 - 1 for h in range(len(plain) // dim) for half in (0, 1)]
        more = torch.zeros_like(plain)
        more[rows] = torch.from_numpy(draw.normal(size=(len(rows), 1))) * w / (w @ mean)
        size = 64.0
        while True:
            copy.tensors[name] = plain + size * more
            if float((_logits(_model(copy), copy) - before).abs().max()) <= KEYS_KEPT:
                break
            size = size / 2 if size > 1e-3 else 0.0


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
    "constant keys": constant_keys,
}  # fmt: skip
ATTACKS = ("permute", "rotate", "gain", "plane", "head", "neuron")
LAYER_NORM = ("permute", "head", "neuron", "cipher", "cast", "shards")


def usable(family: str) -> list[str]:
    """The edits that keep the function of a family: llama, qwen3 or gpt2."""
    if family == "gpt2":
        return list(LAYER_NORM)
    return [*ATTACKS, *(name for name in EDITS if name != "constant keys" or family == "llama")]  # q/k-norm undoes it


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
    return [str(kind) for kind in draw.choice(every, int(draw.integers(1, most + 1)), replace=False)]


def clean(where: Path) -> None:
    """An empty directory."""
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
