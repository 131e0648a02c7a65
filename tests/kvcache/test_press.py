"""Scorers of kvpress in Fathom's frame; the slow tests need kvpress, which is no dependency."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

from fathom.kvcache import build_cache, compressed, press

from .cases import cached, model_of, tokens


@dataclass
class Norms:
    """As kvpress writes one: of keys alone."""

    compression_ratio: float = 0.5

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


@dataclass
class FirstChannel(Norms):
    """Of rotated keys, so that no two are equal."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[..., 0]


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
class Pyramid(Norms):
    """With budgets of its own, as kvpress's PyramidKVPress."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise AssertionError("press must not call this")


@dataclass
class Asks(Norms):
    """Of something that only the model has."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return module.gate_proj(hidden_states)


@dataclass
class Standardised(Norms):
    """Standardised over all that it gets, with random draws, as kvpress's Compactor."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        parts = keys.norm(dim=-1), 3 * values.norm(dim=-1), torch.rand(keys.shape[:3])
        return sum((x - x.mean()) / x.std() for x in parts)


@dataclass
class KeyRerotationPress:
    """kvpress's wrapper, after which entries have consecutive positions."""

    press: Norms


def moved(scorer):
    return press(KeyRerotationPress(scorer))


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
    theirs = read(model, moved(SAME[method](0.5)), how)
    assert (theirs - ours).abs().max() < 1e-5
    if how != "rolling":
        assert (read(model, moved(SAME[method](0.7)), how) - ours).abs().max() > 1e-2


def cut(cache, left):
    """What kvpress leaves of each layer by the scores of `FirstChannel`: entries as they are."""
    for layer in cache.layers:
        best = layer.keys[..., 0].topk(left).indices.sort().values.unsqueeze(-1)
        layer.keys, layer.values = (
            x.gather(2, best.expand(-1, -1, -1, x.shape[-1])) for x in (layer.keys, layer.values)
        )


def by_hand(model, pieces, after):
    """Logits of passes over an ordinary cache that `after` may cut after each of them, at true positions."""
    cache, seen, out = DynamicCache(), 0, []
    for number, piece in enumerate(pieces):
        at = torch.arange(seen, seen := seen + piece.shape[1]).unsqueeze(0)
        out.append(model(piece, past_key_values=cache, position_ids=at).logits)
        after(cache, number)
    return torch.cat(out, 1)


@torch.no_grad()
@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_entries_keep_their_positions(case):
    """As with kvpress, also where entries are rotated by its `KeyRerotationPress` instead."""
    model, pieces = model_of(case), [tokens(2, 90), tokens(2, 9, seed=8)]
    right = by_hand(model, pieces, lambda cache, number: number or cut(cache, 45))
    for method, far in ((press(FirstChannel(0.5)), False), (moved(FirstChannel(0.5)), True)):
        with compressed(model, method):
            cache = model(pieces[0]).past_key_values
        apart = (model(pieces[1], past_key_values=cache).logits - right[:, 90:]).abs().max()
        assert (apart > 1e-2) if far else (apart < 1e-5)
    gaps = []
    for stored in ("int8", "int4"):
        with compressed(model, press(FirstChannel(0.5)), quantized=stored):
            cache = model(pieces[0]).past_key_values
        gaps.append(float((model(pieces[1], past_key_values=cache).logits - right[:, 90:]).abs().max()))
    assert 0 < 10 * gaps[0] < gaps[1] < 0.5


@dataclass
class DecodingPress:
    """As kvpress names what it is given."""

    base_press: Norms
    compression_interval: int = 4
    target_size: int = 30
    hidden_states_buffer_size: int = 9


@dataclass
class PrefillDecodingPress:
    """As kvpress names what it is given."""

    prefilling_press: Norms | None
    decoding_press: DecodingPress | None


@torch.no_grad()
@pytest.mark.quick("0.5")
@pytest.mark.parametrize("first", [None, 0.0, 0.5])
def test_compressed_after_every_so_many_passes(first):
    """A question that is read at once is one pass; padded rows, branches and beams are as alone."""
    model, ids = model_of("llama"), tokens(2, 63)
    pieces = ids.split([40, 9, *[1] * 14], 1)
    scorer = DecodingPress(FirstChannel(0.0))
    method = press(scorer if first is None else PrefillDecodingPress(FirstChannel(first), scorer))

    def after(cache, number):
        if number == 0 and first:
            cut(cache, 20)
        if number and number % 4 == 0 and cache.layers[0].keys.shape[2] > 30:
            cut(cache, 30)

    right = by_hand(model, pieces, after)
    with compressed(model, method):
        begun = model(pieces[0]).past_key_values
    cache = begun.branch()
    found = [model(piece, past_key_values=cache).logits for piece in pieces[1:]]
    assert (torch.cat(found, 1) - right[:, 40:]).abs().max() < 1e-5
    assert (cache.entries, cache.seen) == (33, 63)
    cache = begun.branch()
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = [model(piece.flip(0), past_key_values=cache).logits.flip(0) for piece in pieces[1:]]
    assert (torch.cat(swapped, 1) - right[:, 40:]).abs().max() < 1e-5
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 0
    rows = []
    for given, options in ((ids, dict(attention_mask=mask)), (ids[:1, 13:], {})):
        with compressed(model, method):
            end = model(given[:, :-23], **options).past_key_values
        rows.append(torch.cat([model(one[: len(given)], past_key_values=end).logits[:1] for one in pieces[1:]], 1))
    assert (rows[0] - rows[1]).abs().max() < 1e-5


@torch.no_grad()
def test_what_a_scorer_sees_while_decoding():
    """The hidden states of the latest passes, at their true positions; and that layer's projection of values."""
    seen = []

    @dataclass
    class Notes(Norms):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            places = kwargs["position_embeddings"][0].shape[1]
            seen.append((hidden_states.shape[1], places, round(self.compression_ratio * keys.shape[2])))
            assert module.o_proj.weight.shape == (module.config.hidden_size, 4 * module.head_dim)
            return super().score(module, hidden_states, keys, values, attentions, kwargs)

    model, method = model_of("llama"), press(DecodingPress(Notes(0.0), 4, 30, 2))
    with compressed(model, method):
        cache = model(tokens(1, 40)).past_key_values
    for length in (9, 1, 1, 1, 31):
        model(tokens(1, length), past_key_values=cache)
    assert seen == [(3, 3, 22)] * 3 + [(31, 31, 31)] * 3  # a pass of more than the target is compressed at once


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
    with pytest.raises(ValueError, match="Pyramid overrides compress"):
        press(Pyramid(0.5))
    with pytest.raises(ValueError, match="must lie between 0 and 1, got 0"):
        press(Norms(0.0))
    decoding = DecodingPress(Norms(0.5))
    for wrapper in (DecodingPress(object()), PrefillDecodingPress(object(), decoding)):
        with pytest.raises(ValueError, match="object gives no scores"):
            press(wrapper)
    with pytest.raises(ValueError, match="has no decoding_press and compresses only prompts"):
        press(PrefillDecodingPress(Norms(0.5), None))
    with pytest.raises(ValueError, match="counts the tokens after a prompt"):
        build_cache(model, press(decoding), window=64)
    with compressed(model, press(decoding), ratio=0.3), pytest.raises(ValueError, match="sets its own sizes"):
        model(tokens(1, 40))
    with (
        compressed(model, press(decoding), quantized="int8"),
        pytest.raises(ValueError, match="cannot quantize its entries"),
    ):
        model(tokens(1, 40))
    with (
        pytest.raises(ValueError, match="names a quantization already"),
        compressed(model, "drop+int8", quantized="int4"),
    ):
        pass
    with compressed(model, press(Asks(0.5))), pytest.raises(ValueError, match="Asks asks a layer for more"):
        model(tokens(1, 40))
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
