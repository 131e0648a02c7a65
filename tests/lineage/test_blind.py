"""Copies that compute the same under a false tokenizer, more neurons and loud heads: the layers give them away."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fathom.lineage import blind, comparison, verdict, vocabulary
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options, compare
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, edited, logits, save, tiny_config

FOUND = {verdict.SHARED, verdict.INITIALISATION}
EDITS = ("rotate", "gain", "plane", "head", "neuron")


def decoys(tensors, layers, seed=0):
    """Each neuron (g, u, d) becomes (g, u, d + r), (g, u₂, α r), (g, u₃, β r) with u + α u₂ + β u₃ = 0."""
    draw = torch.Generator().manual_seed(seed)
    for layer in layers:
        gate, up, down = (f"model.layers.{layer}.mlp.{role}_proj.weight" for role in ("gate", "up", "down"))
        u, d = tensors[up], tensors[down]
        r, second = (torch.randn(m.shape, generator=draw, dtype=m.dtype) * m.std() for m in (d, u))
        tensors[gate] = torch.cat([tensors[gate]] * 3)
        tensors[up] = torch.cat([u, second, (u + 1.3 * second) / 0.7])
        tensors[down] = torch.cat([d + r, 1.3 * r, -0.7 * r], 1)


def loud_heads(tensors):
    """As many heads again, far louder, that write nothing."""
    draw = torch.Generator().manual_seed(5)
    for name in [n for n in tensors if ".self_attn." in n and "proj" in n]:
        value = tensors[name]
        more = torch.randn(value.shape, generator=draw, dtype=value.dtype)
        silent = name.endswith("o_proj.weight")
        tensors[name] = torch.cat([value, more * (0 if silent else 3 * value.std())], 1 if silent else 0)


def padded(tensors):
    """Rows of the vocabulary that no token uses."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:64].flip(0)])


def encipher(path, seed=3):
    """Strings of the tokenizer stand for other rows."""
    file = path / "tokenizer.json"
    table = json.loads(file.read_text())
    words, rows = zip(*table["model"]["vocab"].items(), strict=True)
    table["model"]["vocab"] = dict(zip(words, np.random.default_rng(seed).permutation(rows).tolist(), strict=True))
    file.write_text(json.dumps(table))


@pytest.fixture(scope="module")
def disguised(models, tmp_path_factory):
    """One model, rotated with a cipher tokenizer and another vocabulary size, with decoys and loud heads, or both."""
    root = tmp_path_factory.mktemp("disguised")
    base = models(seed=90)
    heads = dict(num_attention_heads=8, num_key_value_heads=4)

    def crowd(tensors):
        decoys(tensors, range(3))
        loud_heads(tensors)

    edited(base, root / "pad", padded, vocab_size=576)
    edited(base, root / "crowd", crowd, intermediate_size=480, **heads)
    edited(root / "crowd", root / "both-pad", padded, vocab_size=576)
    for source, name in (("pad", "cipher"), ("crowd", "decoys"), ("both-pad", "both")):
        attack(open_weights(root / source), EDITS, root / name, dtype="float64")
        difference = logits(root / name)[..., :512] - logits(base)
        assert difference.abs().max() < 1e-5, "the same function"
        if name != "decoys":
            encipher(root / name)
    return root


@pytest.mark.quick("both-0")
@pytest.mark.parametrize("controls", [0, 2])
@pytest.mark.parametrize("kind", ["cipher", "decoys", "both"])
def test_disguises_that_keep_the_function_are_found(models, disguised, kind, controls):
    others = [models(seed=91 + n) for n in range(controls)]
    pair = open_weights(models(seed=90)), open_weights(disguised / kind)
    for nonce in (1, 2):
        found = compare(*pair, others, None, Options(extras=False, nonce=nonce))
        assert found.verdict.label in FOUND, found.verdict.reasons
    assert all(c.paired == c.of == 160 for c in list(found.pair.neurons.values())[-1])


@pytest.mark.quick("cipher")
@pytest.mark.parametrize("kind", ["cipher", "both"])
def test_large_models_are_compared_without_a_tokenizer_too(models, disguised, kind, monkeypatch):
    monkeypatch.setattr(comparison, "SMALL_BYTES", 0)
    found = compare(open_weights(models(seed=90)), open_weights(disguised / kind))
    assert found.verdict.label in FOUND and "blind" in found.pair.neurons
    assert any("others are unknown" in reason for reason in found.verdict.reasons)


def test_nobody_knows_beforehand_which_layers_of_a_large_model_are_looked_at(models, monkeypatch):
    base, layers = open_weights(models(seed=90)), [(i, i) for i in range(30)]
    assert all(comparison._drawn(layers, base, base, Options(nonce=n)) == layers for n in range(2))
    monkeypatch.setattr(comparison, "SMALL_BYTES", 0)
    assert len({tuple(comparison._drawn(layers, base, base, Options(nonce=n))) for n in range(9)}) > 5


@pytest.mark.parametrize("bias", [-1e4, 0.0])
def test_neurons_that_never_fire_change_no_map(models, tmp_path, bias):
    """Without the bias they fire, and the function is another one."""

    def more(tensors):
        for layer in range(3):
            gate, up, down = (f"model.layers.{layer}.mlp.{role}_proj" for role in ("gate", "up", "down"))
            for name, axis in ((gate, 0), (up, 0), (down, 1)):
                tensors[f"{name}.weight"] = torch.cat([tensors[f"{name}.weight"]] * 2, axis)
                tensors[f"{name}.bias"] = torch.zeros(len(tensors[f"{name}.weight"]), dtype=torch.float64)
            tensors[f"{gate}.bias"][160:] = bias

    copy = edited(models(seed=90), tmp_path / "copy", more, mlp_bias=True, intermediate_size=320)
    one, other = (blind.layer_map(open_weights(w), blind.FEED_FORWARD, 1) for w in (models(seed=90), copy))
    assert np.allclose(one, other, rtol=1e-3, atol=1e-6) == (bias < 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_strangers_stay_strangers_without_a_tokenizer(models, kind):
    opened = [open_weights(models(kind, seed=seed)) for seed in range(91, 95)]
    counts = []
    for a, b in [(0, 1), (1, 2), (2, 3), (0, 3)]:
        found = compare(opened[a], opened[b], options=Options(extras=False))
        assert found.verdict.label == verdict.NONE and "blind" in found.pair.neurons
        counts += [count.paired for count in found.pair.neurons["blind"]]
    assert max(counts) <= 9


def test_a_nonce_is_drawn_afresh_and_repeats_a_comparison(models):
    pair = [open_weights(models(seed=seed)) for seed in (91, 92)]
    nonces = {compare(*pair, options=Options(extras=False)).options.nonce for _ in range(2)}
    assert len(nonces) == 2
    again = compare(*pair, options=Options(extras=False, nonce=nonces.pop()))
    assert again.options.nonce not in nonces


def test_no_layer_is_in_the_fit_and_in_the_test():
    cut = [(blind.ATTENTION, i, 2 * i) for i in range(4)] + [(blind.FEED_FORWARD, i, 2 * i + 1) for i in range(4)]
    whole = {count: [(kind, i, i) for i in range(count) for kind in (0, 1)] for count in (2, 3, 6, 30)}
    for maps in (*whole.values(), cut, [(kind, j, i) for kind, i, j in cut]):
        fit, held = blind.split(maps, 7)
        assert fit and held and len(fit) <= blind.FIT and all((blind.FEED_FORWARD, *pair) in maps for pair in held)
        for side in (0, 1):
            assert not {one[1 + side] for one in fit} & {pair[side] for pair in held}
    assert len({tuple(blind.split(whole[30], nonce)[1]) for nonce in range(5)}) > 1


@pytest.mark.slow
def test_copies_of_another_depth_are_found_by_the_layers_alone(models, tmp_path):
    """A layer that writes nothing changes nothing but the number of layers."""
    base = models(seed=90, num_hidden_layers=4)

    def deepen(tensors):
        for name in [n for n in tensors if ".layers.3." in n]:
            tensors[name.replace(".3.", ".4.")] = tensors[name].clone()
        for role in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.4.{role}.weight"] *= 0

    deeper = edited(base, tmp_path / "deeper", deepen, num_hidden_layers=5)
    assert (logits(deeper) - logits(base)).abs().max() < 1e-9
    attack(open_weights(deeper), ("rotate", "neuron"), tmp_path / "copy", dtype="float64")
    encipher(tmp_path / "copy")
    found = compare(open_weights(base), open_weights(tmp_path / "copy"), options=Options(extras=False))
    assert found.verdict.label in FOUND
    stranger = compare(open_weights(models(seed=91)), open_weights(tmp_path / "copy"), options=Options(extras=False))
    assert stranger.verdict.label == verdict.NONE


def test_what_no_test_without_a_tokenizer_saw_is_not_acquitted(tmp_path):
    """One layer is too few for the blind frame, so the absence of evidence acquits nobody."""
    pair = [save(build(tiny_config(num_hidden_layers=1), seed), tmp_path / str(seed), 512) for seed in (1, 2)]
    found = compare(*map(open_weights, pair), options=Options(extras=False))
    assert found.verdict.label == verdict.INCONCLUSIVE
    assert any("two layers" in reason for reason in found.verdict.reasons)
    assert any("no test without a tokenizer" in note for note in found.skipped)


def test_a_byte_level_tokenizer_is_one_however_deep():
    node: object = {"type": "ByteLevel"}
    for _ in range(40):
        node = {"type": "Sequence", "decoders": [node]}
    assert vocabulary._is_byte_level(node) and not vocabulary._is_byte_level([{"type": "Metaspace"}])


@pytest.mark.slow
def test_a_disguised_copy_that_drifted_is_found(models, disguised, tmp_path):
    """Every matrix of the layers moved by a fifth of its size."""

    def drift(tensors):
        draw = torch.Generator().manual_seed(6)
        for name in [n for n in tensors if ".layers." in n and tensors[n].ndim == 2]:
            value = tensors[name]
            rows = value.pow(2).mean(1, keepdim=True).sqrt()  # rows of a re-gauged model differ in size
            tensors[name] = value + 0.2 * rows * torch.randn(value.shape, generator=draw, dtype=value.dtype)

    far = edited(disguised / "cipher", tmp_path / "far", drift)
    for nonce in range(2):
        pair = open_weights(models(seed=90)), open_weights(far)
        found = compare(*pair, options=Options(extras=False, nonce=nonce))
        assert found.verdict.label in FOUND, (nonce, found.pair.neurons["blind"])


@pytest.mark.parametrize("more", [0, 4, 48])
def test_directions_that_nothing_writes_are_left_out(more):
    """Also where most channels are empty, and rounding leaves traces of the rotation in them."""
    draw = np.random.default_rng(more)
    write, read = draw.normal(size=(2, 3, 24 + more, 24 + more))
    write[:, 24:] = 0
    turn = np.linalg.qr(draw.normal(size=(24 + more, 24 + more)))[0]
    span = blind._written([(turn.T @ w @ r @ turn).astype(np.float32) for w, r in zip(write, read, strict=True)])
    if more == 0:
        assert span is None
    else:
        assert span.shape == (24 + more, 24)
        np.testing.assert_allclose(turn.T[:, :24] @ (turn[:24] @ span), span, atol=1e-4)
