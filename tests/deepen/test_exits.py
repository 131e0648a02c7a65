"""Exits with a bound: how often it is broken, what planted loops save, and what the command writes."""

import json
import math
import time

import numpy as np
import pytest
import torch
from scipy import stats

from fathom.checkpoints.export import export
from fathom.cli.main import main
from fathom.deepen.exits import GRID, Bound, ThresholdReader, betting, chosen, exiting, student
from fathom.deepen.spans import Document
from fathom.errors import SettingsError
from fathom.models import FathomForCausalLM
from tests.models.cases import build, config_of, tokens
from tests.tiny import tiny_config, tiny_tokenizer

POPULATION, DOCUMENTS = 20_000, 1000


def population(seed, places=6, shift=0.0):
    """Differences of many documents at ever lower τ, `[places, documents]`: skewed, heavy-tailed, correlated."""
    rng = np.random.default_rng(seed)
    hard = rng.gamma(0.5, 2.0, POPULATION)  # some documents lose much
    scale = 0.004 * 1.6 ** np.arange(places)[:, None] * (1 + shift)
    return scale * hard + rng.normal(0, 0.02, (places, POPULATION)) - 0.002


def broken(found, bound, seed, times, truth=None):
    """The share of resamplings in which the chosen place loses more than ε on the whole population."""
    rng, wrong, saved = np.random.default_rng(seed), 0, 0
    means = (found if truth is None else truth).mean(1)
    for _ in range(0, times, 50):
        drawn = rng.integers(0, found.shape[1], (50, DOCUMENTS))
        passes = np.stack([bound.rejects(row[drawn]) for row in found])  # [places, 50]
        last = passes.cumprod(0).sum(0) - 1  # the place before the first that fails
        wrong += int(((last >= 0) & (means[last] > bound.loss)).sum())
        saved += int((last >= 0).sum())
    return wrong / times, saved / times


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("test", ["betting", "t"])
def test_the_bound_is_seldom_broken(test, times):
    """At ε between the means of two places, and just below one mean, where a false rejection is likeliest."""
    found = population(0)
    for loss in (0.012, float(found.mean(1)[3]) - 1e-6):
        share, saved = broken(found, Bound(loss=loss, test=test), 1, times)
        assert share <= (0.064 if times == 1000 else 0.14)
        assert saved > 0.9, "and not by refusing every exit"


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_choosing_by_the_mean_breaks_it(times, monkeypatch):
    """The negative control: the last place whose mean on the documents is at most ε."""
    found = population(0)
    monkeypatch.setattr(Bound, "rejects", lambda self, d: d.mean(-1) <= self.loss)
    assert broken(found, Bound(loss=float(found.mean(1)[3]) - 1e-6), 1, times)[0] > 0.3


def test_other_text_has_no_bound():
    """Documents that lose four times as much: the rule chosen elsewhere breaks the bound nearly always."""
    found, other = population(0), population(1, shift=3.0)
    assert broken(found, Bound(loss=0.012), 1, 50, truth=other)[0] > 0.9


def test_both_tests_are_what_they_are_called():
    rng = np.random.default_rng(0)
    d = rng.normal(0.0, 0.03, (8, 200))
    expected = stats.ttest_1samp(d, 0.01, axis=1, alternative="less").pvalue
    assert student(d, 0.01) == pytest.approx(expected, rel=1e-9)
    assert betting(np.zeros((1, 1000)), 0.01, 0.5, 0.05).all(), "no loss at all"
    assert not betting(np.full((1, 1000), 0.0101), 0.01, 0.5, 0.05).any()
    ever = betting(rng.choice([-0.5, 0.5], (2000, 400), p=[0.49, 0.51]), 0.01, 0.5, 0.05)
    assert ever.mean() <= 0.06, "a fair game of the largest stakes: mean 0.01"
    alone = [betting(d[i], 0.01, 0.5, 0.05) for i in range(8)]
    assert betting(d, 0.01, 0.5, 0.05).tolist() == [bool(one) for one in alone]


def test_the_search_stops_at_the_first_failure():
    asked, worth = [], {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.0}

    def differences(place):
        asked.append(place)
        return np.full(500, worth[place]) + 1e-4 * np.arange(500) / 500

    assert chosen(differences, Bound(), 4) == 1 and asked == [0, 1, 2]
    assert chosen(lambda place: np.full(500, 0.5), Bound()) is None


@pytest.mark.parametrize("keys", [{"loss": 0.0}, {"loss": 2.0}, {"documents": 1}, {"test": "f"}, {"level": 0.7}])
def test_impossible_bounds_are_refused(keys):
    with pytest.raises(SettingsError, match=f"{next(iter(keys))}="):
        Bound(**keys)


def planted(idle, trips=2):
    """A loop whose later trips do nothing, or whose every trip matters, and text that it wrote itself."""
    model = build(config_of("loop", recurrence_options={"trips": trips}), seed=3)
    with torch.no_grad():
        for layer in model.model.layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight.mul_(0.0 if idle else 0.7)
        model.model.embed_tokens.weight.mul_(2.0)
    return model


@torch.no_grad()
def written(model, count, length):
    """Documents drawn from the model itself, with all its trips."""
    torch.manual_seed(0)
    ids = tokens(count, 1)
    ids = model.generate(ids, max_new_tokens=length, do_sample=True, eos_token_id=None, pad_token_id=0)
    return [Document(str(i), row.numpy()) for i, row in enumerate(ids)]


def calibrated(model, documents, bound):
    reader = ThresholdReader(exiting(model), documents)
    measured = []

    def differences(place):
        found, summary = reader.measured(GRID[place])
        measured.append(summary)
        return found

    return reader, chosen(differences, bound), measured


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_idle_trips_are_saved_and_others_are_not(count):
    bound = Bound(documents=count, test="t" if count < 1000 else "betting")
    grid = len(GRID) if count >= 1000 else 3
    idle = planted(True)
    reader = ThresholdReader(exiting(idle), written(idle, count, 8))
    assert (reader.full == reader.read(0.0)[0]).all(), "an oracle stops every token after one trip"
    place = chosen(lambda place: reader.measured(GRID[len(GRID) - grid + place])[0], bound, grid)
    assert place is not None
    trips = reader.read(GRID[len(GRID) - grid + place])[1]
    assert 2 - trips >= 0.8 * (2 - 1)
    useful = planted(False)
    reader, place, measured = calibrated(useful, written(useful, count, 8), bound)
    assert reader.read(0.0)[0].mean() - reader.full.mean() > 0.2, "a trip is worth much"
    kept = 2.0 if place is None else measured[place].trips
    assert kept > 1.98


@pytest.mark.slow
def test_seconds_are_saved():
    """Reading and writing with every token stopping after one of four trips, against all four."""
    config = tiny_config(num_hidden_layers=6, hidden_size=128, mixer="none")
    keys = {"recurrence": "loop", "recurrence_options": {"trips": 4, "exit_confidence": 0.0}}
    model = FathomForCausalLM(type(config).from_dict(config.to_dict() | keys)).eval()
    ids, seconds = tokens(4, 64), {}
    for confidence in (0.0, math.inf, 0.0, math.inf):
        model.model.recurrence.confidence = confidence
        began = time.process_time()
        with torch.no_grad():
            model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None)
        seconds[confidence] = min(seconds.get(confidence, math.inf), time.process_time() - began)
    print({confidence: round(value, 3) for confidence, value in seconds.items()})
    assert seconds[0.0] < 0.5 * seconds[math.inf]


def test_the_command_writes_what_generate_obeys(tmp_path, capsys):
    torch.manual_seed(0)
    config = tiny_config(num_hidden_layers=2, mixer="none").to_dict()
    config |= {"recurrence": "loop", "recurrence_options": {"trips": 2}}
    model = FathomForCausalLM(type(tiny_config()).from_dict(config)).eval()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    base = export(model, tmp_path / "base", tiny_tokenizer())
    text = tmp_path / "text.jsonl"
    rng = np.random.default_rng(0)
    rows = ["".join(chr(c) for c in rng.integers(97, 123, 6)) for _ in range(40)]
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    words = ["--exit", str(base), "--loss", "0.4", "--test", "t", "--text", str(text), "--documents", "30"]
    assert main(["deepen", *words, "--shifted", str(text), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "loss at most 0.4 above all trips, with 95% confidence over documents, asymptotically" in said
    assert "exit_confidence 0: 1.00 of 2 trips" in said and "nothing is guaranteed there" in said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["recurrence_options"]["exit_confidence"] == 0.0
    found = json.loads((tmp_path / "out" / "exits.json").read_text())
    assert [row["exit_confidence"] for row in found["tested"]] == list(GRID)
    (tmp_path / "prompts").write_text('{"prompt": "abc"}\n')
    given = ["--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "3"]
    assert main(["generate", str(tmp_path / "out"), *given]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["trips"] == 1.0
    (text := tmp_path / "text.txt").write_text("abc")
    for wrong, says in (
        (["--exit", str(base), "--out", "x"], "--exit needs --text"),
        (["--exit", str(base), "--text", str(text), "--out", str(base)], "is the input model itself"),
        (["--exit", str(base), "--with", "loop", "--text", "x", "--out", "x"], "--with has no meaning with --exit"),
        ([str(base), "--out", "x"], "give --with"),
        ([str(base), "--with", "mudd", "--loss", "0.1", "--out", "x"], "--loss needs --exit"),
    ):
        assert main(["deepen", *wrong]) != 0
        assert says in capsys.readouterr().err
