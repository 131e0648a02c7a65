"""Evidence that is none: one matrix seen twice, ties, and rows so loud that nothing else is heard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.lineage import awm, verdict
from fathom.lineage.comparison import Comparison, Options, compare
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import edited

Tensors = dict[str, torch.Tensor]
FOUND = {verdict.SHARED, verdict.INITIALISATION, verdict.PARTIAL}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def said(a: Path, b: Path, *controls: Path, **options: object) -> Comparison:
    return compare(open_weights(a), open_weights(b), controls, None, Options(extras=False, **options))  # type: ignore[arg-type]


def named(found: Comparison) -> set[str]:
    return {test.name for test in found.tests}


def with_head(source: Path, target: Path, noise: float, tied: bool) -> Path:
    """The embedding stored a second time as the head, with noise of so many standard deviations."""
    draw = np.random.default_rng(int(noise * 10) + sum(source.name.encode()))

    def store(tensors: Tensors) -> None:
        embed = tensors[EMBED].numpy()
        tensors[HEAD] = torch.from_numpy(embed + noise * embed.std() * draw.normal(size=embed.shape))

    return edited(source, target, store, tie_word_embeddings=tied)


@pytest.mark.quick("0.0-False", "1.0-False")
@pytest.mark.parametrize(("noise", "tied"), [(0.0, True), (0.0, False), (0.3, False), (1.0, False)])
def test_a_head_that_is_the_embedding_is_no_second_witness(models, tmp_path, noise, tied):
    """Two strangers that store a tied head compare one matrix with itself: always 64 of 64 channels."""
    pair = [with_head(models(seed=seed), tmp_path / str(seed), noise, tied) for seed in (30, 31)]
    found = said(*pair)
    assert found.verdict.label not in FOUND
    assert "T2 embedding and output head" not in named(found)
    assert any("no second witness" in why for why in found.skipped)


def test_a_head_of_its_own_is_a_second_witness(models):
    found = said(models(seed=30), models(seed=30))
    assert "T2 embedding and output head" in named(found) and not found.skipped


@pytest.mark.slow
def test_a_gate_that_is_its_up_projection_makes_no_pairs(models, tmp_path):
    """T4 compares what is read with what is written: a gate that repeats the up row adds nothing."""

    def repeat(tensors: Tensors) -> None:
        for name in [n for n in tensors if "gate_proj" in n]:
            tensors[name] = tensors[name.replace("gate", "up")].clone()

    pair = [edited(models(seed=seed), tmp_path / str(seed), repeat) for seed in (32, 33)]
    found = said(*pair, models(seed=34))
    assert found.verdict.label not in FOUND
    assert max(count.paired for counts in found.pair.neurons.values() for count in counts) <= 4


def last_neurons(tensors: Tensors, source: slice | None = None) -> None:
    """The last 32 neurons of each layer become zero, or copies of others: widths padded for a quantiser's groups."""
    for name, value in tensors.items():
        if "gate_proj" in name or "up_proj" in name:
            value[-32:] = 0 if source is None else value[source]
        if "down_proj" in name:
            value[:, -32:] = 0 if source is None else value[:, source]


def last_channels(tensors: Tensors, source: slice | None = None) -> None:
    """The last 16 channels of the residual stream become zero, or copies of others."""
    for name, value in tensors.items():
        if value.ndim == 2 and ("o_proj" in name or "down_proj" in name):
            value[-16:] = 0 if source is None else value[source]
        elif value.ndim == 2:
            value[:, -16:] = 0 if source is None else value[:, source]


def one_copied_neuron(tensors: Tensors) -> None:
    last_neurons(tensors, slice(0, 1))


def copied_channels(tensors: Tensors) -> None:
    last_channels(tensors, slice(0, 16))


def zero_down_rows(tensors: Tensors) -> None:
    for name, value in tensors.items():
        if "down_proj" in name:
            value[-16:] = 0


def one_vector_for_most_rows(tensors: Tensors) -> None:
    for name in (EMBED, HEAD):
        tensors[name][200:] = tensors[name][200]


TIES = (last_neurons, one_copied_neuron, last_channels, copied_channels, zero_down_rows, one_vector_for_most_rows)


@pytest.mark.quick("0-last_neurons", "0-copied_channels", "0-one_vector_for_most_rows")
@pytest.mark.parametrize("change", TIES)
@pytest.mark.parametrize("controls", [0, 2])
def test_ties_are_no_evidence(models, tmp_path, change, controls):
    """An assignment among equals leaves them in order: strangers padded alike looked alike (p down to 1e-107)."""
    pair = [edited(models(seed=seed), tmp_path / str(seed), change) for seed in (35, 36)]
    found = said(*pair, *(models(seed=37 + n) for n in range(controls)))
    assert found.verdict.label not in FOUND
    assert all(test.p > 1e-4 for test in found.tests), [(t.name, t.p) for t in found.tests]


@pytest.mark.slow
@pytest.mark.parametrize("change", TIES)
def test_what_is_not_tied_still_convicts(models, tmp_path, change):
    base = edited(models(seed=35), tmp_path / "base", change)
    copy = edited(base, tmp_path / "copy")
    found = said(base, copy, models(seed=37), models(seed=38))
    assert found.verdict.label in {verdict.SHARED, verdict.INITIALISATION}
    if "channels" in change.__name__:
        assert any("channels, which are zero or copies" in why for why in found.skipped)
        assert {test.detail["channels"] for test in found.tests if "channels" in test.detail} <= {32, 48}
    if "neuron" in change.__name__:
        merged = 128 if change is last_neurons else 129
        assert {count.of for counts in found.pair.neurons.values() for count in counts} <= {128, merged}


def test_a_zero_embedding_aligns_nothing(models, tmp_path):
    def blank(tensors: Tensors) -> None:
        tensors[EMBED][:] = 0

    found = said(models(seed=35), edited(models(seed=36), tmp_path / "blank", blank))
    assert found.verdict.label == verdict.INCONCLUSIVE and not any(test.p < 0.01 for test in found.tests)
    assert any("neither zero nor copies" in why for why in found.skipped)


def test_equal_costs_are_settled_by_lot():
    """Of 64 equal channels a matching by lot fixes about one; the order they are listed in is no reason."""
    fixed = []
    for seed in range(200):
        found = awm.match(np.ones((64, 64)), seed)
        assert sorted(found.columns) == list(range(64)) and not found.counted.any() and found.fixed == 0
        fixed.append(int(np.sum(found.columns == np.arange(64))))
    assert 0.7 < np.mean(fixed) < 1.4


def test_copies_are_known_from_neighbours():
    draw = np.random.default_rng(0)
    similarity = draw.normal(size=(40, 30)).astype(np.float32)
    similarity[7], similarity[:, 3], similarity[:, 9] = -similarity[21], 0, similarity[:, 11]
    assert np.flatnonzero(awm.tied(similarity)).tolist() == [7, 21]
    assert np.flatnonzero(awm.tied(similarity.T)).tolist() == [3, 9, 11]


@pytest.fixture(scope="module")
def disguised(models, tmp_path_factory):
    from fathom.lineage.attacks import attack

    out = tmp_path_factory.mktemp("disguised") / "model"
    attack(open_weights(models(seed=40)), ("permute", "gain", "plane", "head", "neuron"), out, seed=1, dtype="float64")
    return out


def loud(tensors: Tensors, factor: float = 1e5, seed: int = 3) -> None:
    """Rows of tokens that no text uses are free: one becomes noise as loud as you like."""
    embed = tensors[EMBED].numpy()  # of one memory
    embed[300] = factor * embed.std() * np.random.default_rng(seed).normal(size=embed.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e5, 1e12])
def test_one_loud_row_does_not_hide_a_lineage(models, disguised, tmp_path, factor):
    copy = edited(disguised, tmp_path / "copy", lambda tensors: loud(tensors, factor))
    found = said(models(seed=40), copy, models(seed=41), models(seed=42))
    assert found.verdict.label in {verdict.SHARED, verdict.INITIALISATION}
    assert found.pair.aligned.fixed.size == 64 and found.pair.head_agreement == 64
    assert found.pair.value("awm_canonical") == pytest.approx(1, abs=1e-6)
    assert found.pair.value("procrustes") > 0.98
    assert found.pair.value("awm") < 0.2  # as published: cosines of columns are those of the loud row
    assert any("out of proportion" in sign for sign in found.tampering)
    assert said(models(seed=40), copy).verdict.label == verdict.INITIALISATION


@pytest.mark.slow
def test_one_loud_row_does_not_make_a_lineage(models, tmp_path):
    pair = [edited(models(seed=seed), tmp_path / str(seed), loud) for seed in (43, 44)]
    found = said(*pair, models(seed=41), models(seed=42))
    assert found.verdict.label == verdict.NONE and min(test.p for test in found.tests) > 1e-3


def test_rows_of_unit_length_are_of_unit_length():
    rows = np.array([[3, 4], [0, 0], [1e30, 0], [3e-30, 4e-30]], np.float32)
    assert np.allclose(awm.unit_rows(rows), [[0.6, 0.8], [0, 0], [1, 0], [0.6, 0.8]])
