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


def learned(models):
    """What learning hidden states leaves of the other's attention: the sum over heads of what each value writes."""
    take = taking(models, (EMBED, "input_layernorm", "v_proj", "o_proj"))

    def change(tensors):
        take(tensors)
        draw = torch.Generator().manual_seed(2)
        for name in [n for n in tensors if "v_proj" in n]:
            v, o = tensors[name], tensors[name.replace("v_proj", "o_proj")]
            heads = o.unflatten(1, (2, -1, 16))  # [d, KV, group, D]
            mix = torch.linalg.qr(torch.randn(len(v), len(v), generator=draw, dtype=v.dtype))[0]
            both = (heads.sum(2).flatten(1) @ mix.T).unflatten(1, (2, 1, 16)) / heads.shape[2]
            tensors[name] = mix @ v
            tensors[name.replace("v_proj", "o_proj")] = both.expand_as(heads).flatten(1).contiguous()

    return change


@pytest.mark.slow
@pytest.mark.parametrize("controls", [0, 2])
def test_what_a_student_of_hidden_states_learns_names_no_attention(models, tmp_path, controls):
    other = edited(models(seed=71), tmp_path / "other", learned(models))
    found = compare(
        open_weights(models(seed=70)), open_weights(other), [models(seed=72 + n) for n in range(controls)], None, QUIET
    )
    assert found.verdict.label == verdict.EMBEDDING
    assert any("distillation" in other for other in found.verdict.alternatives)


def test_strangers_pair_few_value_channels(models):
    found = compare(open_weights(models(seed=71)), open_weights(models(seed=72)), options=QUIET)
    assert max(count.paired for counts in found.pair.values.values() for count in counts) <= 4
