"""What was asked for beside the checkpoint's own settings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fathom.errors import SettingsError
from fathom.inference.generate import generate, generate_batch
from fathom.inference.prompt import encode
from fathom.inference.settings import Sampling
from tests.inference.talker import PROMPTS


def test_the_checkpoints_own_sampling_is_the_default() -> None:
    silent, own = SimpleNamespace(do_sample=None), SimpleNamespace(do_sample=True)
    assert Sampling().arguments(silent) == {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95}
    assert Sampling(top_k=5).arguments(own) == {"top_k": 5}
    assert Sampling(options={"min_p": 0.1}).arguments(own) == {"min_p": 0.1, "top_k": 0}
    assert Sampling(temperature=0).arguments(own)["do_sample"] is False


def test_beams_and_stop_strings_may_be_the_checkpoints_own(opened, monkeypatch) -> None:
    model, tokenizer = opened
    with pytest.raises(SettingsError, match="`options` num_beams=None: allowed: a whole number, 1 or more"):
        Sampling(options={"num_beams": None})
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    assert generate(model, tokenizer, "the", Sampling(6, temperature=0), len).tokens == 6, "no streamer reads beams"
    monkeypatch.setattr(model.generation_config, "num_beams", 1)
    monkeypatch.setattr(model.generation_config, "stop_strings", ["fathom"])
    assert generate(model, tokenizer, "the", Sampling(6, temperature=0), len).tokens == 6, "the tokenizer is given"


@pytest.mark.parametrize("empty", ["", [], [""]])
def test_a_checkpoints_empty_stop_strings_end_nothing(opened, monkeypatch, empty: str | list[str]) -> None:
    """They stand at the beginning of every text; one beside them still ends it."""
    free = Sampling(20, temperature=0)
    alone = generate(*opened, "the depth", free)
    word = next(c for c in alone.text[1:] if c.isascii() and c.isalpha())
    monkeypatch.setattr(opened[0].generation_config, "stop_strings", empty)
    assert generate(*opened, "the depth", free).text == alone.text
    monkeypatch.setattr(opened[0].generation_config, "stop_strings", ["", word])
    stopped = generate(*opened, "the depth", Sampling(20, temperature=0, options={"stop_strings": word}))
    assert generate(*opened, "the depth", free).text == stopped.text != alone.text


def test_a_temperature_however_small(opened) -> None:
    likeliest = generate(*opened, "the", Sampling(6, temperature=0)).text
    for temperature in (5e-324, 1e-300, 1e-40, 1e-21, 1e-20):
        assert generate(*opened, "the", Sampling(6, temperature=temperature, top_k=0, seed=1)).text == likeliest


def test_penalties_to_their_limits_leave_something_to_draw(opened) -> None:
    """At any temperature; a penalty of 1e-320 left nothing, which torch found out."""
    limits = [{"repetition_penalty": 1e-6, "encoder_repetition_penalty": 1e9}, {"repetition_penalty": 1e9}]
    for options in (*limits, {"encoder_repetition_penalty": 1e-6}):
        for temperature in (1e-20, 1.0, 1e20):
            assert (
                generate(*opened, "the the", Sampling(6, temperature=temperature, seed=1, options=options)).tokens == 6
            )


def test_a_checkpoint_that_samples_is_sampled_as_it_says(opened, monkeypatch) -> None:
    """From all tokens where it names no top_k; one text, whatever it says of several."""
    own = opened[0].generation_config
    for name, value in {"do_sample": True, "top_k": None, "num_return_sequences": 2, "token_healing": True}.items():
        monkeypatch.setattr(own, name, value, raising=False)
    assert Sampling().arguments(own)["top_k"] == 0 and Sampling(top_k=3).arguments(own)["top_k"] == 3
    drawn = generate(*opened, "the", Sampling(12, seed=1))
    assert drawn == replace(generate(*opened, "the", Sampling(12, seed=1, top_k=0)), seconds=drawn.seconds)
    whole = Sampling(4, seed=1, options={"repetition_penalty": 2})
    assert generate(*opened, "the", whole).tokens == 4


OWN = [{name: 2} for name in ("temperature", "repetition_penalty", "encoder_repetition_penalty")]
OWN += [{"min_p": 1}, {"temperature": 0.0}, {"temperature": 0}, {"temperature": 1e-320}]


@pytest.mark.quick("own0", "own1", "own4", "own6")
@pytest.mark.parametrize("own", OWN)
def test_a_checkpoints_own_numbers_are_those_of_the_command(opened, monkeypatch, own: dict) -> None:
    """Whole numbers, of which transformers takes none, and temperatures below the coldest; alone and in a batch."""
    config, ids = opened[0].generation_config, [encode(opened[1], prompt) for prompt in PROMPTS[:2]]
    monkeypatch.setattr(config, "do_sample", True)
    name, value = next(iter(own.items()))
    asked = {name: value} if name == "temperature" else {"options": {name: float(value)}}

    def texts(**settings: Any) -> list[str]:
        one = generate(*opened, "the", Sampling(8, seed=2, **settings)).text
        torch.manual_seed(2)
        return [one, *(made.text for made in generate_batch(*opened, ids, Sampling(8, **settings)))]

    expected = texts(**asked)
    monkeypatch.setattr(config, name, value)
    assert texts() == expected
    if name != "temperature":  # where the likeliest token is taken too
        assert generate(*opened, "the", Sampling(8, temperature=0)).tokens == 8
