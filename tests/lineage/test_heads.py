"""Heads that do nothing cannot hide the others."""

from __future__ import annotations

import pytest
import torch

from fathom.lineage import heads, verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options, compare, measure
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, edited, logits, save, tiny_config

DIM = 16


def with_junk(source, target, cancel):
    """As many heads again, louder than the others: they write nothing, or in pairs that cancel."""
    draw = torch.Generator().manual_seed(5)

    def add(tensors):
        for name in [n for n in tensors if ".self_attn." in n and "proj" in n]:
            value = tensors[name]
            if name.endswith("o_proj.weight"):
                half = torch.randn(len(value), 2 * DIM, generator=draw, dtype=value.dtype) * (0.3 if cancel else 0)
                more = torch.cat([half, -half], 1)  # the second key head and its queries undo the first
            else:
                rows = (2 if "q_proj" in name else 1) * DIM
                part = torch.randn(rows, value.shape[1], generator=draw, dtype=value.dtype) * 0.3
                more = torch.cat([part, part])
            tensors[name] = torch.cat([value, more], 1 if name.endswith("o_proj.weight") else 0)

    return edited(source, target, add, num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("cancel", [False, True], ids=["mute", "cancelling"])
def test_junk_heads_in_company_hide_no_attention(tmp_path, kind, cancel, dtype):
    base = save(build(tiny_config(kind, rms_norm_eps=1e-12), 80), tmp_path / "base", 512)
    padded = with_junk(base, tmp_path / "padded", cancel)
    attack(open_weights(padded), ("rotate", "gain", "plane", "head", "neuron"), tmp_path / "copy", dtype=dtype)
    close = 1e-6 if (dtype, kind) == ("float64", "llama") else 1e-3  # the norms of heads are computed in float32
    assert (logits(base) - logits(tmp_path / "copy")).abs().max() < close
    for copy in (padded, tmp_path / "copy"):
        found = compare(open_weights(base), open_weights(copy))
        assert found.verdict.label == verdict.INITIALISATION
        assert found.pair.scores[found.pair.best].score > 0.98
        assert any("heads without effect" in note for note in found.skipped)
    blind = measure(open_weights(base), open_weights(padded), Options(extras=False)).scores["awm"]
    assert blind.score < 0.5  # the published score sees the junk


def test_heads_that_do_something_stay(tmp_path):
    base, output = save(build(tiny_config("llama"), 81), tmp_path / "base"), "model.layers.0.self_attn.o_proj.weight"
    assert heads.living(open_weights(base), 0).all()
    pruned = edited(base, tmp_path / "pruned", lambda tensors: tensors[output][:, DIM : 2 * DIM].zero_())
    assert heads.living(open_weights(pruned), 0).tolist() == [True, False, True, True]
    mute = open_weights(edited(base, tmp_path / "mute", lambda tensors: tensors[output].zero_()))
    assert heads.living(mute, 0) is None and heads.living(mute, 1).all()
