"""Ouro's layout, opened and held to its equations, written with transformers' own Llama parts."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import embedding
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from fathom import FathomConfig, FathomForCausalLM

CONFIG = {
    **{"model_type": "ouro", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 1e4},
    **{"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "total_ut_steps": 3},
    "early_exit_threshold": 1.0,
}
NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


def parts():
    """Layers, angles and tensors of a small model under Ouro's names."""
    torch.manual_seed(0)
    llama = LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}, attn_implementation="sdpa")
    layers = [
        {
            "self_attn": LlamaAttention(llama, i),
            "mlp": LlamaMLP(llama),
            **{name: LlamaRMSNorm(32, 1e-6) for name in NORMS},
        }
        for i in range(2)
    ]
    tensors = {"model.embed_tokens.weight": torch.randn(61, 32), "lm_head.weight": torch.randn(61, 32) / 5}
    tensors |= {"model.norm.weight": 1 + torch.randn(32) / 5}
    tensors |= {"model.early_exit_gate.weight": torch.randn(1, 32) / 5, "model.early_exit_gate.bias": torch.zeros(1)}
    for i, layer in enumerate(layers):
        for name, module in layer.items():
            for key, p in module.named_parameters():
                p.data = p.data + 0.2 * torch.randn(p.shape)
                tensors[f"model.layers.{i}.{name}.{key}"] = p.data
    return layers, LlamaRotaryEmbedding(llama), tensors


def readouts(ids):
    """What is read out after every trip."""
    layers, rotary, tensors = parts()
    x, angles = embedding(ids, tensors["model.embed_tokens.weight"]), None
    norm = LlamaRMSNorm(32, 1e-6)
    norm.weight.data, found = tensors["model.norm.weight"], []
    angles = rotary(x, torch.arange(ids.shape[1]).unsqueeze(0))
    for _ in range(CONFIG["total_ut_steps"]):
        for layer in layers:
            attended, _ = layer["self_attn"](layer["input_layernorm"](x), angles, None)
            x = x + layer["input_layernorm_2"](attended)
            x = x + layer["post_attention_layernorm_2"](layer["mlp"](layer["post_attention_layernorm"](x)))
        x = norm(x)
        found.append(x)
    return found, tensors


def saved(directory, **changed):
    """A directory as Ouro's are."""
    save_file(parts()[2], directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG | changed))
    return directory


@pytest.mark.parametrize("threshold", [1.0, 0.6])
def test_logits_are_those_of_the_equations(tmp_path, threshold):
    model = FathomForCausalLM.from_pretrained(saved(tmp_path, early_exit_threshold=threshold)).eval()
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden, tensors = readouts(ids)
        gates = [torch.sigmoid(h @ tensors["model.early_exit_gate.weight"][0]) for h in hidden]
        reached = torch.stack([1 - torch.stack([1 - g for g in gates[: k + 1]]).prod(0) for k in range(3)]) >= threshold
        reached[-1] = True
        first = reached.int().argmax(0)
        chosen = torch.stack(hidden).gather(0, first[None, ..., None].expand(1, -1, -1, 32))[0]
        assert len(first.unique()) == (3 if threshold < 1 else 1)
        assert (model(ids).logits - chosen @ tensors["lm_head.weight"].T).abs().max() < 2e-5
    assert model.config.recurrence_options["trips"] == 3


def test_null_is_the_default(tmp_path):
    model = FathomForCausalLM.from_pretrained(saved(tmp_path, total_ut_steps=None, early_exit_threshold=None))
    assert (model.model.recurrence.trips, model.config.recurrence_options["exit_threshold"]) == (4, 1.0)


def test_a_fixed_exit_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"early_exit_step=1: delete it from config\.json and call the model"):
        FathomForCausalLM.from_pretrained(saved(tmp_path, early_exit_step=1))


def test_norms_under_the_wrong_names_are_seen(tmp_path):
    """The negative control: two of the four names mean other norms here."""
    directory = saved(tmp_path)
    ids = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(1))
    tensors = parts()[2]
    for i in range(2):
        a, b = (f"model.layers.{i}.{name}.weight" for name in NORMS[1:3])
        tensors[a], tensors[b] = tensors[b], tensors[a]
    with torch.no_grad():
        right = FathomForCausalLM.from_pretrained(directory).eval()(ids).logits
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        assert (FathomForCausalLM.from_pretrained(directory).eval()(ids).logits - right).abs().max() > 1e-2


PUBLISHED = {
    **{"architectures": ["OuroForCausalLM"], "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"}},
    **{"head_dim": 8, "layer_types": ["full_attention"] * 2, "max_window_layers": 2, "use_sliding_window": False},
    **{"sliding_window": None, "attention_dropout": 0.0, "rope_scaling": None, "torch_dtype": "bfloat16"},
    **{"use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "attention_bias": False},
}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, None),
        ({"is_causal": False}, "is_causal=false: Fathom's decoder is causal"),
        ({"my_mechanism": 2}, "my_mechanism=2: Fathom does not know this key of ouro models"),
        ({"attention_bias": True}, "attention_bias=true: Fathom does not know what this model"),
    ],
)
def test_the_keys_of_released_files_are_read_closed(keys, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **PUBLISHED, **keys}))
    if says is None:
        assert FathomConfig.from_pretrained(tmp_path).recurrence_options["trips"] == 3
        return
    with pytest.raises(ValueError, match=says):
        FathomConfig.from_pretrained(tmp_path)
