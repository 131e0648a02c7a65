"""Identical tensors are named first, whatever the files look like."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from fathom.cli import lineage as commands
from fathom.lineage import identity, verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options, compare
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import COMMON, build, edited, save, tiny_config

QUIET = Options(extras=False)


def counted(a, b):
    found = identity.identical(open_weights(a), open_weights(b), thorough=True)
    return found.equal, found.tensors, found.whole


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return save(build(tiny_config(), 0, torch.float32, trained=True), tmp_path_factory.mktemp("trained") / "one", 512)


def test_a_copy_is_called_identical_with_and_without_controls(trained, tmp_path, models):
    copy = edited(trained, tmp_path / "copy")
    for controls in ([], [models(seed=5)]):
        said = compare(open_weights(trained), open_weights(copy), controls, None, QUIET).verdict
        assert said.sentence == "The weights are identical, 30 of 30 tensors." and said.label == verdict.SHARED
        assert not any("seed:" in other for other in said.alternatives) and "random numbers" not in said.meaning
    assert counted(trained, models(seed=5)) == (0, 30, False)


def test_the_page_says_identical_and_what_was_read(trained, tmp_path):
    commands.compare(str(trained), str(edited(trained, tmp_path / "copy")), out=tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "The weights are identical, 30 of 30 tensors." in page and "with tokenizer and headers" in page


def halved(tensors):
    for name in tensors:
        tensors[name] = tensors[name].to(torch.bfloat16)


def test_layouts_and_dtypes_do_not_matter_where_values_are_equal(trained, tmp_path):
    rounded = edited(trained, tmp_path / "rounded", halved)
    wide = edited(rounded, tmp_path / "wide", lambda t: t.update({n: v.to(torch.float64) for n, v in t.items()}))
    assert counted(rounded, wide) == (30, 30, True)
    assert not counted(trained, rounded)[2], "rounded numbers are other numbers"
    tf.AutoModelForCausalLM.from_pretrained(trained).save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert counted(trained, tmp_path / "shards") == (30, 30, True)


def test_one_number_makes_a_difference(trained, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][100, 3] += 1e-3

    assert counted(trained, edited(trained, tmp_path / "near", change)) == (29, 30, False)


def test_buffers_of_old_checkpoints_are_no_weights(trained, tmp_path):
    def buffers(tensors):
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
            tensors[f"model.layers.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)

    assert counted(trained, edited(trained, tmp_path / "old", buffers)) == (30, 30, True)
    attack(open_weights(tmp_path / "old"), ["permute"], tmp_path / "permuted")


def test_every_expert_is_compared(tmp_path):
    config = tf.MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=3)
    base = save(build(config, 3, torch.float32), tmp_path / "base")

    def change(tensors):
        name = next(n for n in tensors if "experts" in n and (tensors[n].ndim == 3 or ".2." in n))
        (tensors[name][2] if tensors[name].ndim == 3 else tensors[name])[0, 0] += 1

    assert counted(base, base)[2] and not counted(base, edited(base, tmp_path / "other", change))[2]


def test_channels_that_could_not_be_judged_are_not_counted_against_a_copy(models, tmp_path):
    """Of two models in one place, all channels that could be judged are in the same place."""

    def blur(tensors):
        tensors["model.embed_tokens.weight"][:, :8] *= 0  # zero channels cannot be judged
        tensors["model.embed_tokens.weight"] += 1e-4

    found = compare(open_weights(models()), open_weights(edited(models(), tmp_path / "blurred", blur)), options=QUIET)
    t1 = next(test for test in found.tests if test.name.startswith("T1"))
    assert t1.detail["judged"] == t1.statistic < 64
    assert f"{t1.detail['judged']} could be judged, all in the same place" in verdict._fact([t1])
