"""Shares of a merge: right, with intervals that cover, and refused where the question has no answer."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from fathom.cli import lineage as commands
from fathom.errors import ModelError
from fathom.lineage import comparison, shares
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, edited, save, tiny_config


def simulated(draw, count, layers, size=400, drift=0.3, heterogeneity=0.0):
    """Inner products of a merge that was trained on, its parents having moved from one base."""
    weights = draw.dirichlet(np.full(count, 2.0))
    out = []
    for _ in range(layers):
        base = draw.normal(size=size)
        loud = np.exp(draw.normal(0, 0.5))
        parents = base + loud * draw.normal(size=(count, size))
        own = weights + heterogeneity * (lambda z: z - z.mean())(draw.normal(size=count))
        child = own @ parents + drift * loud * draw.normal(size=size)
        rows = np.vstack([child, parents])
        out.append(rows @ rows.T)
    return np.stack(out), weights


@pytest.mark.quick("0.0-6-2", "0.1-24-4")
@pytest.mark.parametrize(("layers", "count"), [(6, 2), (6, 3), (24, 2), (24, 4)])
@pytest.mark.parametrize("heterogeneity", [0.0, 0.1])
def test_intervals_cover(layers, count, heterogeneity):
    """At least 90 % of the 95 % intervals hold the truth; intervals that ignore the layers' differences do not."""
    draw = np.random.default_rng(layers + count)
    inside, naive = [], []
    for _ in range(120):
        gram, truth = simulated(draw, count, layers, heterogeneity=heterogeneity)
        found = shares.solved(gram, [str(i) for i in range(count)]).shares
        inside += [one.low <= want <= one.high for one, want in zip(found, truth, strict=True)]
        naive += [abs(one.share - want) <= (one.high - one.low) / 8 for one, want in zip(found, truth, strict=True)]
    assert np.mean(inside) >= 0.9
    assert np.mean(naive) < 0.9  # intervals of a quarter of the width do not cover


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Two children of one base, their mean of 70 and 30 %, and a stranger."""
    root = tmp_path_factory.mktemp("merge")
    base = build(tiny_config("llama", num_hidden_layers=4), 0)
    save(base, root / "base", 512)
    save(build(tiny_config("llama", num_hidden_layers=4), 9), root / "stranger", 512)
    for number, name in enumerate(("one", "two"), 1):

        def drift(tensors, seed=number):
            draw = np.random.default_rng(seed)
            for tensor in tensors.values():
                tensor += 0.01 * tensor.new_tensor(draw.normal(size=tensor.shape))

        edited(root / "base", root / name, drift)
    mixed(root / "mean", {root / "one": 0.7, root / "two": 0.3})
    return root


def mixed(target, weights):
    """A weighted mean of checkpoints."""
    parts = [(share, load_file(place / "model.safetensors")) for place, share in weights.items()]
    mean = {name: sum(share * tensors[name] for share, tensors in parts) for name in parts[0][1]}
    edited(next(iter(weights)), target, lambda tensors: tensors.update(mean))


def opened(root, *names):
    return [open_weights(root / name) for name in names]


def test_a_mean_is_told_from_its_relatives(family):
    child, *parents = opened(family, "mean", "one", "two")
    found = shares.shares(child, parents)
    assert [one.share for one in found.shares] == pytest.approx([0.7, 0.3], abs=1e-6)
    assert found.residual < 1e-6 and found.is_merge
    child, *parents = opened(family, "base", "one", "two")  # the base is between its children, and no mean of them
    assert not shares.shares(child, parents).is_merge
    child, *parents = opened(family, "mean", "one", "two", "stranger")
    found = shares.shares(child, parents)
    assert found.shares[2].low <= 0 <= found.shares[2].high + 1e-9 or abs(found.shares[2].share) < 1e-6


def test_questions_without_an_answer_are_refused(family, tmp_path):
    one, two, same = opened(family, "one", "two", "one")
    with pytest.raises(ModelError, match="at least two parents"):
        shares.shares(one, [two])
    with pytest.raises(ModelError, match="cannot be separated"):
        shares.shares(two, [one, same])
    with pytest.raises(ModelError, match="differ in shape"):
        shares.shares(one, [two, open_weights(save(build(tiny_config("llama"), 1), tmp_path / "shallow"))])
    attack(one, ("permute", "neuron", "head"), tmp_path / "hidden")
    with pytest.raises(ModelError, match="match no parent's"):
        shares.shares(open_weights(tmp_path / "hidden"), [one, two])


def test_a_missing_parent_gets_no_share(family, tmp_path):
    """A stranger would get a quarter of the fit; and a mean that stands in for a parent is exact, so the words warn."""
    save(build(tiny_config("llama", num_hidden_layers=4), 10), tmp_path / "absent", 512)
    mixed(tmp_path / "unrelated", {family / "stranger": 0.5, tmp_path / "absent": 0.5})
    mixed(tmp_path / "half", {family / "one": 0.5, family / "two": 0.5})
    said = commands.shares(str(tmp_path / "unrelated"), [str(family / "stranger"), str(family / "two")])
    assert said.data["shares"] == [] and not said.data["is_merge"] and said.data["residual"] > 0.2
    assert "parent may be missing" in said.text and said.text.count("%") == 1  # of the residual
    stand_in = commands.shares(str(family / "mean"), [str(family / "one"), str(tmp_path / "half")])
    assert [round(one["share"], 3) for one in stand_in.data["shares"]] == [0.4, 0.6]
    assert stand_in.text.endswith(shares.IF_COMPLETE)
    same = commands.shares(str(family / "one"), [str(family / "one"), str(family / "two")])
    assert "one alone explains it" in same.text and same.data["shares"] == []


def test_close_parents_keep_their_shares(monkeypatch):
    """Fine-tunes that moved by 0.2 %: sums in float32 are too coarse, and larger matrices make them coarser."""
    monkeypatch.setattr(shares, "COLUMNS", 60_000)
    draw = np.random.default_rng(0)
    base, one, two = draw.standard_normal((3, 100_000), np.float32)
    parents = [base + np.float32(0.002) * one, base + np.float32(0.002) * two]
    rows = np.stack([np.float32(0.6) * parents[0] + np.float32(0.4) * parents[1], *parents])
    found = shares.solved(np.stack([shares._products(rows, rows)] * 3), ["one", "two"])
    assert [one.share for one in found.shares] == pytest.approx([0.6, 0.4], abs=1e-4)
    assert found.is_merge


def test_a_layer_with_fewer_neurons_makes_another_shape(family, tmp_path):
    def pruned(tensors):
        for name, tensor in tensors.items():
            if "layers.0.mlp" in name:
                tensors[name] = tensor[:, :100] if "down" in name else tensor[:100]

    child, *parents = opened(family, "mean", "one")
    parents.append(open_weights(edited(family / "two", tmp_path / "pruned", pruned)))
    with pytest.raises(ModelError, match="differ in shape"):
        shares.shares(child, parents)
    assert comparison._of_low_rank(comparison.measure(*parents, Options())) is False
