"""A corpus of two domains and a model of two layers: a step takes milliseconds."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from fathom.data.prepare import prepare
from fathom.recipe import Recipe, parse_recipe

WORDS = "the,depth,of,a,river,is,measured,with,rope,and,lead,or,with,sound,in,fathoms,and,in,feet"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training-corpus")
    chance = random.Random(0)
    inputs = []
    for domain, count in (("rivers", 120), ("seas", 60)):
        texts = (" ".join(chance.choices(WORDS.split(","), k=chance.randint(5, 80))) for _ in range(count))
        path = folder / f"{domain}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts)))
        inputs.append(f"{domain}={path}")
    prepare(inputs, folder / "out", train_tokenizer=300, held_out=0.2, workers=1)
    return folder / "out"


@pytest.fixture
def recipe(corpus: Path) -> Recipe:
    return tiny_recipe(corpus)


class StopAt:
    """Sends this process SIGTERM once a step is logged."""

    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.step and "loss" in values:
            signal.raise_signal(signal.SIGTERM)

    def close(self) -> None: ...


def tiny_recipe(corpus: Path, *overrides: str) -> Recipe:
    model = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 304,
        "max_position_embeddings": 32,
        "initializer_range": 0.05,
        "mixer": "depth_attention",
    }
    values = {
        "model": model,
        "data": {"directory": str(corpus), "sequence_length": 32, "packing": "documents"},
        "optim": {"lr": 1e-2, "warmup": 0.1},
        "train": {"steps": 8, "tokens_per_step": 256, "micro_batch": 2, "checkpoint_every": 2, "log_every": 2},
        "evaluate": {"every": 4, "tokens": 1000, "position_buckets": 4},
        "track": {"display": "none"},
    }
    return parse_recipe(values, ("train.export=false", "train.device=cpu", *overrides))
