"""A small copy of a configuration has the same relations between its sizes, and every key."""

from __future__ import annotations

from typing import Any

import pytest

from fathom.checkpoints.shrink import BEYOND, ORIGINAL, SHORT, VOCABULARY, WINDOW, read_as_class, shrink

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    **{"bos_token_id": 128000, "eos_token_id": [128001, 128008], "an_unknown_key": 7, "hidden_act": "silu"},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}
PHI3: dict[str, Any] = {
    **{"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
    **{"num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "partial_rotary_factor": 0.75},
    **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144},
    "rope_scaling": {"type": "longrope", "long_factor": [1 + i / 9 for i in range(48)], "short_factor": [1.0] * 48},
}


def test_sizes_shrink_and_every_key_stays() -> None:
    small = shrink(LLAMA).config
    assert set(small) == set(LLAMA)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
    assert {key: small[key] for key in sizes} == sizes and small["intermediate_size"] == 4 * 32
    same = ("rope_theta", "tie_word_embeddings", "rms_norm_eps", "an_unknown_key", "hidden_act", "model_type")
    assert all(small[key] == LLAMA[key] for key in same)
    assert small["vocab_size"] == VOCABULARY and max(small["bos_token_id"], *small["eos_token_id"]) < VOCABULARY


def test_a_text_crosses_the_window_and_the_original_context() -> None:
    for config in (LLAMA, PHI3):
        small = shrink(config)
        full, read = read_as_class(config), read_as_class(small.config)
        ropes = [one.rope_parameters["original_max_position_embeddings"] for one in (full, read)]
        assert ropes[1] == ORIGINAL < small.tokens == ORIGINAL + BEYOND
        contexts = [one.max_position_embeddings for one in (full, read)]
        assert contexts[0] / ropes[0] == contexts[1] / ropes[1]
        assert len(small.crossed) == 1 + (config is PHI3)
    assert shrink(PHI3).config["sliding_window"] == WINDOW < SHORT
    plain = {key: value for key, value in LLAMA.items() if key != "rope_scaling"}
    assert shrink(plain).tokens == SHORT and not shrink(plain).crossed


def test_longrope_has_a_factor_for_every_second_channel() -> None:
    small = shrink(PHI3).config
    head = small["hidden_size"] // small["num_attention_heads"]
    for key in ("long_factor", "short_factor"):
        assert len(small["rope_scaling"][key]) == int(head * 0.75) // 2 >= 4
    assert small["rope_scaling"]["long_factor"] == sorted(set(small["rope_scaling"]["long_factor"]))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_rope_turns_several_channels(share: float) -> None:
    small = shrink({"model_type": "gpt_neox", "rotary_pct": share, "hidden_size": 768, "num_attention_heads": 12})
    head = small.config["hidden_size"] // small.config["num_attention_heads"]
    assert int(head * share) >= 8 and int(head * share) % 2 == 0
    assert "head_dim" not in small.config


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0] * 9}, {"no_rope_layers": {0, 1}}),
        ({"model_type": "smollm3"}, {"no_rope_layers": {0, 1}}),
        ({"model_type": "gemma3_text"}, {"layer_types": {"sliding_attention", "full_attention"}}),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention"] * 20 + ["full_attention"] * 6},
            {"layer_types": {"sliding_attention", "full_attention"}},
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 21},
            {"layer_types": {"sliding_attention", "full_attention"}},
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 99},
            {"layer_types": {"full_attention"}},
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
            {"layer_types": {"sliding_attention"}},
        ),
    ],
)
def test_every_kind_of_layer_stays(values: dict[str, Any], kinds: dict[str, set[object]]) -> None:
    small = shrink(values)
    read = read_as_class(small.config)
    assert {key: set(getattr(read, key)) for key in kinds} == kinds
    assert read.num_hidden_layers <= 6


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
        ({"num_key_value_heads": 32}, {"num_key_value_heads": 4}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": None}),
        ({"head_dim": 128}, {"head_dim": 8, "hidden_size": 24}),
        ({"head_dim": 32}, {"head_dim": 8, "hidden_size": 40}),
        ({"head_dim": None, "hidden_size": 2112}, {"head_dim": None, "hidden_size": 32}),
        ({"pad_token_id": 128256}, {"pad_token_id": VOCABULARY}),
        ({"pad_token_id": -1}, {"pad_token_id": -1}),
        ({"sliding_window": None}, {"sliding_window": None}),
        ({"sliding_window": 3}, {"sliding_window": 3}),
        ({"sliding_window": 131072}, {"sliding_window": 131072}),
    ],
)
def test_relations_stay(values: dict[str, Any], expected: dict[str, Any]) -> None:
    small = shrink({**LLAMA, **values}).config
    assert {key: small[key] for key in expected} == expected


def test_class_defaults_of_a_missing_size_are_small_too() -> None:
    for kind in ("mistral", "gpt2", "opt", "phi3", "gemma2"):
        small = shrink({"model_type": kind})
        read = read_as_class(small.config)
        assert read.hidden_size <= 64 and read.vocab_size == VOCABULARY and read.num_hidden_layers == 3, kind
    assert shrink({"model_type": "gpt2"}).config["n_positions"] == SHORT
    narrow = {"model_type": "opt", "hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512}
    assert shrink(narrow).config["word_embed_proj_dim"] * 2 == shrink(narrow).config["hidden_size"] == 32
    assert shrink({"model_type": "smollm3"}).config["pad_token_id"] < VOCABULARY


def test_a_small_model_does_not_grow() -> None:
    tiny = {"vocab_size": 61, "hidden_size": 12, "num_attention_heads": 2, "head_dim": 6, "num_hidden_layers": 2}
    small = shrink({"model_type": "qwen3", "intermediate_size": 20, "num_key_value_heads": 2, **tiny})
    assert {**tiny, "intermediate_size": 20}.items() <= small.config.items()
