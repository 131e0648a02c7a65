"""Pairs that do not look alike on paper: other families, tokenizers, depths, formats."""

from __future__ import annotations

import json
import tracemalloc
from multiprocessing import Pipe, get_context
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf

from fathom.errors import ModelError
from fathom.lineage import awm, comparison, neurons, nulls, verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options, compare, measure
from fathom.lineage.weights import open_weights
from tests.lineage import zoo as zoo_of
from tests.lineage.test_blind import encipher
from tests.lineage.zoo import LATENT, build, edited, save, save_adapter, tiny_config, write_tokenizer

COMMON = zoo_of.COMMON | dict(hidden_size=64, vocab_size=320, intermediate_size=96)
FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**COMMON, num_key_value_heads=2),
    "tied": lambda: tf.Qwen3Config(**{**COMMON, "tie_word_embeddings": True}, num_key_value_heads=2, head_dim=16),
    "gpt2": lambda: tf.GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=320, n_positions=32),
    "neox": lambda: tf.GPTNeoXConfig(**COMMON),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, num_key_value_heads=2, head_dim=16),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=2),
    "latent": lambda: tf.DeepseekV3Config(**COMMON, **LATENT),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    for seed, (name, config) in enumerate(FAMILIES.items()):
        save(build(config(), seed + 50, torch.float32), root / name, 320)
    return {name: open_weights(root / name) for name in FAMILIES}


@pytest.mark.quick("gemma2", "mixtral")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_itself_and_nobody_else(name, zoo):
    own = measure(zoo[name], zoo[name], Options(mode="exact"))
    for score in ("awm", "order", "awm_canonical", "procrustes", "ics_canonical", "ics_all_layers", "pcs_2d"):
        assert own.value(score) == pytest.approx(1, abs=1e-4), score
    names = list(FAMILIES)
    for other in names[names.index(name) + 1 :]:
        pair = measure(zoo[name], zoo[other], Options(extras=False))
        assert abs(pair.value("awm_canonical")) < 0.25, other  # narrow and of unequal width: a wide null
        assert max((count.paired for counts in pair.neurons.values() for count in counts), default=0) <= 5


def test_shuffled_token_ids_are_paired_by_their_strings(models, tmp_path):
    """Same strings, other ids: rows are paired through the tokenizers, so an exact copy is one."""
    order = np.random.default_rng(0).permutation(512)

    def reorder(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][torch.tensor(order)]

    copy = edited(models(), tmp_path / "copy", reorder)
    table = json.loads((models() / "tokenizer.json").read_text())
    old = {index: word for word, index in table["model"]["vocab"].items()}
    table["model"]["vocab"] = {old[int(source)]: row for row, source in enumerate(order)}
    (copy / "tokenizer.json").write_text(json.dumps(table))
    pair = measure(open_weights(models()), open_weights(copy), Options(mode="exact"))
    assert pair.aligned.pairing == "strings" and pair.aligned.shared == 512
    assert pair.value("ics_rarest") < 0.5  # HuRef's own anchors pair different strings
    for score in ("awm_canonical", "procrustes", "ics_canonical", "ics_all_layers"):
        assert pair.value(score) == pytest.approx(1, abs=1e-6), score
    (copy / "tokenizer.json").unlink()  # without it, rows are paired by number, wrongly, and the score shows it
    blind = measure(open_weights(models()), open_weights(copy), Options(mode="exact"))
    assert blind.aligned.pairing == "row numbers" and blind.value("awm_canonical") < 0.5


def test_exact_mode_has_every_score_of_large_models(models, monkeypatch):
    monkeypatch.setattr(comparison, "SMALL_BYTES", 0)
    ours, theirs = open_weights(models()), open_weights(models(seed=1))
    every = {"ics", "ics_canonical", "ics_rarest", "ics_all_layers", "pcs_2d"}
    assert measure(ours, theirs, Options(mode="exact")).other.keys() == every
    assert measure(ours, theirs, Options(extras=True)).other.keys() == {"ics", "ics_canonical"}


def test_without_shared_strings_the_embedding_is_not_trusted(models, tmp_path):
    path = save(build(tiny_config(), 0), tmp_path / "copy")
    write_tokenizer(path, 512, prefix="Ġother")
    found = compare(open_weights(models()), open_weights(path))
    assert found.pair.aligned.shared == 0 and found.pair.aligned.fixed is None
    # what the tokenizers do not say is seen without them: channels in order, and the axes of the embeddings
    assert found.verdict.label == verdict.INITIALISATION and found.pair.value("order") == pytest.approx(1)
    assert found.verdict.sentence == "The weights are identical, 30 of 30 tensors."
    assert any("shared strings" in reason for reason in found.skipped)


def test_rows_paired_by_number_acquit_nobody(tmp_path):
    """Without tokenizers, shuffled ids would hide a copy."""
    bare = [open_weights(save(build(tiny_config(), seed), tmp_path / f"bare{seed}")) for seed in (0, 1)]
    found = compare(*bare)
    assert found.verdict.label == verdict.INCONCLUSIVE and "for want of a tokenizer" in found.verdict.reasons[-1]
    assert compare(bare[0], bare[0]).verdict.label == verdict.INITIALISATION, "what is found is said all the same"


def test_what_no_test_looks_at_is_said(zoo, tmp_path, monkeypatch):
    assert not any("expert" in note for note in measure(zoo["mixtral"], zoo["llama"], Options()).skipped)
    config = tf.MixtralConfig(**{**COMMON, "intermediate_size": 16}, num_key_value_heads=2, num_local_experts=10)
    many = open_weights(save(build(config, 3, torch.float32), tmp_path / "many", 320))
    assert not any("expert" in note for note in measure(many, many, Options(extras=False)).skipped)
    monkeypatch.setattr(neurons, "MANY", 16)
    assert any("8 of 10 experts" in note for note in measure(many, many, Options(extras=False)).skipped)


def test_a_null_of_related_models_is_refused(tmp_path, zoo):
    related = measure(zoo["llama"], zoo["llama"], Options())
    with pytest.raises(
        ModelError, match=r"llama and .*llama share weights: a null distribution needs unrelated models"
    ):
        nulls.write(tmp_path / "null.json", {"here": [related]})
    body = nulls.write(tmp_path / "null.json", {"here": [measure(zoo["llama"], zoo["mixtral"], Options())]})
    assert len(nulls.read(tmp_path / "null.json", "here").pairs) == 1 and len(body["models"]) == 2


@pytest.mark.slow
def test_a_control_counts_once_whatever_it_is_called(tmp_path, models):
    a, b = (open_weights(models(seed=seed)) for seed in (50, 51))
    control = models(seed=52)
    (tmp_path / "alias").symlink_to(control)
    once = compare(a, b, [control], options=Options(extras=False))
    again = compare(a, b, [control, control, tmp_path / "alias", control], options=Options(extras=False))
    assert once.null.models == again.null.models == 3 and len(again.null.pairs) == len(once.null.pairs) == 2
    assert len(again.controls) == 1 and again.verdict.threshold == once.verdict.threshold


def test_a_compared_model_is_no_control(tmp_path, models):
    (tmp_path / "alias").symlink_to(models())
    with pytest.raises(ModelError, match=r"control .*alias is .*llama.*, which is compared"):
        compare(open_weights(models(seed=1)), open_weights(models()), [tmp_path / "alias"])


def test_adapters_on_one_base_are_different_models(tmp_path, models):
    base = {"base_model_name_or_path": str(models())}
    draw = torch.Generator().manual_seed(0)
    factors = [torch.randn(shape, generator=draw) for shape in ((4, 64), (64, 4))]
    other = dict(zip(("q_proj.lora_A", "q_proj.lora_B"), factors, strict=True))
    places = [
        models(),
        save_adapter(tmp_path / "one", 64, **base),
        save_adapter(tmp_path / "louder", 64, **base, use_rslora=True),
        save_adapter(tmp_path / "two", other, **base),
        save_adapter(tmp_path / "whole", {"q_proj": torch.ones(64, 64)}, **base),
    ]
    assert len({nulls.digest(open_weights(place)) for place in places}) == len(places)


def test_a_pair_that_the_null_file_has_takes_no_other_with_it(monkeypatch):
    monkeypatch.setattr(nulls, "digest", lambda name: name)
    nothing = dict(scores={}, head_agreement=None, neurons={}, values={}, gaps={}, value=lambda name: None)
    pairs = [SimpleNamespace(a=name, b="control", **nothing) for name in ("known", "new")]
    file = nulls.of_pairs(pairs[:1], "file")
    added = nulls.of_pairs(pairs, "controls", file)
    assert nulls.joined(file, added).pairs == [["control", "known"], ["control", "new"]]


def test_nemotrons_gains_fold_away(tmp_path):
    """Norm gains moved into what reads them: the same function, and the same model. They are stored less 1."""
    model = build(tf.NemotronConfig(**COMMON, num_key_value_heads=2, head_dim=12), 3)
    save(model, tmp_path / "own", 320)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before, draw = model(ids).logits, torch.Generator().manual_seed(0)
        for layer in model.model.layers:
            attention = layer.self_attn
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (layer.mlp.up_proj,)),
            ):
                factor = torch.exp(torch.randn(len(norm.weight), generator=draw, dtype=torch.float64))
                norm.weight.copy_((norm.weight + 1) * factor - 1)
                norm.bias.mul_(factor)
                for linear in readers:
                    linear.weight.div_(factor)
        torch.testing.assert_close(model(ids).logits, before)
    save(model, tmp_path / "other", 320)
    pair = measure(open_weights(tmp_path / "own"), open_weights(tmp_path / "other"), Options(mode="exact"))
    assert pair.value("awm_canonical") == pytest.approx(1, abs=1e-6)
    assert pair.value("awm") < 0.9, "as published, the gains show"


def peak(small, paths, answer):
    """Sends the traced peak of a comparison, and the bytes of the files."""
    options = Options(extras=False)
    awm.MAP_CHANNELS = 64  # the map grows with depth, not with width
    measure(open_weights(small), open_weights(small), options)  # what a first call imports is not counted
    opened = [open_weights(path) for path in paths]
    tracemalloc.start()
    measure(*opened, options)
    answer.send((tracemalloc.get_traced_memory()[1], sum(weights.file_bytes for weights in opened)))


def test_no_byte_of_a_small_model_is_read_twice(models):
    one, other = open_weights(models()), open_weights(models(seed=1))
    read = compare(one, other, options=Options(extras=True)).pair.bytes_read
    assert all(0.9 < read[w.name] / w.file_bytes < 1.1 for w in (one, other))


@pytest.mark.slow
def test_memory_stays_near_the_largest_pair_of_tensors(models, tmp_path):
    """Streaming: the traced peak of a comparison is a small multiple of one pair of matrices, not of the model.

    In a process of its own, since other tests' threads are traced too; forked, since that imports nothing again.
    """
    config = tiny_config(
        "llama", num_hidden_layers=5, hidden_size=128, intermediate_size=352, head_dim=32, vocab_size=300
    )
    paths = [save(build(config, seed, torch.float32), tmp_path / str(seed), 300) for seed in (0, 1)]
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=peak, args=(models(), paths, theirs))
    process.start()
    traced, whole = ours.recv() if ours.poll(100) else (0, 0)
    process.join()
    largest = 2 * 128 * 352 * 4
    assert largest < traced < 16 * largest < whole


def test_dead_neurons_and_padded_rows_are_no_reason_to_fail(tmp_path):
    """Pruning leaves rows of exact zeros; in float32 they must divide to zeros, not to NaN."""
    model = build(tiny_config("qwen3"), 0, torch.float32)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[3] = mlp.up_proj.weight[5] = mlp.down_proj.weight[:, 7] = 0
        model.model.layers[1].self_attn.q_proj.weight[:16] = 0
    path = save(model, tmp_path / "pruned", 512)
    pair = measure(open_weights(path), open_weights(path), Options())
    assert pair.scores["awm_canonical"].score == pytest.approx(1, abs=1e-4)
    assert pair.aligned.fixed.fixed == 64


def noisy(tensors, noise=0.02):
    draw = torch.Generator().manual_seed(4)
    for name, value in tensors.items():
        if value.ndim == 2:
            tensors[name] = value + noise * value.std() * torch.randn(value.shape, generator=draw, dtype=value.dtype)


@pytest.fixture(scope="module")
def kin(models, tmp_path_factory):
    """A model, its disguised copy, and relatives that pose as controls."""
    root, base = tmp_path_factory.mktemp("kin"), models(seed=55)
    edited(base, root / "sibling", noisy)
    for name, source, edits in (("copy", base, ("rotate",)), ("permuted", root / "sibling", ("permute", "neuron"))):
        attack(open_weights(source), edits, root / name, dtype="float64")
    attack(open_weights(root / "sibling"), ("rotate", "head"), root / "turned", dtype="float64")
    return root


@pytest.mark.quick("0-turned")
@pytest.mark.parametrize("relative", ["sibling", "permuted", "turned"])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_related_control_is_refused_and_the_verdict_is_as_without_it(models, kin, relative, others):
    controls = [kin / relative, *(models(seed=56 + n) for n in range(others))]
    found = compare(open_weights(models(seed=55)), open_weights(kin / "copy"), controls, None, Options(extras=False))
    assert found.verdict.label in {verdict.SHARED, verdict.INITIALISATION}
    assert any(f"{kin / relative} is itself related" in reason for reason in found.verdict.reasons)
    names = {digest for pair in (found.null.pairs if found.null else []) for digest in pair}
    assert nulls.digest(open_weights(kin / relative)) not in names


@pytest.mark.slow
def test_a_relative_among_the_controls_accuses_no_stranger(models, kin):
    pair = open_weights(models(seed=55)), open_weights(models(seed=58))
    found = compare(*pair, [kin / "sibling", models(seed=59)], None, Options(extras=False))
    assert found.verdict.label == verdict.NONE
    assert any("itself related" in reason for reason in found.verdict.reasons)
    alone = compare(*pair, [kin / "sibling"], None, Options(extras=False))
    assert alone.verdict.label == verdict.NONE and alone.null is None


@pytest.mark.slow
def test_two_runs_of_one_seed_and_one_order_are_no_lineage(tmp_path, models):
    """As alike as an ablation, in order, with no later stage to be seen: the seed and the order explain as much."""
    base = save(build(tiny_config(), 7, trained=True), tmp_path / "base", 512)
    twin = edited(base, tmp_path / "twin", noisy)

    def adapt(tensors):
        name = "model.layers.1.self_attn.v_proj.weight"
        tensors[name] = tensors[name] + torch.outer(tensors[name][:, 0], tensors[name][0])

    adapted = edited(base, tmp_path / "adapted", adapt)
    controls = [save(build(tiny_config(), seed, trained=True), tmp_path / str(seed), 512) for seed in (8, 9)]
    found = compare(open_weights(base), open_weights(twin), controls, None, Options(extras=False))
    assert found.inherited.margin > 0 and found.verdict.label == verdict.INITIALISATION
    assert any("order of data" in other for other in found.verdict.alternatives)
    found = compare(open_weights(base), open_weights(adapted), controls, None, Options(extras=False))
    assert found.verdict.label == verdict.SHARED, "kept matrices and a difference of rank one show a later stage"


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.02, 0.15])
@pytest.mark.parametrize("kinds", [("permute", "neuron"), ("rotate", "head"), ("cipher", "rotate", "head", "neuron")])
def test_a_disguise_makes_no_lineage_of_one_seed_and_one_order(tmp_path, kinds, noise):
    base = save(build(tiny_config(), 7, trained=True), tmp_path / "base", 512)
    edited(base, tmp_path / "run", lambda tensors: noisy(tensors, noise))
    attack(open_weights(tmp_path / "run"), [k for k in kinds if k != "cipher"], tmp_path / "copy", dtype="float64")
    if "cipher" in kinds:
        encipher(tmp_path / "copy")
    controls = [save(build(tiny_config(), seed, trained=True), tmp_path / str(seed), 512) for seed in (8, 9)]
    for others in ([], controls):
        pair = open_weights(base), open_weights(tmp_path / "copy")
        found = compare(*pair, others, None, Options(extras=False))
        assert found.verdict.label == verdict.INITIALISATION, found.verdict.reasons
        assert "cipher" in kinds or found.inherited.margin > 0, "not for want of shared training"
        assert any("order of data" in other for other in found.verdict.alternatives)
