"""Modules of a family's decoder stay where the family has them, and what stands in their place is what runs."""

import copy

import pytest
import torch
from torch import nn

from fathom import FathomForCausalLM
from fathom.models import FathomModel

from .cases import SHAPES, ours_of, theirs_of, tokens


@pytest.mark.quick("nemotron_h")
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_a_module_put_in_its_place_is_run(name):
    """As PEFT does with `modules_to_save`: by the family's own name. Copies keep their own."""
    ours = ours_of(theirs_of(name))
    for part in ("embed_tokens", "norm"):
        model, ids = copy.deepcopy(ours), tokens()
        before = model(ids).logits
        own = model.model.names[part]
        module = copy.deepcopy(getattr(model.model, own))
        module.register_forward_hook(lambda module, given, out: out * torch.linspace(0.5, 2, out.shape[-1]))
        assert torch.equal(model(ids).logits, before)
        setattr(model.model, own, module)
        assert not torch.allclose(model(ids).logits, before, atol=1e-3), own
        assert getattr(model.model, part) is module
        setattr(model.model, part, nn.Identity())  # by our name
        assert isinstance(model.model._modules[own], nn.Identity) and (part == own or part not in model.model._modules)
    assert isinstance(ours.get_input_embeddings(), nn.Embedding)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_the_decoder_alone_opens_a_model_with_a_head(name, tied, tmp_path):
    """And a model, tied or not, opens what it saved. Some classes never tie."""
    theirs, ids = theirs_of(name, tie_word_embeddings=tied), tokens()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = FathomForCausalLM.from_pretrained(tmp_path / "theirs")
    logits = ours(ids).logits
    assert torch.equal(logits, theirs(ids).logits)
    ours.save_pretrained(tmp_path / "ours")
    again = FathomForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids).logits, logits)
    is_tied = theirs.lm_head.weight is theirs.get_input_embeddings().weight
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == is_tied
    for place in ("theirs", "ours"):
        decoder = FathomModel.from_pretrained(tmp_path / place)
        assert torch.equal(decoder(ids).last_hidden_state, ours.model(ids).last_hidden_state)
