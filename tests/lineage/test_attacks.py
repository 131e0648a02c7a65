"""Function-preserving edits: logits stay, repaired scores stay at 1, published ones fall as the card says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fathom.checkpoints.export import export
from fathom.checkpoints.families import ponderlm
from fathom.checkpoints.families.lumia import BASELINE_KEYS, DEPTH_FLAGS
from fathom.errors import ModelError
from fathom.lineage import attacks, canonical, layouts
from fathom.lineage.attacks import ATTACKS, attack
from fathom.lineage.comparison import Options, measure
from fathom.lineage.pairs import SCORE_LABELS
from fathom.lineage.weights import open_weights
from fathom.models import FathomForCausalLM
from fathom.models.registry import DEFAULTS, parse_mechanism
from tests.lineage.zoo import SIZES, build, edited, logits, save, tiny_config
from tests.tiny import tiny_config as small
from tests.tiny import tiny_tokenizer

EXACT = Options(mode="exact")
COMPOSED = ("rotate", "gain", "head", "neuron", "plane")
CASES = [(kind,) for kind in ATTACKS] + [COMPOSED]
ROTATED = {("rotate",), COMPOSED}
# exact up to the epsilon of a norm: the stream's scale, and the head scale under q/k-norm
LOOSE = {("scale",): 1e-2, ("head",): 1e-2, COMPOSED: 1e-2}


@pytest.fixture(autouse=True)
def full_precision_norms(monkeypatch):
    """transformers' RMSNorm works in float32 whatever it is given; the algebra is to be seen in float64."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


@pytest.fixture(scope="module")
def attacked(models, tmp_path_factory):
    made = {}

    def make(kind, kinds):
        if (kind, kinds) not in made:
            out = tmp_path_factory.mktemp("attacked") / "model"
            attack(open_weights(models(kind)), kinds, out, seed=3, dtype="float64")
            base, copy = open_weights(models(kind)), open_weights(out)
            made[kind, kinds] = out, measure(base, copy, EXACT)
        return made[kind, kinds]

    return make


@pytest.mark.quick("*+*", "llama-permute", "qwen3-scale")
@pytest.mark.parametrize("kinds", CASES, ids="+".join)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_function_kept_and_repaired_scores_at_one(kind, kinds, models, attacked):
    path, pair = attacked(kind, kinds)
    before, after = logits(models(kind)), logits(path)
    loose = LOOSE.get(kinds, 1e-10) if kind == "qwen3" or kinds == ("scale",) else 1e-10
    assert (before - after).abs().max() < loose * before.abs().max()
    assert pair.value("procrustes") == pytest.approx(1, abs=1e-6)
    for name in ("ics_canonical", "ics_all_layers"):
        assert pair.value(name) == pytest.approx(1, abs=1e-6), name
    if kinds not in ROTATED:
        assert pair.value("awm_canonical") == pytest.approx(1, abs=1e-6)
        assert pair.head_agreement == 64  # T2
    assert all(count.paired == count.of == 160 for count in list(pair.neurons.values())[-1])  # T4 at its maximum


@pytest.mark.parametrize(
    ("kinds", "score", "low", "high"),
    [
        # card: 0.58, ≈ null, 0.62–0.64, 0.68, 0.69–0.72, 0.66 on another small model
        (("plane",), "awm", 0.2, 0.75),
        (("rotate",), "awm", -0.05, 0.2),
        (("gain",), "awm", 0.4, 0.8),
        (("permute",), "ics", 0.5, 0.85),
        (("rotate",), "ics", 0.4, 0.85),
        (("gain",), "ics", 0.4, 0.85),
        (("permute",), "pcs_2d", -0.1, 0.2),
        (COMPOSED, "awm", -0.05, 0.2),
    ],
)
def test_published_scores_fall_where_the_card_says(kinds, score, low, high, attacked):
    _, pair = attacked("llama", kinds)
    assert low < pair.value(score) < high


def test_a_plain_copy_and_a_stranger_frame_the_table(models):
    base, copy, stranger = (open_weights(models(seed=seed)) for seed in (0, 0, 1))
    same, other = measure(base, copy, EXACT), measure(base, stranger, EXACT)
    for name in (
        name for name in SCORE_LABELS if name not in {"axes", "blind"}
    ):  # looked at only where the others find nothing
        assert same.value(name) == pytest.approx(1, abs=1e-9), name
        assert abs(other.value(name)) < 0.1, name
    assert max(count.paired for counts in other.neurons.values() for count in counts) <= 4


def test_published_guard_returns_zero_for_a_scaled_matrix(models, tmp_path):
    """The reference code calls small matrices constant: the same model with W_Q · 1e-6 scores half."""
    copy = edited(
        models(), tmp_path / "copy", lambda tensors: [t.mul_(1e-4) for n, t in tensors.items() if "q_proj" in n]
    )
    pair = measure(open_weights(models()), open_weights(copy), EXACT)
    assert pair.value("awm") == pytest.approx(0.5, abs=1e-6)
    assert pair.value("awm_canonical") == pytest.approx(1, abs=1e-6)


def test_half_precision_copy_stays_within_a_thousandth(models, tmp_path):
    attack(open_weights(models(dtype=torch.float32)), ("permute", "gain", "plane", "head", "neuron"), tmp_path / "m")
    pair = measure(open_weights(models(dtype=torch.float32)), open_weights(tmp_path / "m"), EXACT)
    for name in ("awm_canonical", "procrustes", "ics_canonical", "ics_all_layers"):
        assert pair.value(name) == pytest.approx(1, abs=1e-3), name


def test_heads_with_biases_keep_the_function(tmp_path):
    """Under q/k-norm the biases of queries were scaled by other numbers than the queries."""
    base = save(build(tiny_config("qwen3", attention_bias=True), 2), tmp_path / "base", 512)
    attack(open_weights(base), ("head",), tmp_path / "copy", seed=1, dtype="float64")
    before, after = logits(base), logits(tmp_path / "copy")
    assert (before - after).abs().max() < LOOSE[("head",)] * before.abs().max()


@pytest.mark.parametrize("name", ["depth_attention", "denseformer", "loop"])
def test_depth_models_are_refused(name, tmp_path):
    """Copies of some were written, and computed something else; the plain decoder is edited as Qwen3 is."""
    values = parse_mechanism(name)
    axis = next(axis for axis, value in values.items() if value == name)
    torch.manual_seed(1)
    base = export(FathomForCausalLM(small(**values)), tmp_path / "base", tiny_tokenizer())
    with pytest.raises(ModelError, match=f"attack: the outputs of a model with {axis}={name}"):
        attack(open_weights(base), ("neuron",), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_plain_decoder_of_ours_is_edited(tmp_path):
    torch.manual_seed(1)
    base = export(
        FathomForCausalLM(small(**parse_mechanism("vanilla"), initializer_range=0.3)),
        tmp_path / "base",
        tiny_tokenizer(),
    )
    attack(open_weights(base), tuple(ATTACKS), tmp_path / "copy", dtype="float64")
    before, after = (opened_logits(path) for path in (base, tmp_path / "copy"))
    assert (after - before).abs().max() < 1e-3 * before.abs().max()


def test_depth_models_are_known_by_the_keys_of_the_registry():
    """They are written again, for lineage does without torch."""
    assert attacks.AXES == DEFAULTS
    pondering = {"recurrent_model", "ponderinglm", "pondering_steps", "num_latent_thoughts"}
    assert pondering <= set(ponderlm.READ)
    assert set(attacks.RELEASED) == {*DEPTH_FLAGS, *BASELINE_KEYS, *pondering}


def opened_logits(path):
    model = FathomForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.arange(3, 27).reshape(2, 12)).logits


def layers(weights):
    return [weights.layer(i, attacks.LAYER_ROLES) for i in range(weights.geometry.layers)]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_canonical_form_is_idempotent(kind, opened):
    weights = opened(kind)
    for layer in layers(weights):
        once = canonical.balance_qk(canonical.fold(layer, weights.geometry), weights.geometry)
        twice = canonical.balance_qk(canonical.fold(once, weights.geometry), weights.geometry)
        for role, value in once.items():
            assert np.allclose(value, twice[role], rtol=1e-11, atol=1e-12), role


def test_canonical_form_keeps_the_logits(models, tmp_path, monkeypatch):
    """Its steps are gauge actions themselves: written out as a model, they compute the same."""

    class Canonical(attacks.Attack):
        def ends(self, ends):
            return {**ends, "head": ends["head"] * ends["final_norm"], "final_norm": np.ones(64)}

        def layer(self, layer, index):
            out = canonical.balance_qk(canonical.fold(layer, self.geometry), self.geometry)
            return {**out, "attn_norm": np.ones(64), "ffn_norm": np.ones(64)}

    monkeypatch.setitem(attacks.ATTACKS, "canonical", Canonical)
    attack(open_weights(models()), ("canonical",), tmp_path / "m", dtype="float64")
    before = logits(models())
    assert (before - logits(tmp_path / "m")).abs().max() < 1e-10 * before.abs().max()


def rescaled_planes(base, copy, near):
    """Write a copy whose planes are rescaled, of equal outputs; returns what measures its score."""
    attack(open_weights(base), ("plane",), copy, seed=3, dtype="float64")
    before = logits(base)
    assert (before - logits(copy)).abs().max() < near * before.abs().max()
    return lambda: measure(open_weights(base), open_weights(copy), EXACT).value("awm_canonical")


@pytest.mark.quick("0.5")
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_half_rotated_heads_with_qk_norm(share, tmp_path, monkeypatch):
    """GLM-4.5, Qwen3-Next: the planes are those of the rotated part, and each coordinate behind has its own scale."""
    config = tf.Glm4MoeConfig(
        **SIZES,
        use_qk_norm=True,
        first_k_dense_replace=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share},
    )
    base = save(build(config, 5), tmp_path / "base", 512)
    assert open_weights(base).geometry.rotary_dim == 16 * share
    score = rescaled_planes(base, tmp_path / "copy", 1e-10)
    assert score() == pytest.approx(1, abs=1e-6)
    planes = canonical.planes
    monkeypatch.setattr(canonical, "planes", lambda m, rotary: planes(16, rotary))  # as if all were rotated
    assert score() < 0.95


@pytest.mark.quick("cohere")
@pytest.mark.parametrize("kind", ["glm", "glm4", "cohere", "ernie4_5", "helium"])
def test_interleaved_planes(kind, tmp_path, monkeypatch):
    """Families that rotate coordinates 2i and 2i + 1 together; in double precision but for their rotation."""
    config = tf.AutoConfig.for_model(kind, **SIZES, pad_token_id=0)
    base = save(build(config, 6), tmp_path / "base", 512)
    assert open_weights(base).geometry.rotary == "interleaved"
    score = rescaled_planes(base, tmp_path / "copy", 1e-4)
    assert score() == pytest.approx(1, abs=1e-6)
    monkeypatch.setattr(layouts, "INTERLEAVED_ROTARY", frozenset())
    assert score() < 0.95


def test_general_balance_leaves_only_rotations():
    """Without rotary planes the gauge is a matrix per head: attacked and plain keys agree up to a rotation."""
    draw = np.random.default_rng(0)
    q, k, a = draw.normal(size=(3, 8, 40)), draw.normal(size=(8, 40)), draw.normal(size=(8, 8))
    attacked_q, attacked_k = np.linalg.inv(a).T @ q, a @ k

    def balanced(query, key):
        s = canonical.balancing(np.einsum("hid,hjd->ij", query, query) / 3, key @ key.T)
        return np.linalg.inv(s) @ query, s @ key

    (q1, k1), (q2, k2) = balanced(q, k), balanced(attacked_q, attacked_k)
    assert np.allclose(k1.T @ k1, k2.T @ k2) and np.allclose(
        np.einsum("hid,hie->hde", q1, q1), np.einsum("hid,hie->hde", q2, q2)
    )
    assert np.allclose(k1 @ k1.T, np.einsum("hid,hjd->ij", q1, q1) / 3)
    assert not np.allclose(k.T @ k, attacked_k.T @ attacked_k)


def test_a_tied_head_is_stored_on_its_own(tmp_path):
    tied = tiny_config("qwen3", tie_word_embeddings=True)
    base = save(build(tied, 4), tmp_path / "tied", 512)
    attack(open_weights(base), ("rotate",), tmp_path / "untied", dtype="float64")
    before = logits(base)
    assert (before - logits(tmp_path / "untied")).abs().max() < 1e-10 * before.abs().max()
