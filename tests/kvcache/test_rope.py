"""Turning keys as the model does, and the models for which that cannot be exact."""

import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fathom.kvcache import build_cache, compress_in_training
from fathom.kvcache.rope import Rope, Still
from fathom.models import FathomForCausalLM
from fathom.models.axes.roles import View
from fathom.models.registry import recurrence_class
from tests.models.cases import config_of

from .cases import SHAPE, model_of, tokens


@pytest.mark.parametrize(
    "case",
    [
        "qwen3-yarn",
        "llama-llama3",
        "llama-linear",
        "llama-proportional",
        "cohere",
        "stablelm",
        "gemma3",
        "gpt_oss",
        "loop",
    ],
)
def test_turns_add_up(case):
    """R(5) R(−2) = R(3), lengths stay, and a shift common to all entries is one shift of each."""
    rope, x = Rope(model_of(case).config).plan[0], torch.randn(1, 2, 10, 16, dtype=torch.float64)
    assert (rope.turn(rope.turn(x, 5), -2, 0) - rope.turn(x, 3)).abs().max() < 1e-5
    assert (rope.turn(x, 7).norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-5
    assert (rope.turn(rope.turn(x, 0), 0, -1) - x).abs().max() < 1e-5
    assert (rope.turn(x, 3) - x).abs().max() > 0.1


@torch.no_grad()
def test_each_entry_by_its_own_distance_is_a_table_gathered():
    turn, x = Rope(model_of("qwen3").config).plan[0], torch.randn(2, 3, 10, 16)
    by = torch.randint(0, 8, (2, 3, 10))
    found = turn.turn_each(x, by, 0, 7)
    for row in range(2):
        for head in range(3):
            for i in range(10):
                one = turn.turn(x[row, head, i].view(1, 1, 1, -1), int(by[row, head, i]), 0)
                assert (found[row, head, i] - one.flatten()).abs().max() < 1e-6


@torch.no_grad()
def test_the_mean_rotation_is_the_mean_of_rotations():
    turn, x = Rope(model_of("stablelm").config).plan[0], torch.randn(2, 3, 4, 16)
    each = torch.stack([turn.turn(x, 7 + i, 0) for i in range(9)])
    assert (turn.turn_mean(x, 7, 9) - each.mean(0)).abs().max() < 1e-6


PLANS = {
    "smollm3": [True, False, True],
    "cohere2": [True, False, False],
    "exaone4": [True, False, True],
    "gemma3": [True, True, True],
    "llama": [True, True, True],
}


@pytest.mark.parametrize("case", PLANS)
def test_the_model_says_which_layers_rotate(case):
    """Also in training mode with dropout, which is as before afterwards; and it is asked once."""
    model = model_of(case).train()
    rope, calls = Rope(model.config), []
    model.model.layers[0].register_forward_hook(lambda *rest: calls.append(1))
    rope.ask(model.model)
    assert [type(turn) is not Still for turn in rope.plan] == PLANS[case]
    assert all(module.training for module in model.modules())
    Rope(model.config).ask(model.model)
    assert len(calls) == 2


def test_angles_by_type_of_layer():
    model = model_of("gemma3")
    rope = Rope(model.config)
    rope.ask(model.model)
    kinds = [turn.kind for turn in rope.plan]
    assert kinds == model.config.layer_types and len(set(kinds)) == 2
    assert rope.plan[0].angles != rope.plan[1].angles


def test_angles_that_were_rounded_are_the_models_own():
    """`model.to(bfloat16)` rounds them too, so what is stored is rotated by rounded ones."""
    model = model_of("llama", torch.bfloat16)
    rope = Rope(model.config)
    rope.ask(model.model)
    assert torch.equal(rope.plan[0].embed.inv_freq, model.model.rotary_emb.inv_freq.float())


@torch.no_grad()
def test_rounded_angles_of_a_fathom_model():
    """In a model of one layer `drop` leaves what the sinks and the last tokens are by themselves, wherever they were.

    By other angles than the model's own, the sinks would be off by more with every compression.
    """
    model = model_of("fathom", num_hidden_layers=1)
    model.model.rotary_emb.to(torch.bfloat16)
    ids, cache = tokens(1, 500), build_cache(model, "drop", window=32, sinks=8)
    found = model(ids, past_key_values=cache).logits[0, -1]
    held = torch.cat([ids[:, :8], ids[:, 8 - cache.entries :]], dim=1)
    assert (found - model(held, use_cache=False).logits[0, -1]).abs().max() < 1e-4


def test_fathoms_angles_by_type_of_layer():
    kinds, rope = ["sliding_attention", "full_attention"], {"rope_type": "default"}
    both = {kind: {**rope, "rope_theta": theta} for kind, theta in zip(kinds, (100.0, 1e4), strict=True)}
    config = config_of("vanilla", num_hidden_layers=2, layer_types=kinds, sliding_window=64, rope_parameters=both)
    model = FathomForCausalLM(config).bfloat16()
    rope = Rope(config)
    rope.ask(model.model)
    for kind, turn in zip(kinds, rope.plan, strict=True):
        assert torch.equal(turn.embed.inv_freq, model.model.rotary_emb[kind].inv_freq.float())


def test_a_model_whose_keys_are_not_rotated_as_its_code_says(monkeypatch):
    """Asked, it is refused: a family that scales keys by position, say."""
    model = model_of("llama")
    code = sys.modules["transformers.models.llama.modeling_llama"]
    plain = code.apply_rotary_pos_emb
    monkeypatch.setattr(code, "apply_rotary_pos_emb", lambda *given: [x.square() for x in plain(*given)])
    with pytest.raises(ValueError, match="llama"):
        build_cache(model, window=64)


def of(kind, **changes):
    return AutoConfig.for_model(kind, **{**SHAPE, **changes})


def renamed(kind, rope_type):
    config = of(kind)
    config.rope_parameters["rope_type"] = rope_type
    return config


LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=4.0)
REFUSED = {
    "dynamic": (
        lambda: of("llama", rope_parameters=dict(rope_type="dynamic", factor=2.0)),
        "'dynamic' changes its angles",
    ),
    "longrope": (
        lambda: of("phi3", rope_parameters=LONGROPE),
        "set rope_type to one of default, linear, llama3, proportional, yarn",
    ),
    "latent": (lambda: of("deepseek_v3"), r"deepseek_v3 stores latents \(MLA\), from which keys are computed"),
    "learned": (lambda: AutoConfig.for_model("gpt2"), "gpt2 has no rotary embedding, so its keys hold positions"),
    "own code": (lambda: AutoConfig.for_model("gptj"), "gptj rotates its keys in code of its own"),
    "unknown": (lambda: renamed("llama", "new"), "'new' is not known here"),
    "states alone": (lambda: of("lfm2", layer_types=["conv"] * 3), "lfm2: no layer keeps keys"),
    "chunked": (lambda: of("llama4_text", num_hidden_layers=2), "layer 0 is chunked_attention"),
    "sliding": (lambda: of("mistral", sliding_window=32), "set window to 32 or less"),
    "after_rope": (lambda: config_of("vanilla", k_norm_position="after_rope"), "'after_rope': keys that were normed"),
    "shared": (
        lambda: config_of("loop", recurrence_options={"kv": "first"}),
        "kv=first shares keys between iterations; use method 'full'",
    ),
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
    with pytest.raises(
        ValueError, match=rf"'loop' attends to other iterations \(view {view.name}\).*use method 'full'"
    ):
        build_cache(config, window=64)


def test_tokens_that_halt(monkeypatch):
    """Trips of one view, but rows of different lengths."""
    config = config_of("loop")
    monkeypatch.setattr(recurrence_class(config), "halts", True)
    with pytest.raises(ValueError, match="'loop' lets tokens halt one by one, which no compressed cache supports; use"):
        build_cache(config, window=64)


def test_norms_of_rotated_keys_are_refused_by_the_model_itself():
    """Hunyuan's weighted norm comes after the rotation: its keys cannot be moved."""
    with pytest.raises(ValueError, match="hunyuan_v1_dense computes other outputs if all positions are shifted"):
        build_cache(model_of("hunyuan"), window=64)
