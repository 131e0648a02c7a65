"""Released checkpoints: small directories with exactly their keys and shapes, opened, and held to the equations."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.checkpoints.families.lumia import LUMIA, published_config
from fathom.models import FathomConfig, FathomForCausalLM, FathomModel
from tests.models.cases import tokens
from tests.models.oracle import agree

L, HIDDEN, INNER, HEADS, KV, D, VOCAB = 4, 32, 48, 4, 2, 8, 61

LLAMA = {  # as transformers 4.46 wrote them
    "_name_or_path": "somewhere/3b",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "head_dim": D,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.01,
    "intermediate_size": INNER,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": L,
    "num_key_value_heads": KV,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "scale_embeds": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": VOCAB,
}


def base_shapes():
    """Card §9: Qwen3's names, and a norm that nothing reads."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head_layernorm.weight": (HIDDEN,),
    }
    for i in range(L):
        p = f"model.layers.{i}."
        shapes |= {
            p + "self_attn.q_proj.weight": (HEADS * D, HIDDEN),
            p + "self_attn.k_proj.weight": (KV * D, HIDDEN),
            p + "self_attn.v_proj.weight": (KV * D, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HEADS * D),
            p + "self_attn.q_norm.weight": (D,),
            p + "self_attn.k_norm.weight": (D,),
            p + "mlp.gate_proj.weight": (INNER, HIDDEN),
            p + "mlp.up_proj.weight": (INNER, HIDDEN),
            p + "mlp.down_proj.weight": (HIDDEN, INNER),
            p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
        }
    return shapes


def denseformer_shapes(dilation=1):
    """Their name and shape, and where the tensor belongs."""
    return {
        f"model.densetransformer_dwa.alphas.{i}": (((i + 1) // dilation + 1,), f"model.layers.{i}.mlp_residual.alpha")
        for i in range(L)
    }


def attnres_shapes(bias):
    places = {"model.attnres_final_aggregator": "model.final_residual"}
    for i in range(L):
        for part in ("attn", "mlp"):
            places[f"model.layers.{i}.attnres_{part}_aggregator"] = f"model.layers.{i}.{part}_residual"
    found = {}
    for theirs, ours in places.items():
        found[f"{theirs}.pseudo_query"] = ((HIDDEN,), f"{ours}.pseudo_query")
        found[f"{theirs}.norm.weight"] = ((HIDDEN,), f"{ours}.norm.weight")
        if bias:
            found[f"{theirs}.recency_bias"] = ((), f"{ours}.recency_bias")
    return found


def mhc_shapes(n=4):
    found = {"model.residual_stream_projector.reduce_logits": ((n,), "model.final_residual.reduce_logits")}
    for i in range(L):
        for part in ("attn", "mlp"):
            theirs, ours = f"model.layers.{i}.{part}_residual_connector", f"model.layers.{i}.{part}_residual"
            found |= {
                f"{theirs}.pre_logits": ((n,), f"{ours}.pre_logits"),
                f"{theirs}.post_logits": ((n,), f"{ours}.post_logits"),
                f"{theirs}.residual_logits": ((n, n), f"{ours}.residual_logits"),
                f"{theirs}.mhc_input_norm.weight": ((n * HIDDEN,), f"{ours}.norm.weight"),
                f"{theirs}.mhc_dynamic_projection.weight": ((n * n + 2 * n, n * HIDDEN), f"{ours}.projection.weight"),
            }
            for alpha in ("alpha_pre", "alpha_post", "alpha_res"):
                found[f"{theirs}.{alpha}"] = ((), f"{ours}.{alpha}")
    return found


# name -> (keys of config.json, further tensors, axes and options it must become)
RELEASED = {
    "depth-attention": (
        {"use_depth_attention": True, "depth_attention_stride": 2, "depth_attention_recent_window": 0},
        {},
        {"mixer": "depth_attention", "stride": 2, "recent_layers": 0, "across_trips": None, "self_bias": 0.0},
    ),
    "depth-attention-both": (
        {
            "use_depth_attention": True,
            "recurrent_model": True,
            "cross_layer_pattern": "depth_softmax",
            "depth_attention_stride": 3,
            "depth_softmax_stride": 1,
        },
        {},
        {"mixer": "depth_attention", "stride": 3, "recent_layers": 0},
    ),
    "depth-attention-old": (
        {
            "recurrent_model": True,
            "cross_layer_pattern": "depth_softmax",
            "depth_softmax_stride": 4,
            "depth_recent_window": 1,
        },
        {},
        {"mixer": "depth_attention", "stride": 4, "recent_layers": 1},
    ),
    "depth-attention-mode": (
        {"recurrent_model": True, "cross_layer_mode": "depth_softmax", "depth_softmax_stride": 1},
        {},
        {"mixer": "depth_attention", "stride": 1},
    ),
    "denseformer": (
        {"baseline_mode": "denseformer", "denseformer_dwa_dilation": 1, "denseformer_dwa_period": 1},
        denseformer_shapes(),
        {"residual": "denseformer", "dilation": 1, "period": 1},
    ),
    "denseformer-old": (
        {"residual_baseline": "denseformer", "densetransformer_dwa_dilation": 2, "densetransformer_dwa_period": 1},
        denseformer_shapes(2),
        {"residual": "denseformer", "dilation": 2, "period": 1},
    ),
    "attnres": (
        {"baseline_mode": "attnres", "attnres_block_size": 3},
        attnres_shapes(bias=True),
        {"residual": "attention_residuals", "variant": "snapshot", "block_size": 3, "recency_bias": 3.0},
    ),
    "attnres-no-bias": (
        {"baseline_mode": "attnres", "attnres_block_size": 3, "attnres_recency_bias_init": 3.0},
        attnres_shapes(bias=False),
        {"residual": "attention_residuals", "variant": "block_sum", "block_size": 3},
    ),
    "attnres-old": (
        {"residual_baseline": "attnres", "attnres_recency_bias_init": 1.5},
        attnres_shapes(bias=True),
        {"residual": "attention_residuals", "variant": "snapshot", "block_size": 12, "recency_bias": 1.5},
    ),
    "mhc": (
        {"baseline_mode": "mhc", "mhc_num_streams": 4, "mhc_alpha_init": 0.01, "mhc_sinkhorn_iters": 5},
        mhc_shapes(),
        {"residual": "hyper_connections", "streams": 4, "sinkhorn_iterations": 5, "alpha": 0.01},
    ),
    "mhc-old": (
        {"residual_baseline": "mhc", "residual_baseline_num_streams": 2},
        mhc_shapes(2),
        {"residual": "hyper_connections", "streams": 2, "sinkhorn_iterations": 20, "alpha": 0.01},
    ),
}
every_release = pytest.mark.parametrize("name", RELEASED)


def tensors_of(name):
    shapes = base_shapes() | {theirs: shape for theirs, (shape, _) in RELEASED[name][1].items()}
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=generator) * (0.25 if len(shape) > 1 else 0.3) + (key.endswith("norm.weight"))
        for key, shape in shapes.items()
    }


def write(directory, name, tensors=None, files=1, **keys):
    """A released directory; more than one file comes with an index."""
    tensors = tensors_of(name) if tensors is None else tensors
    config = {**LLAMA, **RELEASED[name][0], **keys}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    if files == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names, weight_map = list(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = names[i::files]
        save_file({key: tensors[key] for key in part}, directory / file, metadata={"format": "pt"})
        weight_map |= {key: file for key in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.quick("2-*")
@every_release
@pytest.mark.parametrize("files", [1, 2])
def test_every_tensor_arrives(name, files, tmp_path):
    tensors = tensors_of(name)
    model, info = FathomForCausalLM.from_pretrained(write(tmp_path, name, files=files), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    places = {key: key for key in base_shapes() if key != "lm_head_layernorm.weight"}
    places |= {theirs: ours for theirs, (_, ours) in RELEASED[name][1].items()}
    state = model.state_dict()
    assert sorted(places.values()) == sorted(state)
    for theirs, ours in places.items():
        assert torch.equal(state[ours].flatten(), tensors[theirs].flatten()), theirs
        assert state[ours].dtype == torch.float32
    assert not model.training


@every_release
def test_configuration(name, tmp_path):
    config = FathomConfig.from_pretrained(write(tmp_path, name))
    keys, _, wanted = RELEASED[name]
    wanted = dict(wanted)
    for axis in ("mixer", "residual"):
        chosen = wanted.pop(axis, {"mixer": "none", "residual": "plain"}[axis])
        assert getattr(config, axis) == chosen
    options = {**config.mixer_options, **config.residual_options}
    if "variant" in wanted:
        wanted.pop("variant")  # which of the two shows in the tensors alone
    assert {key: options[key] for key in wanted} == wanted
    assert config.k_norm_position == ("after_rope" if config.mixer == "depth_attention" else "before_rope")
    assert config.recurrence == "once"
    assert config.model_type == "fathom"
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 10_000.0)
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings) == (D, KV, False)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 1)
    assert config.max_position_embeddings == 2048
    assert not set(keys) & set(config.to_dict()), "none of their words is left"


@pytest.mark.quick("depth-attention", "depth-attention-both", "denseformer", "attnres", "mhc", "mhc-old")
@every_release
def test_function_is_the_equations(name, tmp_path):
    model = FathomForCausalLM.from_pretrained(write(tmp_path, name), dtype=torch.float64)
    agree(model, tokens(1, 4))


@pytest.mark.quick("depth-attention", "denseformer-old", "attnres", "mhc")
@every_release
def test_saved_again_in_our_words(name, tmp_path):
    (tmp_path / "a").mkdir()
    model = FathomForCausalLM.from_pretrained(write(tmp_path / "a", name))
    model.save_pretrained(tmp_path / "b")
    again = FathomForCausalLM.from_pretrained(tmp_path / "b")
    assert not LUMIA.owns(json.loads((tmp_path / "b" / "config.json").read_text()))
    ids = tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    for option in ("mixer_options", "residual_options", "k_norm_position"):
        assert getattr(again.config, option) == getattr(model.config, option)


# --- norms and scale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "position"),
    [("depth-attention", "after_rope"), ("depth-attention", "before_rope"), ("denseformer", "after_rope")],
)
def test_key_norm_position(name, position, tmp_path):
    """Both orders against the oracle's, with key norms away from ones; and they differ. Which of them a baseline was
    trained in depends on whether flash attention was installed."""
    directory, orders = write(tmp_path, name), ("after_rope", "before_rope")
    model, other = (
        FathomForCausalLM.from_pretrained(directory, dtype=torch.float64, k_norm_position=order)
        for order in sorted(orders, key=lambda order: order != position)
    )
    ids = tokens(1, 6)
    agree(model, ids)
    with torch.no_grad():
        assert (other(ids).logits - model(ids).logits).abs().max() > 1e-3
        for m in (model, other):
            for layer in m.model.layers:
                layer.self_attn.k_norm.weight.fill_(1.0)
        assert (other(ids).logits - model(ids).logits).abs().max() < 1e-6, "with ones there is no order"


def test_scaled_embeddings(tmp_path):
    model = FathomForCausalLM.from_pretrained(write(tmp_path, "denseformer", scale_embeds=True), dtype=torch.float64)
    assert model.config.embedding_scale == HIDDEN**0.5
    agree(model, tokens(1, 5))


def test_keys_that_llama_derives_may_be_absent(tmp_path):
    """`head_dim` and `num_key_value_heads` follow from the heads, as in Llama, not as in Qwen3."""
    config = published_config(
        {
            k: v
            for k, v in {**LLAMA, **RELEASED["mhc"][0]}.items()
            if k not in ("head_dim", "num_key_value_heads", "rope_theta")
        }
    )
    config = FathomConfig.from_dict(config)
    assert (config.head_dim, config.num_key_value_heads) == (HIDDEN // HEADS, HEADS)
    assert config.rope_parameters["rope_theta"] == 10_000.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_precision_is_kept(dtype, tmp_path):
    tensors = {key: t.to(dtype) for key, t in tensors_of("attnres").items()}
    directory = write(tmp_path, "attnres", tensors, torch_dtype=str(dtype).removeprefix("torch."))
    model = FathomForCausalLM.from_pretrained(directory)
    assert {p.dtype for p in model.parameters()} == {dtype}
    wide = FathomForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


# --- what is wrong with a directory -----------------------------------------------------------------------------------


def refused(directory, says, error=ValueError, **keys):
    with pytest.raises(error, match=says) as caught:
        FathomForCausalLM.from_pretrained(directory, **keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["lacks", "shape"])
@pytest.mark.parametrize(
    "name,theirs,ours",
    [
        ("depth-attention", "lm_head.weight", "lm_head.weight"),
        ("denseformer", "model.densetransformer_dwa.alphas.1", "model.layers.1.mlp_residual.alpha"),
        ("attnres", "model.attnres_final_aggregator.recency_bias", "model.final_residual.recency_bias"),
        ("mhc", "model.layers.0.attn_residual_connector.pre_logits", "model.layers.0.attn_residual.pre_logits"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(name, theirs, ours, fault, tmp_path):
    tensors = tensors_of(name)
    rows, *others = tensors.pop(theirs).shape or (1,)  # a scalar becomes a vector
    if fault == "shape":
        tensors[theirs] = torch.zeros(rows + 1, *others)
    says = rf"{ours} has shape \[{rows + 1}.* needs \[{rows}" if fault == "shape" else f"lacks {ours}$"
    refused(write(tmp_path, name, tensors), says)


@pytest.mark.parametrize("strange", ["model.layers.0.attnres_aggregator.pseudo_query", "model.dwa.alphas.0"])
def test_a_tensor_without_a_place_is_named(strange, tmp_path):
    """Were their names others than we know, the model must not quietly start without them."""
    tensors = tensors_of("attnres") | {strange: torch.zeros(HIDDEN)}
    refused(write(tmp_path, "attnres", tensors), strange)


@pytest.mark.parametrize(
    "name,keys,says",
    [
        ("mhc", {"baseline_mode": "moda"}, "baseline_mode must be one of denseformer, attnres, mhc, got 'moda'"),
        ("depth-attention", {"use_qk_norm": False}, "holds the tensor model.layers.0.self_attn.[kq]_norm.weight"),
        ("depth-attention", {"depth_attention_stride": "absent"}, "depth_attention_stride"),
        ("depth-attention", {"depth_attention_stride": 9}, "stride must be between 1 and 4"),
        ("depth-attention", {"use_depth_attention": False, "recurrent_model": True}, "use_depth_attention"),
        ("depth-attention", {"baseline_mode": "mhc"}, "both"),
        ("depth-attention-old", {"cross_layer_pattern": "densenet"}, "densenet"),
        (
            "depth-attention",
            {"use_depth_attention": False},
            "use_qk_norm=true, and 3 more: Fathom does not know these keys of llama models",
        ),
        ("depth-attention", {"attnres_new_switch": 2}, "attnres_new_switch=2: Fathom does not know"),
        ("depth-attention", {"is_causal": False}, "is_causal=false: Fathom's decoder is causal"),
    ],
)
def test_a_configuration_that_we_cannot_honour_is_refused(name, keys, says, tmp_path):
    refused(write(tmp_path, name, **keys), says)


def test_other_files_in_the_directory_are_not_read(tmp_path):
    write(tmp_path, "mhc", files=2)
    save_file({"model.norm.weight": torch.zeros(HIDDEN)}, tmp_path / "optimizer.safetensors")
    model = FathomForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.model.norm.weight, tensors_of("mhc")["model.norm.weight"])


def test_no_weights_at_all(tmp_path):
    write(tmp_path, "mhc")
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "model.safetensors", FileNotFoundError)


def test_an_ordinary_llama_is_none_of_them(tmp_path):
    config = LlamaConfig(**{k: v for k, v in LLAMA.items() if k not in ("use_qk_norm", "scale_embeds", "model_type")})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert FathomForCausalLM.from_pretrained(tmp_path).config.mixer == "none"


def test_without_norms_of_queries_and_keys(tmp_path):
    """As the Llama-shaped ones have it: the scores over depth are those of raw products."""
    tensors = {k: v for k, v in tensors_of("depth-attention").items() if "q_norm" not in k and "k_norm" not in k}
    config = FathomForCausalLM.from_pretrained(write(tmp_path, "depth-attention", tensors, use_qk_norm=False)).config
    assert (config.qk_norm, config.k_norm_position, config.mixer) == ("none", "before_rope", "depth_attention")


def test_a_retrofit_may_stand_on_a_released_model(tmp_path):
    model = FathomForCausalLM.from_pretrained(
        write(tmp_path, "depth-attention"), recurrence="loop", recurrence_options={"trips": 2}
    )
    assert (model.config.mixer, model.config.recurrence) == ("depth_attention", "loop")
    assert model.config.k_norm_position == "after_rope"


def test_the_decoder_without_its_head(tmp_path):
    directory, ids = write(tmp_path, "mhc"), tokens(1, 5)
    whole, body = FathomForCausalLM.from_pretrained(directory), FathomModel.from_pretrained(directory)
    with torch.no_grad():
        assert torch.equal(whole.lm_head(body(ids).last_hidden_state), whole(ids).logits)
