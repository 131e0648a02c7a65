"""A library of cards: the nearest models are compared, with controls that the library supplies."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from fathom.cli.main import main
from fathom.lineage import huref, verdict
from fathom.lineage.attacks import attack
from fathom.lineage.comparison import Options
from fathom.lineage.publishing import cards, identification
from fathom.lineage.publishing.identification import Candidate, identify
from fathom.lineage.weights import open_weights
from fathom.report.files import write_json
from tests.lineage.test_comparison import noisy
from tests.lineage.zoo import build, edited, save, tiny_config

QUIET = Options(extras=False, nonce=1)


def synthetic(library, count):
    """Cards of models that are not there; the first is the one that is searched for."""
    draw, body = np.random.default_rng(0), {"fathom_card": 1, "tool": "", "revision": None, "words": ["a"] * 6}
    shape = {"type": "llama", "layers": 2, "width": 64, "heads": 4, "vocab": 512}
    body |= {"structure": shape, "tokenizer": True, "anchors": 512, "low_coverage": False, "sketch_sha256": ""}
    sketches = draw.integers(-127, 128, (count, huref.SKETCH)).astype(np.int8)
    for at, z in enumerate(sketches):
        text = json.dumps({**body, "name": f"model-{at}", "sketches": {"z_last": z.tobytes().hex()}})
        (library / f"{at:05}.json").write_text(text)
    return cards.read_card(library / "00000.json")


def test_what_is_no_card_is_left_out_of_a_search(tmp_path):
    query = synthetic(tmp_path, 20)
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"fathom_card": 1, "name": "x", "sketches": {"z_last": "zz"}}')):
        (tmp_path / f"{name}.json").write_text(text)
    found = cards.search(query, tmp_path)
    assert len(found) == 20 and found[0].name == "model-0" and found[0].cosine == pytest.approx(1)
    assert all(abs(hit.cosine) < 0.3 for hit in found[1:])
    assert [hit.cosine for hit in found] == sorted((hit.cosine for hit in found), reverse=True)


def test_a_library_without_a_card_is_no_answer(tmp_path, capsys):
    query = synthetic(tmp_path, 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "settings.json").write_text("{}")
    command = ["lineage", "search", str(tmp_path / "00000.json"), "--library"]
    assert main([*command, str(tmp_path)]) == 0 and cards.search(query, tmp_path)
    assert main([*command, str(tmp_path / "empty")]) == 2 and "no card in it" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "gone")]) == 2 and "gone does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_ten_thousand_cards_are_searched_within_a_second(tmp_path):
    query = synthetic(tmp_path, 10_000)
    started = time.process_time()
    found = cards.search(query, tmp_path)
    assert time.process_time() - started < 1 and len(found) == 10_000


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Cards of five models of one shape, one of another and one that is gone."""
    root = tmp_path_factory.mktemp("library")
    for seed in range(5):
        save(build(tiny_config(), 300 + seed, trained=True), root / f"model-{seed}", 512)
    save(build(tiny_config(num_hidden_layers=2), 310), root / "other", 512)
    save(build(tiny_config(), 311), root / "gone", 512)
    for path in sorted(root.iterdir()):
        body = cards.card(open_weights(path))
        write_json(root / f"{path.name}.json", body)
    (root / "gone" / "model.safetensors").unlink()
    return root


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(), ("permute", "neuron"), ("rotate", "head")])
def test_the_ancestor_is_the_first_candidate(library, tmp_path, kinds):
    copy = edited(library / "model-2", tmp_path / "child", noisy)
    if kinds:
        attack(open_weights(copy), kinds, tmp_path / "hidden", dtype="float64")
        copy = tmp_path / "hidden"
    found = identify(open_weights(copy), library, 2, QUIET)
    assert found.candidates[0].name == str(library / "model-2") and found.candidates[0].label in identification.RELATED
    assert len(found.related) == 1 and found.searched == 7
    assert len(found.controls) == 2 and not any(one.refused for one in found.controls)


@pytest.mark.slow
def test_a_stranger_has_no_candidate(library, tmp_path):
    stranger = save(build(tiny_config(), 399, trained=True), tmp_path / "stranger", 512)
    found = identify(open_weights(stranger), library, 7, QUIET)
    assert not found.related and not found.controls and "no model of this shape beyond the nearest 7" in found.notes[0]
    (cards_alone := tmp_path / "library").mkdir()
    for path in library.glob("*.json"):
        text = path.read_text().replace(str(library / "model-"), str(tmp_path / "gone-"))
        (cards_alone / path.name).write_text(text)
    alone = identify(open_weights(stranger), cards_alone, 1, QUIET)
    assert "could not be compared and 0 are related" in alone.notes[0] and "no model" not in alone.notes[0]
    reasons = [reason for one in found.candidates for reason in one.reasons]
    assert identification.NO_CONTROLS in reasons and verdict.GIVE_CONTROLS not in reasons
    gone = next(one for one in found.candidates if one.name.endswith("gone"))
    assert gone.label == identification.NOT_COMPARED and "could not be compared" in gone.meaning


@pytest.mark.slow
def test_a_relative_among_the_controls_becomes_a_candidate(library, tmp_path, monkeypatch):
    """Whatever its card says."""
    child = edited(library / "model-3", tmp_path / "child", noisy)
    search = cards.search
    monkeypatch.setattr(cards, "search", lambda *given: sorted(search(*given), key=lambda hit: "model-3" in hit.name))
    found = identify(open_weights(child), library, 1, QUIET)
    assert found.candidates[0].name == str(library / "model-3") and found.related
    assert [one.refused != "" for one in found.controls] == [True, False, False]


def test_relatives_from_repositories_become_candidates_too(tmp_path, monkeypatch):
    """A card with a commit opens under another name than the card's."""
    query = synthetic(tmp_path, 4)
    kin = SimpleNamespace(convicts=lambda: True)
    opened = SimpleNamespace(name="org/model@commit")
    monkeypatch.setattr(cards, "card", lambda weights: query)
    monkeypatch.setattr(identification, "_opened", lambda hit: opened)
    monkeypatch.setattr(identification, "holding", lambda *models: nullcontext())
    monkeypatch.setattr(identification, "measure", lambda *given: kin)
    monkeypatch.setattr(
        identification, "_candidate", lambda w, hit, *_: Candidate(hit.name, hit.file, hit.cosine, verdict.SHARED, "")
    )
    found = identify(SimpleNamespace(name="x"), tmp_path, 1, QUIET)
    assert len(found.candidates) == 4 and all("so it is a candidate" in one.refused for one in found.controls)


@pytest.mark.slow
def test_the_command_writes_a_page_and_ends_with_the_verdicts_code(library, tmp_path, capsys):
    where = ["--library", str(library), "--top", "1", "--nonce", "1"]
    code = main(["lineage", "identify", str(library / "model-1"), *where, "--exit-code", "--out", str(tmp_path / "r")])
    assert code == verdict.EXIT_CODES[verdict.SHARED] and "identical" in capsys.readouterr().out
    body = json.loads((tmp_path / "r" / "report.json").read_text())
    assert body["candidates"][0]["identical"] and body["searched"] == 7
    assert "candidates for" in (tmp_path / "r" / "report.html").read_text()
