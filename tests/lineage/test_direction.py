"""Direction is said where something was lost or repeated, the right way round, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fathom.lineage.direction import direction
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, edited, save, tiny_config


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(build(tiny_config("llama"), 3, torch.float32), tmp_path_factory.mktemp("direction") / "base", 512)


def changed(source, target, change, **config):
    """A copy whose layer matrices went through `change`."""

    def all_matrices(tensors):
        tensors.update({n: change(t) for n, t in tensors.items() if ".layers." in n and t.ndim == 2})

    return edited(source, target, all_matrices, **config)


def quantised(bits, group=32):
    def change(t):
        groups = t.reshape(-1, group)
        scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return ((groups / scale).round() * scale).reshape(t.shape)

    return change


def pruned(t):
    return torch.where(t.abs() > t.abs().median(), t, 0.0)


LOSSES = {
    "bfloat16": (lambda t: t.bfloat16().float(), "rounded to bfloat16"),
    "float16": (lambda t: t.half().float(), "rounded to float16"),
    "int8": (quantised(8), "a grid of few levels"),
    "int4": (quantised(4), "a grid of few levels"),
    "pruned": (pruned, "are zero, and the rest are the other's"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_what_lost_information_is_the_later_one(base, tmp_path, kind):
    change, reason = LOSSES[kind]
    first, second = open_weights(base), open_weights(changed(base, tmp_path / kind, change))
    for pair in ((first, second), (second, first)):
        found = direction(*pair)
        assert (found.made, found.source) == (second.name, first.name) and reason in found.reason


def moved(scale, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return lambda t: t + scale * t.std() * torch.randn(t.shape, generator=draw)


def test_training_has_no_direction(base, tmp_path):
    """Nor have two roundings of one model, nor a model that was pruned and then trained."""
    first = open_weights(base)
    assert direction(first, open_weights(changed(base, tmp_path / "tuned", moved(0.05)))).made is None
    eight, four = (open_weights(changed(base, tmp_path / f"int{bits}", quantised(bits))) for bits in (8, 4))
    assert direction(eight, four).made is None
    sparse = changed(base, tmp_path / "sparse", pruned)
    assert direction(first, open_weights(changed(sparse, tmp_path / "healed", moved(0.05)))).made is None
    assert direction(first, first).made is None


def deeper(tensors):
    """The second layer comes twice."""
    whole = dict(tensors)
    for new, old in ((2, 1), (3, 2)):
        for name in [n for n in whole if f"layers.{old}." in n]:
            tensors[name.replace(f"layers.{old}.", f"layers.{new}.")] = whole[name].clone()


def upcycled(tensors):
    """Each feed-forward becomes two experts, which some training moved."""
    draw = np.random.default_rng(0)
    for name in [n for n in tensors if ".mlp." in n]:
        tensor = tensors.pop(name)
        for expert in range(2):
            noise = torch.from_numpy(draw.normal(size=tensor.shape)).float() * 0.1 * tensor.std()
            tensors[name.replace(".mlp.", f".mlp.experts.{expert}.")] = tensor + noise


def test_repeated_layers_and_copied_experts_are_later(base, tmp_path):
    target = edited(base, tmp_path / "deeper", deeper, num_hidden_layers=4, layer_types=None)
    found = direction(open_weights(base), open_weights(target))
    assert found.made == str(target) and "layers 1 of the other come twice" in found.reason
    assert direction(open_weights(target), open_weights(base)).made == str(target)
    target = edited(base, tmp_path / "moe", upcycled, num_experts=2)
    found = direction(open_weights(base), open_weights(target))
    assert found.made == str(target) and "copies of the other's feed-forward" in found.reason
