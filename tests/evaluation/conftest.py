"""A corpus and a model so small that a whole comparison takes seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fathom.data.prepare import prepare
from fathom.recipe import Recipe, parse_recipe

WORDS = "the,depth,of,a,river,is,measured,with,rope,and,lead,or,with,sound,in,fathoms,and,in,feet"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison-corpus")
    chance = random.Random(0)
    inputs = []
    for domain, count in (("rivers", 120), ("seas", 60)):
        texts = (" ".join(chance.choices(WORDS.split(","), k=chance.randint(5, 80))) for _ in range(count))
        path = folder / f"{domain}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts)))
        inputs.append(f"{domain}={path}")
    prepare(inputs, folder / "out", train_tokenizer=300, held_out=0.2, workers=1)
    return folder / "out"


@pytest.fixture(scope="session")
def small(corpus: Path) -> Recipe:
    model = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 304,
        "max_position_embeddings": 32,
        "initializer_range": 0.05,
    }
    values = {
        "model": model,
        "data": {"directory": str(corpus), "sequence_length": 32},
        "optim": {"lr": 1e-2, "warmup": 0.1},
        "train": {"steps": 12, "tokens_per_step": 256, "micro_batch": 8, "checkpoint_every": 12, "log_every": 2},
        "evaluate": {"every": 4, "tokens": 2000, "position_buckets": 4},
    }
    return parse_recipe(values, ("train.export=false", "train.device=cpu"))
