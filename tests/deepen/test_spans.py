"""Spans are ranked by what the loop itself computes, on documents that did not choose them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.deepen.spans import LOG, Candidate, Document, Reading, Search, read_documents, search
from fathom.errors import SettingsError
from fathom.models import FathomConfig, FathomForCausalLM
from tests.models.cases import BACKBONES, SHAPE, build, tokens
from tests.tiny import tiny_config, tiny_tokenizer

KINDS = {
    "qwen": {},
    "neox": BACKBONES["neox"],
    "gpt2": BACKBONES["gpt2"],
    "sliding": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
}


@pytest.mark.quick("Candidate(first=0*", "*-neox")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one", [Candidate(1, 2, 2, 0.5), Candidate(0, 3, 3, 1.0), Candidate(2, 3, 3, 0.25)], ids=str)
def test_a_span_scores_what_its_loop_does(kind, one):
    base = build(FathomConfig(**SHAPE, **KINDS[kind]))
    options = {"trips": one.trips, "prelude": one.first, "coda": 3 - one.last, "damping": one.damping}
    loop = FathomForCausalLM(FathomConfig(**SHAPE, **KINDS[kind], recurrence="loop", recurrence_options=options)).eval()
    loop.load_state_dict(base.state_dict())
    ids = tokens(1, 20)
    with torch.no_grad():
        reading = Reading(base, Document("one", ids[0].numpy()))
        wanted = [float(m(ids, labels=ids, use_cache=False).loss) * (ids.shape[1] - 1) for m in (base, loop)]
    assert (reading.nats, reading.looped(one)) == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted[0] - wanted[1]) > 0.01, "the loop must be another function"


@pytest.fixture
def model_and_text(tmp_path):
    """A small model, its tokenizer, and a file of documents."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = FathomForCausalLM(tiny_config(num_hidden_layers=4, mixer="none")).eval()
    words = np.random.default_rng(0)
    file = tmp_path / "text.jsonl"
    rows = [{"text": "".join(chr(int(c)) for c in words.integers(97, 123, 40 + 7 * i))} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, tokenizer, str(file)


ASKED = Search(sizes=(1, 3), dampings=(0.5, 1.0), documents=(5, 6), keep=4, tokens=30)


def test_the_best_are_judged_by_other_documents(model_and_text):
    model, tokenizer, text = model_and_text
    found = search(model, tokenizer, [text], ASKED)
    assert len(found) == 2 * (4 + 3 + 2) and len({row.candidate for row in found}) == len(found)
    best, others = found[:4], found[4:]
    assert all(row.again is not None and row.again.pairs == 6 for row in best) and all(
        row.again is None for row in others
    )
    assert [row.again.mean for row in best] == sorted(row.again.mean for row in best)
    assert max(row.gap.mean for row in best) <= min(row.gap.mean for row in others)

    documents = read_documents(tokenizer, [text], 11, 30)
    assert len({document.name for document in documents}) == 11 and all(len(d.ids) <= 31 for d in documents)
    one = best[0].candidate
    with torch.no_grad():
        readings = [Reading(model, document) for document in documents]
        gaps = [(reading.looped(one) - reading.nats, reading.ids.shape[1] - 1) for reading in readings]
    for part, gap in ((gaps[:5], best[0].gap), (gaps[5:], best[0].again)):
        assert gap.mean == pytest.approx(sum(g for g, _ in part) / sum(w for _, w in part), abs=1e-9)


def test_a_search_that_was_stopped_goes_on(model_and_text, tmp_path, monkeypatch):
    model, tokenizer, text = model_and_text
    whole = search(model, tokenizer, [text], ASKED, tmp_path / "whole")
    calls, looped = [], Reading.looped

    def stops(self, one):
        calls.append(one)
        if len(calls) == 50:
            raise KeyboardInterrupt
        return looped(self, one)

    monkeypatch.setattr(Reading, "looped", stops)
    with pytest.raises(KeyboardInterrupt):
        search(model, tokenizer, [text], ASKED, tmp_path / "out")
    with (tmp_path / "out" / LOG).open("a") as file:
        file.write('{"document": "text/1", "fir')  # a line that a kill cut short
    again = search(model, tokenizer, [text], ASKED, tmp_path / "out")
    assert again == whole
    assert len(calls) < 50 + 18 * 5 + 4 * 6 - 30, "what was scored is not scored again"
    with pytest.raises(SettingsError, match="scores of another model or length"):
        search(model, tokenizer, [text], Search(**{**vars(ASKED), "tokens": 20}), tmp_path / "out")


def test_scores_of_other_weights_or_another_text_are_not_taken(model_and_text, tmp_path):
    """Though the shape is the same, and the names of the documents."""
    model, tokenizer, text = model_and_text
    search(model, tokenizer, [text], ASKED, tmp_path / "out")
    lines = Path(text).read_text().splitlines()
    Path(text).write_text("\n".join(line.upper() for line in lines).replace('"TEXT"', '"text"'))
    assert search(model, tokenizer, [text], ASKED, tmp_path / "out") == search(model, tokenizer, [text], ASKED)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(2)
    with pytest.raises(SettingsError, match="scores of another model or length"):
        search(model, tokenizer, [text], ASKED, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trips": 0}, "trips=0: allowed: 2 or more"),
        ({"dampings": (5.0,)}, r"damping=\[5.0\]: allowed: above 0, up to 1"),
        ({"documents": (0, 3)}, "documents=0,3: allowed: 1 or more, and 0 or more others"),
        ({"tokens": -1}, "tokens=-1: allowed: 1 or more"),
    ],
)
def test_numbers_without_a_meaning_are_refused(change, says):
    with pytest.raises(SettingsError, match=says):
        Search(**change)


def test_what_cannot_be_searched_is_one_line(model_and_text):
    model, tokenizer, text = model_and_text
    with pytest.raises(SettingsError, match="sizes=2-9: allowed: from 1 to 4, the number of layers"):
        search(model, tokenizer, [text], Search(sizes=(2, 9)))
    with pytest.raises(SettingsError, match=r"only 12 documents, but 52 are needed.*A text file is one document"):
        search(model, tokenizer, [text], Search(sizes=(2, 3)))
    deeper = FathomForCausalLM(tiny_config(num_hidden_layers=4, mixer="depth_attention"))
    with pytest.raises(SettingsError, match="a model without mechanisms, this one has mixer=depth_attention"):
        search(deeper, tokenizer, [text], ASKED)


def test_no_candidate_is_left_out():
    assert len(Search().candidates(30)) == 2 * (29 + 28 + 27 + 26 + 25)
    assert math.isclose(Search().candidates(30)[0].damping, 0.5)
