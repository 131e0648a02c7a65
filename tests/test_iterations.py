"""A budget of trips at run time: generate, serve and evaluate keep it, say what was made, refuse what means nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import DynamicCache

from fathom.checkpoints.open import load
from fathom.cli.main import main
from fathom.evaluation.perplexity import Cut, sampled
from fathom.inference.generate import generate
from fathom.inference.server import Service, build_app
from fathom.inference.settings import Sampling
from fathom.iterations import counting, most_trips, stored_trips
from tests.tiny import export_tiny

TEXT = "To fathom a thing is to measure its depth, and after much thought to understand it."
OPTIONS = {
    "latent_cot": {"trips": 3, "tau": 0.7},
    "ponder2": {"trips": 2, "jacobi_eval": 1},
    "ponder": {"trips": 3, "top_k": 9},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    export_tiny(root / "once")
    for name, options in OPTIONS.items():
        export_tiny(root / name, mixer="none", recurrence=name, recurrence_options=options)
    return root


def test_what_is_reported_is_what_was_made(models: Path) -> None:
    model, tokenizer = load(models / "latent_cot", "cpu")
    made = generate(model, tokenizer, TEXT, Sampling(6, temperature=0))
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad(), counting(model) as seen:
        whole = model.generate(ids, max_new_tokens=6, do_sample=False)
        seen.clear()
        model(whole[:, :-1])
    assert made.trips == pytest.approx(float(seen[0].double().mean())) and 1 < made.trips < 3
    assert made.tokens == 6
    assert generate(model, tokenizer, TEXT, Sampling(6, temperature=0, max_trips=1)).trips == 1
    beams = generate(model, tokenizer, TEXT, Sampling(6, temperature=0, options={"num_beams": 2}))
    assert beams.trips is None, "the cache is of the beams that ran on"


def test_padding_and_what_follows_the_end_are_not_counted() -> None:
    class Model:
        model = config = None

    layer = type("Layer", (), {"table": type("Table", (), {"halt": torch.tensor([[-1, 0, 2, 2], [1, 1, 1, 0]])})})
    cache = type("Cache", (), {"layers": [layer]})
    model = Model()
    model.model = type("Inner", (), {"recurrence": type("R", (), {"most_trips": lambda self, _: 3, "trips": 3})()})
    assert most_trips(model) == 3
    assert stored_trips(model, cache, 2, [3, 4]) == [2.0, 1.75]
    assert stored_trips(model, object(), 2, [3, 4], most=2) == [2.0, 2.0]


def test_generate(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(models / "ponder"), TEXT, "--max-new-tokens", "3", "--temperature", "0", "--json"]
    assert main([*words, "--max-trips", "2"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["trips"] == 2 and "2.00 iterations per token" in shown.err
    assert main([*words[:1], str(models / "once"), *words[2:]]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["trips"] is None and "trips" not in shown.err


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("ponder", ["--max-trips", "4"], "--max-trips 4: this model was trained for 3 iterations; allowed: 1 to 3"),
        ("ponder", ["--max-trips", "0"], "allowed: 1 to 3"),
        ("once", ["--max-trips", "1"], "has no loop iterations to limit"),
        (
            "ponder2",
            ["--set", "prefill_chunk_size=4"],
            "set recurrence_options.prefill=exact, or leave prefill_chunk_size",
        ),
    ],
)
def test_what_cannot_be_asked(
    models: Path, name: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(models / name), TEXT, *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_chunks_of_a_prompt(models: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    chunked = {"prefill_chunk_size": 2, "max_new_tokens": 2, "do_sample": False}
    model, _ = load(models / "ponder2", "cpu")
    with pytest.raises(ValueError, match="prefill_chunk_size=2: ponder2 reads"):
        model.generate(ids, **chunked)
    recurrence = model.model.recurrence
    recurrence.options = replace(recurrence.options, prefill="exact")
    assert model.generate(ids, **chunked).shape == (1, 8)


def test_serve(models: Path) -> None:
    model, tokenizer = load(models / "ponder", "cpu")
    client = TestClient(build_app(Service(model, tokenizer, "tiny", max_trips=2)), raise_server_exceptions=False)

    def ask(**more):
        body = {"model": "tiny", "prompt": "To fathom", "max_tokens": 3, "temperature": 0, **more}
        seen.clear()
        return client.post("/v1/completions", json=body)

    with counting(model) as seen:
        assert ask().status_code == 200 and {int(x) for x in seen} == {2}
        assert ask(max_trips=1).status_code == 200 and {int(x) for x in seen} == {1}
        refused = ask(max_trips=4)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "max_trips: 4; a token of this model makes 3 at most"


def test_evaluate(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["evaluate", str(models / "latent_cot"), "--perplexity", str(tmp_path / "text.txt")]
    assert main([*words, "--max-trips", "1,3", "--out", str(tmp_path / "scores"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "scores" / "report.json").read_text())
    one, three = (report["checkpoints"][f"latent_cot@{budget}"] for budget in (1, 3))
    assert one["max_trips"] == 1 and one["perplexity"]["text"]["trips_per_token"] == 1
    assert three["max_trips"] == 3 and 1 < three["perplexity"]["text"]["trips_per_token"] < 3
    assert one["perplexity"]["text"]["loss"] != three["perplexity"]["text"]["loss"]

    model, tokenizer = load(models / "latent_cot", "cpu")
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(TEXT).input_ids]])
    with torch.no_grad():
        loss = model(ids, labels=ids, max_trips=1).loss.item()
    assert one["perplexity"]["text"]["loss"] == pytest.approx(loss, rel=1e-5)

    assert main([*words, "--max-trips", "1,3"]) == 0
    assert "iterations per token" in capsys.readouterr().out
    for wrong in ("1,1", "many", "0"):
        assert main([*words, "--max-trips", wrong]) == 2
        assert f"--max-trips {wrong}: expected" in capsys.readouterr().err
    assert main([*words, "--max-trips", "4"]) == 2
    assert "allowed: 1 to 3" in capsys.readouterr().err


@torch.no_grad()
def decoded(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """The mean loss of generation's own way: a cache, and one token at a time."""
    cache, losses = DynamicCache(config=model.config), []
    for t in range(ids.shape[1] - 1):
        logits = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits[:, -1]
        losses.append(-logits.double().log_softmax(-1)[0, ids[0, t + 1]].item())
    return sum(losses) / len(losses)


@pytest.mark.slow
def test_a_perplexity_says_how_far_it_is_from_decoding(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "one.txt").write_text(TEXT)
    (tmp_path / "two.txt").write_text(TEXT.upper())
    out = ["--out", str(tmp_path / "scores")]
    words = ["evaluate", *(str(models / name) for name in ("ponder2", "ponder", "once")), "--perplexity"]
    words += [str(tmp_path / "one.txt"), str(tmp_path / "two.txt"), "--context", "8"]
    assert main([*words, *out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["checkpoints"]
    once, ponder = (report[name]["perplexity"]["one"] for name in ("once", "ponder"))
    assert once["trips_per_token"] is once["decoding"] is ponder["decoding"] is None and ponder["trips_per_token"] > 1
    model, tokenizer = load(models / "ponder2", "cpu")
    gaps = {}
    for name, text in (("one", TEXT), ("two", TEXT.upper())):
        found = report["ponder2"]["perplexity"][name]
        ids, losses = [tokenizer.eos_token_id, *tokenizer(text).input_ids], []
        for start in range(0, len(ids) - 1, 8):
            part = torch.tensor([ids[start : start + 9]])
            losses.append(decoded(model, part) * (part.shape[1] - 1))
        gaps[name] = found["decoding"]["value"]
        assert gaps[name] == pytest.approx(found["loss"] - sum(losses) / found["tokens"], abs=1e-4)
        assert abs(gaps[name]) > 1e-3 and found["decoding"]["low"] < gaps[name] < found["decoding"]["high"]
        assert found["decoding"]["rounds"] == 1 and found["decoding"]["tokens"] == found["tokens"]
    one, two, whole = (report["ponder2"]["perplexity"][name] for name in ("one", "two", "all text"))
    mean = (gaps["one"] * one["tokens"] + gaps["two"] * two["tokens"]) / whole["tokens"]
    assert whole["decoding"]["value"] == pytest.approx(mean)

    assert main([*words, *out]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("done before") == 10, "what was decoded is kept as well"
    line = next(line for line in shown.out.splitlines() if line.startswith("ponder2, one") and "1.000" not in line)
    assert f"{gaps['one']:+.4f} [" in line and "2.000" in line
    assert any(line.startswith("ponder, one") and "3.000" in line for line in shown.out.splitlines())
    assert main([*words[:2], *words[4:], "--max-trips", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["checkpoints"].values()
    scores = [score for entry in report for score in entry["perplexity"].values()]
    assert scores and all(score["decoding"] is None for score in scores), "one trip reads nothing that is not known"


def test_a_sample_of_a_long_text() -> None:
    chosen = sampled([70, 3, 20_000, 900], Cut(64, 32))
    assert 4096 <= sum(window.stop - window.scored for _, window in chosen) < 4096 + 64
    assert len(set(chosen)) == len(chosen) and chosen == sampled([70, 3, 20_000, 900], Cut(64, 32))
    assert {document for document, _ in chosen} >= {2, 3}
    assert len(sampled([9_000_000], Cut(8192))) == 8, "never one window alone"
    assert len(sampled([70, 3], Cut(64, 32))) == len([*Cut(64, 32).windows(70)]) + 1
