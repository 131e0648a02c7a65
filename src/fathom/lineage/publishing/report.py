"""The report of a comparison as plain data; `page.py` makes it a page.

`commitments.py` hashes the models' files, `nulls.py` the null file. `verification.py` makes the report again and
compares the entries.
"""

from __future__ import annotations

import platform
import shlex

import numpy as np

from fathom._version import __version__
from fathom.checkpoints.tensors import Array
from fathom.lineage import evidence
from fathom.lineage.comparison import Comparison
from fathom.lineage.pairs import SCORE_LABELS, Pair
from fathom.lineage.publishing import cards, portrait
from fathom.lineage.publishing.commitments import content, header_digest
from fathom.lineage.publishing.results import (
    Bounds,
    ControlEntry,
    LineageReport,
    ModelEntry,
    PortraitEntry,
    ToolEntry,
)
from fathom.lineage.weights import Weights

SCHEMA = 4
CANONICAL_STEPS = (
    "norm gains folded into the readers that follow them",
    "query/key scale balanced per rotary plane (q/k-norm: per head and plane; no rotary: per head)",
    "neurons of equal gates merged, those without effect dropped, the rest scaled to unit length",
    "the scale of every matrix dropped: each score divides by the norm of what it compares",
)


def made(found: Comparison, hashed: bool) -> LineageReport:
    """The report, with portraits if the comparison has any.

    Args:
        found: A comparison.
        hashed: Hash the files of all models, so that `verify` recognises them.
    """
    pair, null = found.pair, found.null
    drawn = pair.given if found.options.has_extras(pair.a, pair.b) else ()
    covered, depth_a, depth_b = found.coverage
    keys = () if found.inherited is None else ("share", "bar", "directions", "matrices")
    inherited = {key: getattr(found.inherited, key) for key in keys} or None
    return LineageReport(
        fathom_lineage_report=SCHEMA,
        tool=ToolEntry(__version__, np.__version__, platform.platform(), command(found)),
        inputs=[_input(model, pair, hashed) for model in pair.given],
        given=found.given,
        base=pair.a.name,
        structure={
            "paired_by": pair.aligned.pairing,
            "shared_rows": pair.aligned.shared,
            "layers_scored": [len(some) for some in pair.layers],
            "layer_map": [[pair.layers[0][i], pair.layers[1][j]] for i, j in pair.scores[pair.best].pairs]
            if pair.best
            else [],
            "coverage": {"layers_with_evidence": covered, "of_base": depth_a, "of_other": depth_b},
            "identical": None if pair.identical is None else vars(pair.identical),
            "skipped": list(found.skipped),
        },
        canonicalisation=list(CANONICAL_STEPS),
        options=found.options,
        scores={name: _score(pair, name) for name in SCORE_LABELS if pair.value(name) is not None},
        tests=[vars(test) for test in found.tests],
        controls=[_control(name, pairs, hashed) for name, pairs in found.controls],
        null=None if null is None else vars(null),
        bounds=bounds(found),
        inherited=inherited,
        tampering=found.tampering,
        verdict=found.verdict,
        portraits={model.name: portrait_of(cards.sketch(model)) for model in drawn},
        seconds=round(pair.seconds, 2),
    )


def _control(name: str, pairs: list[Pair], hashed: bool) -> ControlEntry:
    control = pairs[0].a if pairs[0].a.name == name else pairs[0].b
    found = content(control) if hashed else None
    return ControlEntry(control.origin.revision, found, name, [_values(p) for p in pairs])


def _input(weights: Weights, pair: Pair, hashed: bool) -> ModelEntry:
    g = weights.geometry
    return ModelEntry(
        revision=weights.origin.revision,
        content=content(weights) if hashed else None,
        origin=weights.name,
        headers_sha256=header_digest(weights.store.tensors),
        file_bytes=weights.file_bytes,
        bytes_read=pair.bytes_read.get(weights.name, 0),
        structure={k: v for k, v in vars(g).items() if k != "latent"},
        extra_tensors=list(weights.extra_tensors[:32]),
    )


def _score(pair: Pair, name: str) -> dict[str, object]:
    if name not in pair.scores:
        return {"value": pair.other[name]}
    scores = pair.scores[name]
    return {
        "value": scores.score,
        "covering_all_layers": scores.covering(max(map(len, pair.layers))),
        "pairs": scores.pairs,
        "q": scores.q,
        "k": scores.k,
        "map": np.round(scores.map, 4).tolist(),
    }


def _values(pair: Pair) -> dict[str, float]:
    return {name: value for name in SCORE_LABELS if (value := pair.value(name)) is not None}


def portrait_of(z: Array) -> PortraitEntry:
    """The published form of a sketch z: hashes of its picture and its numbers, its words, and the numbers."""
    image = portrait.pixels(z)
    return PortraitEntry(portrait.pixel_hash(image), portrait.sketch_hash(z), portrait.words(z), z.tobytes().hex())


def bounds(found: Comparison) -> Bounds:
    """The upper bound on the false-positive rate from controls without a false positive."""
    pairs = len(found.null.pairs) if found.null else 0
    models = found.null.models if found.null else 0
    note = (
        "95 % upper bound if none of these pairs is a false positive and all are independent; "
        "pairs that share a model are not, so the true bound is wider"
    )
    return Bounds(pairs, models, evidence.false_positive_bound(pairs), note)


def command(found: Comparison) -> str:
    """The command line that repeats this comparison."""
    options, given = found.options, found.given
    words = ["fathom", "lineage", "compare", *(model.name for model in found.pair.given)]
    words += ["--mode", options.mode, "--seed", str(options.seed)]
    words += [] if options.nonce is None else ["--nonce", str(options.nonce)]
    if found.controls:
        words += ["--control", *(name for name, _ in found.controls)]
    for flag, value in (("--null", given.null), ("--adapter-base", given.adapter_base)):
        if value is not None:
            words += [flag, str(value)]
    return shlex.join(words)
