"""Which families open with their own layers, and what is said of the others."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mxfp4Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fathom import FathomConfig, FathomForCausalLM
from fathom.checkpoints.export import export
from fathom.checkpoints.families import FAMILIES, hosted
from fathom.checkpoints.families.layouts import CLOSED, HOSTS
from tests.models.hosts.cases import SHAPE, SHAPES, configured, theirs_of, tokens


def test_every_causal_model_of_transformers_opens_or_says_why_not():
    known = {*HOSTS, *FAMILIES, *CLOSED, FathomConfig.model_type}
    assert not set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known
    assert not CLOSED.keys() & {*HOSTS, *FAMILIES}


def test_a_type_that_a_later_transformers_runs_is_refused_with_its_number(monkeypatch):
    values = configured("afmoe").to_dict() | {"model_type": "afmoe"}
    assert hosted.configuration(values)["host"] == "afmoe"
    monkeypatch.setattr(hosted.transformers, "__version__", "5.16.2")
    with pytest.raises(ValueError, match=r"^afmoe models need transformers 5\.17 or newer; installed is 5\.16\.2$"):
        hosted.configuration(values)


def test_a_closed_type_is_refused_with_its_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon_h1"}))
    with pytest.raises(ValueError, match=f"is a falcon_h1 model: {CLOSED['falcon_h1']}"):
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


CARRIED = {
    "qwen3_moe": {"max_window_layers": 48, "use_sliding_window": False, "sliding_window": None},
    "qwen3_next": {"use_sliding_window": False, "full_attention_interval": 4},
    "qwen3_5_text": {"attn_output_gate": True, "mlp_only_layers": [], "mamba_ssm_dtype": "float32"},
    "kimi_linear": {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"},
    "granitemoehybrid": {"normalization_function": "rmsnorm", "init_method": "mup"},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
    "gemma4_text": {"use_bidirectional_attention": "vision", "expert_intermediate_size": None},
    "gpt_oss": {"swiglu_limit": 7.0, "experts_per_token": 4, "initial_context_length": 4096},
    "minimax_m2": {"attn_type_list": [1] * 4, "qk_norm_type": "per_layer", "num_mtp_modules": 3},
    "hunyuan_v1_moe": {"moe_intermediate_size": [48] * 4, "im_start_id": 4, "vit_path": None, "use_cla": False},
    "cohere2": {"order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0},
    "afmoe": {"n_group": 1, "score_func": "sigmoid", "use_grouped_mm": True},
    "nemotron_h": {"rms_norm_eps": 1e-5, "attention_head_dim": 8, "time_step_rank": 256},
}
"""Keys of published files that their classes do not know, with the values there."""
OTHERWISE = {"qwen3_5_text": {"attn_output_gate": False}, "kimi_linear": {"mla_use_nope": False}}
OTHERWISE |= {"gemma4_text": {"use_bidirectional_attention": "all"}}
OTHERWISE |= {"minimax_m2": {"attn_type_list": [1, 0, 1, 1]}, "hunyuan_v1_moe": {"moe_intermediate_size": [24] * 4}}
OTHERWISE |= {"cohere2": {"rotary_pct": 0.5}, "nemotron_h": {"rms_norm_eps": 1e-6}}
OTHERWISE |= {"granitemoehybrid": {"normalization_function": "layernorm"}}


@pytest.mark.parametrize("name", CARRIED)
def test_what_published_files_carry_is_not_refused(name):
    config = configured(name)
    if name == "minimax_m2" and "rotary_dim" not in inspect.getsource(type(config)):
        pytest.skip("this transformers' class turns whole heads, whatever rotary_dim says")
    theirs = {**config.to_dict(), "model_type": name}
    hosted.require_known({**theirs, **CARRIED[name]})
    if other := OTHERWISE.get(name):
        with pytest.raises(ValueError, match=next(iter(other))):
            hosted.require_known({**theirs, **other})


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_left_out(name, tmp_path):
    """Published files hold them after the last layer, and the classes of transformers know their numbers there."""
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path)
    values = {**json.loads((tmp_path / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = load_file(tmp_path / "model.safetensors")
    further = {
        "model.layers.4.eh_proj.weight": torch.ones(4, 8),
        "model.layers.4.input_layernorm.weight": torch.ones(4),
    }
    save_file({**tensors, **further}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        ours = FathomForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(ours(tokens()).logits, theirs(tokens()).logits)
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"model\.layers\.4\.eh_proj\.weight, which the model does not have"):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_a_family_may_call_its_own_parts_mixer(tmp_path):
    """As Nemotron-H does: a tensor of one without a place is not taken for a mechanism's."""
    theirs_of("nemotron_h").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    beside = next(name for name in tensors if ".mixer." in name).rpartition(".")[0]
    save_file({**tensors, f"{beside}.extra": torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"mixer\.extra, which the model does not have"):
        FathomForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_weights_in_blocks_are_refused_with_the_way_round(method, tmp_path):
    values = {**configured("gpt_oss").to_dict(), "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"stored in {method}.*dequantize=True.*save_original_format=False"):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_the_way_round_opens_weights_in_blocks(tmp_path):
    """As gpt-oss is published: codes of 32 numbers and their scales."""
    theirs = theirs_of("gpt_oss", hidden_size=64, intermediate_size=64, head_dim=16)
    theirs.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, rows, width // 32), 124, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "mxfp4"}}))
    asked = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, **asked).eval()
    plain.save_pretrained(tmp_path / "plain", save_original_format=False)
    ours = FathomForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(ours(tokens()).logits, plain(tokens()).logits)


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
    with pytest.raises(ValueError, match=r"holds the tensor lm_head\.bias, which the model does not have"):
        FathomForCausalLM.from_pretrained(tmp_path)
