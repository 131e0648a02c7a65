"""Scorers of kvpress in Fathom's frame; the slow tests need kvpress, which is no dependency."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from fathom.kvcache import build_cache, compressed, press

from .cases import cached, model_of, tokens


@dataclass
class Norms:
    """As kvpress writes one: of keys alone."""

    compression_ratio: float = 0.5

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


@dataclass
class LastQuery(Norms):
    """TOVA as kvpress writes it: queries are projected from hidden states and rotated."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        heads, size = module.config.num_attention_heads, module.head_dim
        query = module.q_proj(hidden_states[:, -1:]).view(len(keys), 1, heads, size).transpose(1, 2)
        cos, sin = (x[:, None, -1:] for x in kwargs["position_embeddings"])
        turned = torch.cat([-query[..., size // 2 :], query[..., : size // 2]], -1)
        query = query * cos + turned * sin
        groups = module.num_key_value_groups
        weights = (query @ keys.repeat_interleave(groups, 1).mT / size**0.5).softmax(-1)[..., :-1]
        scores = weights.mean(1).repeat(1, keys.shape[1], 1)
        return torch.nn.functional.pad(scores, (0, 1), value=float(scores.max()) + 1)


@dataclass
class Weights(Norms):
    """Of attention weights, which kvpress has with eager attention only."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert attentions is not None, 'Set attn_implementation="eager" to use this hook'
        scores = attentions[:, :, -1:].mean(1).repeat(1, keys.shape[1], 1)
        scores[..., -1] = 2.0
        return scores


@dataclass
class Whole(Norms):
    """Of prompts only."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] == keys.shape[2], "only supports prefill"
        return keys.norm(dim=-1)


@dataclass
class Standardised(Norms):
    """Standardised over all that it gets, with random draws, as kvpress's Compactor."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        parts = keys.norm(dim=-1), 3 * values.norm(dim=-1), torch.rand(keys.shape[:3])
        return sum((x - x.mean()) / x.std() for x in parts)


SAME = {"key_norm": Norms, "tova": LastQuery}
HOW = ("plain", "padded", "chunked", "while decoding", "rolling")


@torch.no_grad()
def read(model, method, how, **given):
    """Logits after a context that was read under a method."""
    ids, question = tokens(2, 90), tokens(2, 40, seed=8)
    if how == "rolling":
        return cached(model, ids, build_cache(model, method, window=64, kept=20, sinks=0))
    options = {}
    if how == "padded":
        options["attention_mask"] = torch.ones(2, 90, dtype=torch.long)
        options["attention_mask"][0, :33] = 0
    if how == "chunked":
        options["prefill_chunk_size"] = 16
    with compressed(model, method, while_decoding=how == "while decoding", **given):
        cache = model.generate(
            ids, do_sample=False, max_new_tokens=2, return_dict_in_generate=True, **options
        ).past_key_values
    return model(question, past_key_values=cache).logits


@pytest.mark.quick("llama-tova-padded", "llama-tova-while decoding", "qwen3-tova-rolling", "llama-key_norm-plain")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", SAME)
@pytest.mark.parametrize("case", ["llama", "qwen3", "loop"])
def test_a_scorer_is_the_method_that_it_describes(case, method, how):
    model = model_of(case)
    ours = read(model, method, how, ratio=0.5, sinks=0)
    theirs = read(model, press(SAME[method](0.5)), how)
    assert (theirs - ours).abs().max() < 1e-5
    if how != "rolling":
        assert (read(model, press(SAME[method](0.7)), how) - ours).abs().max() > 1e-2


@torch.no_grad()
def test_attention_weights():
    """Without eager attention too."""
    model = model_of("llama")
    theirs, ours = (read(model, press(scorer(0.5)), "plain") for scorer in (Weights, LastQuery))
    assert (theirs - ours).abs().max() < 1e-5


@torch.no_grad()
def test_a_row_is_scored_alone():
    """What a scorer says of a row depends neither on the others nor on how many there are."""
    model, ids, question = model_of("llama"), tokens(3, 60), tokens(1, 5, seed=8)

    def answers(ids):
        torch.manual_seed(0)
        with compressed(model, press(Standardised(0.5))):
            cache = model(ids).past_key_values
        return model(question.expand(len(ids), -1), past_key_values=cache).logits, torch.rand(1)

    together, drawn = answers(ids)
    for row in range(3):
        alone, as_many = answers(ids[row : row + 1])
        assert (together[row] - alone[0]).abs().max() < 1e-5 and torch.equal(drawn, as_many)


@torch.no_grad()
@pytest.mark.parametrize(("length", "removed"), [(100, 0.9), (100, 0.71), (37, 0.3), (3, 0.9)])
def test_as_many_entries_as_kvpress(length, removed):
    model = model_of("llama")
    with compressed(model, press(Norms(removed))):
        assert model(tokens(1, length)).past_key_values.entries == max(1, int(length * (1 - removed)))


@torch.no_grad()
def test_what_is_no_scorer():
    model = model_of("llama")
    with pytest.raises(ValueError, match="object gives no scores"):
        press(object())
    with pytest.raises(ValueError, match="must lie between 0 and 1, got 0"):
        press(Norms(0.0))
    with pytest.raises(ValueError, match="Whole: only supports prefill"):
        cached(model, tokens(1, 130), build_cache(model, press(Whole(0.5)), window=64))
    glm = model_of("glm")  # rotates neighbours
    with (
        compressed(glm, press(LastQuery(0.5))),
        pytest.raises(ValueError, match="LastQuery rotates a head in two halves"),
    ):
        glm(tokens(1, 40))


THEIRS = """
import sys, torch
sys.path.insert(0, ".")
from tests.kvcache.cases import cache_of, cached, model_of, tokens
runs = [("llama", "sdpa"), ("loop", "sdpa"), ("llama", "eager")]
def read():
    out = []
    for case, attention in runs:
        model = model_of(case)
        model.set_attn_implementation(attention)
        out += [model(tokens(1, 90)).logits.detach(), cached(model, tokens(1, 90), cache_of(model, "snapkv"))]
    return out
before = read()
import kvpress
assert all(torch.equal(a, b) for a, b in zip(before, read()))
"""


@pytest.mark.slow
def test_kvpress_is_harmless():
    """It wraps every attention function when it is imported."""
    pytest.importorskip("kvpress")
    done = subprocess.run([sys.executable, "-c", THEIRS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


THIRTEEN = (
    "CapPress",
    "CompactorPress",
    "CURPress",
    "ExpectedAttentionPress",
    "KeyDiffPress",
    "KnormPress",
    "LagKVPress",
    "LeverageScorePress",
    "NonCausalAttnPress",
    "ObservedAttentionPress",
    "SnapKVPress",
    "StreamingLLMPress",
    "TOVAPress",
)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("how", HOW[1:3])
@pytest.mark.parametrize(
    "name",
    THIRTEEN,
)
def test_padded_and_chunked_as_alone(name, how):
    kvpress = pytest.importorskip("kvpress")
    sizes = {"SnapKVPress": dict(window_size=8), "LagKVPress": dict(lag_size=8)}
    method, model = press(getattr(kvpress, name)(compression_ratio=0.5, **sizes.get(name, {}))), model_of("llama")
    torch.manual_seed(0)
    found = read(model, method, how)
    ids, question = tokens(2, 90)[:, 33:] if how == "padded" else tokens(2, 90), tokens(2, 40, seed=8)
    torch.manual_seed(0)
    with compressed(model, method):
        done = model.generate(ids[:1], do_sample=False, max_new_tokens=2, return_dict_in_generate=True)
    alone = model(question[:1], past_key_values=done.past_key_values).logits
    if name in ("CompactorPress", "LeverageScorePress") and how == "padded":
        return  # sketches are drawn for all rows of a batch
    assert (found[:1] - alone).abs().max() < 1e-4
