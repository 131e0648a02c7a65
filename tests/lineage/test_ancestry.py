"""Layers are traced through pruning, repetition, reordering and disguise; none is invented."""

from __future__ import annotations

import pytest
import torch

from fathom.cli import lineage as commands
from fathom.errors import ModelError
from fathom.lineage.ancestry import sources
from fathom.lineage.attacks import attack
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, save, tiny_config

STACK = (0, 4, 4, 2, None, 1)
"""The layer of the base that each layer of the child is; None is a new one."""


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    root = tmp_path_factory.mktemp("ancestry")
    base = build(tiny_config("qwen3", num_hidden_layers=5), 0, torch.float32)
    child = build(tiny_config("qwen3", num_hidden_layers=len(STACK)), 7, torch.float32)
    draw = torch.Generator().manual_seed(0)
    for part in ("embed_tokens", "norm"):
        getattr(child.model, part).load_state_dict(getattr(base.model, part).state_dict())
    for here, there in enumerate(STACK):
        if there is not None:
            child.model.layers[here].load_state_dict(base.model.layers[there].state_dict())
            for value in child.model.layers[here].parameters():  # some training
                value.data += 0.3 * value.data.std().nan_to_num(0) * torch.randn(value.shape, generator=draw)
    for name, model in {"base": base, "child": child}.items():
        save(model, root / name, 512)
    save(build(tiny_config("qwen3", num_hidden_layers=5), 9, torch.float32), root / "stranger", 512)
    attack(open_weights(root / "child"), ("rotate", "gain", "neuron"), root / "hidden")
    return root


@pytest.mark.parametrize("name", ["child", "hidden"])
def test_every_layer_is_traced_and_the_new_one_is_not(family, name):
    found = sources(open_weights(family / "base"), open_weights(family / name))
    assert tuple(one.source for one in found) == STACK
    assert all(one.second < one.of / 10 for one in found)


def test_a_stranger_has_no_sources(family):
    found = sources(open_weights(family / "base"), open_weights(family / "stranger"))
    assert [one.source for one in found] == [None] * 5 and min(one.p for one in found) > 0.01


def test_a_negative_seed_is_refused(family):
    with pytest.raises(ModelError, match=r"^seed=-1: wanted 0 or more$"):
        sources(open_weights(family / "base"), open_weights(family / "child"), -1)


def test_the_command_says_it_in_lines(family):
    result = commands.layers(str(family / "base"), str(family / "child"))
    lines = result.text.splitlines()
    assert len(lines) == len(STACK) + 1 and "layer 1 of" in lines[1] and "layer 4" in lines[1] and "none" in lines[4]
    assert [one["source"] for one in result.data["layers"]] == list(STACK)
