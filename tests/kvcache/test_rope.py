"""Turning keys as the model does, and the models for which that cannot be exact."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fathom.kvcache import build_cache, compress_in_training
from fathom.kvcache.rope import FAMILIES, Rope, refuse
from fathom.models.registry import recurrence_class
from fathom.models.roles import View
from tests.models.cases import config_of

from .cases import MODELS, SHAPE, model_of, tokens


@pytest.mark.parametrize("case", MODELS)
def test_turns_add_up(case):
    """R(5) R(−2) = R(3), lengths stay, and a shift common to all entries is one shift of each."""
    rope, x = Rope(model_of(case).config), torch.randn(1, 2, 10, 16, dtype=torch.float64)
    assert (rope.turn(rope.turn(x, 5), -2, 0) - rope.turn(x, 3)).abs().max() < 1e-5
    assert (rope.turn(x, 7).norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-5
    assert (rope.turn(rope.turn(x, 0), 0, -1) - x).abs().max() < 1e-5
    assert (rope.turn(x, 3) - x).abs().max() > 0.1


@pytest.mark.parametrize("case", [case for case in MODELS if MODELS[case][0] in FAMILIES or case == "fathom"])
@torch.no_grad()
def test_attention_of_every_family_is_relative(case):
    """What the frame rests on: the stock model does not notice an offset of all positions."""
    model, ids = model_of(case), tokens(1, 50)
    moved = model(ids, position_ids=torch.arange(50).unsqueeze(0) + 100).logits
    assert (moved - model(ids).logits).abs().max() < 2e-4


def test_every_family_is_tested():
    assert set(FAMILIES) == {MODELS[case][0] for case in MODELS} & set(FAMILIES) | {"fathom"}


def of(kind, **changes):
    return AutoConfig.for_model(kind, **{**SHAPE, **changes})


LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=4.0)
REFUSED = {
    "dynamic": (
        lambda: of("llama", rope_parameters=dict(rope_type="dynamic", factor=2.0)),
        "'dynamic' changes its angles",
    ),
    "longrope": (lambda: of("phi3", rope_parameters=LONGROPE), "set rope_type to one of default, linear, llama3, yarn"),
    "latent": (lambda: of("deepseek_v3"), r"latent keys \(MLA\), which cannot be turned back; use method 'full'"),
    "unknown": (lambda: AutoConfig.for_model("gpt2"), "gpt2 is not among the families"),
    "no positions": (lambda: of("smollm3"), "smollm3 is not among the families"),
    "per layer type": (lambda: of("gemma3_text"), "gemma3_text is not among the families"),
    "sliding": (lambda: of("mistral", sliding_window=32), "set window to 32 or less"),
    "hybrid": (lambda: of("gemma2", sliding_window=32), "sliding layers see 32 tokens and the memory would hold 64"),
    "after_rope": (lambda: config_of("vanilla", k_norm_position="after_rope"), "'after_rope' scales turned keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        build_cache(make(), window=64)


def test_the_training_function_refuses_alike():
    model = AutoModelForCausalLM.from_config(of("mistral", sliding_window=32))
    with pytest.raises(ValueError, match="set window to 32 or less"):
        compress_in_training(model, window=64)


@pytest.mark.parametrize("view", [View.DUO, View.ALL])
def test_trips_that_read_one_another(view, monkeypatch):
    """Entries of several trips share a position."""
    config = config_of("loop")
    recurrence = recurrence_class(config)
    monkeypatch.setattr(recurrence, "sees", staticmethod(lambda config: view))
    with pytest.raises(ValueError, match=rf"'loop' reads other trips \(view {view.name}\).*use method 'full'"):
        build_cache(config, window=64)


def test_tokens_that_halt(monkeypatch):
    """Trips of one view, but rows of different lengths."""
    config = config_of("loop")
    monkeypatch.setattr(recurrence_class(config), "halts", True)
    with pytest.raises(ValueError, match="'loop' lets tokens halt one by one; use method 'full'"):
        build_cache(config, window=64)


def test_the_same_view_passes():
    refuse(config_of("loop"), 64)
