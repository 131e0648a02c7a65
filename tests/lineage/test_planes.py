"""Plane words survive every edit that keeps the function; strangers agree on half; alone they decide nothing."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from fathom.lineage import evidence, planes, verdict
from fathom.lineage.comparison import Options, compare
from fathom.lineage.verdict import Findings
from fathom.lineage.weights import open_weights

EVERY = ([0, 1, 2], [0, 1, 2])
HIDDEN = ["triple", "mixed heads", "own keys", "widen", "rotate", "plane", "head", "cipher"]


def told(a, b):
    """Agreements of two models, and how many there could be."""
    return planes.agreements(*(planes.words(open_weights(path), *EVERY) for path in (a, b)))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_no_edit_that_keeps_the_function_changes_the_words(models, tmp_path, kind, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "lineage"))
    neutral = importlib.import_module("neutral")
    source = models(kind, seed=150)
    copy = neutral.composed(source, HIDDEN, tmp_path / "copy", np.random.default_rng(1))
    assert planes.comparable(open_weights(source), open_weights(copy))
    assert told(source, copy) == (12, 12)
    assert told(models(kind, seed=151), copy)[0] < 11


def test_neighbouring_planes_of_strangers_agree_by_chance():
    draw = np.random.default_rng(0)
    found = draw.normal(size=(40, 4, 16, 8)) + np.linspace(0, 3, 16)[:, None]  # a trend that all models share
    counts = [planes.agreements(found[i], found[j]) for i in range(40) for j in range(i)]
    p = np.array([evidence.test_planes(*count).p for count in counts])
    assert {of for _, of in counts} == {32}
    assert (p <= 0.05).mean() < 0.07 and (p <= 0.01).mean() < 0.02
    assert planes.agreements(found[0], found[0] + 0.1 * found[1]) == (32, 32)


def test_models_without_the_same_planes_are_not_compared(models):
    deeper, plain = (open_weights(models(num_hidden_layers=n)) for n in (4, 3))
    assert planes.comparable(plain, plain) and not planes.comparable(plain, deeper)
    assert not planes.comparable(plain, open_weights(models(head_dim=8)))


def test_the_words_are_a_witness_and_decide_nothing():
    def said(*tests):
        return verdict.decide(Findings(list(tests), 0.0, None, 0.0, set(), set(), []))

    alone, none = (said(evidence.test_planes(count, 192)) for count in (192, 110))
    assert alone.label == verdict.INCONCLUSIVE and any("distillation" in reason for reason in alone.reasons)
    assert none.label == verdict.NONE
    with_neurons = said(evidence.test_planes(192, 192), evidence.test_neurons("order", [_sure()], []))
    assert with_neurons.label == verdict.EMBEDDING or "192" not in with_neurons.sure


def _sure():
    return evidence.NeuronCount((0, 0), 150, 160)


@pytest.mark.slow
def test_the_report_has_the_words(models):
    found = compare(open_weights(models(seed=150)), open_weights(models(seed=151)), options=Options(extras=False))
    assert found.verdict.label == verdict.NONE
    assert [test.name for test in found.tests].count("T6 plane words") == 1
