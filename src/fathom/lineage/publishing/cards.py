"""Cards: a summary of a model that can be published and searched without its weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fathom._version import __version__
from fathom.checkpoints.origin import parse_json
from fathom.checkpoints.tensors import Array
from fathom.errors import ModelError
from fathom.lineage import huref, vocabulary
from fathom.lineage.publishing import portrait
from fathom.lineage.publishing.results import Card, CardOutline
from fathom.lineage.weights import Weights
from fathom.report.results import restored

VERSION = 1
ANCHORS = 1024
LOW_COVERAGE = 256


def anchor_rows(weights: Weights) -> tuple[list[bytes], Array]:
    """The anchor strings of one model and their embedding rows."""
    words = weights.vocabulary() or vocabulary.rows_as_strings(weights.geometry.vocab)
    texts = vocabulary.anchors(words, weights.geometry.vocab, ANCHORS)
    return texts, np.array([words[text] for text in texts], np.int64)


def sketches(weights: Weights, all_layers: bool = False) -> dict[str, Array]:
    """z_last (last two layers) and, on request, z_all (every layer), as floats."""
    texts, rows = anchor_rows(weights)
    x = huref.anchor_embeddings(weights, rows)
    out = {"z_last": huref.sketch(huref.last_terms(weights, x), texts)}
    if all_layers:
        out["z_all"] = huref.sketch(huref.summed_terms(weights, x), texts)
    return out


def sketch(weights: Weights) -> Array:
    """The published sketch of a model: z_last, int8 `[512]`."""
    return huref.quantised(sketches(weights)["z_last"])


def card(weights: Weights, all_layers: bool = False) -> Card:
    """The card of a model: 512 bytes per sketch, six words, and the model's dimensions."""
    made = {name: huref.quantised(z) for name, z in sketches(weights, all_layers).items()}
    texts, _ = anchor_rows(weights)
    g = weights.geometry
    return Card(
        fathom_card=VERSION,
        tool=__version__,
        name=weights.name,
        revision=weights.origin.revision,
        structure=CardOutline(g.model_type, g.layers, g.width, g.heads, g.vocab),
        tokenizer=weights.vocabulary() is not None,
        anchors=len(texts),
        low_coverage=len(texts) < LOW_COVERAGE,
        sketches={name: z.tobytes().hex() for name, z in made.items()},
        sketch_sha256=portrait.sketch_hash(made["z_last"]),
        words=portrait.words(made["z_last"]),
    )


def read_card(path: Path) -> Card:
    """A card from a file, checked."""
    body = parse_json(path.read_bytes(), str(path))
    try:
        found = restored(Card, body)
    except ValueError:
        raise ModelError(f"{path}: not a card of version {VERSION}") from None
    if found.fathom_card != VERSION or "z_last" not in found.sketches:
        raise ModelError(f"{path}: not a card of version {VERSION}")
    for name, text in found.sketches.items():
        if len(text) != 2 * huref.SKETCH or set(text) - set("0123456789abcdef"):
            raise ModelError(f"{path}: sketch {name!r:.40} is not {huref.SKETCH} bytes in hexadecimal")
    return found


def sketch_bytes(text: str) -> Array:
    """A sketch from hexadecimal, int8 `[512]`."""
    return np.frombuffer(bytes.fromhex(text), np.int8)


def search(query: Card, library: Iterable[Path]) -> list[tuple[float, str, str]]:
    """Cards by decreasing similarity: (cosine, name, file), by z_all if both have it. For searching, not for
    judging."""
    found: list[tuple[float, str, str]] = []
    for path in library:
        try:
            other = read_card(path)
        except ModelError:
            continue
        name = "z_all" if "z_all" in query.sketches and "z_all" in other.sketches else "z_last"
        cosine = huref.sketch_cosine(sketch_bytes(query.sketches[name]), sketch_bytes(other.sketches[name]))
        found.append((cosine, other.name, str(path)))
    return sorted(found, reverse=True)
