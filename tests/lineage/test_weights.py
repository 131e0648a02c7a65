"""Every layout's roles against the live transformers module, bit for bit."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.checkpoints.gguf import GgufStore
from fathom.checkpoints.origin import LocalOrigin
from fathom.errors import ModelError
from fathom.lineage import vocabulary as v
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import COMMON, LATENT, build, edited, save, save_adapter, write_tokenizer

GQA = dict(num_key_value_heads=2, head_dim=8)
LAYOUTS = {
    "llama": lambda: tf.LlamaConfig(**COMMON, **GQA, attention_bias=True),
    "qwen2": lambda: tf.Qwen2Config(**COMMON, num_key_value_heads=2),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, **GQA),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, **GQA),
    "olmo2": lambda: tf.Olmo2Config(**COMMON, num_key_value_heads=2),
    "phi3": lambda: tf.Phi3Config(**COMMON, num_key_value_heads=2),
    "gpt2": lambda: tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=32),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**COMMON),
    "opt": lambda: tf.OPTConfig(**{**COMMON, "word_embed_proj_dim": 32, "ffn_dim": 48}),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=2),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **COMMON, **GQA, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=24
    ),
}


def spied(model):
    """Input of every attention module, and the query, key and value it hands to the attention function."""
    seen = []

    def spy(module, query, key, value, *args, **kwargs):
        seen[-1] |= {"q": query, "k": key, "v": value}
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def before(module, args, kwargs):
        seen.append({"x": kwargs.get("hidden_states", args[0] if args else None)})

    ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    model.config._attn_implementation = "spy"
    for name, module in model.named_modules():
        if type(module).__name__.endswith(("Attention", "SdpaAttention")) and not name.endswith("attn.attn"):
            module.register_forward_pre_hook(before, with_kwargs=True)
    with torch.no_grad():  # every token at position 0, so that rotary embeddings turn nothing
        model(torch.arange(5)[None] + 3, position_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=False)
    return seen


def normed(rows, gain, eps):
    return rows / rows.pow(2).mean(-1, keepdim=True).add(eps).sqrt() * gain


@pytest.mark.parametrize("name", LAYOUTS)
def test_roles_are_what_the_live_module_computes(name, tmp_path):
    dtype = torch.float32 if name in {"mixtral", "qwen3_moe"} else torch.float64  # experts want float32
    model = build(LAYOUTS[name](), 3, dtype)
    weights = open_weights(save(model, tmp_path))
    g = weights.geometry
    for layer, found in enumerate(spied(model)):
        x = found["x"][0]
        for role in "qkv":
            ours = x @ torch.tensor(weights.tensor(role, layer)).T
            if weights.has(f"{role}_bias", layer):
                ours += torch.tensor(weights.tensor(f"{role}_bias", layer))
            if role in "qk" and g.qk_norm:
                gain = torch.tensor(weights.tensor(f"{role}_norm", layer))
                ours = normed(
                    ours if len(gain) == ours.shape[-1] else ours.view(len(x), -1, g.head_dim),
                    gain,
                    model.config.rms_norm_eps,
                )
            live = found[role][0].transpose(0, 1)  # [T, heads, dim]
            ours = ours.reshape(len(x), -1, live.shape[-1])
            if role != "q" and live.shape[1] != ours.shape[1]:  # some modules repeat the keys before the call
                live = live[:, :: live.shape[1] // ours.shape[1]]
            scale = live.norm() / ours.norm() if name == "opt" else 1.0  # OPT scales its queries early
            torch.testing.assert_close(ours * scale, live, rtol=1e-5, atol=1e-6, msg=f"{role} of layer {layer}")


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        (dict(new_decoder_architecture=True, num_kv_heads=2), 2),
        (dict(new_decoder_architecture=False, multi_query=True), 1),
        (dict(new_decoder_architecture=False, multi_query=False), 4),
    ],
)
def test_falcon_interleavings(changes, kv_heads, tmp_path):
    common = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=96, alibi=False, bias=False)
    model = build(tf.FalconConfig(**common, **changes), 5)
    weights = open_weights(save(model, tmp_path))
    assert weights.geometry.kv_heads == kv_heads
    x, attention = torch.randn(3, 32, dtype=torch.float64), model.transformer.h[0].self_attention
    with torch.no_grad():
        live = attention._split_heads(attention.query_key_value(x)[None])
    for role, want in zip("qkv", live, strict=True):
        ours = (x @ torch.tensor(weights.tensor(role, 0)).T).view(3, -1, 8)
        want = want[0][:, :: want.shape[2] // ours.shape[1]]
        torch.testing.assert_close(ours, want)


def test_latent_attention_is_composed(tmp_path):
    model = build(tf.DeepseekV3Config(**COMMON, **LATENT), 9)
    weights = open_weights(save(model, tmp_path))
    for layer, found in enumerate(spied(model)):
        x, attention = found["x"][0], model.model.layers[layer].self_attn
        rms_q = attention.q_a_proj(x).pow(2).mean(-1, keepdim=True).sqrt()
        rms_k = attention.kv_a_proj_with_mqa(x)[:, :10].pow(2).mean(-1, keepdim=True).sqrt()
        q = (x @ torch.tensor(weights.tensor("q", layer)).T / rms_q).view(5, 4, 10)
        k = x @ torch.tensor(weights.tensor("k", layer)).T
        torch.testing.assert_close(q[..., :6], found["q"][0].transpose(0, 1)[..., :6], rtol=1e-4, atol=1e-6)
        live_k = found["k"][0].transpose(0, 1)
        torch.testing.assert_close((k[:, :24] / rms_k).view(5, 4, 6), live_k[..., :6], rtol=1e-4, atol=1e-6)
        # the shared rotary part arrives with its planes in another order: compare dot products
        ours = torch.einsum("thd,sd->hts", q[..., 6:], k[:, 24:])
        live = torch.einsum("thd,shd->hts", found["q"][0].transpose(0, 1)[..., 6:], live_k[..., 6:])
        torch.testing.assert_close(ours, live, rtol=1e-4, atol=1e-6)


def test_prefixed_multimodal_and_nested_config(tmp_path, models):
    plain = open_weights(models())
    tensors = {f"language_model.{k}": v for k, v in load_file(models() / "model.safetensors").items()}
    tensors["vision_tower.layers.0.self_attn.q_proj.weight"] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((models() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
    prefixed = open_weights(tmp_path)
    assert np.array_equal(prefixed.tensor("q", 1), plain.tensor("q", 1))
    assert np.array_equal(prefixed.tensor("head"), plain.tensor("head"))


@pytest.mark.parametrize(
    ("change", "config", "reason"),
    [
        (lambda t: t.update({"language_model.lm_head.weight": torch.ones(2, 2)}), {}, None),
        (lambda t: t.update({"output.weight": torch.ones(2, 2)}), {}, "output head is ambiguous"),
        (
            lambda t: t.update({"model.layers.1.self_attn.qkv_proj.weight": torch.ones(128, 64)}),
            {},
            r"attention of model\.layers\.1 is ambiguous.*q_proj.*qkv_proj",
        ),
        (
            lambda t: t.pop("model.layers.2.self_attn.q_proj.weight"),
            {},
            "says 3 layers, but the layout of only 2 is known",
        ),
        (lambda t: None, {"num_attention_heads": 8, "head_dim": 16}, "q of layer 0 is 64×64, wanted"),
        (lambda t: None, {"num_attention_heads": None}, "how many attention heads"),
        (lambda t: t.pop("model.embed_tokens.weight"), {}, "no decoder found: its layers are known"),
        (lambda t: t.pop("model.layers.0.input_layernorm.weight"), {}, "norms have no known names"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, models, change, config, reason):
    path = edited(models(), tmp_path / "changed", change, **config)
    if reason is None:
        open_weights(path)
    else:
        with pytest.raises(ModelError, match=reason):
            open_weights(path)


def test_a_name_that_no_file_can_have_is_one_line():
    with pytest.raises(ModelError, match="File name too long"):
        open_weights("x" * 300)


def test_a_refusal_says_whose_weights(tmp_path, models):
    damaged = edited(models(), tmp_path / "damaged")
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(ModelError) as error:
        open_weights(damaged)
    assert str(error.value).count(str(damaged)) == 1


def test_unknown_interleaving_is_not_guessed(tmp_path):
    model = build(LAYOUTS["gpt_neox"](), 0)
    path = save(model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "somebody_elses"}))
    with pytest.raises(ModelError, match="interleaved in three ways"):
        open_weights(path)


def test_extra_tensors_are_listed_and_unused(tmp_path, models):
    def mixers(tensors):
        tensors["model.layers.0.self_attn.mixer.weight"] = torch.ones(3)

    weights = open_weights(edited(models(), tmp_path / "mixers", mixers))
    assert weights.extra_tensors == ("model.layers.0.self_attn.mixer.weight",)


def test_gains_are_what_they_multiply_by(tmp_path):
    model = build(LAYOUTS["gemma2"](), 3)
    weights = open_weights(save(model, tmp_path))
    stored = model.model.layers[0].input_layernorm.weight.detach().numpy()
    assert np.array_equal(weights.tensor("attn_norm", 0), stored + 1)


def test_rows_read_only_what_was_asked_for(models):
    weights = open_weights(models())
    before = weights.origin.bytes_read
    rows = weights.tensor("embed", rows=np.array([3, 4, 90]))
    assert weights.origin.bytes_read - before == 3 * 64 * 8
    assert np.array_equal(rows, weights.tensor("embed")[[3, 4, 90]])


@pytest.mark.parametrize("rslora", [False, True])
def test_lora_adapter_on_its_base(tmp_path, models, rslora):
    base = open_weights(models())
    config = {"use_rslora": rslora, "base_model_name_or_path": str(models())}
    adapted = open_weights(save_adapter(tmp_path, 64, **config))
    a, b = (value.numpy() for value in load_file(tmp_path / "adapter_model.safetensors").values())
    want = base.tensor("q", 1) + (8 / (2 if rslora else 4)) * (b @ a)
    assert np.allclose(adapted.tensor("q", 1), want, atol=1e-4)
    assert np.allclose(adapted.tensor("q", 1, slice(3, 9)), want[3:9], atol=1e-4)
    assert np.array_equal(adapted.tensor("q", 0), base.tensor("q", 0))
    with pytest.raises(ModelError, match="allowed: LORA without"):
        open_weights(save_adapter(tmp_path, 64, **config, use_dora=True))


@pytest.mark.parametrize(
    ("a", "b", "rows"),
    [((4, 128), (128, 4), None), ((4, 64), (64, 3), None), ((4, 64, 1), (64, 4), None), ((4, 64), (64, 4), (64, 32))],
    ids=["another width", "ranks", "axes", "saved whole"],
)
def test_an_adapter_of_another_shape_is_refused(tmp_path, models, a, b, rows):
    """In one line that names the tensor; it failed when rows were first added."""
    tensors = {"q_proj.lora_A": torch.ones(a), "q_proj.lora_B": torch.ones(b)}
    if rows:
        tensors["o_proj.modules_to_save"] = torch.ones(rows)
    save_adapter(tmp_path, tensors, base_model_name_or_path=str(models()))
    with pytest.raises(ModelError, match=r"self_attn\.o_proj.* is 64 x 32" if rows else r"self_attn\.q_proj.*64 x 64"):
        open_weights(tmp_path)


def gguf(path, metadata, tensors):
    """A GGUF file, written from the format's description."""

    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def pair(key, value):
        if isinstance(value, str):
            return text(key) + struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        return text(key) + struct.pack("<II", 4, value)

    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(tensors), len(metadata))
        + b"".join(pair(*item) for item in metadata.items())
    )
    offset, body = 0, b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", side) for side in shape[::-1])
        head += struct.pack("<IQ", kind, offset)
        raw += bytes(-len(raw) % 32)
        body, offset = body + raw, offset + len(raw)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def as_gguf(plain, kind):
    """Metadata and tensors of a model as a GGUF file of float32."""
    g = plain.geometry
    meta = {
        "general.architecture": kind,
        f"{kind}.block_count": g.layers,
        f"{kind}.embedding_length": g.width,
        f"{kind}.attention.head_count": g.heads,
        f"{kind}.attention.head_count_kv": g.kv_heads,
        f"{kind}.attention.key_length": g.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"Ġw{i}" for i in range(g.vocab)],
    }
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up"}
    names |= {"down": "ffn_down", "attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}
    names |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"} if g.qk_norm else {}
    ends = {"token_embd": "embed", "output": "head", "output_norm": "final_norm"}
    tensors = {f"{name}.weight": (0, *raw(plain.tensor(role))) for name, role in ends.items()}
    for layer in range(g.layers):
        for role, name in names.items():
            value = plain.tensor(role, layer)
            if kind == "llama" and role in "qk":  # the converter's row order: (2, half) of each head becomes (half, 2)
                heads = g.heads if role == "q" else g.kv_heads
                value = value.reshape(heads, 2, g.head_dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
            tensors[f"blk.{layer}.{name}.weight"] = (0, *raw(value))
    return meta, tensors


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gguf(tmp_path, models, kind):
    plain = open_weights(models(kind))
    meta, tensors = as_gguf(plain, kind)
    q8 = plain.tensor("up", 0).astype(np.float32).reshape(-1, 32)
    scale = (np.abs(q8).max(1) / 127).astype(np.float16)
    codes = np.rint(q8 / scale[:, None].astype(np.float32)).astype(np.int8)
    packed = b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, codes, strict=True))
    tensors["blk.0.ffn_up.weight"] = (8, (160, 64), packed)
    found = open_weights(gguf(tmp_path / "m.gguf", meta, tensors))
    for role in ("q", "k", "v", "down"):
        assert np.allclose(found.tensor(role, 1), plain.tensor(role, 1), atol=1e-6), role
    assert np.allclose(found.tensor("up", 0), plain.tensor("up", 0), atol=2e-3)
    assert found.vocabulary()[b" w7"] == 7
    tensors["blk.0.ffn_up.weight"] = (99, (160, 64), packed)
    with pytest.raises(ModelError, match="number type 99"):
        open_weights(gguf(tmp_path / "k.gguf", meta, tensors))
    damaged = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(damaged[:300])
    with pytest.raises(ModelError):
        open_weights(tmp_path / "cut.gguf")


@pytest.mark.parametrize("label", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_quantised_gguf_is_read_as_its_own_package_reads_it(tmp_path, label):
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[label]
    block, size = GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 60, (4 * 512 // block, size), dtype=np.uint8)  # small bytes: scales that are numbers
    meta = {"general.architecture": "qwen3", "qwen3.block_count": 1, "qwen3.embedding_length": 512}
    meta |= {"qwen3.attention.head_count": 2, "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 256}
    path = gguf(tmp_path / "m.gguf", meta, {"token_embd.weight": (int(kind), (4, 512), codes.tobytes())})
    store = GgufStore(LocalOrigin(tmp_path), path.name)
    wanted = quants.dequantize(codes, kind).reshape(4, 512)
    assert store.tensors["token_embd.weight"].dtype == label and np.ptp(wanted) > 0
    np.testing.assert_allclose(store.read("token_embd.weight"), wanted, rtol=1e-6)
    np.testing.assert_allclose(store.read("token_embd.weight", [(1, 3)]), wanted[1:3], rtol=1e-6)


def raw(value):
    return value.shape, value.astype(np.float32).tobytes()


def test_vocabularies_meet_in_bytes(tmp_path):
    assert v.piece_bytes("Ġthe", True) == b" the" == v.piece_bytes("▁the", False)
    assert v.piece_bytes("<0xE2>", False) == b"\xe2"
    write_tokenizer(tmp_path, 40)
    byte_level = v.read_vocabulary(LocalOrigin(tmp_path))
    pieces = [["<s>", 0.0], ["▁waaa", -1.0], ["▁waab", -2.0]]
    table = {"model": {"type": "Unigram", "vocab": pieces}, "added_tokens": [{"content": "<s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    unigram = v.read_vocabulary(LocalOrigin(tmp_path))
    a, b = v.shared_rows(byte_level, unigram, 40, 3)
    assert list(zip(a.tolist(), b.tolist(), strict=True)) == [(0, 1)]  # "waab" is row 676 of a larger one
    assert b"<s>" not in unigram
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_text("IHRoZQ== 0\nIGE= 1\n")
    assert v.read_vocabulary(LocalOrigin(tmp_path)) == {b" the": 0, b" a": 1}
    proto = b"".join(
        b"\n" + bytes([len(m)]) + m for m in (b"\n\x03<s>\x18\x03", b"\n\x06\xe2\x96\x81the", b"\n\x06<0x0A>\x18\x06")
    )
    (tmp_path / "tokenizer.model").write_bytes(proto)
    assert v.read_vocabulary(LocalOrigin(tmp_path)) == {b" the": 1, b"\n": 2}
