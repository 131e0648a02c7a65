"""A corpus of two domains and recipes whose steps take milliseconds, for every test that trains."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fathom.data.prepare import prepare
from fathom.recipe import Recipe, parse_recipe

WORDS = "the,depth,of,a,river,is,measured,with,rope,and,lead,or,with,sound,in,fathoms,and,in,feet"


def make_corpus(folder: Path) -> Path:
    """Rivers and seas, a fifth of them held out."""
    chance = random.Random(0)
    inputs = []
    for domain, count in (("rivers", 120), ("seas", 60)):
        texts = (" ".join(chance.choices(WORDS.split(","), k=chance.randint(5, 80))) for _ in range(count))
        path = folder / f"{domain}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts)))
        inputs.append(f"{domain}={path}")
    prepare(inputs, folder / "out", train_tokenizer=300, held_out=0.2, workers=1)
    return folder / "out"


def shape(**fields: object) -> dict[str, object]:
    """A model block of a few thousand parameters."""
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 304,
        "max_position_embeddings": 32,
        "initializer_range": 0.05,
        **fields,
    }


def tiny_recipe(corpus: Path, *overrides: str) -> Recipe:
    """Two layers with depth attention, eight steps."""
    values = {
        "model": shape(mixer="depth_attention"),
        "data": {"directory": str(corpus), "sequence_length": 32, "packing": "documents"},
        "optim": {"lr": 1e-2, "warmup": 0.1},
        "train": {"steps": 8, "tokens_per_step": 256, "micro_batch": 2, "checkpoint_every": 2, "log_every": 2},
        "evaluate": {"every": 4, "tokens": 1000, "position_buckets": 4},
        "track": {"display": "none"},
    }
    return parse_recipe(values, ("train.export=false", "train.device=cpu", *overrides))


def comparable_recipe(corpus: Path) -> Recipe:
    """Four layers, twelve steps: enough for arms to differ."""
    values = {
        "model": shape(num_hidden_layers=4),
        "data": {"directory": str(corpus), "sequence_length": 32},
        "optim": {"lr": 1e-2, "warmup": 0.1},
        "train": {"steps": 12, "tokens_per_step": 256, "micro_batch": 8, "checkpoint_every": 12, "log_every": 2},
        "evaluate": {"every": 4, "tokens": 2000, "position_buckets": 4},
    }
    return parse_recipe(values, ("train.export=false", "train.device=cpu"))
