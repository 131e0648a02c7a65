"""A learning-rate probe finds the rate at which gradient norms turn, of a curve that is known and of a run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fathom.experiments.run_page import Extras, read_run, run_page
from fathom.recipe import Recipe, load_recipe
from fathom.training import train
from fathom.training.probe import find_edges, is_probe, read_probe

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_least_is_where_the_curve_is_least(noise: float) -> None:
    chance = random.Random(0)
    rates = [1e-3 * (n + 1) / 200 for n in range(200)]
    gradients = [1 + (rate / 3e-4 - 1) ** 2 + noise * chance.gauss(0, 1) for rate in rates]
    losses = [2 + (rate / 6e-4 - 1) ** 2 + noise * chance.gauss(0, 1) for rate in rates]
    found = find_edges(rates, losses, gradients)
    assert found.gradient == pytest.approx(3e-4, rel=0.02 if not noise else 0.35)
    assert found.loss == pytest.approx(6e-4, rel=0.02 if not noise else 0.35)
    # One lucky batch is no minimum.
    gradients[190] = 0.5
    assert find_edges(rates, losses, gradients).gradient < 6e-4
    with pytest.raises(ValueError, match="19 steps are too few for a learning-rate probe"):
        find_edges(rates[:19], losses[:19], gradients[:19])


@pytest.mark.slow
def test_a_probe_is_a_run_that_says_what_it_saw(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shipped = load_recipe(ROOT / "recipes" / "specialise" / "probe.yaml")
    assert is_probe(shipped) and not is_probe(recipe)
    probe = recipe.override(
        "train.steps=24", "optim.lr=0.5", "optim.schedule=constant", "optim.warmup=1", "train.skip_spikes=null"
    ).override("track.display=lines", "train.checkpoint_every=12")
    train(probe, tmp_path / "run")
    said = capsys.readouterr()
    assert "the gradient norm was least at" in said.out + said.err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    rates = [json.loads(line).get("lr") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert report["rates"] == [rate for rate in rates if rate is not None]
    assert report["rates"] == sorted(report["rates"]) and len(report["rates"]) == 24
    assert str(read_probe(tmp_path / "run")) == report["verdict"]
    assert "Gradient norm" in (tmp_path / "run" / "report.html").read_text(), "of a diverged one too"
    said = run_page(read_run(tmp_path / "run"), Extras())
    assert report["verdict"][1:] in said and "Learning-rate probe" in said
    (tmp_path / "run" / "result.json").unlink()
    assert read_run(tmp_path / "run").verdict.splitlines()[1][1:-1] == report["verdict"][1:], "of an unfinished run"
    train(recipe.override("train.steps=2"), tmp_path / "plain")
    assert "Learning-rate probe" not in run_page(read_run(tmp_path / "plain"), Extras())
