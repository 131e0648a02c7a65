"""`benchmarks/kvcache.py`: every method has a row, and what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from benchmarks import kvcache as benchmark
from benchmarks import kvcache_frontier, kvcache_ruler, kvcache_smollm2, kvcache_tuned

from fathom.kvcache import METHODS
from fathom.kvcache.whole import WHOLE

PLACE = Path(benchmark.__file__).parent


@pytest.fixture
def options(tmp_path):
    arms = ["full", "drop", "snapkv", "key_norm", "full_fp8"]
    return SimpleNamespace(work=tmp_path, seeds=1, steps=1, tunings=["1"], arms=arms, window=32, decode=3)


QUANTIZED = {"full_int8", "full_int4"}
"""Without a row on the page of the toy model."""


def test_every_method_that_reads_without_training_of_its_own_has_a_row():
    assert set(benchmark.ARMS) == {*METHODS, *WHOLE} - {"learned", "full_static", *QUANTIZED}
    assert set(benchmark.BORROWED.values()) <= set(benchmark.TUNED)


@pytest.fixture
def brief(monkeypatch):
    """One step and one text of each task, by a model that learns nothing."""
    monkeypatch.setattr(benchmark, "train", lambda model, *rest: model.eval())
    plain = benchmark.recalled
    monkeypatch.setattr(
        benchmark,
        "recalled",
        lambda model, arm, schedule, texts, keyless=False: plain(model, arm, schedule, 256, keyless),
    )


@pytest.mark.slow
def test_needles_have_every_row_and_resume(options, brief, capsys):
    report = benchmark.run_needles(options)
    assert [(run["arm"], run["tuned"]) for run in report["runs"]] == [
        (arm, tuned) for tuned in (None, "1") for arm in options.arms
    ]
    table = "\n".join(benchmark.needle_table(report))
    for arm in options.arms:
        assert f"| nothing | 4 needles | {arm} |" in table and f"| 1 | 1 needle | {arm} |" in table
    capsys.readouterr()
    assert benchmark.run_needles(options) == report
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_system_has_static_beside_dynamic_and_resumes(options, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "SHAPES", ((1, 32), (1, 32)))
    report = benchmark.run_system(options)
    assert {run["arm"] for run in report["runs"] if run["batch"] == 1} == {*METHODS, *WHOLE} - {"learned"}
    held = {
        run["arm"]: [load["entries"] for load in run["loads"]]
        for run in report["runs"]
        if run["batch"] == 1 and len(run["loads"]) == 3
    }
    assert held["full"] == [32, 128, 512] and held["full_static"] == [35, 131, 515]
    assert max(held["snapkv"]) <= 32
    assert any("full_static" in line for line in benchmark.system_table(report))
    capsys.readouterr()
    assert json.dumps(benchmark.run_system(options)) == json.dumps(report)
    assert capsys.readouterr().out == ""


def test_rounds_resume(options, capsys):
    for window in (1024, 2048, 4096, 8192):
        for transform in ("default", "matrix", "fft"):
            found = {"window": window, "transform": transform, "seconds": [1.0, 0.5], "peak_bytes": 3_000_000}
            (options.work / f"rounds-{window}-{transform}.json").write_text(json.dumps({"round": found}))
    table = list(benchmark.rounds_table(benchmark.run_rounds(options)))
    assert len(table) == 14 and table[2] == "| 1,024 | default | 1.00 | 0.50 | 3 MB |"
    assert capsys.readouterr().out == ""


def test_needles_are_those_of_the_logs():
    """The page's table, and what it says of `snapkv`."""
    page = (PLACE.parent / "docs" / "results" / "2026-11-22-caches-toy.md").read_text(encoding="utf-8")
    table = page.partition("## Needles")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")][2:]
    assert len(rows) == 10
    found = {}
    for name in ("", "-untuned", "-tuned"):
        for run in json.loads((PLACE / "results" / f"kvcache-needles{name}.json").read_text())["runs"]:
            tuned = {"4": "yes", None: "no"}.get(run["tuned"])
            if "4 needles" in run["recall"]:
                found.setdefault((run["arm"], tuned, run["seed"]), run["recall"]["4 needles"]["accuracy"])
    for cache, tuned, *cells in rows:
        means = [fmean(seeds) for seeds in zip(*(found[cache, tuned, seed] for seed in range(3)), strict=True)]
        assert cells == [f"{means[compressions]:.2f}" for compressions in (0, 1, 3, 8)], (cache, tuned)
    for seed in range(3):
        untuned, tuned, resampled = (
            found[key][3:9] for key in (("snapkv", "no", seed), ("snapkv", "yes", seed), ("freqkv", "yes", seed))
        )
        assert all(a > b for a, b in zip(untuned, tuned, strict=True))
        assert all(a > b for a, b in zip(untuned, resampled, strict=True))


def test_the_costs_on_the_page_are_those_of_the_log():
    """As the log has them: bytes, milliseconds of a decoded token and prefill, `full_static` beside `full`."""
    text = (
        (PLACE.parent / "docs" / "results" / "2026-11-22-caches-toy.md")
        .read_text()
        .partition("| one row of | bytes")[2]
        .partition("\n\n")[0]
    )
    lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:])
    rows = {cache: cells for cache, *cells in lines}
    log = json.loads((PLACE / "results" / "kvcache-system-all.json").read_text())
    one = [run for run in log["runs"] if run["batch"] == 1 and len(run["loads"]) > 1]
    assert set(rows) <= {run["arm"] for run in one} and {*WHOLE} - QUANTIZED < set(rows) <= {*METHODS, *WHOLE}
    for run in (run for run in one if run["arm"] in rows):
        loads = {load["tokens"]: load for load in run["loads"]}
        cells = [f"{loads[n]['cache_bytes'] / 1e6:.1f} MB" if n in loads else "" for n in (4096, 16384)]
        cells += [f"{loads[n]['decode_ms']['p50']:.1f}" if n in loads else "" for n in (1024, 4096, 16384)]
        cells += [f"{loads[n]['prefill_tokens_per_second']:,.0f}" if n in loads else "" for n in (4096, 16384)]
        assert rows[run["arm"]] == cells, run["arm"]


def test_the_page_of_a_real_model_has_the_tables_of_its_logs():
    page = (PLACE.parent / "docs" / "results" / "2026-11-28-caches.md").read_text(encoding="utf-8")
    cells, tuned = PLACE / "results" / "kvcache-smollm2.jsonl", PLACE / "results" / "kvcache-tuned.json"
    lines = [*kvcache_smollm2.table(cells), *kvcache_tuned.table(json.loads(tuned.read_text(encoding="utf-8")))]
    shown = [line for line in page.splitlines() if line.startswith("|")]
    assert len(shown) > 20 and [line for line in shown if line not in lines] == []
    picture = PLACE.parent / "docs" / "pictures" / "caches.svg"
    assert picture.read_text(encoding="utf-8") == kvcache_smollm2.picture(cells)


def test_the_page_by_bytes_has_the_table_and_the_picture_of_its_log():
    page = (PLACE.parent / "docs" / "results" / "2026-11-30-caches-bytes.md").read_text(encoding="utf-8")
    log, picture = PLACE / "results" / "kvcache-frontier.jsonl", PLACE.parent / "docs" / "pictures" / "frontier.svg"
    assert [line for line in page.splitlines() if line.startswith("|")] == [*kvcache_frontier.table(log)]
    assert picture.read_text(encoding="utf-8") == kvcache_frontier.picture(log)


def test_the_page_on_ruler_has_the_table_of_its_log():
    page = (PLACE.parent / "docs" / "results" / "2026-11-30-caches-ruler.md").read_text(encoding="utf-8")
    log = PLACE / "results" / "kvcache-ruler.jsonl"
    assert [line for line in page.splitlines() if line.startswith("|")] == [*kvcache_ruler.table(log)]
    asked = [(line["task"], line["number"]) for line in kvcache_ruler.lines(log) if line["cache"] == "kvzip"]
    assert len(asked) == len(set(asked)) >= 20


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_1", "niah_multiquery"])
def test_a_question_is_asked_as_ruler_asks_it(task):
    """One needle is named in the singular; what is asked for is planted, and the same for every cache."""
    asked, again = (kvcache_ruler.ask(task, 3, ["It was late. Nobody came."], Words()) for _ in range(2))
    assert asked == again != kvcache_ruler.ask(task, 4, ["It was late. Nobody came."], Words())
    several = task == "niah_multiquery"
    assert asked.question.startswith("What are all the special" if several else "What is the special magic number for ")
    assert asked.context.startswith(
        f"{'Some special magic numbers are' if several else 'A special magic number is'} hidden"
    )
    assert len(asked.answers) == (4 if several else 1) and all(f" is: {one}." in asked.context for one in asked.answers)
    assert 600 < len(asked.context.split()) <= kvcache_ruler.LENGTH


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text, **kwargs):
        return {"input_ids": text.split()}


def test_intervals_are_over_documents_that_every_cache_has_read(tmp_path):
    """A document that is read again at greater length counts once, a text that one cache has not read for none."""

    def cells(method: str, losses: dict[tuple[int, int], float]):
        for (number, length), nats in losses.items():
            cell = dict(kind="text", text="books", round=number, length=length, share=0.5, method=method)
            found = dict(nats=nats, peak_bytes=1, mean_bytes=1, decode_seconds=1, document=number % 2)
            yield json.dumps({"cell": cell, "found": found})

    full = {(0, 1024): 1.0, (0, 2048): 2.0, (1, 1024): 3.0, (2, 4096): 6.0, (3, 2048): 9.0}
    drop = {key: loss + (0.2 if key[0] == 1 else 0.1) for key, loss in full.items() if key[0] < 3}
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([*cells("full", full), *cells("drop", drop), *cells("tova", drop)]))
    row = {line.split(" | ")[0]: line.split(" | ")[1:] for line in kvcache_smollm2.table(log)}
    assert row["| full"][0] == "3.000 (2)"  # (1 + 2 + 6) / 3 and 3
    assert row["| drop ½"][:2] == ["+0.150 ±0.635", ""] and row["| tova ½"][1] == "+0.000 ±0.000"
