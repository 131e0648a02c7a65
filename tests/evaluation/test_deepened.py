"""What making a model deeper was worth: sentences, and intervals that hold the planted gain."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fathom.cli.main import main
from fathom.evaluation import deepened
from fathom.evaluation.deepened import Speed, effects_of
from fathom.evaluation.perplexity import DomainScore
from fathom.evaluation.scoring import Checkpoint
from tests.tiny import export_tiny


def scores(nats: np.ndarray, tokens: np.ndarray, name: str) -> Checkpoint:
    """A checkpoint that was scored on one text."""
    domain = DomainScore(nats.tolist(), tokens.tolist(), (4 * tokens).tolist())
    return Checkpoint(name, Path(name), lambda _: None, domains={"wiki": domain})  # type: ignore[arg-type]


def planted(gain: float, documents: int, draw: np.random.Generator) -> tuple[Checkpoint, Checkpoint]:
    """A control, and a model that is better by `gain` nats a token on average; documents of very different lengths."""
    tokens = draw.integers(50, 800, documents)
    control = tokens * draw.normal(3.5, 0.5, documents)
    gaps = tokens * (gain + draw.normal(0, 0.05, documents)) + np.sqrt(tokens) * draw.normal(0, 0.3, documents)
    return scores(control - gaps, tokens, "deeper"), scores(control, tokens, "control")


@pytest.mark.quick("0.0-20", "0.03-20", "-0.1-60")
@pytest.mark.parametrize("documents", [20, 60])
@pytest.mark.parametrize("gain", [0.0, 0.03, -0.1])
def test_intervals_hold_the_planted_gain(documents, gain):
    draw, held, said = np.random.default_rng(0), 0, []
    bits = -gain / np.log(2) / 4
    for _ in range(1500):
        (effect,) = effects_of(*planted(gain, documents, draw))
        held += effect.gap.low <= bits <= effect.gap.high
        said.append(effect.verdict)
    assert held / 1500 >= 0.94
    wrong = {0.0: {"better", "worse"}, 0.03: {"worse"}, -0.1: {"better"}}[gain]
    assert sum(word in wrong for word in said) / 1500 <= 0.06
    if gain:
        assert said.count("better" if gain > 0 else "worse") > (0.9 if documents > 20 or gain < 0 else 0.5) * 1500


def test_an_interval_of_half_the_width_would_be_seen(monkeypatch):
    """The negative control of the coverage."""
    draw, held, original = np.random.default_rng(0), 0, deepened.rows

    def narrow(found):
        made = original(found)
        for gap in (gap for row in made for gap in row.differences.values()):
            half = (gap.high - gap.low) / 4
            gap.low, gap.high = gap.value - half, gap.value + half
        return made

    monkeypatch.setattr(deepened, "rows", narrow)
    for _ in range(300):
        (effect,) = effects_of(*planted(0.03, 40, draw))
        held += effect.gap.low <= -0.03 / np.log(2) / 4 <= effect.gap.high
    assert held / 300 < 0.85


def test_sentences():
    draw = np.random.default_rng(1)
    (better,) = effects_of(*planted(0.1, 40, draw))
    (worse,) = effects_of(*planted(-0.1, 40, draw))
    (unclear,) = effects_of(*planted(0.0, 40, draw))
    assert str(better).startswith("wiki: better than control by 0.0") and "bits per byte (95 % interval" in str(better)
    assert str(worse).startswith("wiki: worse than control by 0.0")
    assert str(unclear).startswith("wiki: against control: not significant (95 % interval")
    small = replace(better, gap=replace(better.gap, value=-2e-5, low=-3e-5, high=-1e-5))
    assert str(small) == (
        "wiki: against control: no difference above 0.005 bits per byte "
        "(95 % interval of the difference -3.0e-05 to -1.0e-05)."
    )
    assert "better than control by 0.0060" in str(replace(small, gap=replace(small.gap, value=-0.006)))
    assert "better than control by 0.0000 acc" in str(replace(small, metric="acc")), "the noise is of bits per byte"
    (alone,) = effects_of(*planted(0.1, 1, draw))
    assert str(alone) == "wiki: against control: not significant (too few documents for an interval)."
    same = [scores(np.full(40, nats), np.full(40, 10), name) for nats, name in ((2.0, "deeper"), (3.0, "control"))]
    assert "(no interval: the same difference in every document, " in str(effects_of(*same)[0])
    two = [replace(one, domains={**one.domains, "sea": one.domains["wiki"]}) for one in planted(0.1, 40, draw)]
    assert [effect.on for effect in effects_of(*two)] == ["wiki", "sea"], "all text together is not judged again"
    speed = Speed(ratio=1.31, low=1.2, high=1.4, clock="wall time", pairs=9)
    assert speed.sentence("control") == (
        "Decoding: slower than control by 31 % (95 % interval of the ratio 1.20 to 1.40)."
    )
    assert "neither slower nor faster" in replace(speed, low=0.9).sentence("control")
    assert "faster than control by 20 %" in replace(speed, ratio=0.8, low=0.7, high=0.9).sentence("control")


@pytest.mark.slow
def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fathom.evaluation.deepened.DECODED", 4)
    monkeypatch.setattr("fathom.evaluation.deepened.PAIRS", 6)
    loop = {"recurrence": "loop", "recurrence_options": {"trips": 4}}
    for name, keys in (("base", {}), ("deeper", loop), ("control", {})):
        export_tiny(tmp_path / name, mixer="none", **keys)
    text = tmp_path / "text.jsonl"
    rows = [{"text": f"{i} fathoms under the keel, by the deep {i * i}, and no bottom " * 2} for i in range(20)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = [str(tmp_path / name) for name in ("base", "deeper", "control")]
    words = ["evaluate", "deepened", *models, "--perplexity", f"sea={text}", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "sea: " in printed and " than control" in printed and " than base" in printed
    assert "Decoding: slower than control by" in printed, "four times the layers"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["deepened"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8").partition("</div>")[0]
    assert all(sentence in page.replace("\u00a0", " ") for sentence in found["sentences"]), "the verdict is the effect"
    kept = json.loads((tmp_path / "out" / "deepened.json").read_text())
    assert [effect["against"] for effect in found["effects"]] == ["control", "base"]
    assert kept["effects"] == found["effects"] and found["speed"]["ratio"] > 1.5
    assert main([*words[:4], *words[5:]]) == 2
    assert "the following arguments are required: CONTROL" in capsys.readouterr().err
