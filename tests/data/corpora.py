"""Generated documents, and the tokens of a corpus."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from fathom.data.shards import TokenDataset

SENTENCE = "the depth of a river is measured with rope and lead, or with sound — naïve 水深 in fathoms\n"
WORDS = SENTENCE.split(" ")


def write_documents(path: Path, count: int, seed: int = 0, **fields: str) -> list[str]:
    """JSON lines of random sentences, all different; returns the texts."""
    chance = random.Random(seed)
    texts = [f"{seed}/{i}: " + " ".join(chance.choices(WORDS, k=chance.randint(1, 60))) for i in range(count)]
    lines = [json.dumps({"id": i, "text": text, **fields}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return texts


def stream(dataset: TokenDataset) -> np.ndarray:
    """All tokens of a dataset."""
    tokens = np.empty(dataset.num_tokens, np.int64)
    dataset.read(0, tokens)
    return tokens
