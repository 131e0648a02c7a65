"""End to end: commands, verdicts, JSON, page, cards and commitments."""

from __future__ import annotations

import html.parser
import json
import re

import numpy as np
import pytest
import torch

from fathom.cli import lineage as commands
from fathom.errors import ModelError
from fathom.lineage import huref, nulls
from fathom.lineage.comparison import Options, measure
from fathom.lineage.publishing import cards
from fathom.lineage.verdict import INITIALISATION, NONE, PARTIAL, SHARED
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, save, tiny_config


def built(seed, trained=True, **changes):
    """A model of six layers, or with other sizes."""
    sizes = dict(num_hidden_layers=6, hidden_size=96, intermediate_size=256, vocab_size=400)
    return build(tiny_config("qwen3", **{**sizes, **changes}), seed, torch.float32, trained)


def drifted(seed, epsilon, path, elsewhere=None):
    """A stand-in for training: attention moves by epsilon times its own size, and all other matrices `elsewhere`."""
    model, draw = built(seed), torch.Generator().manual_seed(99)
    for name, parameter in model.named_parameters():
        size = epsilon if elsewhere is None or "self_attn" in name else elsewhere
        if parameter.ndim == 2 and size:
            parameter.data += size * parameter.data.std() * torch.randn(parameter.shape, generator=draw)
    return save(model, path, 400)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base, a drifted child, the child rotated and re-gauged, two strangers and a graft."""
    root = tmp_path_factory.mktemp("family")
    for name, seed in (("base", 0), ("stranger", 1), ("control", 2), ("control2", 3)):
        save(built(seed), root / name, 400)
    drifted(0, 0.5, root / "child")
    assert commands.attack(str(root / "child"), root / "hidden", ["rotate", "gain", "head", "neuron"]).exit_code == 0
    graft, base = built(1), built(0)
    graft.model.embed_tokens.load_state_dict(base.model.embed_tokens.state_dict())
    for layer in (2, 3):
        graft.model.layers[layer].load_state_dict(base.model.layers[layer].state_dict())
    save(graft, root / "graft", 400)
    return root


def ran(family, a, b="base", controls=("control",), mode="fast", **options):
    names, choices = [str(family / name) for name in controls], commands.Choices(mode=mode)
    return commands.compare(str(family / a), str(family / b), names, exit_code=True, choices=choices, **options)


@pytest.mark.quick("child-shared lineage-10")
@pytest.mark.parametrize(
    ("a", "label", "code"),
    [("child", SHARED, 10), ("hidden", SHARED, 10), ("graft", PARTIAL, 11), ("stranger", NONE, 0)],
)
def test_verdicts_end_to_end(family, a, label, code):
    result = ran(family, a, mode="exact")
    assert result.data["verdict"]["label"] == label and result.exit_code == code
    if a == "hidden":
        assert any("rotation" in sign for sign in result.data["tampering"])
        assert result.data["scores"]["awm"]["value"] < 0.2 < 0.7 < result.data["scores"]["procrustes"]["value"]
    if a == "graft":
        assert "layers 2, 3" in result.data["verdict"]["sentence"]
    if a == "child":
        assert result.data["scores"]["awm_canonical"]["value"] == pytest.approx(0.9, abs=0.05)
        assert not result.data["tampering"]


def test_without_controls_a_lineage_is_only_half_said(family):
    result = ran(family, "child", controls=())
    assert result.data["verdict"]["label"] == INITIALISATION
    assert any("give a control" in reason for reason in result.data["verdict"]["reasons"])
    assert not any(test["kind"] == "control" for test in result.data["tests"])


@pytest.mark.slow
@pytest.mark.parametrize(("controls", "label"), [(("control", "hidden"), SHARED), (("hidden",), INITIALISATION)])
def test_a_related_control_is_refused(family, controls, label):
    result = ran(family, "child", controls=controls)
    assert result.data["verdict"]["label"] == label
    assert any("hidden is itself related" in why for why in result.data["verdict"]["reasons"])


@pytest.mark.slow
def test_order_of_the_arguments_does_not_matter(family):
    first, second = ran(family, "child", "base"), ran(family, "base", "child")
    for name, score in first.data["scores"].items():
        assert second.data["scores"][name]["value"] == pytest.approx(score["value"], abs=1e-3), name
    assert first.data["verdict"]["label"] == second.data["verdict"]["label"]


@pytest.mark.slow
def test_depth_and_width_pruned_copies(family, tmp_path):
    base, kept, copy = built(0), (0, 2, 5), built(7, False, num_hidden_layers=3)
    for there, here in enumerate(kept):
        copy.model.layers[there].load_state_dict(base.model.layers[here].state_dict())
    for part in ("embed_tokens", "norm"):
        getattr(copy.model, part).load_state_dict(getattr(base.model, part).state_dict())
    copy.lm_head.load_state_dict(base.lm_head.state_dict())
    save(copy, tmp_path / "shallow", 400)
    pair = measure(open_weights(family / "base"), open_weights(tmp_path / "shallow"), Options(mode="exact"))
    assert pair.scores["awm_canonical"].pairs == [(layer, i) for i, layer in enumerate(kept)]
    assert pair.value("awm_canonical") == pytest.approx(1, abs=1e-3)
    assert pair.scores["awm_canonical"].covering(6) == pytest.approx(0.5, abs=1e-3)

    slim, channels = built(8, False, hidden_size=64), sorted(np.random.default_rng(0).permutation(96)[:64].tolist())
    for (_, target), (_, source) in zip(slim.named_parameters(), base.named_parameters(), strict=True):
        data = source.data
        for axis, size in enumerate(data.shape):
            if size == 96:
                data = data.index_select(axis, torch.tensor(channels))
        target.data = data.clone()
    save(slim, tmp_path / "slim", 400)
    controls = [str(family / name) for name in ("control", "control2")]
    result = commands.compare(str(tmp_path / "slim"), str(family / "base"), control=controls)
    assert result.data["scores"]["awm_canonical"]["value"] == pytest.approx(1, abs=1e-3)
    assert result.data["base"].endswith("base")
    assert result.data["verdict"]["label"] == INITIALISATION  # nothing shows a later stage of training


@pytest.mark.slow
def test_shared_initialisation_is_not_called_lineage_nor_missed(family, tmp_path):
    """Attention trained far away, the rest moderately: what two runs from one seed look like."""
    drifted(0, 12.0, tmp_path / "far", elsewhere=0.7)
    result = commands.compare(str(tmp_path / "far"), str(family / "base"), control=[str(family / "control")])
    assert result.data["verdict"]["label"] == INITIALISATION
    assert result.data["scores"]["awm_canonical"]["value"] < 0.1


def test_the_best_alignment_meets_the_highest_bar_of_any(family, tmp_path):
    """In-order scores of strangers are near 0, so what a seed leaves behind stands out there; that is no lineage."""
    scores = {"order": [0.0, 0.01], "awm_canonical": [0.3, 0.31], "procrustes": [0.3, 0.31]}
    null = {"scores": scores, "witnesses": [], "neurons": {}, "gaps": {}, "per_layer": {}}
    null["pairs"] = [["a", "b"], ["b", "c"]]
    models = dict.fromkeys("abc", "a model")
    body = {"fathom_null": nulls.VERSION, "models": models, "classes": {"width 96/96, equal depth": null}}
    (tmp_path / "null.json").write_text(json.dumps(body))
    far = drifted(0, 2.0, tmp_path / "far", elsewhere=0)
    result = commands.compare(str(far), str(family / "base"), null=tmp_path / "null.json")
    assert 0.12 < result.data["scores"]["order"]["value"] < 0.35
    assert result.data["verdict"]["label"] == INITIALISATION
    assert result.data["verdict"]["threshold"] == pytest.approx(0.41, abs=1e-6)


@pytest.mark.slow
def test_controls_of_another_class_are_shown_and_not_used(family, tmp_path):
    save(built(9, False, num_hidden_layers=4, hidden_size=64), tmp_path / "small", 400)
    result = commands.compare(str(family / "child"), str(family / "base"), control=[str(tmp_path / "small")])
    assert result.data["null"] is None and len(result.data["controls"]) == 1
    assert any("not of the class" in note for note in result.data["structure"]["skipped"])
    assert result.data["verdict"]["label"] == INITIALISATION


class Loads(html.parser.HTMLParser):
    """Everything a page would fetch, and tags that are left open."""

    def __init__(self):
        super().__init__()
        self.fetched, self.stack, self.faults = [], [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in {"src", "href"} and not (v or "").startswith("data:")]
        if tag not in {"meta", "link", "img", "wbr", "!doctype"}:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if not self.stack or self.stack.pop() != tag:
            self.faults.append(tag)


@pytest.mark.slow
def test_report_files(family, tmp_path):
    result = ran(family, "hidden", mode="exact", out=tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    body = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert body["verdict"]["sentence"] == result.data["verdict"]["sentence"]
    read = Loads()
    read.feed(page)
    assert not read.fetched and not read.faults and not read.stack
    assert "http://" not in page and "https://" not in page
    for piece in (body["verdict"]["sentence"], "Layer against layer", "does not claim", "--control", "visual checksum"):
        assert piece in page, piece
    assert page.count("<img") == 2 and "prefers-color-scheme: dark" in page
    assert "nan" not in re.sub(r"base64,[^\"]+", "", page).lower().split()
    assert (tmp_path / "out" / "portrait-a.png").read_bytes()[:4] == b"\x89PNG"


def test_names_are_escaped(family, tmp_path):
    evil = tmp_path / "<img src=x onerror=alert(1)>"
    evil.symlink_to(family / "base")
    commands.compare(str(evil), str(family / "stranger"), out=tmp_path / "out")
    assert "<img src=x" not in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_calibrated_null_replaces_controls(family, tmp_path):
    names = [str(family / name) for name in ("stranger", "control", "control2")]
    done = commands.calibrate(names, tmp_path / "null.json", mode="exact")
    assert "3 pairs" in done.text
    result = ran(family, "child", controls=(), null=tmp_path / "null.json", mode="exact")
    assert result.data["verdict"]["label"] == SHARED and len(result.data["null"]["pairs"]) == 3
    body = json.loads((tmp_path / "null.json").read_text())
    body["classes"] = {"width 9/9, equal depth": next(iter(body["classes"].values()))}
    (tmp_path / "other.json").write_text(json.dumps(body))
    with pytest.raises(ModelError, match="no null distribution for"):
        ran(family, "child", controls=(), null=tmp_path / "other.json")


def test_cards_are_found_and_survive_attacks(family, tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    for name in ("base", "stranger", "control"):
        commands.card(str(family / name), library / f"{name}.json", all_layers=True)
    commands.card(str(family / "hidden"), tmp_path / "query.json", all_layers=True)
    (library / "junk.json").write_text('{"fathom_card": 1, "sketches": {"z_last": "zz"}}')
    found = commands.search(tmp_path / "query.json", library).data["found"]
    assert found[0]["name"].endswith("base") and found[0]["cosine"] > 0.4 and abs(found[1]["cosine"]) < 0.2
    exact = [huref.quantised(cards.sketches(open_weights(family / name))["z_last"]) for name in ("child", "hidden")]
    assert huref.sketch_cosine(*exact) > 0.9999
    drawn = [
        commands.portrait(str(family / "base"), tmp_path / "1.png"),
        commands.portrait(str(library / "base.json"), tmp_path / "2.png"),
    ]
    assert drawn[0].data["pixels_sha256"] == drawn[1].data["pixels_sha256"] and "visual checksum" in drawn[0].text


def test_sketch_estimates_the_exact_cosine(family):
    """z against the terms it is a sketch of: error about 1/√512."""
    opened = {name: open_weights(family / name) for name in ("base", "child", "stranger")}
    z, exact = {}, {}
    for name, weights in opened.items():
        _, rows = cards.anchor_rows(weights)
        exact[name] = np.stack(huref.last_terms(weights, huref.anchor_embeddings(weights, rows))).reshape(-1)
        z[name] = cards.sketches(weights)["z_last"]
        assert abs(z[name].mean()) < 0.15 and z[name].std() == pytest.approx(1, abs=0.15)
        assert huref.sketch_cosine(z[name], huref.quantised(z[name])) > 0.999
    for a, b in (("base", "child"), ("base", "stranger"), ("child", "stranger")):
        assert huref.sketch_cosine(z[a], z[b]) == pytest.approx(huref.sketch_cosine(exact[a], exact[b]), abs=0.13)


@pytest.mark.slow
def test_tampering_is_suspected_only_beyond_what_unrelated_models_show(family, tmp_path):
    assert commands.attack(str(family / "base"), tmp_path / "gain", ["gain"]).exit_code == 0
    controls = [str(family / name) for name in ("control", "control2")]
    found = commands.compare(str(family / "base"), str(tmp_path / "gain"), controls)
    assert any("re-gauging" in sign for sign in found.data["tampering"])
    apart = commands.compare(str(family / "stranger"), str(tmp_path / "gain"), controls)
    assert apart.data["tampering"] == []
