"""Run lineage and corpora without torch and transformers: `python .github/without_torch.py`, in a new folder."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree

import numpy as np
from safetensors.numpy import save_file

from fathom.cli.main import main

WIDTH, INNER, LAYERS, WORDS = 64, 128, 4, 300
SHAPES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), (WIDTH, WIDTH)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INNER, WIDTH)),
    "mlp.down_proj": (WIDTH, INNER),
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": WORDS,
}


def write_llama(directory: Path, seed: int) -> None:
    """A Llama with random weights."""
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": (WORDS, WIDTH), "lm_head.weight": (WORDS, WIDTH)}
    tensors |= {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) / 8 for name, shape in tensors.items()}
    norms = [
        f"model.layers.{i}.{name}" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    weights |= {f"{name}.weight": np.ones(WIDTH, dtype=np.float32) for name in (*norms, "model.norm")}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))


def check(code: int, *words: str) -> None:
    """Run a command, whose exit code must be `code`."""
    found = main(words)
    assert found == code, f"fathom {' '.join(words)} ended with {found}, not with {code}"


if __name__ == "__main__":
    assert find_spec("torch") is None and find_spec("transformers") is None
    docs = str(Path(__file__).parents[1] / "docs")
    check(0, "prepare", docs, "--train-tokenizer", str(WORDS), "--held-out", "0.1", "--out", "shards")
    for name, seed in (("a", 0), ("copy", 0), ("b", 1)):
        write_llama(Path(name), seed)
        copytree("shards/tokenizer", name, dirs_exist_ok=True)
    check(13, "lineage", "compare", "a", "copy", "--exit-code")  # equal, but weights that were never trained
    check(0, "lineage", "compare", "a", "b", "--exit-code")
    Path("corpus.yaml").write_text(
        json.dumps({"collections": {"docs": {"inputs": docs}}, "tokenize": {"train": WORDS}})
    )
    check(0, "corpus", "corpus.yaml", "--out", "corpus")
