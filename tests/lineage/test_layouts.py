"""Families that later checkpoints brought: read right, or refused with the reason."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from fathom.errors import ModelError
from fathom.lineage import verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options, compare, measure
from fathom.lineage.weights import open_weights
from tests.lineage import zoo
from tests.lineage.zoo import build, logits, save

COMMON = zoo.COMMON | dict(num_hidden_layers=4, num_key_value_heads=2)
WIDE = COMMON | dict(hidden_size=64, vocab_size=512, num_hidden_layers=3)
MIXTURE = dict(num_local_experts=2, num_experts_per_tok=1)
REFUSED = {
    "mamba": (
        lambda: tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96),
        "layers 0, 1 of 2 hold a state-space mixer",
    ),
    "minimax": (
        lambda: tf.MiniMaxConfig(**COMMON, **MIXTURE, head_dim=8, block_size=8),
        "only 1 is known: layer 1 has no attention of known names; it holds self_attn.diagonal_decay",
    ),
    "kimi_linear": (
        lambda: tf.KimiLinearConfig(
            **COMMON | zoo.LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2},
            linear_num_heads=3,
            linear_head_dim=6,
        ),
        "layers.1: its attention weights are packed unlike earlier layers'",
    ),
}
DEEP = WIDE | dict(num_hidden_layers=8)
STATES = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=3, mamba_chunk_size=8)
DELTAS = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
EIGHT = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, shared_expert_intermediate_size=96)
CONVOLVED = dict(layer_types=["conv", "conv", "full_attention", "conv"] * 2)
HYBRIDS = {
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(**DEEP, **DELTAS, head_dim=16),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**DEEP, **DELTAS, **EIGHT, head_dim=16),
    "qwen3_5_moe_text": lambda: tf.Qwen3_5MoeTextConfig(**DEEP, **DELTAS, **EIGHT, head_dim=16),
    "lfm2": lambda: tf.Lfm2Config(**DEEP, **CONVOLVED),
    "lfm2_moe": lambda: tf.Lfm2MoeConfig(
        **DEEP, **CONVOLVED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, num_dense_layers=2
    ),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **DEEP, **STATES, **MIXTURE, layer_types=["mamba", "mamba", "attention", "mamba"] * 2
    ),
    "granite without experts": lambda: tf.GraniteMoeHybridConfig(
        **DEEP, **STATES, num_local_experts=0, layer_types=["mamba", "mamba", "attention", "mamba"] * 2
    ),
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(
        **DEEP, **DELTAS, layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2
    ),
    "bamba": lambda: tf.BambaConfig(**DEEP, **STATES, attn_layer_indices=[2, 6]),
    "jamba": lambda: tf.JambaConfig(
        **DEEP,
        num_experts=4,
        num_experts_per_tok=1,
        attn_layer_period=4,
        attn_layer_offset=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
}
DENSE = {
    "gpt2": (
        lambda: tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
        ("permute", "head", "neuron"),
    ),
    "gpt_neox": (lambda: tf.GPTNeoXConfig(**{**COMMON, "num_key_value_heads": 4}), ("permute", "head", "neuron")),
    "gptj": (
        lambda: tf.GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64, rotary_dim=4),
        ("permute", "plane", "head", "neuron"),
    ),
    "olmo": (lambda: tf.OlmoConfig(**COMMON), ("permute", "plane", "head", "neuron")),
    "apertus": (lambda: tf.ApertusConfig(**COMMON, rms_norm_eps=1e-12), ("rotate", "plane", "head", "neuron")),
    "hunyuan": (
        lambda: tf.HunYuanDenseV1Config(**COMMON, head_dim=8, rms_norm_eps=1e-12),
        ("rotate", "gain", "plane", "head", "neuron"),
    ),
}


@pytest.mark.quick("gpt_neox", "apertus", "gpt2")
@pytest.mark.parametrize("name", DENSE)
def test_a_disguised_copy_computes_the_same_and_scores_one(tmp_path, name):
    config, kinds = DENSE[name]
    base = save(build(config(), 0), tmp_path / "base", 96)
    attack(open_weights(base), kinds, tmp_path / "copy", dtype="float64")
    assert (logits(base) - logits(tmp_path / "copy")).abs().max() < (1e-10 if name in {"gpt2", "gpt_neox"} else 1e-5)
    pair = measure(open_weights(base), open_weights(tmp_path / "copy"), Options(mode="exact"))
    for score in ("procrustes" if "rotate" in kinds else "awm_canonical", "ics_canonical", "ics_all_layers"):
        assert pair.value(score) == pytest.approx(1, abs=1e-4), score
    assert pair.value("awm") < 0.99 or name == "gpt_neox"
    assert all(count.paired == count.of for count in list(pair.neurons.values())[-1])
    if open_weights(base).geometry.norm == "layer":
        with pytest.raises(ModelError, match="RMSNorm"):
            attack(open_weights(base), ("rotate",), tmp_path / "no")


NORMED = {
    "glm4": (lambda: tf.Glm4Config(**COMMON, head_dim=8), ["permute"]),
    "vaultgemma": (lambda: tf.VaultGemmaConfig(**COMMON, head_dim=8), ["permute", "rotate", "gain"]),
    "cohere": (lambda: tf.CohereConfig(**COMMON, use_qk_norm=True), ["plane", "head"]),
    "bloom": (lambda: tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=96), ["neuron"]),
}


@pytest.mark.parametrize("name", NORMED)
def test_an_attack_edits_every_norm(tmp_path, name):
    config, kinds = NORMED[name]
    base = save(build(config(), 0), tmp_path / "base")
    attack(open_weights(base), kinds, tmp_path / "copy", dtype="float64")
    assert (logits(base) - logits(tmp_path / "copy")).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (lambda: tf.BitNetConfig(**COMMON, bos_token_id=1, eos_token_id=2), "neuron", "ffn_sub_norm"),
        (lambda: tf.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=96, max_seq_len=64), "head", "ALiBi"),
    ],
    ids=["bitnet", "mpt"],
)
def test_an_attack_that_would_change_the_function_is_refused(tmp_path, config, kind, reason):
    base = open_weights(save(build(config(), 0), tmp_path / "base"))
    with pytest.raises(ModelError, match=reason):
        attack(base, [kind], tmp_path / "copy")


@pytest.mark.parametrize("name", ["granitemoe", "llama4", "gpt_oss"])
def test_every_expert_of_a_stack_is_what_the_module_computes(tmp_path, name):
    """Gate, up and down of the second expert, put through the activation, against the live module's own experts."""
    config = {
        "granitemoe": lambda: tf.GraniteMoeConfig(**COMMON, **MIXTURE),
        "llama4": lambda: tf.Llama4TextConfig(
            **COMMON, **MIXTURE, head_dim=8, intermediate_size_mlp=64, interleave_moe_layer_step=2
        ),
        "gpt_oss": lambda: tf.GptOssConfig(**COMMON, **MIXTURE, head_dim=8),
    }[name]()
    model = build(config, 1, torch.float32)
    weights = open_weights(save(model, tmp_path))
    assert weights.experts(1) == 2 and weights.geometry.ffn == 48
    gate, up, down = (torch.tensor(weights.tensor(role, 1, expert=1)) for role in ("gate", "up", "down"))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if name == "granitemoe":
            moe = model.model.layers[1].block_sparse_moe
            live = moe.experts(x, torch.ones(5, 1, dtype=torch.long), torch.ones(5, 1))
        elif name == "llama4":
            experts = model.model.layers[1].feed_forward.experts
            live = experts(torch.stack([x, x]).reshape(-1, 32)).reshape(2, 5, 32)[1]
        else:
            experts = model.model.layers[1].mlp.experts
            experts.gate_up_proj_bias.zero_(), experts.down_proj_bias.zero_()
            live = experts(x, torch.ones(5, 1, dtype=torch.long), torch.ones(5, 1))
        first, second = x @ gate.T, x @ up.T
        inner = torch.nn.functional.silu(first) * second
        if name == "gpt_oss":
            inner = first * torch.sigmoid(1.702 * first) * (second + 1)
        torch.testing.assert_close(inner @ down.T, live, rtol=1e-4, atol=1e-5)


EXPERTS = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **WIDE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **{**WIDE, **zoo.LATENT, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 20}
        | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16},
        moe_intermediate_size=48,
        num_experts_per_tok=2,
    ),
}


def with_experts_reordered(tensors):
    """The same mixture: experts and the rows of their router in another order."""
    order = [2, 0, 3, 1]
    for name, value in dict(tensors).items():
        before, mark, rest = name.partition(".experts.")
        index, _, part = rest.partition(".")
        if index.isdigit():
            tensors[f"{before}{mark}{order.index(int(index))}.{part}"] = value
        elif mark or name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            tensors[name] = value[order]


@pytest.mark.slow
@pytest.mark.parametrize("controls", [0, 2])
@pytest.mark.parametrize("name", EXPERTS)
def test_a_mixture_with_its_experts_in_another_order_is_found(tmp_path, name, controls):
    models = [
        save(build(EXPERTS[name](), seed, torch.float32, trained=True), tmp_path / str(seed), 512)
        for seed in range(2 + controls)
    ]
    copy = zoo.edited(models[0], tmp_path / "copy", with_experts_reordered)
    quiet = Options(extras=False, nonce=1)
    found = compare(open_weights(models[0]), open_weights(copy), models[2:], None, quiet)
    assert found.verdict.label in {verdict.SHARED, verdict.INITIALISATION}, found.verdict.reasons
    assert {"attention", "feed-forward"} <= {t.family for t in found.tests if t.p < 1e-6}
    assert all(count.paired == count.of for counts in found.pair.neurons.values() for count in counts)
    stranger = compare(open_weights(models[1]), open_weights(copy), models[2:], None, quiet)
    assert stranger.verdict.label == verdict.NONE, stranger.verdict.reasons


def tuned(tensors):
    """Every number moved by a tenth of its tensor's spread."""
    draw = torch.Generator().manual_seed(5)
    for value in tensors.values():
        if value.numel() > 1:
            value += 0.1 * value.std() * torch.randn(value.shape, generator=draw)


@pytest.mark.quick("lfm2")
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_tuned_hybrid_is_found_and_a_stranger_is_not(tmp_path, name):
    """By its embedding, its layers with attention, and the feed-forward parts of all layers."""
    base, stranger = (
        save(build(HYBRIDS[name](), seed, torch.float32, trained=True), tmp_path / str(seed), 512) for seed in (0, 1)
    )
    copy = zoo.edited(base, tmp_path / "copy", lambda tensors: (with_experts_reordered(tensors), tuned(tensors)))
    weights = open_weights(base)
    assert weights.keyed == ([3, 7] if "qwen" in name else [2, 6]) and weights.geometry.layers == 8
    found = compare(weights, open_weights(copy), (), None, Options(extras=True, nonce=1))
    assert found.verdict.label == verdict.INITIALISATION, found.verdict.reasons
    assert {"attention", "feed-forward", "embedding"} <= {t.family for t in found.tests if t.p < 1e-6}
    layers = {count.layers for counts in found.pair.neurons.values() for count in counts}
    assert layers == {(i, i) for i in range(8)}
    far = compare(weights, open_weights(stranger), (), None, Options(extras=False, nonce=1))
    assert far.verdict.label == verdict.NONE, far.verdict.reasons


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(3,), (2, 7), (3, 4), (1, 5), (0,), (2, 3, 4)])
def test_a_hybrid_without_some_layers_is_found(tmp_path, gone):
    """Every layer that is left has evidence, as in a dense model."""
    base = save(build(HYBRIDS["qwen3_5_text"](), 0, torch.float32, trained=True), tmp_path / "base", 512)
    left = [i for i in range(8) if i not in gone]

    def cut(tensors):
        for name in [n for n in tensors if n.startswith("model.layers.")]:
            at, rest = name.removeprefix("model.layers.").split(".", 1)
            value = tensors.pop(name)
            if int(at) in left:
                tensors[f"~model.layers.{left.index(int(at))}.{rest}"] = value
        for name in [n for n in tensors if n.startswith("~")]:
            tensors[name[1:]] = tensors.pop(name)

    kinds = HYBRIDS["qwen3_5_text"]().layer_types
    changed = {"num_hidden_layers": len(left), "layer_types": [kinds[i] for i in left]}
    copy = zoo.edited(base, tmp_path / "copy", cut, **changed)
    found = compare(open_weights(base), open_weights(copy), (), None, Options(extras=False, nonce=1))
    assert found.verdict.label in {verdict.SHARED, verdict.INITIALISATION}, found.verdict.reasons
    assert f"layers with evidence: {len(left)} of {len(left)}" in found.verdict.reasons


def test_a_layer_whose_attention_is_unknown_is_no_state(tmp_path):
    """Although it holds a mixer besides."""
    base = save(build(tf.FalconH1Config(**DEEP, **STATES, mamba_d_ssm=128), 0, torch.float32), tmp_path / "base", 512)
    name = "model.layers.3.self_attn.q_proj.weight"
    broken = zoo.edited(base, tmp_path / "broken", lambda tensors: tensors.pop(name))
    with pytest.raises(
        ModelError, match="8 layers, but the layout of only 3 is known: layer 3 has no attention of known names"
    ):
        open_weights(broken)


@pytest.mark.slow
def test_attack_refuses_a_gated_output(tmp_path):
    config = tf.Qwen3_5TextConfig(**COMMON, head_dim=8, layer_types=["full_attention"] * 4)
    base = open_weights(save(build(config, 0, torch.float32), tmp_path / "base"))
    with pytest.raises(ModelError, match="attention with a gated output is not supported"):
        attack(base, ("permute",), tmp_path / "out")


@pytest.mark.slow
def test_the_gate_of_an_output_is_no_query(tmp_path):
    """Qwen3.5 stores both in one matrix, head by head."""
    model = build(HYBRIDS["qwen3_5_text"](), 0, torch.float32)
    weights = open_weights(save(model, tmp_path))
    x = torch.randn(2, 5, 64)
    both = model.model.layers[3].self_attn.q_proj(x).view(2, 5, 4, 32)
    for role, live in (("q", both[..., :16]), ("q_gate", both[..., 16:])):
        own = torch.from_numpy(weights.tensor(role, 3))
        torch.testing.assert_close(x @ own.T, live.reshape(2, 5, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_rotated_hybrid_is_found(tmp_path):
    """LFM2 with its gains folded and its stream rotated computes the same, and no column stays where it was."""
    base = save(build(HYBRIDS["lfm2"](), 0, torch.float64, trained=True), tmp_path / "base", 512)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    readers = {"operator_norm": ("in_proj", "q_proj", "k_proj", "v_proj"), "ffn_norm": ("w1", "w3")}

    def rotated(tensors):
        for name in [n for n in tensors if re.search(r"layers\..*(proj|w[123])\.weight", n)]:
            layer, part = name.rsplit(".", 3)[0].split(".")[:3], name.split(".")[-2]
            norm = next((norm for norm, parts in readers.items() if part in parts), None)
            if norm:
                tensors[name] = tensors[name] * tensors[".".join(layer) + f".{norm}.weight"] @ turn
            else:  # out_proj, w2
                tensors[name] = turn.T @ tensors[name]
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * tensors["model.embedding_norm.weight"] @ turn
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] @ turn
        for name in [
            n for n in tensors if n.endswith(("operator_norm.weight", "ffn_norm.weight", "embedding_norm.weight"))
        ]:
            tensors[name] = torch.ones_like(tensors[name])

    copy = zoo.edited(base, tmp_path / "copy", rotated)
    assert (logits(base) - logits(copy)).abs().max() < 1e-5
    (copy / "tokenizer.json").unlink()
    found = compare(open_weights(base), open_weights(copy), (), None, Options(extras=False, nonce=1))
    assert found.verdict.label == verdict.INITIALISATION, found.verdict.reasons
    assert all(count.paired == count.of for count in list(found.pair.neurons.values())[-1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_attention_that_is_known_is_refused(tmp_path, name):
    config, reason = REFUSED[name]
    tf.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        open_weights(tmp_path)


def test_packed_experts_are_refused_as_such(tmp_path):
    path = save(build(tf.GptOssConfig(**COMMON, **MIXTURE, head_dim=8), 1, torch.float32), tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("gate_up_proj")]:
        tensors[f"{name}_blocks"] = tensors.pop(name).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.from_numpy(np.zeros(4, np.uint8))
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match="packed low-bit weights"):
        open_weights(path)
