"""Random compositions of edits that keep the function end in no "no evidence"; a composed stranger stays a stranger."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fathom.lineage import verdict
from fathom.lineage.comparison import Options, compare
from fathom.lineage.weights import open_weights

MODELS = (("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen3", {}))
QUIET = Options(extras=False, nonce=3)


@pytest.fixture
def neutral(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "lineage"))
    return importlib.import_module("neutral")


@pytest.mark.slow
def test_random_compositions_are_found(neutral, models, tmp_path):
    labels: Counter[str] = Counter()
    for number in range(24):
        kind, changes = MODELS[number % len(MODELS)]
        source, draw = models(kind, seed=140 + number % 2, **changes), np.random.default_rng([7, number])
        kinds = neutral.drawn(draw, kind)
        copy = neutral.composed(source, kinds, tmp_path / str(number), draw)
        if (neutral.logits(source) - neutral.logits(copy)).abs().max() > neutral.KEPT:  # a cast that rounds too much
            assert "cast" in kinds
            continue
        found = compare(open_weights(source), open_weights(copy), options=QUIET)
        assert found.verdict.label != verdict.NONE, kinds
        labels[found.verdict.label] += 1
    assert labels[verdict.INCONCLUSIVE] == 0 and verdict.EMBEDDING not in labels and labels.total() >= 20


DIRECTED = (
    ("flip", "rotate", "cipher"),
    ("flip", "mixed heads", "rotate", "cipher"),
    ("cut layers", "flip", "rotate", "cipher"),
    ("widen", "rotate", "cipher"),
    ("widen", "cut layers", "mixed heads", "rotate", "decoy layer", "cipher"),
    ("own keys", "wide heads", "triple", "rotate", "junk rows", "cipher"),
    ("faint twins", "cipher"),
    ("faint twins", "rotate", "decoy layer", "cipher"),
    ("rotate", "cipher", "mute twins"),
    ("widen", "rotate", "decoy layer", "decoy layer", "decoy layer", "decoy layer", "cipher", "mute twins"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", DIRECTED, ids=" ".join)
def test_edits_directed_at_the_test_without_a_tokenizer_are_found(neutral, models, tmp_path, kinds):
    source, draw = models(seed=140), np.random.default_rng(5)
    copy = neutral.composed(source, list(kinds), tmp_path / "copy", draw)
    assert (neutral.logits(source) - neutral.logits(copy)).abs().max() <= neutral.KEPT
    for nonce in range(2):
        options = Options(extras=False, nonce=nonce)
        found = compare(open_weights(source), open_weights(copy), options=options)
        assert found.verdict.label == verdict.INITIALISATION, found.verdict.reasons
        stranger = compare(open_weights(models(seed=141)), open_weights(copy), options=options)
        assert stranger.verdict.label == verdict.NONE, stranger.verdict.reasons


PLAIN = (
    ("flip plain",),
    ("turn plain", "cipher"),
    ("flip plain", "turn plain", "cipher"),
    ("turn plain", "mute plain", "cipher"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", PLAIN, ids=" ".join)
def test_disguises_of_models_with_layer_norm_are_found(neutral, tmp_path, kinds):
    tiny = importlib.import_module("tiny")
    shape = tiny.Shape("gpt2", kv_heads=4)
    runs = [tiny.Run(seed, torch.arange(4096) * 7919 % 512) for seed in (1, 2)]
    found, _ = tiny.trained(shape, runs, 3)
    vocab = {f"w{row}": row for row in range(512)}
    words = tmp_path / "tokenizer.json"
    words.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))
    paths = [tiny.write(tmp_path / str(at), shape, tiny.tensors_of(found, shape, at), words) for at in (0, 1)]
    copy = neutral.composed(paths[0], list(kinds), tmp_path / "copy", np.random.default_rng(2))
    assert (neutral.logits(paths[0]) - neutral.logits(copy)).abs().max() <= neutral.KEPT
    labels = [compare(open_weights(path), open_weights(copy), options=QUIET).verdict.label for path in paths]
    assert labels == [verdict.INITIALISATION, verdict.NONE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [("triple", "rotate", "cipher"), ("decoy layer", "junk rows"), ("split heads", "plane")]
)
def test_the_same_edits_make_no_relative_of_a_stranger(neutral, models, tmp_path, kinds):
    copy = neutral.composed(models(seed=141), list(kinds), tmp_path / "copy", np.random.default_rng(1))
    found = compare(open_weights(models(seed=140)), open_weights(copy), options=QUIET)
    assert found.verdict.label == verdict.NONE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_edit_keeps_the_function(neutral, models, tmp_path, kind):
    source = models(kind, seed=140)
    for number, edit in enumerate(neutral.usable(kind)):
        copy = neutral.composed(source, [edit], tmp_path / str(number), np.random.default_rng(number))
        assert (neutral.logits(source) - neutral.logits(copy)).abs().max() <= neutral.KEPT, edit
