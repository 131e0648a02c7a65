"""Attention is shared if value channels are paired by what they read and write; an equal embedding is not enough."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fathom.lineage import verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options, compare
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import edited

QUIET = Options(extras=False)
EMBED = "model.embed_tokens.weight"


def taking(models, names, noise=0.0):
    """Tensors of another model, whose names hold one of some words, with some noise."""
    source = load_file(models(seed=70) / "model.safetensors")
    draw = torch.Generator().manual_seed(1)

    def change(tensors):
        for name in [n for n in tensors if any(word in n for word in names)]:
            value = source[name]
            tensors[name] = value + noise * value.std() * torch.randn(value.shape, generator=draw, dtype=value.dtype)

    return change


@pytest.mark.quick("0-0.2")
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("controls", [0, 2])
def test_an_equal_embedding_alone_says_nothing_of_the_layers(models, tmp_path, noise, controls):
    """Frozen or public embeddings, and students of hidden states: channels agree, and no layer does."""
    other = edited(models(seed=71), tmp_path / "other", taking(models, (EMBED,), noise))
    found = compare(
        open_weights(models(seed=70)), open_weights(other), [models(seed=72 + n) for n in range(controls)], None, QUIET
    )
    assert found.verdict.label == verdict.EMBEDDING and found.verdict.exit_code == 14
    assert "attention" not in found.verdict.sentence and found.coverage[0] == 0
    assert any("distillation" in other for other in found.verdict.alternatives)


@pytest.mark.quick("edits1")
@pytest.mark.parametrize("edits", [(), ("head",), ("rotate", "head")])
def test_shared_attention_is_named_by_its_own_test(models, tmp_path, edits):
    names = (EMBED, "self_attn", "input_layernorm")
    other = edited(models(seed=71), tmp_path / "other", taking(models, names))
    if edits:
        attack(open_weights(other), edits, tmp_path / "edited", dtype="float64")
        other = tmp_path / "edited"
    found = compare(open_weights(models(seed=70)), open_weights(other), options=QUIET)
    t5 = {test.name: test for test in found.tests if test.name.startswith("T5")}
    assert min(test.p for test in t5.values()) < 1e-6
    assert found.verdict.label in {verdict.PARTIAL, verdict.INITIALISATION}
    assert not any(test.p < 1e-3 for test in found.tests if test.name.startswith("T4"))


def test_strangers_pair_few_value_channels(models):
    found = compare(open_weights(models(seed=71)), open_weights(models(seed=72)), options=QUIET)
    assert max(count.paired for counts in found.pair.values.values() for count in counts) <= 4
