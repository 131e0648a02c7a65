"""Random compositions of edits that keep the function end in no "no evidence"; a composed stranger stays a stranger."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

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
        assert (neutral.logits(source) - neutral.logits(copy)).abs().max() <= neutral.KEPT, kinds
        found = compare(open_weights(source), open_weights(copy), options=QUIET)
        assert found.verdict.label != verdict.NONE, kinds
        labels[found.verdict.label] += 1
    assert labels[verdict.INCONCLUSIVE] == 0 and verdict.EMBEDDING not in labels


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
