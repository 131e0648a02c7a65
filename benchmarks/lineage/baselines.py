"""Published statistics that Fathom does not ship, for the same table: PCS, sigma, a polar statistic, REEF."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import svd
from tokenizers import Tokenizer

from checkpoints import Checkpoint
from fathom.lineage import Weights, awm
from fathom.lineage.aligning import paired_rows
from fathom.lineage.vocabulary import string_hash

Array = NDArray[np.float64]
TEXTS = 200
DEPTH = 0.6  # REEF reads layer 18 of 32


def pcs(a: Weights, b: Weights) -> float:
    """Parameter cosine as coded: tensors zipped by role, gains included, those whose sizes differ skipped."""
    dot = size_a = size_b = 0.0
    for place in a.views:
        if place in b.views:
            x, y = a.tensor(*place).ravel(), b.tensor(*place).ravel()
            if len(x) == len(y):
                dot, size_a, size_b = dot + float(x @ y), size_a + float(x @ x), size_b + float(y @ y)
    return dot / max(np.sqrt(size_a * size_b), 1e-30)


def deviations(weights: Weights) -> Array:
    """Standard deviation of Q, K, V and O in each layer, [4, L], each row z-scored over depth."""
    rows = [[weights.tensor(role, i).std() for i in range(weights.geometry.layers)] for role in "qkvo"]
    table = np.asarray(rows, np.float64)
    return (table - table.mean(1, keepdims=True)) / np.maximum(table.std(1, keepdims=True), 1e-12)


def sigma(a: Weights, b: Weights) -> float:
    """Pearson's correlation of the two profiles; the deeper one is read at the other's relative depths."""
    x, y = deviations(a), deviations(b)
    x, y = (x, y) if x.shape[1] <= y.shape[1] else (y, x)
    places = np.linspace(0, y.shape[1] - 1, x.shape[1]).round().astype(int)
    x, y = x.ravel(), y[:, places].ravel()
    return float(x @ y / max(np.linalg.norm(x) * np.linalg.norm(y), 1e-12))


def polar(a: Weights, b: Weights) -> float:
    """After MDIR: R, the polar factor of E_Aᵀ E_B; the best signed permutation's share of its trace, Σ|R_π(j)j| / d."""
    if a.geometry.width < b.geometry.width:
        a, b = b, a
    rows_a, rows_b, _ = paired_rows(a, b)
    cross = awm.cross_products(a, b, rows_a, rows_b, published=True).published
    assert cross is not None
    product = cross.product
    u, _, vt = svd(product, full_matrices=False)
    rotation = u @ vt  # [d_A, d_B]
    return float(np.abs(rotation[awm.match(rotation).columns, np.arange(rotation.shape[1])]).mean())


@dataclass
class Activations:
    """What REEF compares: the hidden state of the last token at 60 % depth, for the same texts. Kept by model."""

    texts: list[str]
    _known: dict[str, Array] = field(default_factory=dict)

    def of(self, path: Path) -> Array:
        """[texts, d] of one model, run on its own tokens."""
        if path.name not in self._known:
            self._known[path.name] = activations(path, self.texts)
        return self._known[path.name]

    def cka(self, a: Path, b: Path) -> float:
        """Linear CKA of the two, as published (biased)."""
        x, y = self.of(a), self.of(b)
        kernels = (gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean() for gram in (x @ x.T, y @ y.T))
        k, m = kernels
        return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


def texts_of(paths: list[str]) -> list[str]:
    """200 paragraphs, chosen by hash."""
    found = {
        p.strip() for path in paths for p in Path(path).read_text(encoding="utf-8", errors="replace").split("\n\n")
    }
    return sorted((p for p in found if 80 <= len(p) <= 400), key=lambda p: string_hash(p.encode()))[:TEXTS]


def activations(path: Path, texts: list[str]) -> Array:
    """Hidden states of the last token."""
    model = live(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    layer = max(1, round(DEPTH * model.config.num_hidden_layers))
    states = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids[: model.config.max_position_embeddings]])
            found = model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            states.append(found.hidden_states[layer][0, -1].double().numpy())
    return np.stack(states)


def live(path: Path) -> torch.nn.Module:
    """A model that runs."""
    if (path / "model.safetensors.index.json").exists() or '"qwen3_moe"' in (path / "config.json").read_text():
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model.eval()
    return Checkpoint.read(path).model().eval()


def all_of(a: Weights, b: Weights) -> dict[str, float]:
    """Those that need weights alone."""
    return {"pcs": pcs(a, b), "sigma": sigma(a, b), "polar": polar(a, b)}
