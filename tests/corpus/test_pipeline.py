"""From files to shards: the same bytes whoever does it, wherever, however often it is killed; and no work twice."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from fathom.cli.main import main
from fathom.corpus import executor, publish
from fathom.corpus.pipeline import Report, build, preview
from fathom.corpus.recipe import parse_corpus_recipe
from fathom.corpus.stage import Workspace
from fathom.data.shards import TokenDataset
from fathom.data.tokenizer import plain_encoder
from fathom.errors import DataError
from tests.corpus.files import write
from tests.corpus.prose import Prose, recipe_values, tree, write_jsonl
from tests.corpus.test_quality import PARAGRAPHS
from tests.data.corpora import stream


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two collections with duplicates, leaks and bad rows; and a benchmark."""
    folder = tmp_path_factory.mktemp("corpora")
    prose = Prose(21)
    texts = [prose.document(150) for _ in range(60)]
    leak = prose.sentence(20)
    domain = [*texts, *(prose.edited(text, 1) for text in texts[:5]), texts[9], "short", {"other": 1}]
    (folder / "domain").mkdir()
    write_jsonl(folder / "domain" / "a.jsonl", domain[:30])
    write_jsonl(folder / "domain" / "b.jsonl", domain[30:])
    write(folder / "domain" / "c.txt", f"{prose.document(100)} {leak} {prose.document(100)}")
    write_jsonl(folder / "replay.jsonl", [prose.document(150) for _ in range(30)])
    write_jsonl(folder / "quiz.jsonl", [{"id": "leaked", "question": leak}, {"question": prose.sentence(20)}])
    return folder


def recipe_of(corpora: Path, tokenizer: str, **sections: Any) -> dict[str, Any]:
    collections: dict[str, Any] = {
        "domain": {"inputs": [str(corpora / "domain")], "license": "CC0-1.0"},
        "replay": [corpora / "replay.jsonl"],
    }
    quiz = {"benchmarks": {"quiz": str(corpora / "quiz.jsonl")}}
    return recipe_values(
        collections, decontaminate=quiz, tokenize={"tokenizer": tokenizer, "held_out": 0.1}, **sections
    )


def made(directory: Path, values: dict[str, Any]) -> Report:
    return build(parse_corpus_recipe(values), directory)


@pytest.fixture(scope="module")
def whole(corpora: Path, tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The corpus of `recipe_of`, made once."""
    return made(tmp_path_factory.mktemp("whole") / "out", recipe_of(corpora, tokenizer))


@pytest.fixture
def out(whole: Report, tmp_path: Path) -> Path:
    """A finished corpus of one's own."""
    return shutil.copytree(whole.directory, tmp_path / "out")


def test_shards_decode_to_the_documents(corpora: Path, tokenizer: str, whole: Report) -> None:
    report = whole
    encoder = plain_encoder(Path(tokenizer) / "tokenizer.json")
    documents, tokens = 0, 0
    kept = {}
    for split in ("train", "val"):
        for domain in TokenDataset.open(report.directory / "shards", split).domains:
            data = TokenDataset.open(report.directory / "shards", split, domain)
            ids = stream(data)
            ends = np.flatnonzero(ids == data.eos_token_id)
            assert len(ends) == data.num_documents and ends[-1] == len(ids) - 1
            texts = [encoder.decode(one.tolist()) for one in np.split(ids, ends[:-1] + 1)]
            kept[split, domain] = [text.removesuffix("<|endoftext|>") for text in texts]
            assert sum(len(text.encode()) for text in kept[split, domain]) == data.num_bytes
            documents, tokens = documents + data.num_documents, tokens + data.num_tokens
    cleaned = Workspace(report.directory, parse_corpus_recipe(recipe_of(corpora, tokenizer)))
    originals = {
        json.loads(line)["text"]
        for part in cleaned.parts("clean")
        for line in cleaned.path(part).read_text().splitlines()
    }
    found = [text for texts in kept.values() for text in texts]
    assert set(found) <= originals and len(set(found)) == len(found) == documents == 90
    encoded = sum(len(encoder.encode(text, add_special_tokens=False).ids) + 1 for text in found)
    assert tokens == encoded == report.stages["tokenize"].counts["tokens"]
    card = report.card.read_text()
    for row in ("| duplicate | 6 | 0 |", "| filter: min_words | 1 | 0 |", "| unreadable: parse_error | 1 | 0 |",
                "| contaminated: drop | 1 | 0 |", "CC0-1.0 (60)", "| quiz | 2 | 1 |"):  # fmt: skip
        assert row in card, card


def test_the_same_bytes_from_anyone_anywhere_and_no_work_twice(
    corpora: Path, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathom.corpus.ingest.TASK_FILES", 1)
    monkeypatch.setattr("fathom.corpus.executor.POOL_BYTES", 0)
    values = recipe_of(corpora, tokenizer, deduplicate={"bands": 2, "rows": 4})
    made(tmp_path / "one", values)
    shutil.copytree(corpora, tmp_path / "moved")
    copied = recipe_of(
        tmp_path / "moved", str(shutil.copytree(tokenizer, tmp_path / "tokenizer")), executor={"workers": 3}
    )
    copied["deduplicate"] = values["deduplicate"]
    made(tmp_path / "two", copied)
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    changed = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    assert changed == {"shards/index.json"}  # which says what it was made from
    indices = [json.loads(found["shards/index.json"]) for found in (one, two)]
    assert indices[0].pop("settings") != indices[1].pop("settings")
    assert indices[0].pop("crc32") != indices[1].pop("crc32") and indices[0] == indices[1]
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*") if path.parent.parent.name != "one"
    }
    again = made(tmp_path / "one", values)
    assert sum(stage.done for stage in again.stages.values()) == 0 and "nothing had changed" in str(again)
    assert tree(tmp_path / "one") == one
    shards = {path: stamp for path, stamp in before.items() if "shards" in path.parts and path.is_file()}
    assert shards and all(path.stat().st_mtime_ns == stamp for path, stamp in shards.items() if path.suffix == ".bin")


@pytest.mark.slow
def test_a_corpus_below_its_inputs_does_not_read_itself(corpora: Path, tokenizer: str, tmp_path: Path) -> None:
    shutil.copytree(corpora, tmp_path / "in")
    domain = tmp_path / "in" / "domain"
    (domain / "again").symlink_to("corpus")
    values = recipe_of(tmp_path / "in", tokenizer)
    first = tree(made(domain / "corpus", values).directory / "shards")
    assert tree(made(domain / "corpus", values).directory / "shards") == first
    for inputs in (domain, domain / "**"):
        values["collections"]["domain"]["inputs"] = [str(inputs)]
        assert preview(parse_corpus_recipe(values), domain / "corpus").inputs["domain"].files == 3


@pytest.mark.slow
def test_a_threshold_does_again_what_follows_alone(corpora: Path, tokenizer: str, out: Path) -> None:
    mine = [write(out / "shards" / name, "mine") for name in ("notes.txt", "train/domain/notes.txt")]
    stricter = {**recipe_of(corpora, tokenizer), "deduplicate": {"jaccard": 0.9999}}
    stages = made(out, stricter).stages
    assert [name for name in stages if stages[name].done] == ["verify", "duplicates", "contamination", "tokenize"]
    kept = [stages["tokenize"].counts[f"{name} train documents"] for name in ("domain", "replay")]
    assert TokenDataset.open(out / "shards").num_documents == sum(kept)
    # Another order of collections in the mixture touches no stage at all.
    mixed = {**stricter, "mix": {"shares": {"domain": 0.5, "replay": 0.5}, "block": 64}}
    report = made(out, mixed)
    assert not any(stage.done for stage in report.stages.values()) and report.budget.weights == {
        "domain": 1,
        "replay": 1,
    }
    # What is filtered differently, with the same outcome, goes no further.
    looser = {**mixed, "filter": {"max_words": 90_000}}
    assert [name for name, stage in made(out, looser).stages.items() if stage.done] == ["clean"]
    # What is no longer published goes; a user's own files stay.
    whole = {"normalize": {"blank_lines": 5}, "tokenize": {**looser["tokenize"], "held_out": 0}}
    assert made(out, {**looser, **whole}).stages["clean"].done
    assert not (out / "shards" / "val").exists() and all(path.read_text() == "mine" for path in mine)


@pytest.mark.quick("_link-3", "unlink-3", "replace-4")
@pytest.mark.parametrize("stops, at", [("_link", 3), ("unlink", 3), ("replace", 1), ("replace", 4), ("replace", 6)])
def test_publishing_that_stops_leaves_nothing_behind(
    corpora: Path, tokenizer: str, whole: Report, out: Path, monkeypatch: pytest.MonkeyPatch, stops: str, at: int
) -> None:
    """The old shards stay until the new ones are complete; later the next recipe's are all that is there."""
    recipe, before, calls = recipe_of(corpora, tokenizer), tree(out / "shards"), list[Path]()
    owner = publish if stops == "_link" else Path
    real = getattr(owner, stops)

    def stopping(path: Path, *given: object, **how: object) -> object:
        places = (str(path), *map(str, given))
        calls.extend([path] * any(str(out / name) in place for name in ("shards", ".shards.new") for place in places))
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        return real(path, *given, **how)

    with monkeypatch.context() as planted:
        planted.setattr(owner, stops, stopping)
        with pytest.raises((OSError, DataError)):
            made(out, {**recipe, "tokenize": {**recipe["tokenize"], "held_out": 0}})
    assert len(calls) == at and (stops != "_link" or tree(out / "shards") == before)
    made(out, recipe)
    assert tree(out) == tree(whole.directory) and not (out / "shards" / publish.PARTIAL).exists()


DAMAGED = (
    *("stages/clean/*/part-*.jsonl", "stages/duplicates/*/*.jsonl", "stages/tokenize/**/*.bin"),
    *("shards/train/replay/*.bin", "shards/train/*/*.idx", "shards/tokenizer/tokenizer.json"),
)


@pytest.mark.quick("altered", "linked")
@pytest.mark.parametrize("damage", ["cut", "altered", "linked"])
def test_nothing_damaged_is_used_again(corpora: Path, tokenizer: str, whole: Report, out: Path, damage: str) -> None:
    """Files that are cut, or have one other byte, are named and made again, linked to a stage's or not."""
    places = ("shards/train/domain/*.bin",) if damage == "linked" else DAMAGED
    files = [next(path for path in sorted(out.glob(place)) if path.stat().st_size > 20) for place in places]
    if damage == "linked":
        made_by = next(
            path for path in out.glob("stages/tokenize/**/*.bin") if path.read_bytes() == files[0].read_bytes()
        )
        files[0].unlink()
        os.link(made_by, files[0])
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[:-10] if damage == "cut" else data[:10] + bytes([data[10] ^ 1]) + data[11:])
    with pytest.warns() as said:
        made(out, recipe_of(corpora, tokenizer))
    assert tree(out) == tree(whole.directory)
    named = [str(one.message) for one in said if "damaged" in str(one.message)]
    assert all(any(file.name in words for words in named) for file in files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as a control, nothing is damaged now
        assert "nothing had changed" in str(made(out, recipe_of(corpora, tokenizer)))


@pytest.mark.slow
def test_what_a_recipe_no_longer_makes_is_removed(corpora: Path, tokenizer: str, tmp_path: Path) -> None:
    """A directory is what its recipe makes, whatever was made there before; a user's own files stay."""
    both = recipe_of(corpora, tokenizer, converse={"template": "alpaca"})
    talk = [{"instruction": Prose(22).sentence(9), "output": "Two fathoms."}]
    rows = write_jsonl(tmp_path / "talk.jsonl", [*talk, {"instruction": "How deep?", "output": "Three."}])
    both["collections"]["talk"] = {"inputs": [str(rows)], "kind": "conversations"}
    both["tokenize"]["held_out"] = 0
    alone = {name: {**both, "collections": {name: both["collections"][name]}} for name in ("replay", "talk")}
    made(tmp_path / "out", both)
    for name, published in (("replay", {"shards", "mixture.json", "mixture.u8"}), ("talk", {"conversations"})):
        made(tmp_path / "out", alone[name])
        made(tmp_path / f"only {name}", alone[name])
        assert tree(tmp_path / "out") == tree(tmp_path / f"only {name}")
        ours = {"shards", "conversations", "mixture.json", "mixture.u8"}
        assert {path.name for path in (tmp_path / "out").iterdir()} & ours == published
    for mine in ("notes.txt", "train/mine.txt"):
        write(tmp_path / "out" / "conversations" / mine, "mine")
    made(tmp_path / "out", alone["replay"])
    left = (path for path in (tmp_path / "out" / "conversations").rglob("*") if path.is_file())
    assert {path.name for path in left} == {"notes.txt", "mine.txt"}


def test_files_of_others_stay_among_exports(tmp_path: Path) -> None:
    made = [write(tmp_path / f"made{number}", str(number)) for number in range(2)]
    place = tmp_path / "exports"
    publish._publish_files(place, {"trl/a.jsonl": made[0], "lm_eval/b.jsonl": made[0]})
    mine = write(place / "lm_eval" / "results.json", "mine")
    publish._publish_files(place, {"trl/a.jsonl": made[1]})
    assert tree(place) == {"trl/a.jsonl": b"1", "lm_eval/results.json": b"mine", ".published.json": ANY}
    assert made[0].read_text() == "0"
    publish._publish_files(place, {})
    assert tree(place) == {"lm_eval/results.json": b"mine"} and not (place / "trl").exists()
    mine.unlink()
    publish._publish_files(tmp_path / "none", {})
    assert not (tmp_path / "none").exists()


def test_an_infeasible_budget_is_refused_before_shards(corpora: Path, tokenizer: str, out: Path) -> None:
    shutil.rmtree(out / "shards")
    mix = {"shares": {"domain": 0.9, "replay": 0.1}, "tokens": 10**7}
    said = r"mix\.tokens=10000000: domain has .* allowed: at most .* tokens"
    with pytest.raises(DataError, match=said) as raised:
        made(out, recipe_of(corpora, tokenizer) | {"mix": mix})
    assert raised.value.exit_code == 1 and not (out / "shards").exists()


def test_a_preview_writes_nothing(corpora: Path, tokenizer: str, whole: Report, tmp_path: Path) -> None:
    """A file of ours in a new or empty directory would make the real run take it for somebody else's."""
    recipe = parse_corpus_recipe(recipe_of(corpora, tokenizer))
    found = preview(recipe, tmp_path / "out")
    preview(recipe, tmp_path)
    assert not list(tmp_path.iterdir())
    assert found.inputs["domain"].files == 3 and not found.budget.counted
    assert found.stages["ingest"].to_do == 2 and "waits" in found.stages["clean"].state
    before = tree(whole.directory)
    after = preview(recipe, whole.directory)
    assert {stage.state for stage in after.stages.values()} == {"unchanged"} and after.budget.counted
    assert tree(whole.directory) == before


def test_what_a_late_stage_cannot_read_is_refused_before_any_stage(
    corpora: Path, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    write(tmp_path / "broken" / "tokenizer.json", "{")
    for name in map(str, (tmp_path / "nowhere", tmp_path / "broken")):
        lacking = parse_corpus_recipe(recipe_of(corpora, name))
        for plan in (build, preview):
            with pytest.raises(DataError, match=name):
                plan(lacking, tmp_path / "new")
    for quiz in (tmp_path / "none.jsonl", write(tmp_path / "quiz.jsonl", '{"other": 1}\n')):
        lacking = parse_corpus_recipe(
            recipe_of(corpora, tokenizer) | {"decontaminate": {"benchmarks": {"q": str(quiz)}}}
        )
        for plan in (build, preview):
            with pytest.raises(DataError, match=r"decontaminate\.benchmarks\.q: "):
                plan(lacking, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    own = parse_corpus_recipe(recipe_of(corpora, tokenizer))
    assert preview(own, tmp_path / "new").stages["ingest"].to_do
    assert not any(stage.to_do for stage in preview(own, out).stages.values())


def test_nothing_kept_is_said_with_the_rule(corpora: Path, tokenizer: str, tmp_path: Path) -> None:
    strict = recipe_of(corpora, tokenizer, filter={"min_words": 10_000})
    with pytest.raises(DataError, match=r"clean: all \d+ documents are dropped, \d+ by the rule min_words") as raised:
        made(tmp_path / "out", strict)
    assert raised.value.exit_code == 2  # the input cannot be used; nothing failed
    write_jsonl(tmp_path / "bad.jsonl", [{"other": 1}])
    unread = recipe_values({"bad": [tmp_path / "bad.jsonl"]}, tokenize={"tokenizer": tokenizer})
    with pytest.raises(DataError, match="clean: no document could be read") as raised:
        made(tmp_path / "unread", unread)
    assert raised.value.exit_code == 2


def test_the_command(corpora: Path, tokenizer: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(out.with_name("mine.yaml"), json.dumps(recipe_of(corpora, tokenizer)))
    words = ["corpus", str(recipe), "--out", str(out)]
    assert main([*words, "--dry-run"]) == 0 and "ingest" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stages"]["duplicates"]["counts"]["removed"] == 6 and Path(report["card"]).is_file()
    assert main([*words, "mix.tokens=99999999", "--dry-run"]) == 1 and "infeasible" in capsys.readouterr().out
    for more, said in (
        (["filter.min_wrds=3"], "fathom: filter.min_wrds: unknown key; did you mean filter.min_words?\n"),
        (["--workers", "0", "--dry-run"], "fathom: executor.workers=0: allowed: 1 or more\n"),
    ):
        assert main([*words, *more]) == 2 and capsys.readouterr().err == said
    other = write(out.with_name("other") / "thesis.txt", "mine").parent
    assert main([*words[:-1], str(other)]) == 2 and "contains other files" in capsys.readouterr().err


def test_a_worker_that_dies_is_replaced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[int] = []
    dying = "import os, pathlib, sys\nflag = pathlib.Path(%r)\nif flag.exists(): %s\nflag.touch()\nos.abort()"
    answer = "print('{\"done\": 0}', flush=True); sys.stdin.readlines()"
    monkeypatch.setattr(
        executor, "WORKER", "import sys; sys.stdin.readline()\n" + dying % (str(tmp_path / "f"), answer)
    )
    executor.Pool(1).run(str(tmp_path), "stage", 1, 1, lambda: ticks.append(1))
    assert ticks == [1]
    monkeypatch.setattr(executor, "WORKER", "import os; os.abort()")
    with pytest.raises(DataError, match="died twice"):
        executor.Pool(1).run(str(tmp_path), "stage", 1, 1, lambda: None)


def test_an_error_ends_the_other_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Task 0 takes a minute, task 1 fails."""
    fail = 'print(\'{"error": "a bad file", "code": 1}\', flush=True)'
    program = f"import sys, time\nfor line in sys.stdin:\n    {fail} if ' 1]' in line else time.sleep(60)"
    monkeypatch.setattr(executor, "WORKER", program)
    began = time.monotonic()
    with pytest.raises(DataError, match="a bad file"):
        executor.Pool(2).run(str(tmp_path), "stage", 2, 2, lambda: None)
    assert time.monotonic() - began < 40


def killed(recipe: Path, out: Path, after: float) -> int:
    """Start the command in a process group of its own, and kill all of it after so many seconds."""
    command = [sys.executable, "-m", "fathom", "corpus", str(recipe), "--out", str(out), "--workers", "2"]
    started = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        return started.wait(after)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        return started.wait()


@pytest.mark.slow
def test_killed_at_random_moments(corpora: Path, tokenizer: str, tmp_path: Path) -> None:
    """Each time it comes further, and it ends with the bytes of a run that nothing stopped, whose time sets theirs."""
    values = recipe_of(corpora, tokenizer)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(values))
    began = time.monotonic()
    assert killed(recipe, tmp_path / "one", 600) == 0
    took, chance = time.monotonic() - began, random.Random(0)
    statuses = [killed(recipe, tmp_path / "out", took * chance.uniform(0.1, 0.6)) for _ in range(10)]
    assert statuses.count(-signal.SIGKILL) >= 3
    made(tmp_path / "out", values)
    assert tree(tmp_path / "out") == tree(tmp_path / "one")


def test_the_benchmark_of_kills_sees_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file that is on one side alone; not when a run was, or how long. Its moments are the first run's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    kills = importlib.import_module("corpus_kills")
    files = {"card.md": "a", "stages/clean/1/task.json": "b", "stages/clean/1/times.json": "c", "run.json": "d"}
    for place in ("one", "other"):
        for name, text in files.items():
            write(tmp_path / place / name, text + place * name.endswith(("times.json", "run.json")))
    assert kills.compared(tmp_path / "one", tmp_path / "other") == {
        "same_files": {"card.md": 1, "stages": 1},
        "same_megabytes": 0.0,
        "different": [],
    }
    write(tmp_path / "other" / "card.md", "A")
    write(tmp_path / "one" / "shards" / "0.bin", "")
    assert kills.compared(tmp_path / "one", tmp_path / "other")["different"] == ["card.md", "shards/0.bin"]
    assert kills.finished(tmp_path / "one") == 1
    watch = kills.Watch(tmp_path, None, history=[(2.0, 0), (5.0, 1), (9.0, 3), (10.0, 3)])
    points = kills.moments(watch, 50, random.Random(0))
    assert {done for done, _ in points} == {0, 1, 3} and points == kills.moments(watch, 50, random.Random(0))
    assert all(0 <= wait <= {0: 3, 1: 4, 3: 1}[done] for done, wait in points)


def test_the_driver_killed_its_workers_end_and_nothing_is_lost(
    corpora: Path, tokenizer: str, whole: Report, tmp_path: Path
) -> None:
    """Killed inside a task: the draft is there, its folder is not; the next run sweeps the one and makes the other."""
    values = recipe_of(corpora, tokenizer)
    script = (
        "import os, signal, json, sys\n"
        "from fathom.corpus import clean, stages, worker\n"
        "from fathom.corpus.pipeline import build\nfrom fathom.corpus.recipe import parse_corpus_recipe\n"
        "from pathlib import Path\n"
        "def run(self, task, folder):\n"
        "    (folder / 'part-00000.jsonl').write_text('half a li')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "clean.Clean.run = run\n"
        "build(parse_corpus_recipe(json.loads(sys.argv[1])), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, json.dumps(values), str(tmp_path / "out")]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    assert list((tmp_path / "out" / "stages" / "clean").glob(".*.new"))
    # Killed while a file was replaced, it leaves its draft; here one beside each kind of file.
    for name in (".recipe.yaml.7.new", "stages/clean/.plan.json.7.new", "stages/exact/.manifest.json.7.new"):
        write(tmp_path / "out" / name, "half a fi")
    made(tmp_path / "out", values)
    assert not list((tmp_path / "out").rglob(".*.new"))
    assert tree(tmp_path / "out") == tree(whole.directory)


def test_a_worker_ends_with_its_driver(tmp_path: Path) -> None:
    """Whatever it is doing: its standard input closes when the driver is gone, however it went."""
    busy = "import time\nfrom fathom.corpus import worker\nworker.carry_out = lambda *_: time.sleep(60)\nworker.serve()"
    process = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write('["x", "y", 0]\n')
    process.stdin.flush()
    time.sleep(0.2)
    process.stdin.close()
    assert process.wait(30) == 0


def test_the_card_names_the_languages_that_were_dropped(tmp_path: Path, tokenizer: str) -> None:
    """German and Greek are kept where they are named; French is not among them."""
    for package in ("py3langid", "justext"):
        pytest.importorskip(package)
    for language in ("de", "el", "fr", "en"):
        write(tmp_path / "in" / f"{language}.txt", PARAGRAPHS[language])
    off = dict.fromkeys(("min_words", "max_word_length"))
    values = recipe_values({"a": [tmp_path / "in"]}, filter={**off, "languages": ["de", "el"]})
    report = build(parse_corpus_recipe(values | {"tokenize": {"tokenizer": tokenizer}}), tmp_path / "out")
    card = report.card.read_text()
    assert "For their language: 0 documents" in card and "by language: en 1, fr 1)" in card
    assert report.stages["clean"].counts["kept"] == 2


def test_languages_need_no_lists_where_no_stop_words_are_counted(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "justext" else name)
    monkeypatch.setattr("fathom.corpus.clean.language_of", lambda text: "de")
    write(tmp_path / "de.txt", PARAGRAPHS["de"])
    values = recipe_values({"a": [tmp_path / "de.txt"]}, tokenize={"tokenizer": tokenizer})
    off = dict.fromkeys(("min_words", "max_word_length"), None) | {"languages": ["de"]}
    with pytest.raises(DataError, match="languages needs justext"):
        build(parse_corpus_recipe(values | {"filter": off}), tmp_path / "out")
    report = build(parse_corpus_recipe(values | {"filter": {**off, "min_stop_words": None}}), tmp_path / "out")
    assert report.stages["clean"].counts["kept"] == 1


def test_small_stages_need_no_scheduler(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a cluster takes longer to start than they take; large ones go to it. A document in German is dropped,
    and the card says for what."""
    asked: list[str] = []
    monkeypatch.setattr(executor, "require_scheduler", lambda name: None)
    monkeypatch.setattr(executor, "schedule", lambda wanted, work, count, logs, stage: asked.append(stage))
    write(tmp_path / "a.txt", Prose(3).document(200))
    write(tmp_path / "b.txt", " ".join([PARAGRAPHS["de"], *Prose(4).words[:60]]))
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    values = recipe_values({"a": {"inputs": inputs}}, tokenize={"tokenizer": tokenizer})
    recipe = parse_corpus_recipe({**values, "executor": {"name": "ray"}})
    assert "For their language: 1 documents" in build(recipe, tmp_path / "out").card.read_text()
    assert not asked and (tmp_path / "out" / "shards" / "index.json").is_file()
    monkeypatch.setattr(executor, "POOL_BYTES", 0)
    with pytest.raises(DataError, match="ingest: 1 of 1 tasks are not done"):
        build(recipe, tmp_path / "spread")
    assert asked == ["ingest"]


@pytest.mark.parametrize(("name", "said"), [("ray", "ray is not installed"), ("slurm", "no sbatch here")])
def test_a_scheduler_that_is_not_here_is_one_line(
    name: str, said: str, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Before datatrove, whose own words would be a second line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    write(tmp_path / "a.txt", "the depth of a river")
    values = recipe_values({"a": {"inputs": [str(tmp_path / "a.txt")]}}, tokenize={"tokenizer": tokenizer})
    with pytest.raises(DataError, match=rf"^executor.name={name}: {said}"):
        build(parse_corpus_recipe({**values, "executor": {"name": name}}), tmp_path / "out")
    assert "Traceback" not in capfd.readouterr().err
