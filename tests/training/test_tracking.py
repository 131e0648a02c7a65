"""Numbers reach every tracker that is named, and the terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from fathom.data.shards import TokenDataset
from fathom.models.cost import count_parameters
from fathom.recipe import Recipe
from fathom.report.numbers import duration
from fathom.training import read_metrics, train
from fathom.training.tracking import Display, open_trackers, readable

STUB = """
calls = []
class Run:
    def log(self, values, step): calls.append((step, dict(values)))
    def finish(self): calls.append("finish")
run = Run()
def init(**settings):
    calls.append(settings)
    return run
log, finish = run.log, run.finish
"""


@pytest.mark.parametrize("backend", ["wandb", "trackio"])
def test_named_trackers(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    (tmp_path / f"{backend}.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, backend, raising=False)
    train(recipe.override(f"track.backends=[{backend}]", "train.steps=4"), tmp_path / "run")
    (settings, *logged, last) = sys.modules[backend].calls
    assert settings["project"] == "fathom" and settings["config"]["train"]["steps"] == 4 and last == "finish"
    assert [{"step": step, **values} for step, values in logged] == read_metrics(tmp_path / "run")
    del sys.modules[backend]


@pytest.mark.parametrize(("backend", "key"), [("wandb", "id"), ("trackio", "name")])
def test_every_run_is_one_of_its_own(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, key: str
) -> None:
    """Two arms of one seed are two runs to a tracking service, and a resumed run is the one that it was."""
    (tmp_path / f"{backend}.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, backend, raising=False)
    runs = [tmp_path / "deep" / "arms" / arm / "seed-0" for arm in ("vanilla", "depth_attention")]
    runs += [tmp_path / "here" / "run", tmp_path / "there" / "run"]
    for run in [*runs, runs[0]]:
        run.mkdir(parents=True, exist_ok=True)
        for tracker in open_trackers(recipe.override(f"track.backends=[{backend}]"), run, 0, print):
            tracker.after_run(None, None)
    begun = [call for call in sys.modules[backend].calls if isinstance(call, dict)]
    keys = [settings[key] for settings in begun]
    assert len(set(keys[:4])) == 4 and keys[4] == keys[0]
    assert [settings.get("group") for settings in begun] == ["deep", "deep", None, None, "deep"]
    assert "depth_attention seed-0" in begun[1]["name"]
    del sys.modules[backend]


VALUES = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 1234.0, "mfu": 0.42, "memory_bytes": 2.0**30}


def test_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    display = Display("lines", 10)
    display.log(4, {"loss": 9.9, "lr": 1e-3, "grad_norm": 0.5})
    display.log(5, {**VALUES, "eta_seconds": 65.0})
    display.say("a [sentence]")
    shown = sys.stderr.getvalue()
    assert all(text in shown for text in ("2.5000", "1,234", "42.0 %", "1.0 GiB", "1:05", "a [sentence]"))
    assert "9.9" not in shown, "between looks there is no speed to show"


def test_a_run_says_what_it_trains_and_on_what(
    recipe: Recipe, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first step; and after the second, how long a slow run will take: the first sets much up."""
    recipe = recipe.override("track.display=lines", "train.steps=3", "train.log_every=3", "evaluate.every=0")
    monkeypatch.setattr("fathom.training.tracking.SLOW", -1.0)
    train(recipe, tmp_path / "run")
    said = capsys.readouterr().err.splitlines()
    size, text = count_parameters(recipe.config()), TokenDataset.open(corpus).num_tokens
    where = f"cpu, {torch.get_num_threads()} thread"
    assert said[0].startswith(f"{tmp_path / 'run'}: {size:,} parameters on {where}")
    assert said[0].endswith(f"; 3 steps of 256 tokens, corpus of {text:,}; Ctrl-C stops and saves")
    assert said[1] == "step 1/3 took 0:00" and said[2].startswith("step 2/3 took 0:00, about 0:00 to go")
    assert said[3].startswith("step 3/3  loss")
    monkeypatch.setattr("fathom.training.tracking.SLOW", 100.0)
    train(recipe, tmp_path / "fast")
    assert " took " not in capsys.readouterr().err, "the negative control"


def test_a_distilled_run_shows_what_its_loss_is_made_of() -> None:
    values = {**VALUES, "eta_seconds": 5.0}
    shown = readable({**values, "cross_entropy": 4.75, "distill": 0.25})
    assert list(shown)[:3] == ["loss", "ce", "kl"] and (shown["ce"], shown["kl"]) == ("4.7500", "0.2500")
    assert not {"ce", "kl"} & readable(values).keys()


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_trips_are_shown_where_there_are_any() -> None:
    values = {**VALUES, "eta_seconds": 5}
    assert "trips" not in readable(values)
    assert readable({**values, "trips": 2.706})["trips"] == "2.71"
