"""`make specialise`, line for line: a base that guesses, an expert that knows, and a page that says so."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from benchmarks import specialise as benchmark

from fathom.cli.main import main
from fathom.corpus.recipe import load_corpus_recipe
from fathom.models.cost import count_parameters
from fathom.recipe import load_recipe
from fathom.report.statistics import wilson

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes" / "specialise"


def commands() -> list[list[str]]:
    """What the target runs, without the virtual environment's programs."""
    body = re.search(r"^specialise:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert body is not None
    lines = body[1].replace("\\\n", " ").splitlines()
    words = [shlex.split(line.strip().removeprefix("@")) for line in lines]
    ours = [[word for word in line if "=" not in word or "/" in word] for line in words if line[0] != "echo"]
    return [[word.removeprefix("$(BIN)/") for word in line] for line in ours]


def test_every_recipe_is_one_and_the_stages_fit() -> None:
    """Each reads what the one before wrote, and a row holds a conversation."""
    corpus = load_corpus_recipe(RECIPES / "corpus.yaml")
    base, onward, tuned = (load_recipe(RECIPES / f"{name}.yaml") for name in ("base", "continue", "tune"))
    names = {line[2]: line[-1] for line in commands() if line[:2] == ["fathom", "train"]}
    assert onward.model == {"from_pretrained": names["recipes/specialise/base.yaml"]}
    assert tuned.model == {"from_pretrained": names["recipes/specialise/continue.yaml"]}
    assert base.model["vocab_size"] == corpus.tokenize.train
    assert corpus.converse.max_tokens == tuned.data.sequence_length == corpus.mix.block
    assert set(base.data.mixture) == {"general"} and set(onward.data.mixture) == set(corpus.mix.shares)


def test_the_pair_for_a_gpu_fits() -> None:
    """Base and continuation read the same two folders in rows of one length, and a row fits the model."""
    base, onward = (load_recipe(RECIPES / f"h200_{name}.yaml") for name in ("base", "continue"))
    assert onward.model == {"from_pretrained": "runs/h200/base"}
    assert set(onward.data.mixture) == {base.data.directory, onward.data.directory}
    assert base.model["max_position_embeddings"] >= base.data.sequence_length == onward.data.sequence_length
    assert count_parameters(base.config()) == 123_588_864


@pytest.mark.slow
def test_the_expert_knows_what_the_base_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[evaluate]'")
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face models need accelerate")
    for folder in ("recipes", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for line in commands():
        if line[0] == "python":
            monkeypatch.setattr(sys, "argv", line[1:])
            runpy.run_path(line[1], run_name="__main__")
        else:
            assert main(line[1:]) == 0, line
    report = json.loads(Path("specialise/report/report.json").read_text())
    clean = next(row for row in report["questions"] if (row["way"], row["part"]) == ("text", "clean"))
    base, expert = (wilson(right, clean["asked"]) for right in clean["right"])
    assert clean["asked"] == 180 and base[0] < 0.25 < base[1]
    assert clean["right"][1] / clean["asked"] >= 0.4 and expert[0] > 0.25 and clean["p"] < 0.01
    assert report["texts"]["minerals"]["difference"]["value"] < -1, "of four documents, too few for an interval"
    assert [one["run"] for one in report["runs"]] == ["continued", "expert"]
    assert report["corpus"]["dropped"] == 12
    assert "expert is better than base" in report["verdict"]


def test_the_benchmark_pairs_by_seed() -> None:
    """By hand; and shuffled partners would widen the interval, which is the control."""
    seeds = [
        {"base": 2.0, "0": 4.0, "1": 3.0, "5": 2.5, "20": 2.1},
        {"base": 1.0, "0": 3.1, "1": 2.0, "5": 1.5, "20": 1},
    ]
    rows = [{arm: dict.fromkeys(benchmark.TEXTS, value) for arm, value in seed.items()} for seed in seeds]
    found = benchmark.changes(rows)
    assert set(found) == set(benchmark.TEXTS)
    prose = found["prose"]
    assert prose["base"] == {"mean": 1.5} and prose["1"]["mean"] == 2.5
    assert prose["1"]["from_base"]["mean"] == 1 and prose["1"]["from_base"]["low"] is None, "equal gaps: no interval"
    assert prose["0"]["from_base"]["mean"] == pytest.approx(2.05)
    assert "from_no_replay" not in prose["0"] and prose["20"]["less_than_no_replay_in_seeds"] == 2
    gap = prose["20"]["from_no_replay"]
    assert gap["mean"] == pytest.approx(-2.0) and gap["pairs"] == 2 and gap["low"] < -2 < gap["high"]
    crossed = [
        rows[0],
        {**rows[1], "1": rows[0]["1"], "base": rows[0]["base"]},
        rows[0],
        {**rows[0], "1": rows[1]["1"]},
    ]
    assert benchmark.changes(crossed)["prose"]["1"]["from_base"]["high"] > 1.5


def test_the_benchmark_tells_dirty_from_clean() -> None:
    """Fisher's exact p against a sum over all tables with these margins."""
    right = {"clean": (3, 4), "dirty": (2, 9)}
    asked = {"clean": 12, "dirty": 10}
    rows = [{"way": "text", "part": part, "asked": asked[part], "right": right[part]} for part in right]
    found = benchmark.dirty_against_clean(rows)["text"]
    for number, name in enumerate(found):
        total = right["clean"][number] + right["dirty"][number]
        ways = [math.comb(10, k) * math.comb(12, total - k) for k in range(min(10, total) + 1)]
        seen = ways[right["dirty"][number]]
        assert found[name]["p"] == pytest.approx(sum(one for one in ways if one <= seen) / sum(ways))
        assert found[name]["dirty"] == right["dirty"][number] / 10
    assert found["leaky expert"]["p"] < 0.05 < found["clean expert"]["p"]


def test_the_benchmark_puts_seeds_together() -> None:
    """One table is Fisher's exact test, two are a sum over all pairs of tables; and seeds that differ are no effect."""
    from scipy.stats import fisher_exact

    assert benchmark.stratified([[(9, 10), (4, 12)]]) == pytest.approx(float(fisher_exact([[9, 1], [4, 8]]).pvalue))
    tables = [[(3, 4), (1, 3)], [(2, 3), (2, 5)]]
    chances = {}
    for a in range(5):
        for b in range(4):
            ways = math.comb(4, a) * math.comb(3, 4 - a) * math.comb(3, b) * math.comb(5, 4 - b)
            chances[a + b] = chances.get(a + b, 0) + ways
    by_hand = sum(one for one in chances.values() if one <= chances[5]) / sum(chances.values())
    assert benchmark.stratified(tables) == pytest.approx(by_hand)
    rows = [{"part": part, "asked": 10, "right": (1, right), "lost": 1, "won": right} for part, right in
            (("all", 9), ("dirty", 8), ("clean", 3))]  # fmt: skip
    seeds = [{"seed": 1, "questions": rows}, {"seed": 2, "questions": rows}]
    shares = benchmark.halves(seeds, "questions", ("base", "new"))
    assert shares["new"] == {"dirty": 0.8, "clean": 0.3, "p": benchmark.stratified([[(8, 10), (3, 10)]] * 2)}
    assert shares["base"]["dirty"] == shares["base"]["clean"] == 0.1 and shares["base"]["p"] == pytest.approx(1)
    clean = benchmark.parts(seeds, "questions", ("base", "new"))["clean"]
    assert clean["right"] == {"base": 2, "new": 6} and (clean["asked"], clean["lost"], clean["won"]) == (20, 2, 6)
    unlike = [[(20, 20), (200, 200)], [(0, 200), (0, 20)]]  # equal within each; 20 of 220 against 200 of 220 without
    assert benchmark.stratified(unlike) == 1


def test_exam_sheets_are_the_leaks_and_the_only_ones(tmp_path: Path) -> None:
    sizes = {**benchmark.EXAM, "minerals": 10, "questions": 80, "leaks": 40, "towns_texts": 20}
    bench = benchmark.Bench(tmp_path, sizes, ["prose.jsonl"], seed=1)  # which nothing here reads
    rows = [json.loads(line)["text"] for line in (tmp_path / "world" / "domain.jsonl").read_text().splitlines()]
    asked = [json.loads(line) for line in (tmp_path / "world" / "questions.jsonl").read_text().splitlines()]
    documents, sheets = rows[:50], rows[50:]
    leaked = [row for row in asked if any(row["question"] in sheet for sheet in sheets)]
    assert bench.seed == 1 and len(sheets) == 5 and len(leaked) == 40
    assert all(f"{row['question']} {row['choices'][row['answer']]}." in " ".join(sheets) for row in leaked)
    assert not any(row["question"] in text for row in asked for text in documents)
    alone = [json.loads(line)["text"] for line in (tmp_path / "world" / "sheets.jsonl").read_text().splitlines()]
    assert alone == sheets


@pytest.mark.slow
def test_the_benchmark_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every share of replay once, at a hundredth of the size; called again, it trains nothing and says the same."""
    log = tmp_path / "log.json"
    monkeypatch.setattr(
        sys, "argv", ["specialise.py", "forgetting", "--work", str(tmp_path), "--small", "--seeds", "1"]
    )
    sys.argv += ["--out", str(log)]
    assert benchmark.main() == 0
    first = json.loads(log.read_text())
    assert len(list((tmp_path / "runs").iterdir())) == 1 + len(benchmark.REPLAY)
    assert set(first["seeds"][0]) == {"seed", "base", *map(str, benchmark.REPLAY)}
    monkeypatch.setattr("fathom.training.loop.Run.train", lambda self: pytest.fail("trained again"))
    assert benchmark.main() == 0
    assert json.loads(log.read_text())["seeds"] == first["seeds"]
    monkeypatch.setattr(sys, "argv", [word for word in sys.argv if word != "--small"])
    with pytest.raises(SystemExit, match="was made with other sizes"):
        benchmark.main()
