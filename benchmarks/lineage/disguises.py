"""Random compositions of edits that keep the function: found, flagged, or missed?

    python benchmarks/lineage/disguises.py --directory strangers --out benchmarks/results/lineage-disguises.json

Takes the models that strangers.py trained. Each disguise is one to five edits in random order: those of `fathom lineage
attack`, neurons split in two, pairs of neurons that cancel, loud heads without effect, and a tokenizer that names other
rows. The logits of every
copy are compared with the original's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from strangers import commit
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from fathom.lineage import comparison, open_weights
from fathom.lineage.attacks import attack

RMS = ("permute", "rotate", "gain", "plane", "head", "neuron", "scale")
FAMILIES = {"llama": RMS, "llama-tied": RMS, "qwen3": RMS, "qwen3-tied": RMS, "gpt2": ("permute", "head", "neuron")}
EXTRA = ("split", "cancel", "heads", "relabel")
LOOSE = 2e-2  # of the largest logit: float32, and `scale` moves the epsilon of the norms

Tensors = dict[str, torch.Tensor]


def whole(path: Path) -> Tensors:
    """All tensors of a checkpoint."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def grown(source: Path, target: Path, draw: np.random.Generator, cancel: bool) -> None:
    """Neurons split in two that add up, or pairs added that cancel; gated models."""
    tensors, config = whole(source), json.loads((source / "config.json").read_text())
    generator = torch.Generator().manual_seed(int(draw.integers(1 << 30)))
    for name in [n for n in tensors if n.endswith("gate_proj.weight")]:
        names = [name.replace("gate", role) for role in ("gate", "up", "down")]
        gate, up, down = (tensors[n] for n in names)
        if cancel:
            more = torch.randn(gate.shape, generator=generator).to(gate.dtype) * gate.std()
            out = torch.randn(down.shape, generator=generator).to(down.dtype) * down.std()
            parts = [gate, more, more], [up, more, more], [down, out, -out]
        else:
            share = torch.rand(gate.shape[0], generator=generator).to(gate.dtype)
            parts = [gate, gate], [up, up], [down * share, down * (1 - share)]
        for n, part, axis in zip(names, parts, (0, 0, 1), strict=True):
            tensors[n] = torch.cat(part, axis).contiguous()
    config["intermediate_size"] *= 3 if cancel else 2
    written(source, target, tensors, config)


def crowded(source: Path, target: Path, draw: np.random.Generator, _: bool) -> None:
    """As many key heads again, louder than the others: they write nothing, or cancel in pairs."""
    tensors, config = whole(source), json.loads((source / "config.json").read_text())
    generator = torch.Generator().manual_seed(int(draw.integers(1 << 30)))
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    loud = float(draw.integers(2)) * 3  # of what they write
    for name in [n for n in tensors if ".self_attn." in n and n.endswith("proj.weight")]:
        value = tensors[name]
        if name.endswith("o_proj.weight"):
            half = torch.randn(len(value), heads // 2 * dim, generator=generator).to(value.dtype) * value.std() * loud
            more = torch.cat([half, -half], 1)
        else:
            rows = (heads if name.endswith("q_proj.weight") else keys) // 2 * dim
            half = torch.randn(rows, value.shape[1], generator=generator).to(value.dtype) * value.std() * 4
            more = torch.cat([half, half])
        tensors[name] = torch.cat([value, more], 1 if name.endswith("o_proj.weight") else 0).contiguous()
    config |= {"num_attention_heads": 2 * heads, "num_key_value_heads": 2 * keys, "head_dim": dim}
    written(source, target, tensors, config)


def written(source: Path, target: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """A checkpoint beside its source's tokenizer."""
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    save_file(tensors, target / "model.safetensors")


def relabelled(source: Path, target: Path, draw: np.random.Generator, _: bool) -> None:
    """A tokenizer whose strings stand for other rows."""
    written(source, target, whole(source), json.loads((source / "config.json").read_text()))
    table = json.loads((target / "tokenizer.json").read_text())
    words = list(table["model"]["vocab"])
    table["model"]["vocab"] = {words[at]: row for row, at in enumerate(draw.permutation(len(words)))}
    (target / "tokenizer.json").write_text(json.dumps(table))


OWN: dict[str, Callable[[Path, Path, np.random.Generator, bool], None]] = {
    "split": grown,
    "cancel": grown,
    "heads": crowded,
    "relabel": relabelled,
}


def disguised(source: Path, kinds: list[str], where: Path, draw: np.random.Generator) -> Path:
    """The copy after all edits."""
    for number, kind in enumerate(kinds):
        target = where / str(number)
        if kind in OWN:
            OWN[kind](source, target, draw, kind == "cancel")
        else:
            attack(open_weights(source), (kind,), target, seed=int(draw.integers(1 << 30)))
        source = target
    return source


def logits(path: Path) -> torch.Tensor:
    """Logits of a fixed text of token ids."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    tokens = torch.arange(2 * 24).reshape(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(tokens).logits


def main(words: list[str] | None = None) -> int:
    """Make, check, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="these families alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    draw, started, rows = np.random.default_rng(0), time.monotonic(), []
    where = options.directory / "disguised"
    while len(rows) < options.count and time.monotonic() - started < 60 * options.minutes:
        family = options.only[len(rows) % len(options.only)]
        source = options.directory / f"{family}-{draw.integers(6)}"
        usable = [*FAMILIES[family], *(EXTRA if family != "gpt2" else ("relabel",))]
        kinds = [str(k) for k in draw.choice(usable, min(int(draw.integers(1, 6)), len(usable)), replace=False)]
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        copy = disguised(source, kinds, where, draw)
        before, after = logits(source), logits(copy)
        apart = float((before - after).abs().max() / before.abs().max())
        pair = comparison.measure(open_weights(source), open_weights(copy), comparison.Options(extras=False))
        found = comparison.judge(pair, [])
        said = {"label": found.verdict.label, "signs": found.tampering}
        rows.append({"model": source.name, "kinds": kinds, "logits": apart, **said})
    shutil.rmtree(where, ignore_errors=True)
    kept = [row for row in rows if row["logits"] < LOOSE]
    body = {
        "command": "python benchmarks/lineage/disguises.py " + " ".join(words or sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "compositions": len(rows),
        "function kept": len(kept),
        "labels": dict(Counter(row["label"] for row in kept)),
        "labels by family": {
            f: dict(Counter(r["label"] for r in kept if r["model"].rsplit("-", 1)[0] == f)) for f in options.only
        },
        "with signs": sum(bool(row["signs"]) for row in kept),
        "not found": [row for row in kept if row["label"] in {"no evidence found", "inconclusive"}],
    }
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
