"""Neurons are paired by what they read and write, whatever was done to hide them, and strangers' are not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from fathom.lineage import awm, evidence, neurons, signs, verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import compare
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import SIZES, build, edited, logits, save, tiny_config


def paired(pair, frame):
    return [(count.paired, count.of) for count in pair.neurons[frame]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    root = tmp_path_factory.mktemp("neurons")
    for seed, name in enumerate(("base", "stranger", "control", "another")):
        save(build(tiny_config("qwen3"), 70 + seed), root / name, 512)
    return root


def split(tensors):
    """Every neuron becomes two that add up to it, and a pair that cancels is put beside each."""
    draw = torch.Generator().manual_seed(0)
    for i in range(SIZES["num_hidden_layers"]):
        names = {role: f"model.layers.{i}.mlp.{role}_proj.weight" for role in ("gate", "up", "down")}
        gate, up, down = (tensors[name] for name in names.values())
        extra = torch.randn(gate.shape, generator=draw, dtype=gate.dtype) * gate.std()
        share = torch.rand(gate.shape[0], generator=draw, dtype=gate.dtype)
        junk = torch.randn(down.shape, generator=draw, dtype=down.dtype)
        tensors[names["gate"]] = torch.cat([gate, gate, extra, extra])
        tensors[names["up"]] = torch.cat([up, up, extra, extra])
        tensors[names["down"]] = torch.cat([down * share, down * (1 - share), junk, -junk], 1)


@pytest.mark.slow
def test_split_and_cancelling_neurons_are_merged_even_under_a_rotation(llama, tmp_path):
    copy = edited(llama / "base", tmp_path / "split", split, intermediate_size=4 * SIZES["intermediate_size"])
    assert (logits(copy) - logits(llama / "base")).abs().max() < 1e-9
    attack(open_weights(copy), ("rotate", "neuron"), tmp_path / "turned", dtype="float64")
    for other, frame in ((copy, "order"), (tmp_path / "turned", "tokens")):
        found = compare(open_weights(llama / "base"), open_weights(other))
        assert found.verdict.label == verdict.INITIALISATION
        assert all(count == of for count, of in paired(found.pair, frame)), other


def reordered(tensors):
    """Channels permuted."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    for name, value in tensors.items():
        if value.ndim == 1 and len(value) == 64:
            tensors[name] = value[order]
        elif value.ndim == 2:
            tensors[name] = value[order] if any(role in name for role in ("o_proj", "down_proj")) else value[:, order]


@pytest.mark.slow
def test_a_lying_tokenizer_is_found_by_the_axes_of_the_embedding(llama, tmp_path):
    copy = edited(llama / "base", tmp_path / "lie", reordered)
    table = json.loads((copy / "tokenizer.json").read_text())
    words = list(table["model"]["vocab"])
    lied = np.random.default_rng(2).permutation(len(words))  # strings stand for other rows
    table["model"]["vocab"] = {words[at]: row for row, at in enumerate(lied)}
    (copy / "tokenizer.json").write_text(json.dumps(table))
    assert (logits(copy) - logits(llama / "base")).abs().max() < 1e-5  # the norms of transformers are in float32
    controls = [llama / "control", llama / "another"]
    found = compare(open_weights(llama / "base"), open_weights(copy), controls)
    assert found.verdict.label in {verdict.SHARED, verdict.INITIALISATION}
    assert signs.WORDS["relabelled"] in found.tampering
    assert found.pair.value("axes") == pytest.approx(1, abs=1e-3)
    strangers = compare(open_weights(llama / "base"), open_weights(llama / "stranger"), controls)
    assert strangers.verdict.label == verdict.NONE and not strangers.tampering
    assert max(count for count, _ in paired(strangers.pair, "axes")) <= 4


@pytest.mark.slow
def test_stolen_experts_are_found_by_all_experts(tmp_path):
    """Experts 1 to 3 of another mixture, in a model with its own embedding, attention and first expert."""
    config = tf.MixtralConfig(**SIZES, num_local_experts=4)
    for seed, name in enumerate(("giver", "taker")):
        save(build(config, 30 + seed), tmp_path / name, 512)
    given = load_file(tmp_path / "giver" / "model.safetensors")

    def steal(tensors):
        for name in tensors:
            if ".experts." in name and ".experts.0." not in name:
                if tensors[name].ndim == 3:
                    tensors[name][1:] = given[name][1:]
                else:
                    tensors[name] = given[name]

    thief = edited(tmp_path / "taker", tmp_path / "thief", steal)
    honest = compare(open_weights(tmp_path / "giver"), open_weights(tmp_path / "taker"))
    assert honest.verdict.label == verdict.NONE
    found = compare(open_weights(tmp_path / "giver"), open_weights(thief))
    assert found.verdict.label == verdict.PARTIAL and "feed-forward" in found.verdict.sentence


def test_the_axes_do_not_depend_on_rows_or_channels():
    draw = np.random.default_rng(0)
    table = draw.normal(size=(300, 12)) * np.linspace(3, 1, 12)
    table[:40] += 2 * draw.normal(size=12)
    turn = np.linalg.qr(draw.normal(size=(12, 12)))[0]
    one = table @ neurons.axes(lambda: iter([table])).basis
    moved = (table @ turn)[draw.permutation(300)]
    other = moved @ neurons.axes(lambda: iter([moved[:100], moved[100:]])).basis
    np.testing.assert_allclose(np.sort(one, 0), np.sort(other, 0), atol=1e-5)


def test_duplicates_are_what_reads_alike():
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(6, 40))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    group = neurons.duplicates(rows[[0, 1, 0, 2, 0]], np.array([1, 1, 1, 1, 2]))
    assert group[0] == group[2] and len(set(group)) == 4, "equal directions of another size are other neurons"


def test_gates_that_are_turned_around_are_the_same_neurons():
    """silu(z) - silu(-z) = z, so (g, u, d) equals (-g, u, d), (u, g, d) and (-u, g, -d) together."""
    gate, up, down = np.random.default_rng(0).normal(size=(3, 20, 12)).astype(np.float32)
    frame = neurons.order(12, 0)
    before = neurons._merged(gate, up.copy(), down.copy(), np.zeros(20), True, frame)
    pieces = ((-gate, up, -up), (up, gate, gate), (down, down, -down))
    after = neurons._merged(*(np.concatenate(some) for some in pieces), np.zeros(60), True, frame)
    assert len(after) == 20, "the others cancel"
    assert neurons.agreement(neurons.by_roles(before, after, True))[:2] == (20, 20)
    without = neurons._merged(*(np.concatenate(some) for some in pieces[:1] * 3), np.zeros(60), True, frame)
    assert neurons.agreement(neurons.by_roles(before, without, True))[0] < 5, "another function"


@pytest.mark.parametrize("gated", [True, False])
def test_neurons_that_never_fire_hide_none_with_their_gate(gated):
    """A bias keeps the second half from firing, so its other rows, however loud, are not added to the first half's."""
    draw, frame = np.random.default_rng(0), neurons.order(24, 0)
    read, up, write = draw.normal(size=(3, 40, 24))
    plain, closed = np.zeros(40), np.full(40, -1e4)
    loud = 1e9 * draw.normal(size=(2, 40, 24))

    def merged(offset):
        rows = (np.concatenate(pair) for pair in ((read, read), (up, loud[0]), (write, loud[1])))
        return neurons._merged(*rows, np.concatenate([plain, offset]), gated, frame)

    own = neurons._merged(read.copy(), up.copy(), write.copy(), plain, gated, frame)
    for offset, low, high in ((closed, 40, 40), (plain, 0, 4)):  # without a bias they are one neuron
        other = merged(offset)
        assert len(other) == 40 and low <= neurons.agreement(neurons.by_roles(own, other, gated))[0] <= high


def test_neurons_that_are_tied_hide_none_and_pair_none():
    """Two decoys stand before each neuron and share one side with it each. Strangers whose one side is all alike."""
    draw = np.random.default_rng(0)
    read, write, *junk = (awm.unit_rows(draw.normal(size=(160, 32))) for _ in range(4))
    decoyed = np.concatenate([read, junk[0], read]), np.concatenate([junk[1], write, write])
    copy = [(read, decoyed[0], False), (write, decoyed[1], True)]
    assert neurons.agreement(copy)[0] == 160
    assert neurons.agreement([copy[0], (write, decoyed[1][::-1], True)])[0] < 8, "other rows"
    flat = np.repeat(write[:1], 160, 0)
    for few in (1, 2, 4, 8, 20, 80, 160):
        tied = flat.copy()
        tied[few:] = write[few:]
        for one, other in ((tied, tied), (tied, flat)):
            assert neurons.agreement([(read, junk[0], False), (one, other, False)])[0] <= 8, few


def test_neither_order_nor_rotation_chooses_the_experts(tmp_path):
    """24 experts of which 16 are read; a vector added to all rows of a router moves no choice."""
    shape = {**SIZES, "hidden_size": 16, "intermediate_size": 1024, "num_hidden_layers": 1}
    one = save(build(tf.MixtralConfig(**shape, num_local_experts=24), 3), tmp_path / "one", 512)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]

    def moved(tensors):
        new = {name: tensor.clone() for name, tensor in tensors.items() if ".experts." in name}
        for name in new:
            own = int(name.split(".experts.")[1].split(".")[0])
            tensors[name] = new[name.replace(f".experts.{own}.", f".experts.{(7 * own + 5) % 24}.")]
        name = next(name for name in tensors if name.endswith("block_sparse_moe.gate.weight"))
        rows = tensors[name][[(7 * own + 5) % 24 for own in range(24)]].double() + torch.linspace(-9, 9, 16)
        gain = tensors["model.layers.0.post_attention_layernorm.weight"]
        tensors[name] = rows * gain @ turn
        gain.fill_(1)

    other = edited(one, tmp_path / "other", moved)
    read = []
    for weights in map(open_weights, (one, other)):
        assert neurons.experts(weights, 0) == sorted(neurons.experts(weights, 0)), "by number first"
        weights.ranked = True
        chosen = neurons.experts(weights, 0)
        read.append({weights.tensor("down", 0, None, expert).tobytes() for expert in chosen})
        assert len(chosen) == len(set(chosen)) == 16 and chosen != sorted(chosen)
    assert read[0] == read[1]


def test_the_rate_is_raised_by_controls():
    counts = [evidence.NeuronCount((0, 0), 40, 352)]
    assert evidence.test_neurons("tokens", counts, []).p < 1e-4 < evidence.test_neurons("tokens", counts, [0.06]).p
