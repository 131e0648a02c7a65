"""Token shards read with numpy alone, as another trainer would (the format: docs/reference/formats.md)."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def documents(corpus: Path, split: str = "train") -> Iterator[np.ndarray]:
    """Every document's token ids, the EOS at its end included."""
    index = json.loads((corpus / "index.json").read_text())
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    for shard in sorted((corpus / split).glob("*/*.bin")):  # split/DOMAIN/00000.bin
        tokens = np.memmap(shard, dtype, "r")
        ends = np.fromfile(shard.with_suffix(".idx"), "<i8").reshape(-1, 2)  # [documents, (tokens, bytes)]
        yield from np.split(tokens, ends[:-1, 0])


if __name__ == "__main__":
    corpus = Path(sys.argv[1] if len(sys.argv) > 1 else "data/example")
    found = list(documents(corpus))
    print(f"{len(found)} documents, {sum(map(len, found))} tokens; the first begins {found[0][:8].tolist()}")
