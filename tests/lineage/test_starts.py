"""Strangers that begin from one formula are no relatives; a formula is known inside one model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fathom.lineage import starts, verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options, compare
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import edited

QUIET = Options(extras=False)
NOISE = 0.03


def hadamard(size):
    out = torch.ones(1, 1)
    while len(out) < size:
        out = torch.cat([torch.cat([out, out], 1), torch.cat([out, -out], 1)])
    return out


def begun(formula, seed):
    """Matrices of the layers from a formula, and as much noise as some training leaves."""

    def change(tensors):
        draw = torch.Generator().manual_seed(seed)
        for name, value in tensors.items():
            if value.ndim == 2 and ".layers." in name:
                begin = (
                    torch.eye(*value.shape)
                    if formula == "identity"
                    else hadamard(256)[: len(value), : value.shape[1]] / 8
                )
                tensors[name] = (begin + NOISE * torch.randn(value.shape, generator=draw)).to(value.dtype)

    return change


def waves(seed):
    """Sinusoids of the row number, as in position codes, for an embedding."""

    def change(tensors):
        draw = torch.Generator().manual_seed(seed)
        rows, width = tensors["model.embed_tokens.weight"].shape
        angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
        table = torch.cat([angles.sin(), angles.cos()], 1) + 0.05 * torch.randn(rows, width, generator=draw)
        tensors["model.embed_tokens.weight"] = table.double()

    return change


@pytest.mark.quick("identity-False-0", "waves-True-0")
@pytest.mark.parametrize("controls", [0, 2])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("formula", ["identity", "hadamard", "waves"])
def test_strangers_from_one_formula_are_not_accused(models, tmp_path, formula, turned, controls):
    pair = []
    for seed in (60, 61):
        change = waves(seed) if formula == "waves" else begun(formula, seed)
        path = edited(models(seed=seed), tmp_path / str(seed), change)
        if turned and seed == 61:
            attack(open_weights(path), ("rotate",), tmp_path / "turned", dtype="float64")
            path = tmp_path / "turned"
        pair.append(open_weights(path))
    found = compare(*pair, [models(seed=62 + n) for n in range(controls)], None, QUIET)
    assert found.verdict.label in {verdict.INCONCLUSIVE, verdict.NONE}
    if any(test.void for test in found.tests):
        assert verdict.START in found.verdict.alternatives
    want = {"embedding"} if formula == "waves" else {"attention", "feed-forward"}
    assert all(starts.found(w) == want for w in pair)


@pytest.mark.slow
def test_a_worn_formula_of_different_rows_is_known(models, tmp_path):
    """Gate and up rows that are other rows of one matrix, and twice as much training."""

    def change(seed):
        def worn(tensors):
            begun("hadamard", seed)(tensors)
            draw = torch.Generator().manual_seed(100 + seed)
            for name, value in tensors.items():
                if value.ndim == 2 and ".layers." in name:
                    start = hadamard(256)[64 : 64 + len(value), : value.shape[1]] / 8 if "up_proj" in name else value
                    tensors[name] = (start + 0.1 * torch.randn(value.shape, generator=draw)).to(value.dtype)

        return worn

    pair = [open_weights(edited(models(seed=seed), tmp_path / str(seed), change(seed))) for seed in (60, 61)]
    assert all(starts.found(w) == {"attention", "feed-forward"} for w in pair)
    assert compare(*pair, options=QUIET).verdict.label in {verdict.INCONCLUSIVE, verdict.NONE}


def test_random_starts_have_no_formula(models):
    for kind in ("llama", "qwen3"):
        assert not starts.found(open_weights(models(kind, seed=63)))


def test_rows_that_training_brought_together_are_no_formula(models, tmp_path):
    """Hot training brings gates and up rows to cosines of 0.5 to 0.8. A copy of such a model is still found."""

    def train(tensors):
        for name in [n for n in tensors if "up_proj" in n]:
            tensors[name] = tensors[name] + 0.9 * tensors[name.replace("up_proj", "gate_proj")]

    base = edited(models(seed=63), tmp_path / "hot", train)
    attack(open_weights(base), ("permute", "neuron"), tmp_path / "copy", dtype="float64")
    found = compare(open_weights(base), open_weights(tmp_path / "copy"), options=QUIET)
    assert not starts.found(open_weights(base)) and found.verdict.label == verdict.INITIALISATION


def test_a_table_sorted_by_frequency_has_no_lines(models, tmp_path):
    """Real vocabularies are sorted by frequency: power rises slowly to low frequencies, without lines."""

    def sort(tensors):
        table = tensors["model.embed_tokens.weight"]
        table += torch.linspace(1, 0, len(table))[:, None].double() * table.std() * 3
        table *= torch.from_numpy(np.linspace(0.2, 2, len(table)))[:, None]

    assert not starts.found(open_weights(edited(models(seed=63), tmp_path / "sorted", sort)))


def test_a_copy_of_a_formula_is_still_a_copy(models, tmp_path):
    base = edited(models(seed=60), tmp_path / "base", begun("identity", 1))
    found = compare(open_weights(base), open_weights(edited(base, tmp_path / "copy")), options=QUIET)
    assert found.verdict.sentence.startswith("The weights are identical")
