"""The lens at one place says what the lens of the whole text says there."""

import math

import pytest
import torch

from fathom.errors import SettingsError
from fathom.lens.look import look
from fathom.lens.place import look_at
from tests.lens.test_look import PONDERING, model_of
from tests.tiny import TEXT, tiny_tokenizer


@pytest.mark.parametrize("case", ["window", "loop, mixed", "same, halting", "all, halting"])
def test_a_place_is_as_in_the_whole_text(case):
    model, tokenizer = model_of(case), tiny_tokenizer()
    ids = tokenizer(TEXT[0][:40])["input_ids"]
    whole = look(model, tokenizer, TEXT[0][:40])
    for at in (1, len(ids) - 1):
        found = look_at(model, tokenizer, ids[:at], ids[at])
        assert [(one["layer"], one["trip"]) for one in found["visits"]] == whole.visits
        assert found["trips"] == whole.trips[at - 1]
        for v, one in enumerate(found["visits"]):
            assert one["bits"] == pytest.approx(whole.next_surprisal[v, at - 1], abs=1e-3)
            assert [word for word, _ in one["top"]] == [
                whole.vocabulary[entry] for entry in whole.predictions[v, at - 1]
            ]
        assert found["final"]["bits"] == pytest.approx(whole.surprisal[at], abs=1e-3)


@pytest.mark.parametrize("case", PONDERING)
def test_a_place_under_a_budget_is_what_the_model_says_under_it(case):
    model, tokenizer = model_of(case), tiny_tokenizer()
    ids = torch.tensor([tokenizer(TEXT[0][:40])["input_ids"]])
    found = look_at(model, tokenizer, ids[0, :-1].tolist(), int(ids[0, -1]), max_trips=1)
    with torch.no_grad():
        logits = model(ids[:, :-1], max_trips=1).logits[0, -1]
    bits = -logits.log_softmax(-1)[ids[0, -1]] / math.log(2)
    assert found["final"]["bits"] == pytest.approx(float(bits), abs=1e-3)
    assert found["trips"] == 1 and {one["trip"] for one in found["visits"]} == {0}


@pytest.mark.parametrize("tokens", [[], [1] * 513, [-1], [384]])
def test_a_place_that_is_none(tokens):
    with pytest.raises(SettingsError, match="tokens: "):
        look_at(model_of("vanilla"), tiny_tokenizer(), tokens, 3)
    with pytest.raises(SettingsError, match="said: "):
        look_at(model_of("vanilla"), tiny_tokenizer(), [1], 384)
