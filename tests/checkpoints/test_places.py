"""No command writes into a folder that another made, nor over a file of another kind; all take their own again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fathom.checkpoints.export import require_replaceable
from fathom.checkpoints.file_names import RECIPE
from fathom.checkpoints.places import LITTER, Kind, contents, is_file_with, is_page, require_file, require_folder
from fathom.cli.main import main
from fathom.corpus.pipeline import RUN, _is_ours
from fathom.corpus.recipe import load_corpus_recipe
from fathom.corpus.stage import STAGES
from fathom.data.shards import INDEX
from fathom.deepen import screen_page, search_page, spans, trial
from fathom.errors import ModelError, SettingsError
from fathom.evaluation import deepened
from fathom.experiments.paper_table import TABLE
from fathom.lineage.publishing.portrait import SIZE, is_portrait, png
from fathom.recipe import load_recipe
from fathom.report.html import page
from fathom.training.loop import require_place
from tests.tiny import tiny_recipe

CORPUS = "collections:\n  mine:\n    inputs: [thesis.txt]\ntokenize: {train: 300}\n"
HOLDS: dict[Kind, dict[str, str]] = {
    "a run": {RECIPE: "model: {}\n", "metrics.jsonl": '{"step": 1}\n'},
    "a corpus": {RECIPE: CORPUS, RUN: "{}"},
    "a recipe": {RECIPE: "model: {}\n"},
    "an audit": {f"{STAGES}/ingest/manifest.json": "{}", "report.json": "{}"},
    "a model": {"config.json": "{}"},
    "token shards": {INDEX: '{"format": "fathom-tokens"}'},
    "a ladder": {"ladder.json": "{}", "report.json": "{}"},
    "a comparison": {"plan.json": "{}", "report.json": '{"arms": []}'},
    "a paper's table": {TABLE: '{"tier": "tiny"}'},
    "a trial": {trial.NOTES: "{}"},
    "a search": {search_page.REPORT: "{}"},
    "an evaluation": {"report.json": '{"checkpoints": {}}', "report.html": "scores"},
    "a lineage report": {"report.json": '{"fathom_lineage_report": 1}', "report.html": "verdict"},
    "candidates of a lineage": {"report.json": '{"candidates": []}', "report.html": "verdict"},
    "other files": {"report.html": "my thesis"},
}
COMMANDS: dict[str, Kind] = {
    "train tiny data.directory=puzzle:hops train.export=false --run OUT": "a run",
    "corpus corpus.yaml --out OUT": "a corpus",
    "corpus corpus.yaml --dry-run --out OUT": "a corpus",
    "corpus audit thesis.txt --benchmark thesis.txt --out OUT": "an audit",
    "prepare thesis.txt --train-tokenizer 300 --out OUT": "token shards",
    "compare tiny --arms vanilla,loop --out OUT": "a comparison",
    "compare tiny --arms vanilla,loop --dry-run --out OUT": "a comparison",
    "ladder cpu --arms vanilla,loop --out OUT": "a ladder",
    "compare papers/ponderlm/feedback --out OUT": "a paper's table",
    "compare papers/ponderlm/feedback --dry-run --out OUT": "a paper's table",
    "evaluate nowhere --perplexity thesis.txt --out OUT": "an evaluation",
    "evaluate deepened a b c --perplexity thesis.txt --out OUT": "an evaluation",
    "evaluate tuned a b --benchmark nowhere --out OUT": "an evaluation",
    "evaluate caches nowhere --kvcache full --out OUT": "an evaluation",
    "lineage compare nowhere nowhere --out OUT": "a lineage report",
    "lineage identify nowhere --library nowhere --out OUT": "candidates of a lineage",
    "lineage attack nowhere --kind scale --out OUT": "a model",
    "deepen nowhere --with loop --search --text thesis.txt --out OUT": "a search",
    "deepen nowhere --screen --text thesis.txt --out OUT": "a search",
    "try nowhere/model --text thesis.txt --out OUT": "a trial",
}


def made(folder: Path, files: dict[str, str]) -> Path:
    """A folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """All files with their contents."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_kind_is_known_by_the_names_that_its_command_writes(tmp_path: Path) -> None:
    for kind, files in HOLDS.items():
        found = contents(made(tmp_path / kind.replace(" ", "-"), files))
        assert found is not None and found[0] == kind, kind
    marks = (spans.LOG, screen_page.REPORT, deepened.REPORT)
    kinds = [contents(made(tmp_path / mark, {mark: "{}"})) for mark in marks]
    assert kinds == [("a search", spans.LOG), ("a search", screen_page.REPORT), ("an evaluation", deepened.REPORT)]
    assert contents(tmp_path / "nowhere") is None and contents(made(tmp_path / "notes", {"notes.txt": "mine"})) is None


FEW: tuple[Kind, ...] = ("a run", "a recipe", "a lineage report")


@pytest.mark.parametrize("kinds", [FEW, pytest.param(tuple(HOLDS), marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("line", COMMANDS)
def test_a_folder_of_another_command_is_refused_untouched(
    line: str,
    kinds: tuple[Kind, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, {"thesis.txt": "the depth\n\nof a river\n", "corpus.yaml": CORPUS})
    for kind in kinds:
        if kind == COMMANDS[line] or (kind, COMMANDS[line]) == ("a recipe", "a run"):
            continue
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        before = tree(made(tmp_path / "out", HOLDS[kind]))
        code, said = main([word.replace("OUT", "out") for word in line.split()]), capsys.readouterr().err
        assert (code, said.count("\n")) == (2, 1) and said.startswith(("fathom: out ", "fathom: --out out ")), kind
        assert tree(tmp_path / "out") == before


def test_one_s_own_folder_is_taken_and_so_is_a_free_one(tmp_path: Path) -> None:
    for kind, files in HOLDS.items():
        require_folder(made(tmp_path / kind.replace(" ", "-"), files), kind)
        with pytest.raises(SettingsError, match="holds"):
            require_folder(tmp_path / kind.replace(" ", "-"), "a checkpoint")
    require_folder(made(tmp_path / "notes", {"notes.txt": "mine"}), "a run")
    require_folder(tmp_path / "new" / "deep", "a run")
    for place in (tmp_path / "notes" / "notes.txt", tmp_path / "notes" / "notes.txt" / "run"):
        with pytest.raises(SettingsError, match=r"is a file|is not a directory"):
            require_folder(place, "a run")


def test_what_a_desktop_leaves_is_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path / "out", dict.fromkeys(LITTER, ""))
    require_replaceable(folder)
    trial._opened(trial.Trial("base"), folder)
    assert _is_ours(made(tmp_path / "corpus", dict.fromkeys(LITTER, "")))
    made(tmp_path / "corpus", {"notes.txt": "mine"})
    assert not _is_ours(tmp_path / "corpus")
    with pytest.raises(ModelError, match="not an earlier export"):
        require_replaceable(tmp_path / "corpus")
    with pytest.raises(SettingsError, match="holds no trial"):
        trial._opened(trial.Trial("base"), tmp_path / "corpus")


def test_a_run_replaces_no_recipe_that_was_written_by_hand(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(corpus)
    hand = "# my notes\n" + recipe.to_yaml()
    path = made(tmp_path / "project", {RECIPE: hand}) / RECIPE
    for words in ([str(path), "--run", str(path.parent)], [str(path.parent)], [str(path.parent), "--dry-run"]):
        assert main(["train", *words]) == 2 and "choose another directory" in capsys.readouterr().err
        assert path.read_text() == hand
    path.write_text(recipe.to_yaml())  # as a run that was stopped at once leaves it
    require_place(load_recipe(path), path.parent)
    path.write_text(hand)
    (path.parent / ".lock").touch()  # a run began here
    require_place(load_recipe(path), path.parent)
    (path.parent / ".lock").unlink()
    made(tmp_path / "downloads" / "model", HOLDS["a model"])
    with pytest.raises(SettingsError, match=r"holds a model \(model\)"):
        require_place(recipe, tmp_path / "downloads")
    (path.parent / "metrics.jsonl").touch()
    path.write_text(hand)  # edited where a run already is
    require_place(load_recipe(path), path.parent)


def test_a_corpus_replaces_no_recipe_that_was_written_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made(tmp_path, {"project/recipe.yaml": CORPUS, "thesis.txt": "the depth\n\nof a river\n"}))
    words = ["corpus", "project/recipe.yaml", "--out", "project"]
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) == 2 and "choose another directory with --out" in capsys.readouterr().err
        assert tree(tmp_path / "project") == {RECIPE: CORPUS.encode()}
    own = load_corpus_recipe(Path("project/recipe.yaml")).to_yaml()
    Path("project/recipe.yaml").write_text(own)  # as a build that was stopped at once leaves it
    assert main([*words, "--dry-run"]) == 0


WRITERS = {
    "lens nowhere text -o FILE": "page",
    "report run -o FILE": "page",
    "lineage portrait nowhere --out FILE": "portrait",
    "lineage card nowhere --out FILE": "fathom_card",
    "lineage commit nowhere --out FILE": "fathom_commitment",
    "lineage calibrate nowhere nowhere --out FILE": "fathom_null",
    "lineage commit nowhere --blind --out new --key-out FILE": "key",
    "recipes copy tiny --to FILE": "recipe",
    "generate nowhere --prompts prompts.jsonl --out FILE": "answers",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each kind that a command writes."""
    folder = tmp_path_factory.mktemp("files")
    for key in ("fathom_card", "fathom_commitment", "fathom_null"):
        (folder / key).write_text(json.dumps({key: 1}))
    (folder / "page").write_text(page("Title", "Verdict"))
    (folder / "portrait").write_bytes(png(np.zeros((SIZE, SIZE, 3), np.uint8)))
    (folder / "photo").write_bytes(png(np.zeros((SIZE, SIZE + 1, 3), np.uint8)))
    (folder / "website").write_text("<!doctype html>\n<title>Fathom</title>\n")
    (folder / "recipe").write_text("model: {}\n")
    (folder / "list").write_text("[1]")
    (folder / "key").write_text("ab" * 32)
    return folder


@pytest.mark.parametrize("kinds", ["[rw]e*", pytest.param("*", marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("line", WRITERS)
def test_a_file_of_another_kind_is_never_written_over(
    line: str,
    kinds: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(made(tmp_path, {"prompts.jsonl": '{"prompt": "a"}\n', "run/thesis.txt": "mine"}))
    for path in files.glob(kinds):  # a recipe and a website
        if path.name == WRITERS[line] and path.name not in ("key", "recipe"):
            continue
        shutil.copy(path, "file")
        words = [word.replace("FILE", "file") for word in line.split()]
        assert main(words) == 2 and "file" in (said := capsys.readouterr().err), path.name
        assert "choose another" in said or "name another" in said, said
        assert Path("file").read_bytes() == path.read_bytes()


def test_a_file_of_the_same_kind_is_written_again(files: Path, tmp_path: Path) -> None:
    own = {"page": is_page, "portrait": is_portrait}
    own |= {key: is_file_with(key) for key in ("fathom_card", "fathom_commitment", "fathom_null")}
    for name, is_own in own.items():
        assert [path.name for path in files.iterdir() if is_own(path)] == [name]
        require_file(files / name, "one", is_own)
    require_file(tmp_path / "new" / "page.html", "a page", is_page)
    (tmp_path / "empty").touch()
    require_file(tmp_path / "empty", "a page", is_page)
    with pytest.raises(SettingsError, match="is a directory"):
        require_file(tmp_path, "a page", is_page)
    with pytest.raises(SettingsError, match="is not a page"):
        require_file(Path("/dev/null"), "a page", is_page)


def test_the_list_of_a_folder_of_runs_replaces_no_page_of_one_s_own(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {RECIPE: tiny_recipe(corpus).to_yaml(), "metrics.jsonl": '{"step": 1, "tokens": 64, "loss": 5.0}\n'}
    made(tmp_path / "runs" / "a", run)
    index = made(tmp_path / "runs", {"index.html": "<title>My site</title>"}) / "index.html"
    assert main(["report", str(tmp_path / "runs")]) == 2 and "index.html exists" in capsys.readouterr().err
    assert index.read_text() == "<title>My site</title>"
    index.unlink()
    for _ in range(2):
        assert main(["report", str(tmp_path / "runs")]) == 0 and is_page(index)
