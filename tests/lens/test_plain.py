"""The logit lens on transformers' own classes: the numbers of Fathom's decoder, and no way but the model's own."""

import json

import numpy as np
import pytest
import torch
import transformers as tf

from fathom.cli.main import main
from fathom.errors import ModelError
from fathom.lens.look import look
from fathom.lens.page import lens_page
from fathom.lens.plain import look_plain
from fathom.models import FathomForCausalLM
from tests.tiny import tiny_tokenizer

TEXT = "To fathom a thing is to measure its depth"
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.3}
STRANGERS = {
    "bloom": tf.BloomConfig(vocab_size=384, hidden_size=32, n_layer=3, n_head=4),
    "falcon": tf.FalconConfig(vocab_size=384, hidden_size=32, num_hidden_layers=3, num_attention_heads=4),
    "mixtral": tf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "cohere, whose logits are scaled": tf.CohereConfig(**LLAMA, logit_scale=0.25, pad_token_id=0),
    "gemma2, whose logits are capped": tf.Gemma2Config(**LLAMA, head_dim=8, final_logit_softcapping=2.0),
    "opt, which projects to its embeddings": tf.OPTConfig(
        **SHAPE, ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False
    ),
    "stablelm": tf.StableLmConfig(**LLAMA),
}


def model_of(config):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_a_llama_is_seen_as_our_decoder_sees_it(tmp_path, tokenizer):
    theirs = model_of(tf.LlamaConfig(**LLAMA))
    theirs.save_pretrained(tmp_path)
    ours = look(FathomForCausalLM.from_pretrained(tmp_path).eval(), tokenizer, TEXT)
    found = look_plain(theirs, tokenizer, TEXT)
    assert found.tokens == ours.tokens and found.visits == ours.visits and found.parameters == ours.parameters
    for name in ("surprisal", "next_surprisal", "probabilities", "said_probabilities"):
        assert np.allclose(getattr(found, name), getattr(ours, name), atol=1e-5, equal_nan=True), name
    assert np.array_equal(found.predictions, ours.predictions) and found.vocabulary == ours.vocabulary
    assert not np.allclose(found.next_surprisal[0], found.next_surprisal[-1], atol=0.1, equal_nan=True)


@pytest.mark.parametrize("name", STRANGERS)
def test_the_last_layer_says_what_the_model_says(name, tokenizer):
    model = model_of(STRANGERS[name])
    found = look_plain(model, tokenizer, TEXT, top=3, max_tokens=7)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:7]])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    bits = -logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0] / np.log(2)
    assert np.allclose(found.surprisal[1:], bits, atol=1e-4) and np.isnan(found.surprisal[0])
    assert np.allclose(found.probabilities[-1], logprobs.exp().topk(3).values, atol=1e-5)
    assert found.dropped > 0 and len(found.visits) == 3 and not found.mixes
    assert "<html" in lens_page(found)


def test_a_way_that_is_not_the_models_is_refused(tokenizer):
    """A layer between the norm and the head that no module holds, and layers that are not in one list."""
    model = model_of(tf.LlamaConfig(**LLAMA))
    norm = model.model.norm
    model.model.norm = torch.nn.Identity()
    model.lm_head.register_forward_pre_hook(lambda _, given: (norm(given[0].flip(-1)),))
    assert np.isfinite(look_plain(model, tokenizer, TEXT).surprisal[1:]).all(), "a hook of the head is part of the way"
    forward = model.forward
    model.forward = lambda *given, **named: changed(forward(*given, **named))
    with pytest.raises(ModelError, match=r"cannot compute the logits of a LlamaForCausalLM from its layers"):
        look_plain(model, tokenizer, TEXT)
    other = model_of(tf.LlamaConfig(**LLAMA))
    other.config.num_hidden_layers = 5
    with pytest.raises(ModelError, match="it supports one list of layers, then norms, then the head"):
        look_plain(other, tokenizer, TEXT)


def changed(out):
    out.logits = out.logits.roll(1, -1)
    return out


def test_the_command_line_looks_through_a_family_that_fathom_does_not_open(tmp_path, tokenizer, capsys):
    model_of(STRANGERS["bloom"]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert main(["lens", str(tmp_path), TEXT, "--json", "-o", str(tmp_path / "lens.html")]) == 0
    (told,) = json.loads(capsys.readouterr().out)["models"]
    assert told["mechanism"] == "bloom" and len(told["predictions"]) == 3 and told["sources"] == []
    assert (tmp_path / "lens.html").stat().st_size > 1000
