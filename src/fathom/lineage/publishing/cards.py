"""Cards: a summary of a model that can be published and searched without its weights.

`identification.py` opens the models of the nearest cards, finds them by the names in the cards, and chooses controls.
`lineage/vocabulary.py` chooses the anchor strings; `lineage/huref.py` makes the sketch from them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    """The sketches of a model as floats: z_last from the last two layers and, on request, z_all from every layer."""
    texts, rows = anchor_rows(weights)
    x = huref.anchor_embeddings(weights, rows)
    out = {"z_last": huref.sketch(huref.last_terms(weights, x), texts)}
    if all_layers:
        out["z_all"] = huref.sketch(huref.summed_terms(weights, x), texts)
    return out


def sketch(weights: Weights) -> Array:
    """The published sketch of a model, int8 `[512]`, computed from its last two layers."""
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
    """Read a card from a file, and check it."""
    if path.is_dir():
        raise ModelError(f"{path} is a directory, not a card: `fathom lineage card {path}` makes a model's card")
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


@dataclass(frozen=True)
class Hit:
    """A card found in a library, and its similarity to the card that was searched for."""

    cosine: float
    name: str
    file: str


def in_library(directory: Path) -> list[Path]:
    """The files of a directory whose extension is that of cards, sorted by name."""
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ModelError(f"{directory} {what}; give a directory of cards: `fathom lineage card MODEL` makes cards")
    return sorted(path for path in directory.iterdir() if path.suffix in {".json", ".card"} and path.is_file())


def search(query: Card, library: Path) -> list[Hit]:
    """The cards of a directory by decreasing similarity: of z_all if both cards have it, else of z_last; other files
    are left out.

    For searching, not for judging. Only what the ranking needs is read; `read_card` checks a card as a whole.
    """
    found: dict[str, list[tuple[bytes, str, Path]]] = {}
    for path in in_library(library):
        try:
            body = json.loads(path.read_bytes())
            kind = "z_all" if "z_all" in query.sketches and "z_all" in body["sketches"] else "z_last"
            z, name = bytes.fromhex(body["sketches"][kind]), str(body["name"])
            if body["fathom_card"] == VERSION and len(z) == huref.SKETCH:
                found.setdefault(kind, []).append((z, name, path))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
    if not found:
        raise ModelError(f"{library}: no card in it: `fathom lineage card MODEL --out {library}/NAME.card` makes one")
    hits = []
    for kind, some in found.items():
        table = np.frombuffer(b"".join(z for z, _, _ in some), np.int8).reshape(len(some), -1)  # [cards, 512]
        cosines = huref.sketch_cosine(table, sketch_bytes(query.sketches[kind]))
        hits += [Hit(float(c), name, str(path)) for c, (_, name, path) in zip(cosines, some, strict=True)]
    return sorted(hits, key=lambda hit: (-hit.cosine, hit.name, hit.file))
