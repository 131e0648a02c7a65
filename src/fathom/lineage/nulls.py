"""Null distributions: the scores of unrelated pairs of models, from the controls of a comparison or from a file of
`calibrate`.

`comparison.py` decides which controls enter the null distribution: trained and unrelated models of the pair's
structure class (widths, and whether depths are equal). Others are listed, but do not enter it. In fast mode fewer
layers of a control are measured (`Options.of_controls` in `comparison.py`). `evidence.py` sets the score that counts as
high (`score_threshold`); `verdict.py` decides what a comparison without controls may claim.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy import stats

from fathom.checkpoints.origin import parse_json
from fathom.checkpoints.tensors import AdapterStore, TensorStore
from fathom.errors import ModelError
from fathom.lineage import evidence
from fathom.lineage.pairs import NAMES, SCORE_LABELS, Pair
from fathom.lineage.weights import Weights
from fathom.report.files import write_json
from fathom.report.results import restored

VERSION = 2
SLICE = 4096  # bytes of each tensor that identify a model


@dataclass
class Null:
    """Scores of pairs known to be unrelated."""

    origin: str
    scores: dict[str, list[float]]
    witnesses: list[int]  # channels that embedding and head pair alike
    neurons: dict[str, list[float]]  # by frame: the largest share of a layer's neurons (or values) paired alike
    gaps: dict[str, list[float]]  # gaps that are signs of tampering
    per_layer: dict[str, list[list[float]]]
    pairs: list[list[str]]  # digests of the two models of each pair
    file: dict[str, object] | None = field(default=None)  # path, sha256 and the part that was used

    @property
    def models(self) -> int:
        """The number of different models in the unrelated pairs."""
        return len({digest for pair in self.pairs for digest in pair})

    def rate(self) -> float:
        """The Poisson rate for T2: the upper 95 % limit of the mean count in the controls, but at least 3."""
        if not self.witnesses:
            return evidence.POISSON_RATE
        total, count = sum(self.witnesses), len(self.witnesses)
        return max(evidence.POISSON_RATE, float(stats.chi2.ppf(0.95, 2 * (total + 1))) / (2 * count))


FIELDS = ("scores", "witnesses", "neurons", "gaps", "per_layer", "pairs")


def digest(weights: Weights) -> str:
    """A hash of a model: of the header and of the first 4 KiB of every tensor. Equal for one model under two names."""
    found = hashlib.sha256()
    _hash(weights.store, found.update)
    return found.hexdigest()


def _hash(store: TensorStore, update: Callable[[bytes | bytearray], object]) -> None:
    """Hash the tensors of a store; of an adapter, those of its base too."""
    if isinstance(store, AdapterStore):
        _hash(store.base, update)
        update(json.dumps(["adapter", store.scale]).encode())
        store = store.adapter
    for name in sorted(store.tensors):
        info = store.tensors[name]
        update(json.dumps([name, info.dtype, list(info.shape)]).encode())
        update(store.origin.read(info.file, info.start, min(info.start + SLICE, info.stop)))


def of_pairs(pairs: Sequence[Pair], origin: str, known: Null | None = None) -> Null:
    """The null distribution from measured unrelated pairs of models; a repeated pair counts once, and a pair of a known
    null distribution not at all."""
    null, before = Null(origin, {}, [], {}, {}, {}, []), [sorted(pair) for pair in known.pairs] if known else []
    for pair in pairs:
        models = sorted(digest(w) for w in (pair.a, pair.b))
        if models in null.pairs or models in before:
            continue
        null.pairs.append(models)
        for name in SCORE_LABELS:
            if (value := pair.value(name)) is not None:
                null.scores.setdefault(name, []).append(value)
        for name, found in pair.scores.items():
            null.per_layer.setdefault(name, []).append(found.per_layer)
        if pair.head_agreement is not None:
            null.witnesses.append(pair.head_agreement)
        for frame, counts in (*pair.neurons.items(), *((f"values {at}", some) for at, some in pair.values.items())):
            shares = [count.paired / count.of for count in counts if count.of]
            null.neurons.setdefault(frame, []).append(max(shares, default=0.0))
        for name, gap in pair.gaps.items():
            null.gaps.setdefault(name, []).append(gap)
    return null


def structure_class(a: Weights, b: Weights) -> str:
    """The class within which pairs of models are comparable: the same two widths, and whether the two depths are
    equal."""
    widths = sorted((a.geometry.width, b.geometry.width), reverse=True)
    depth = "equal depth" if a.geometry.layers == b.geometry.layers else "unequal depth"
    return f"width {widths[0]}/{widths[1]}, {depth}"


def read(path: Path, kind: str) -> Null:
    """The part of a calibration file that matches a structure class."""
    if not os.path.isfile(path):  # is_file raises for a name that no file can have
        raise ModelError(f"{path}: no such null file")
    raw = path.read_bytes()
    body = parse_json(raw, str(path))
    classes = body.get("classes")
    if body.get("fathom_null") != VERSION or not isinstance(classes, dict):
        raise ModelError(
            f"{path}: not a file of null distributions, version {VERSION} (`fathom lineage calibrate` writes one)"
        )
    if kind not in classes:
        raise ModelError(f"{path}: no null distribution for {kind}; the file has {'; '.join(classes)}")
    file = {"path": str(path), "sha256": hashlib.sha256(raw).hexdigest(), "class": classes[kind]}
    try:
        if not isinstance(classes[kind], dict) or set(classes[kind]) != set(FIELDS):
            raise ValueError("its fields are not those of a null distribution")
        null = restored(Null, {**classes[kind], "origin": f"{path.name} ({kind})", "file": file})
        if (fault := _fault(null, body.get("models"))) is not None:
            raise ValueError(fault)
    except ValueError as error:
        raise ModelError(f"{path}: class {kind}: {error}") from None
    return null


def _fault(null: Null, models: object) -> str | None:
    """What is wrong with the data of one structure class in a null file; None if nothing is."""
    known = set(models) if isinstance(models, dict) else set()
    if not null.pairs or not all(_is_pair(pair, known) for pair in null.pairs):
        return "its pairs are not of two models that the file lists with their digests"
    if len({tuple(sorted(pair)) for pair in null.pairs}) != len(null.pairs):
        return "a pair of models comes twice"
    if len(null.witnesses) > len(null.pairs) or min(null.witnesses, default=0) < 0:
        return "its counts are not one for each pair"
    curves = {name: [value for curve in some for value in curve] for name, some in null.per_layer.items()}
    for values, least in ((null.scores, -1.0), (curves, -1.0), (null.neurons, 0.0), (null.gaps, -2.0)):
        if not all(least <= value <= 1.0 + 1e-3 for some in values.values() for value in some):
            return "its numbers are not scores between -1 and 1"
    tables: tuple[Mapping[str, Sequence[object]], ...] = (null.scores, null.neurons, null.gaps, null.per_layer)
    if any(len(values) > len(null.pairs) for table in tables for values in table.values()):
        return "it has more numbers than pairs"
    if high := [name for name in NAMES.values() if (evidence.score_threshold(null.scores.get(name, [])) or 0) >= 1]:
        return f"a score of {high[0]} would have to pass 1 to be high: a pair in it is related"
    return None


def _is_pair(pair: list[str], known: set[str]) -> bool:
    return len(pair) == 2 and pair[0] != pair[1] and known.issuperset(pair)


def write(path: Path, groups: dict[str, list[Pair]]) -> dict[str, object]:
    """Write measured unrelated pairs, by structure class, with the digests of their models."""
    models: dict[str, str] = {}
    for pair in (pair for pairs in groups.values() for pair in pairs):
        if pair.convicts():
            raise ModelError(
                f"{pair.a.name} and {pair.b.name} share weights: a null distribution needs unrelated models"
            )
        models |= {digest(w): w.name for w in (pair.a, pair.b)}
    classes = {}
    for kind, pairs in groups.items():
        null = of_pairs(pairs, "")
        classes[kind] = {name: getattr(null, name) for name in FIELDS}
    body = {"fathom_null": VERSION, "models": models, "classes": classes}
    write_json(path, body)
    return body


def joined(one: Null, other: Null) -> Null:
    """Two null distributions joined, which have no pair of models in common."""
    out = copy.deepcopy(one)
    out.origin += f" and {other.origin}"
    out.pairs += other.pairs
    out.witnesses += other.witnesses
    for field_name in ("scores", "neurons", "gaps", "per_layer"):
        for name, values in getattr(other, field_name).items():
            getattr(out, field_name).setdefault(name, []).extend(values)
    return out


def band(null: Null | None, name: str, count: int) -> list[tuple[float, float]]:
    """The lowest and highest score of the controls at each of `count` relative depths."""
    curves = [curve for curve in (null.per_layer.get(name, []) if null else []) if curve]
    if not curves or not count:
        return []
    at = np.linspace(0, 1, count)
    spread = np.stack([np.interp(at, np.linspace(0, 1, len(curve)), curve) for curve in curves])
    return [(float(low), float(high)) for low, high in zip(spread.min(0), spread.max(0), strict=True)]
