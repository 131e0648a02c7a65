"""`fathom try`: resumes to the same bytes, finds a planted gain, and says nothing where there is nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from fathom.cli.main import main
from fathom.data.shards import read_index, write_index
from fathom.deepen import trial as trials
from fathom.deepen.heal import gains_of
from fathom.deepen.request import parse_request
from fathom.deepen.trial import Finding, Trial, attempt
from fathom.deepen.write import deeper_config
from fathom.errors import FathomError, SettingsError
from fathom.evaluation.deepened import NOISE, DeepenedReport, Effect
from fathom.evaluation.results import ScoreGap
from fathom.experiments.arms import parse_arms
from fathom.models import FathomConfig
from fathom.recipe import find_recipe, load_recipe
from fathom.report.files import write_json
from fathom.training.loop import Run
from tests.cli.test_first_hour import llama
from tests.models.cases import SHAPE
from tests.tiny import export_tiny

command = import_module("fathom.cli.try")  # a keyword, which no import statement takes
SMALL = Trial("base", steps=12, tokens=64)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return llama(tmp_path / "base")


def found(value: float, width: float, verdict: str) -> Finding:
    """A finding with a made difference."""
    gap = ScoreGap("difference", value, value - width, value + width, 0.95, 40, 0.01, 0.01)
    effect = Effect("held-out", "bits_per_byte", "control", gap, verdict)
    return Finding(SMALL, Path("out"), DeepenedReport("base", "deepened", "control", [effect], None, []), {})


def test_the_verdict_speaks_of_two_models_and_of_one_seed() -> None:
    better, worse = found(-10 * NOISE, NOISE, "better"), found(10 * NOISE, NOISE, "worse")
    assert " is better than its control: " in better.verdict and " is worse than its control: " in worse.verdict
    for silent in (found(-10 * NOISE, 11 * NOISE, "not significant"), found(-NOISE / 2, NOISE / 9, "better")):
        assert "better" not in silent.verdict.partition("One seed")[0].replace("neither better nor worse", "")
    assert all("no verdict on the mechanism" in finding.verdict for finding in (better, worse))


def test_the_printed_comparison_runs(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the vocabulary of the tried model, and the tried options; layers of that model are not carried over."""
    monkeypatch.setattr("fathom.experiments.dry_run._step_seconds", lambda _: 1.0)
    data = shutil.copytree(corpus, tmp_path / "tried" / "data")
    write_index(data, replace(read_index(data), vocab_size=49152))
    asked = "depth_attention:blend=learned,gates=head+loop:trips=3,prelude=12,coda=10"
    for trial in (Trial("base", asked), Trial("base", "loop", "12-16")):
        said = shlex.split(command._compare(trial, tmp_path / "tried"))
        assert main([*said[1:], "--dry-run"]) == 0, said
    assert main([*said[1:4], *said[5:], "--dry-run"]) == 2 and "does not fit" in capsys.readouterr().err
    recipe = load_recipe(find_recipe("tiny"), said[3:5])
    control, loop = parse_arms(shlex.split(command._compare(Trial("base", asked), tmp_path / "tried"))[6])
    config = loop.recipe(recipe).config()
    assert control.mechanism == "vanilla" and config.vocab_size == 49152
    assert (config.mixer_options["blend"], config.mixer_options["gates"]) == ("learned", "head")
    assert config.recurrence_options["trips"] == 3


def test_a_directory_holds_one_trial(base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(SettingsError, match="holds no trial"):
        trials._opened(SMALL, tmp_path / "mine")
    trials._opened(SMALL, tmp_path / "out")
    longer = Trial("base", steps=13, tokens=64)
    assert trials._opened(longer, tmp_path / "out").trial == longer, "nothing is done, so nothing is lost"
    write_json(tmp_path / "out" / trials.NOTES, trials.Notes(SMALL, done=["deeper"]))
    assert trials._opened(SMALL, tmp_path / "out").done == ["deeper"]
    with pytest.raises(SettingsError, match="with `steps=12`"):
        trials._opened(longer, tmp_path / "out")
    (tmp_path / "out" / "try.json").write_text('{"trial": 3}')
    with pytest.raises(SettingsError, match="damaged"):
        trials._opened(SMALL, tmp_path / "out")
    with pytest.raises(SettingsError, match="mechanism"):
        Trial("base", mechanism="depth_atention")
    assert list((tmp_path / "mine").iterdir()) == [tmp_path / "mine" / "thesis.txt"]


def test_the_text_is_read_before_the_first_step(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_deepen", lambda *_: pytest.fail("the first step began"))
    (tmp_path / "line.txt").write_text("one line")
    for text in ("nowhere", "line.txt"):
        assert main(["try", str(base), "--text", text, "--out", "out"]) == 2 and text in capsys.readouterr().err
        assert not Path("out").exists()
    for texts, said in ((("a", "b c"), "with --text a b c; choose"), ((), "without --text; choose")):
        write_json(tmp_path / "out" / trials.NOTES, trials.Notes(Trial(str(base), text=texts), done=["deeper"]))
        assert main(["try", str(base), "--text", __file__, "--out", "out"]) == 2
        assert f"holds a trial that was run {said}" in capsys.readouterr().err


def test_the_control_of_learnt_gates_has_as_many_gains() -> None:
    def keys(text: str, **base: object) -> tuple[str, ...]:
        request = parse_request(text)
        return gains_of(request, deeper_config(FathomConfig(**SHAPE, **base), request))

    heads = ("model.mixer=value_gain", "model.mixer_options.gates=head")
    assert keys("depth_attention:blend=learned,gates=head") == heads
    assert keys("loop:blend=learned") == ("model.residual=branch_gain", "model.residual_options.gates=layer")
    assert keys("value_gain") == ("optim.groups={}",) and keys("depth_attention") == ()
    assert keys("value_gain", residual="branch_gain") == (), "the base model's gains keep their learning rate"
    learned = {"residual_options": {"blend": "learned"}}
    assert keys("loop:blend=learned", residual="attention_residuals", **learned) == ()


def test_the_control_opens_what_the_model_holds_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = export_tiny(tmp_path / "base", mixer="depth_attention", mixer_options={"blend": 0})
    trial, recipes = Trial(str(base), "loop", steps=12), []
    monkeypatch.setattr(trials, "train", lambda recipe, _: recipes.append(recipe) or SimpleNamespace(finished=True))
    steps = {name: step for name, _, step in trials._steps(trial, tmp_path)}
    for name in ("deeper", "healed", "control"):
        steps[name]()
    deeper, control = (recipe.config() for recipe in recipes)
    assert deeper.mixer_options == control.mixer_options and control.mixer_options["blend_steps"] == 6
    assert (deeper.recurrence, control.recurrence) == ("loop", "once")


@pytest.mark.slow
def test_stopped_twice_it_ends_with_the_same_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(SMALL, tmp_path / "whole", lambda _: None)
    announce, stops = Run._announce, {"healed": 4, "control": 2}  # a step before the last

    def stopped(self: Run) -> None:
        announce(self)
        if self.step == stops.get(self.run_dir.name):
            del stops[self.run_dir.name]
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, "_announce", stopped)
    said: list[str] = []
    for step in (5, 3):
        with pytest.raises(FathomError, match=f"stopped at step {step} of 12; the same command resumes") as caught:
            attempt(SMALL, tmp_path / "parts", said.append)
        assert caught.value.exit_code == 130
    finding = attempt(SMALL, tmp_path / "parts", said.append)
    for run in ("healed", "control"):
        whole, parts = (tmp_path / name / run / "model" / "model.safetensors" for name in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()
    assert sum(line.startswith("1/5") and line.endswith("done") for line in said) == 2
    assert finding.spent.keys() == {"deeper", "data", "healed", "control", "report"}


@pytest.mark.slow
@pytest.mark.parametrize("which, verdict", [("healed", "worse"), ("control", "better"), (None, "neither")])
def test_a_planted_gain_is_found_and_a_seed_is_not(
    which: str | None, verdict: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that never learns loses; two runs that differ by the order of the text do not differ."""
    train = trials._train

    def planted(trial: Trial, out: Path, name: str, overrides: list[str]) -> object:
        if which is None:
            return train(trial, out, name, [*overrides, f"train.seed={int(name == 'control')}"])
        return train(trial, out, name, [*overrides, f"optim.lr={1e-9 if name == which else 1e-3}"])

    monkeypatch.setattr(trials, "_train", planted)
    trial = Trial("base", "depth_attention:blend=0", steps=60, tokens=64)
    assert f"is {verdict}" in attempt(trial, tmp_path / "out", lambda _: None).verdict


@pytest.mark.slow
def test_the_command_prints_the_road_and_writes_a_page(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathom.evaluation.deepened.DECODED", 2)
    monkeypatch.setattr("fathom.evaluation.deepened.PAIRS", 6)
    text = [f"{i} fathoms under the keel, by the deep {i * i}. " * 2 for i in range(120)]
    Path("text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in text), encoding="utf-8")
    words = ["try", "base", "--text", "text.jsonl", "--steps", "4", "--tokens", "32"]
    assert main(words) == 0
    first = capsys.readouterr().out
    page = Path("tried/report.html").read_text(encoding="utf-8")
    assert "no verdict on the mechanism" in first and "no verdict on the mechanism" in page
    assert "fathom chat tried/healed" in first and "<svg" in page
    shutil.rmtree("tried/deeper")  # what is done is not done again
    assert main(words) == 0 and capsys.readouterr().out.partition("Minutes")[0] == first.partition("Minutes")[0]
    assert main([*words, "--layers", "0-1"]) == 2
