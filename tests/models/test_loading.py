"""A checkpoint's config.json decides shapes and tying; transformers' table of tensors is never printed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from fathom.models.configuration import CHOICES
from fathom.models.loading import LEARNED, SHAPING, described, differing, require_shapes
from fathom.models.registry import AXES
from tests.models.cases import SHAPE, build, config_of, tokens


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)).save_pretrained(tmp_path)
    return tmp_path


def test_tying_an_untied_checkpoint_is_refused(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FathomConfig.from_pretrained(untied, tie_word_embeddings=True)
    monkeypatch.setattr("transformers.modeling_utils.load_state_dict", None)  # nothing is loaded before
    for wish in ({"tie_word_embeddings": True}, {"config": config}):
        with pytest.raises(ValueError, match=r"^the checkpoint has tie_word_embeddings=false \(not true\); its conf"):
            FathomForCausalLM.from_pretrained(untied, **wish)


def test_other_shapes_are_named_together(untied: Path) -> None:
    says = r"has hidden_size=32 \(not 64\), num_hidden_layers=4 \(not 2\); its config.json decides, .* these keys out$"
    with pytest.raises(ValueError, match=says):
        FathomForCausalLM.from_pretrained(untied, num_hidden_layers=2, hidden_size=64, vocab_size=61)


def test_agreeing_keys_are_allowed(untied: Path) -> None:
    same = {**SHAPE, "tie_word_embeddings": False}
    model, stock = FathomForCausalLM.from_pretrained(untied, **same), Qwen3ForCausalLM.from_pretrained(untied)
    ids = tokens(1, 7)
    assert torch.equal(model.eval()(ids).logits, stock.eval()(ids).logits)


def test_a_configuration_of_another_class_is_refused(untied: Path) -> None:
    """Such as that of the checkpoint's family, which transformers' own classes take."""
    for config in (Qwen3Config.from_pretrained(untied), str(untied)):
        with pytest.raises(ValueError, match=r"^config must be a FathomConfig, got a (Qwen3Config|str); leave it out"):
            FathomForCausalLM.from_pretrained(untied, config=config)


def test_mismatched_sizes_may_be_asked_for_but_not_another_head(untied: Path) -> None:
    loose = {"ignore_mismatched_sizes": True}
    assert FathomForCausalLM.from_pretrained(untied, vocab_size=70, **loose).lm_head.out_features == 70
    assert len(FathomForCausalLM.from_pretrained(untied, num_hidden_layers=2, **loose).model.layers) == 2
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        FathomForCausalLM.from_pretrained(untied, tie_word_embeddings=True, **loose)


def test_a_head_that_the_checkpoint_calls_tied_is_refused(untied: Path) -> None:
    """transformers opens it untied, after a warning; to tie it again would discard the head."""
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        FathomForCausalLM.from_pretrained(untied)
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, untied / "model.safetensors", metadata={"format": "pt"})
    model = FathomForCausalLM.from_pretrained(untied)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_no_table_is_printed(untied: Path, logged) -> None:
    lines = logged("transformers")
    FathomForCausalLM.from_pretrained(untied, residual="denseformer")
    tensors = load_file(untied / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(60, 32)}, untied / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape"):
        FathomForCausalLM.from_pretrained(untied)
    assert "REPORT" not in "".join(lines)
    with pytest.raises(RuntimeError):
        Qwen3ForCausalLM.from_pretrained(untied)
    assert "LOAD REPORT" in "".join(lines)  # anybody else's is


SETTINGS = ("max_trips", "pad_token_id", "bos_token_id", "eos_token_id", "sliding_window", "max_window_layers")


def test_every_key_that_shapes_a_tensor_is_listed() -> None:
    """Each number, switch and choice of the configuration is changed alone."""
    keys = [one.name for one in fields(FathomConfig) if one.name not in (*AXES, *SETTINGS, "tie_word_embeddings")]
    before = shapes()
    found = {key for key in keys for value in others(key) if shapes(**{key: value}) != before}
    assert found == set(SHAPING) - {"tie_word_embeddings", "experts_per_token"}
    assert shapes(experts=4, experts_per_token=1) != shapes(experts=4, experts_per_token=2)
    learned = shapes(positions="learned")
    assert {key for key in LEARNED if shapes(positions="learned", **{key: 7}) != learned} == set(LEARNED)


def others(key: str) -> tuple[object, ...]:
    """Other values of a key."""
    value = getattr(config_of("vanilla"), key)
    if key == "experts":
        return (4,)
    if key in CHOICES or key == "output_bias":
        return CHOICES.get(key, (True,))
    return (not value,) if isinstance(value, bool) else (2 * value,) if isinstance(value, int) else ()


def shapes(**changed: object) -> dict[str, torch.Size]:
    """Every tensor of a model."""
    with torch.device("meta"):
        model = FathomForCausalLM(config_of("vanilla", **{"num_hidden_layers": 1, **changed}))
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_a_table_of_positions_has_the_checkpoints_length() -> None:
    theirs = config_of("vanilla", positions="learned")
    with pytest.raises(ValueError, match=r"max_position_embeddings=128 \(not 64\)"):
        require_shapes(theirs, {"max_position_embeddings": 64})
    require_shapes(config_of("vanilla"), {"max_position_embeddings": 64})


def test_differing_keys_are_told_one_by_one() -> None:
    theirs = config_of("depth_attention")
    keys = {"rms_norm_eps": 1e-6, "max_position_embeddings": 64, "mixer_options": {"self_bias": 20.0, "stride": 2}}
    keys |= {"residual": "denseformer", "residual_options": {"dilation": 2}}
    ours = FathomConfig.from_dict(theirs.to_dict(), **keys)
    assert described(differing(theirs, ours, keys)) == (
        "max_position_embeddings 128 → 64, mixer_options.self_bias 0.0 → 20.0, residual plain → denseformer"
    )
    assert differing(theirs, theirs, {"hidden_size": 32, "max_trips": None}) == {}


def test_weights_given_by_hand_are_held_to_their_configuration() -> None:
    model = build(config_of("vanilla", tie_word_embeddings=False))
    given = {"state_dict": model.state_dict(), "state_config": model.config.to_dict()}
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        FathomForCausalLM.from_pretrained(None, config=config_of("vanilla", tie_word_embeddings=True), **given)
    fresh = FathomForCausalLM.from_pretrained(None, config=config_of("vanilla", hidden_size=64), state_dict={})
    assert fresh.config.hidden_size == 64
