"""Which families open with their own layers, and what is said of the others."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fathom import FathomConfig, FathomForCausalLM
from fathom.checkpoints.export import export
from fathom.checkpoints.families import FAMILIES
from fathom.checkpoints.families.layouts import CLOSED, HOSTS
from tests.models.hosts.cases import SHAPE, SHAPES, tokens


def test_every_causal_model_of_transformers_opens_or_says_why_not():
    known = {*HOSTS, *FAMILIES, *CLOSED, FathomConfig.model_type}
    assert not set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known
    assert not CLOSED.keys() & {*HOSTS, *FAMILIES}


def test_a_closed_type_is_refused_with_its_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron_h"}))
    with pytest.raises(ValueError, match=f"is a nemotron_h model: {CLOSED['nemotron_h']}"):
        FathomConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_the_text_model_of_a_multimodal_file(kind, tmp_path):
    """Its configuration is within the file's, its tensors have a prefix, and there are a vision tower's beside them."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 1, "num_position_embeddings": 16}
    text = {**SHAPE, **SHAPES[f"{kind}_text"], "num_hidden_layers": 4}
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, text_config=text, vision_config=vision))
    assert any(name.startswith("model.language_model.") for name in whole.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    ours = FathomForCausalLM.from_pretrained(tmp_path / "whole").eval()
    export(ours, tmp_path / "native", form="native")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native").eval()
    ours.save_pretrained(tmp_path / "again")
    again = FathomForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        expected = theirs(tokens()).logits
        assert all(torch.equal(model(tokens()).logits, expected) for model in (ours, native, again))


def test_a_head_with_a_bias_is_opened_or_refused(tmp_path, monkeypatch):
    """A bias for which the head has no place changes logits, so it is not left out in silence."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("ernie4_5_moe", **{**SHAPE, **SHAPES["ernie4_5_moe"], "use_bias": True})
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.nn.init.normal_(theirs.lm_head.bias)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = FathomForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(ours(tokens()).logits, theirs(tokens()).logits)
    monkeypatch.setitem(HOSTS, "ernie4_5_moe", HOSTS["mixtral"])  # a family that says nothing of its head
    with pytest.raises(ValueError, match=r"holds lm_head\.bias, for which the model has no place"):
        FathomForCausalLM.from_pretrained(tmp_path)
