"""RoPE whose angles change with the length: a host with a mechanism reads a text again where they do."""

from __future__ import annotations

import pytest
import torch

from fathom.models import FathomForCausalLM

from .cases import ours_of, theirs_of, tokens

LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16)
LONG |= dict(short_factor=[1.0] * 4, long_factor=[3.0] * 4, short_mscale=1.0, long_mscale=1.2)
SHAPES = {
    "phimoe": dict(rope_parameters=LONG),
    "qwen3_moe": dict(
        max_position_embeddings=16, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    ),
}
GREEDY = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)


def looped(name: str) -> FathomForCausalLM:
    return ours_of(theirs_of(name, **SHAPES[name]), recurrence="loop", recurrence_options={"trips": 2})


@pytest.mark.parametrize("name", ["phimoe", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_text_is_read_again_where_its_angles_change(name, monkeypatch):
    model, ids = looped(name), tokens(2, 24)
    assert torch.equal(model.generate(ids[:, :12], **GREEDY), model.generate(ids[:, :12], use_cache=False, **GREEDY))
    before = model(ids[:, :20]).logits
    model(ids)
    assert torch.equal(model(ids[:, :20]).logits, before), "a longer text that was read before does not matter"
    monkeypatch.setattr(model.model, "rereads", False)
    out = model(ids[:, :12], use_cache=True)
    rest = model(ids[:, 12:], past_key_values=out.past_key_values).logits
    assert (rest - model(ids).logits[:, 12:]).abs().max() > 1e-3, "keys with earlier angles are seen"
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: the angles of this model's RoPE change within 20"):
        monkeypatch.setattr(model.model, "rereads", True)
        model.generate(ids[:, :12], prompt_lookup_num_tokens=2, **GREEDY)


@pytest.mark.slow
@torch.no_grad()
def test_without_a_mechanism_tokens_are_the_familys():
    theirs, ids = theirs_of("phimoe", **SHAPES["phimoe"]), tokens(2, 12)
    ours = ours_of(theirs)
    assert torch.equal(ours.generate(ids, **GREEDY), theirs.generate(ids, **GREEDY))


@torch.no_grad()
def test_angles_that_change_in_some_layers_only_are_refused():
    plain = dict(rope_type="default", rope_theta=1e4)
    by_kind = dict(sliding_attention=plain, full_attention=dict(plain, rope_type="dynamic", factor=2.0))
    theirs, ids = theirs_of("olmo3", rope_parameters=by_kind), tokens(2, 12)
    with pytest.raises(ValueError, match="olmo3: rope_parameters: angles that change with the length"):
        ours_of(theirs, recurrence="loop", recurrence_options={"trips": 2})
    assert torch.equal(ours_of(theirs)(ids).logits, theirs(ids).logits), "without a mechanism it is the family's"
