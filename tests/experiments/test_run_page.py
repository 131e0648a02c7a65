"""`fathom report`: the numbers of a page are the run's own; an unfinished run has one; a folder has a front page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fathom.cli.main import main
from fathom.experiments.run_page import Extras, _cost, _overview, read_run, run_page
from fathom.recipe import load_recipe
from fathom.report import html
from fathom.report.plots import Line

SHORT = ("train.steps=6", "train.tokens_per_step=256", "train.micro_batch=2", "train.device=cpu", "evaluate.tokens=512")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Two finished runs, and one that was stopped."""
    folder = tmp_path_factory.mktemp("runs")
    words = ("train", "tiny", f"data.directory={corpus}", "model.vocab_size=304", "evaluate.every=3", *SHORT)
    assert main([*words, "--run", str(folder / "a")]) == 0
    shutil.copytree(folder / "a", folder / "b")
    other = load_recipe(folder / "a" / "recipe.yaml", ("optim.lr=1e-3",))
    (folder / "b" / "recipe.yaml").write_text(other.to_yaml(), encoding="utf-8")
    shutil.copytree(folder / "a", folder / "stopped")
    (folder / "stopped" / "result.json").unlink()
    shutil.rmtree(folder / "stopped" / "model")
    return folder


@pytest.mark.slow
def test_training_leaves_a_page_with_its_own_numbers(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (runs / "a" / "report.html").read_text(encoding="utf-8")
    score = json.loads((runs / "a" / "result.json").read_text())["evaluation"]
    assert f"Held-out loss {score['loss']:.4f}" in page and f"perplexity {score['perplexity']:.2f}" in page
    assert page.count("<svg") >= 4 and "Loss by position" in page and "tokens_per_step: 256" in page
    digest = (runs / "a" / "model" / "weights.sha256").read_text().split()[0]
    assert digest in page
    assert main(["report", str(runs / "a"), "--against", str(runs / "b"), "-o", str(runs / "pair.html")]) == 0
    pair = (runs / "pair.html").read_text(encoding="utf-8")
    assert "optim.lr" in pair and "optim.betas" not in pair.partition("Keys that differ")[2].partition("</table>")[0]


def test_a_prompt_is_continued_and_seen_through_the_lens(runs: Path) -> None:
    assert main(["report", str(runs / "a"), "--prompt", "A <b>model</b>"]) == 0
    page = (runs / "a" / "report.html").read_text(encoding="utf-8")
    assert "A &lt;b&gt;model&lt;/b&gt;" in page and 'href="report-lens.html"' in page
    assert (runs / "a" / "report-lens.html").is_file()


def test_a_run_whose_source_is_not_here_has_a_page(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("a", 0), ("stopped", 2)):
        run = shutil.copytree(runs / name, tmp_path / name)
        text = (run / "recipe.yaml").read_text(encoding="utf-8")
        (run / "recipe.yaml").write_text(text.replace("model:\n", "model:\n  from_pretrained: elsewhere/model\n", 1))
        assert main(["report", str(run), "--against", str(runs / "b")]) == code
    assert "model.from_pretrained=elsewhere/model" in capsys.readouterr().err
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "elsewhere/model" in page.partition("Keys that differ")[2].partition("</table>")[0]


def test_losses_of_different_texts_are_not_subtracted(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes tell, whatever the tokenizer: twice the tokens, each of half as many bytes, are of the same text."""
    score = json.loads((runs / "a" / "result.json").read_text())["evaluation"]
    cut = {"tokens": score["tokens"] // 2}
    other = {"tokens": 2 * score["tokens"], "loss": score["loss"] / 2}
    for name, changes in (("a", {}), ("cut", cut), ("other", other)):
        run = shutil.copytree(runs / "a", tmp_path / name)
        result = json.loads((run / "result.json").read_text())
        result["evaluation"] |= changes
        (run / "result.json").write_text(json.dumps(result))
    said = {}
    for name in ("cut", "other"):
        assert main(["report", str(tmp_path / name), "--against", str(tmp_path / "a")]) == 0
        said[name] = capsys.readouterr().out
    result["evaluation"] |= {"loss": None, "bits_per_byte": None}  # JSON's null is how NaN is written
    (tmp_path / "other" / "result.json").write_text(json.dumps(result))
    assert main(["report", str(tmp_path / "other"), "--against", str(tmp_path / "a")]) == 0
    assert "minus" not in capsys.readouterr().out
    assert "different held-out text" in said["cut"] and "minus" not in said["cut"]
    assert "other minus a: +0.0000 bits per byte" in said["other"]
    assert main(["report", str(tmp_path)]) == 0
    assert "none is called the best" in Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")


def test_a_part_without_targets_moves_no_other(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four parts of the context the first is all prompt: the others stay where they are, none beyond the end."""
    run = read_run(runs / "a")
    assert run.result is not None and run.result.evaluation is not None
    score = replace(run.result.evaluation, position_loss=[None, 3.0, 2.0, 1.0])
    drawn: dict[str, Sequence[Line]] = {}
    monkeypatch.setattr(html, "plot", lambda title, lines, *words: drawn.update({title: lines}) or "")
    run_page(replace(run, result=replace(run.result, evaluation=score)), Extras())
    length = run.recipe.data.sequence_length
    (line,) = drawn["Loss by position"]
    assert list(line.x) == [length / 2, 3 * length / 4, length]


def test_a_run_without_a_finite_loss_is_not_the_best(runs: Path) -> None:
    """Nor does it make the text of the others a different one."""
    run, other = read_run(runs / "a"), read_run(runs / "b")
    assert run.result is not None and run.result.evaluation is not None
    score = replace(run.result.evaluation, loss=float("nan"), bits_per_byte=float("nan"))
    lost = replace(run, result=replace(run.result, evaluation=score))
    assert _overview([lost, run, other]).startswith("3 runs, 3 finished. a has the fewest bits per byte, ")
    assert _overview([lost, lost, run]) == "3 runs, 3 finished."


def test_a_distilled_run_shows_the_loss_of_the_next_token(runs: Path) -> None:
    run = read_run(runs / "stopped")
    mixed = [
        {**line, "loss": line["loss"] / 2, "cross_entropy": line["loss"]} for line in run.metrics if "loss" in line
    ]
    held = [line for line in run.metrics if "loss" not in line]
    pages = [run_page(one, Extras()) for one in (run, replace(run, metrics=[*mixed, *held]))]
    one, other = (page.partition("Where this page comes from")[0] for page in pages)
    assert one == other


def test_the_cost_of_a_finished_distilled_run_has_the_teachers(runs: Path, tmp_path: Path) -> None:
    """If the teacher is gone, the page says that its FLOPs are left out."""
    plain, run = read_run(runs / "a"), shutil.copytree(runs / "a", tmp_path / "run")
    for teacher, left_out in ((runs / "b" / "model", False), (tmp_path / "gone", True)):
        recipe = plain.recipe.override(f"distill.teacher={teacher}")
        (run / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        found = read_run(run)
        assert (found.cost.training_flops == plain.cost.training_flops) is left_out
        assert ("without the teacher" in _cost(found)["FLOPs of the training"]) is left_out


def test_a_run_whose_hooks_log_numbers_has_a_page(runs: Path) -> None:
    run = read_run(runs / "a")
    logged = replace(run, metrics=[*run.metrics, {"step": 6, "best_loss": 1.0}])
    one, other = (re.sub(r"[\d:]+ UTC", "", run_page(each, Extras())) for each in (logged, run))
    assert one == other and logged.tokens == run.tokens > 0


def test_a_stopped_run_and_a_folder(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stopped = read_run(runs / "stopped")
    assert "unfinished: 6 of 6" in run_page(stopped, Extras()) and "skipped" not in stopped.verdict
    lost = [{**stopped.metrics[0], "skipped": 1.0}] * 2
    assert "The last 2 were skipped" in replace(stopped, metrics=[*stopped.metrics, *lost]).verdict
    for words in (["report", str(runs / "stopped"), "--prompt", "x"], ["report", str(tmp_path)], ["report", "nowhere"]):
        assert main(words) == 2
    assert main(["report", str(runs), "--against", str(runs / "a")]) == 2
    capsys.readouterr()
    (runs / "stopped" / "report.html").unlink()  # a copy of a's
    assert main(["report", str(runs)]) == 0
    front = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    assert all(f'href="{name}/report.html"' in front for name in ("a", "b", "stopped"))
    assert "<h1>Training runs in " in front and "<p>3 runs, 2 finished. " in front
    assert "step 6 of 6" in front and (runs / "stopped" / "report.html").is_file()
