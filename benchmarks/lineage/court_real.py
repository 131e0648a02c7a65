"""Honest and dishonest children of a real model, and strangers of its shape, made once: the real part of the court.

The model is a Llama directory with tied embeddings, such as SmolLM2-135M. Training is short and on the CPU: it is there
to move the weights as training does, not to make anything better.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from edited import kept_layers, merged, quantised, sparse
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig

from checkpoints import Checkpoint, in_layers
from fathom.lineage import open_weights
from fathom.lineage.attacks import attack

LENGTH, ROWS, STEPS = 64, 2, 6
RANK = 8
EXPERTS = 2

Build = Callable[["Real", Path], None]


class Real:
    """A base model, text to train on, and where its relatives go."""

    def __init__(self, base: Path, text: Path, directory: Path):
        self.base, self.directory = base, directory
        words = text.read_text(encoding="utf-8", errors="replace")[: 1 << 20]
        ids = AutoTokenizer.from_pretrained(base)(words, return_tensors="pt").input_ids[0]
        self.halves = [half[: len(half) // LENGTH * LENGTH].view(-1, LENGTH) for half in ids.chunk(2)]

    def read(self, name: str) -> Checkpoint:
        """A relative, or the base by the name of base."""
        return Checkpoint.read(self.base if name == "base" else self.directory / name)

    def live(self, where: Path) -> LlamaForCausalLM:
        """A model in float32."""
        return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)

    def trained(self, model: LlamaForCausalLM, half: int, rate: float, parameters: list[Tensor] | None = None) -> None:
        """A few steps of AdamW on one half of the text."""
        draw = torch.Generator().manual_seed(half)
        optimiser = torch.optim.AdamW(parameters or list(model.parameters()), lr=rate)
        rows = self.halves[half]
        for _ in range(STEPS):
            batch = rows[torch.randint(len(rows), (ROWS,), generator=draw)]
            model(batch, labels=batch).loss.backward()
            optimiser.step()
            optimiser.zero_grad()

    def save(self, model: LlamaForCausalLM, path: Path) -> None:
        """Weights, config and the base's tokenizer."""
        model.save_pretrained(path)
        shutil.copyfile(self.base / "tokenizer.json", path / "tokenizer.json")


def tuned(half: int, rate: float) -> Build:
    """A short fine-tune of every weight."""

    def build(real: Real, path: Path) -> None:
        model = real.live(real.base)
        real.trained(model, half, rate)
        real.save(model, path)

    return build


def adapted(real: Real, path: Path) -> None:
    """A LoRA adapter on queries and values, trained and merged."""
    model = real.live(real.base).requires_grad_(False)
    factors: list[Tensor] = []
    hooked: list[tuple[torch.nn.Linear, Tensor, Tensor]] = []
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            down = torch.nn.Parameter(torch.randn(RANK, module.in_features) * 0.02)
            up = torch.nn.Parameter(torch.zeros(module.out_features, RANK))
            module.register_forward_hook(lambda m, x, y, a=down, b=up: y + x[0] @ a.T @ b.T)
            factors += [down, up]
            hooked.append((module, down, up))
    real.trained(model, 0, 5e-3, factors)
    for module, down, up in hooked:
        module.weight.data += up.detach() @ down.detach()
        module._forward_hooks.clear()
    real.save(model, path)


def edited(edit: Callable[[Checkpoint], Checkpoint]) -> Build:
    """A child by an edit of the base's tensors."""

    def build(real: Real, path: Path) -> None:
        edit(real.read("base")).write(path)

    return build


def upscaled(model: Checkpoint) -> Checkpoint:
    """The first two thirds of the layers, then the last two thirds."""
    third = model.layers // 3
    return kept_layers(model, [*range(model.layers - third), *range(third, model.layers)])


def pruned_depth(model: Checkpoint) -> Checkpoint:
    """Every fourth layer dropped."""
    return kept_layers(model, [layer for layer in range(model.layers) if layer % 4 != 2])


def extended(model: Checkpoint) -> Checkpoint:
    """256 more rows of vocabulary, each the mean of the others."""
    name = "model.embed_tokens.weight"
    table = model.tensors[name]
    out = Checkpoint(dict(model.config), dict(model.tensors), model.tokenizer)
    out.tensors[name] = torch.cat([table, table.mean(0, keepdim=True).repeat(256, 1)])
    out.config["vocab_size"] += 256
    return out


def upcycled(real: Real, path: Path) -> None:
    """A Mixtral whose experts are noisy copies of the feed-forward."""
    source, draw = real.read("base"), torch.Generator().manual_seed(0)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors: dict[str, Tensor] = {}
    for name, value in source.tensors.items():
        role = name.split(".")[-2]
        if not in_layers(name) or role not in names:
            tensors[name] = value
            continue
        stem = name.split(".mlp.")[0]
        for expert in range(EXPERTS):
            noise = torch.randn(value.shape, generator=draw) * 0.02 * value.float().std()
            tensors[f"{stem}.block_sparse_moe.experts.{expert}.{names[role]}.weight"] = value.float() + noise
    for layer in range(source.layers):
        gate = torch.randn(EXPERTS, source.config["hidden_size"], generator=draw) * 0.02
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = gate
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = {key: source.config[key] for key in (*kept, "vocab_size", "tie_word_embeddings", "rms_norm_eps")}
    config = MixtralConfig(**more, num_local_experts=EXPERTS, num_experts_per_tok=1).to_dict()
    Checkpoint({**config, "architectures": ["MixtralForCausalLM"]}, tensors, source.tokenizer).write(path)


def mean_of(*names: str) -> Build:
    """The even mean of relatives."""

    def build(real: Real, path: Path) -> None:
        merged([real.read(name) for name in names], [1 / len(names)] * len(names)).write(path)

    return build


def disguised(*kinds: str, source: str = "base") -> Build:
    """A relative that computes the same with other weights."""

    def build(real: Real, path: Path) -> None:
        where = real.base if source == "base" else real.directory / source
        attack(open_weights(where), kinds, path, seed=7)

    return build


def stranger(seed: int, half: int) -> Build:
    """The base's shape and tokenizer from a random start, trained a little."""

    def build(real: Real, path: Path) -> None:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(real.base)).float()
        real.trained(model, half, 3e-4)
        real.save(model, path)

    return build


CHILDREN: Mapping[str, Build] = {
    "fine-tuned": tuned(0, 2e-5),
    "fine-tuned hard": tuned(1, 2e-4),
    "LoRA, merged": adapted,
    "int8": edited(lambda m: quantised(m, 8)),
    "int4": edited(lambda m: quantised(m, 4)),
    "pruned by half": edited(lambda m: sparse(m, 0.5)),
    "layers dropped": edited(pruned_depth),
    "depth-upscaled": edited(upscaled),
    "upcycled": upcycled,
    "vocabulary extended": edited(extended),
    "merged": mean_of("fine-tuned", "LoRA, merged"),
    "disguised: permuted": disguised("permute", "gain", "plane", "head", "neuron"),
    "disguised: rotated": disguised("rotate", "plane", "head", "neuron", source="fine-tuned"),
}
STRANGERS: Mapping[str, Build] = {
    "stranger": stranger(1, 0),
    "stranger, other text": stranger(2, 1),
    "stranger, seed again": stranger(1, 1),  # the seed of the first, other text
}


def built(real: Real, name: str, build: Build) -> Path:
    """A relative, made if it is not there."""
    path = real.directory / name
    if not path.exists():
        half_made = real.directory / f".{name}"
        shutil.rmtree(half_made, ignore_errors=True)
        build(real, half_made)
        half_made.rename(path)
    return path
