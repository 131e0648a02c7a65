"""`fathom evaluate caches`, from the command line to the page."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fathom.cli.main import main
from fathom.evaluation.caches import evaluate as cache_evaluation
from fathom.evaluation.caches.needles import Recall
from fathom.evaluation.caches.page import summarize, verdict
from fathom.evaluation.caches.questions import Scores
from fathom.evaluation.caches.results import (
    Answer,
    CacheGap,
    CacheReport,
    CacheRow,
    CheckpointCaches,
    Load,
    Questions,
)
from fathom.evaluation.caches.spectrum import Spectrum
from fathom.evaluation.scoring import Checkpoint
from fathom.kvcache import NAMES, WHOLE, Schedule
from fathom.kvcache.policy import CacheOptions
from fathom.report.provenance import provenance
from tests.tiny import TEXT, export_tiny

SCHEDULE = ("--kvcache-window", "32", "--kvcache-sinks", "2")
ALLOWED = ", ".join([*WHOLE, *NAMES[1:]])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, one of which says that it was tuned, and five texts."""
    folder = tmp_path_factory.mktemp("kvcache")
    export_tiny(folder / "plain", mixer="none")
    export_tiny(folder / "tuned", kvcache={"method": "average", "window": 32, "sinks": 2, "ratio": 0.5})
    (folder / "texts").mkdir()
    chance, words = random.Random(0), " ".join(TEXT).split()
    for i in range(5):
        (folder / "texts" / f"{i}.txt").write_text(" ".join(chance.choices(words, k=200 if i else 10)))
    return folder


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_evaluation, "QUESTIONS", 2)
    monkeypatch.setattr(cache_evaluation, "DECODED", 3)


def run(here: Path, *words: str, checkpoints: tuple[str, ...] = ("plain",)) -> int:
    return main(["evaluate", "caches", *(str(here / name) for name in checkpoints), "--device", "cpu", *words])


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "svg" and (label := dict(attrs).get("aria-label")):
            self.pictures.append(label)


@pytest.mark.slow
def test_every_number_and_a_page(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--kvcache", "freqkv,drop,full", *SCHEDULE, "--at", "1x,2x,4x", "--perplexity", f"t={here / 'texts'}")
    both = ("plain", "tuned")
    assert run(here, *words, "--json", "--out", str(tmp_path), checkpoints=both) == 0
    first = capsys.readouterr()
    report = json.loads(first.out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    for name in both:
        values = report["checkpoints"][name]
        assert values["documents"] == 4  # the short one is left out
        caches = values["caches"]
        for cache in caches.values():
            assert len(cache["nats"]) == 4 and len(cache["loss"]) == 8 and len(cache["spans"]) == 3
            assert [load["tokens"] for load in cache["loads"]] == [32, 64, 128]
            assert set(cache["recall"]) == set(cache_evaluation.TASKS)
        freqkv, drop, full = (np.array(caches[method]["nats"]) for method in ("freqkv", "drop", "full"))
        assert np.array_equal(freqkv[:, :1], drop[:, :1]) and np.allclose(freqkv[:, :2], full[:, :2])
        assert not np.allclose(freqkv[:, 3:], full[:, 3:]) and not np.allclose(freqkv[:, 3:], drop[:, 3:])
        held = [[load["cache_bytes"] for load in caches[method]["loads"]] for method in ("freqkv", "full")]
        assert held[0][1] == held[0][2] and held[1] == [held[1][0] * n for n in (1, 2, 4)]
        assert len(values["differences"]) == 3 and len(values["spectrum"]["keys"]["kept"]) == 4
        asked = [found["asked"] for cache in caches.values() for found in cache["recall"].values()]
        assert all(each[n] for each in asked for n in (0, 1, 2, 4))  # compressions, as `--compressions` has them
        assert values["haystack"] == "documents"
    assert report["checkpoints"]["plain"]["spectrum"]["unmixed_values"] is None
    assert "plain, not tuned under compression: freqkv's loss" in report["verdict"]
    assert "tuned: freqkv's loss" in report["verdict"]

    text = (tmp_path / "report.html").read_text()
    pictures = Page(text).pictures
    for start, count in (
        ("Loss: freqkv from", 2),
        ("4 needles: freqkv", 2),
        ("Cache bytes: freqkv ends at", 2),
        ("Keys, before rotation: of what varies, kept: plain", 1),
        ("Values, unmixed: of what varies, kept: tuned", 1),
    ):
        assert sum(picture.startswith(start) for picture in pictures) == count, start
    assert "planted in a text of documents" in text and "freqkv − drop" in text and "<script" not in text

    # Again: nothing is computed, and the same comes out.
    assert run(here, *words, "--json", "--out", str(tmp_path), checkpoints=both) == 0
    second = capsys.readouterr()
    assert json.loads(second.out)["checkpoints"] == report["checkpoints"]
    assert second.err.count("done before\n") == 2 * (3 * 5 + 1) and "done before" not in first.err


@pytest.mark.slow
def test_every_cache_has_a_row_in_every_table(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = [*NAMES, "full_static", "full_fp8"]
    words = ("--kvcache", ",".join(methods), *SCHEDULE, "--kvcache-ratio", "0.75", "--at", "1x,2x")
    assert run(here, *words, "--perplexity", str(here / "texts"), "--json", "--out", str(tmp_path)) == 0
    caches = json.loads(capsys.readouterr().out)["checkpoints"]["plain"]["caches"]
    assert list(caches) == methods
    for cache in caches.values():
        assert len(cache["spans"]) == 2 and len(cache["recall"]) == 3 and len(cache["loads"]) == 2
    assert np.allclose(caches["full_static"]["nats"], caches["full"]["nats"], rtol=1e-4)
    dynamic, static, small = (
        [x["cache_bytes"] for x in caches[m]["loads"]] for m in ("full", "full_static", "full_fp8")
    )
    assert all(s > d > 3 * f for d, s, f in zip(dynamic, static, small, strict=True))


@pytest.mark.parametrize("command", ["generate", "evaluate caches", "serve"])
def test_the_help_names_some_of_what_is_allowed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are written out, since help must not wait for torch; the line about a wrong name, below, has all."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    before, found, _ = shown.partition(", ... --kvcache-window")
    names = {word.strip(",") for word in before.split()[-6:]}
    assert found and names < {*NAMES} - {"full"}


def test_without_text_there_are_needles_and_costs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(here, "--kvcache", "freqkv", *SCHEDULE, "--at", "1x") == 0
    shown = capsys.readouterr().out
    assert "accuracy by compressions" in shown and "what it costs" in shown and "nats per token" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kvcache", "freqkv"], "--kvcache freqkv needs --kvcache-window"),
        (["--kvcache", "dct", *SCHEDULE], f"--kvcache dct: allowed: {ALLOWED}"),
        (["--kvcache", "learned", *SCHEDULE], f"--kvcache learned: allowed: {ALLOWED}"),
        (["--kvcache", "freqkv", *SCHEDULE, "--at", "2x,many"], "--at 2x,many: expected numbers of windows"),
        (["--kvcache", "freqkv", *SCHEDULE, "--at", "0x"], "--at 0x: expected numbers of windows"),
        (["--kvcache", "freqkv", "--kvcache-window", "8", "--kvcache-sinks", "4"], "--kvcache: a window of 8"),
        (
            ["--kvcache", "freqkv", *SCHEDULE, "--tasks", "piqa"],
            "--tasks piqa: with --kvcache, allowed: ruler, niah_single_1",
        ),
        (["--at", "2x"], "the following arguments are required: --kvcache"),
        *(
            (["--kvcache", "drop", *SCHEDULE, *words], f"unrecognized arguments: {words[0]}")
            for words in (
                ["--stride", "3"],
                ["--context", "17"],
                ["--num-fewshot", "0"],
                ["--benchmark", "DIR"],
                ["--apply-chat-template"],
                ["--batch-size", "2"],
                ["--include", "DIR"],
                ["--task-data", "DIR"],
                ["--max-trips", "1"],
            )
        ),
        (
            ["--kvcache", "drop", *SCHEDULE, "--no-needles", "--questions", "999"],
            "--questions 999: has no effect without",
        ),
        (
            ["--kvcache", "drop", *SCHEDULE, "--no-needles", "--compressions", "7"],
            "--compressions 7: has no effect without",
        ),
        (
            ["--kvcache", "sinks,full", *SCHEDULE, "--kvcache-ratio", "0.3"],
            "--kvcache-ratio 0.3: method sinks removes one",
        ),
        (["--kvcache", "freqkv", *SCHEDULE, "--kvcache-kept", "30"], "--kvcache: a window of 32 with 2 sinks can keep"),
        (["--kvcache", "freqkv", *SCHEDULE, "--at", "99x", "--perplexity", "TEXTS"], "no document has 3,169 tokens"),
    ],
)
def test_bad_words_are_one_line(here: Path, words: list[str], message: str, capsys: Any) -> None:
    words = [str(here / "texts") if word == "TEXTS" else word for word in words]
    assert run(here, *words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("plain: ")]
    assert len(errors) == 1 and message in errors[0]


@pytest.mark.slow
def test_questions_in_words_end_to_end(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens are said before anything is read; all caches answer the same questions; run again, it goes on."""
    (tmp_path / "long.txt").write_text(". ".join(f"The {word} is here" for word in " ".join(TEXT).split() * 40))
    words = (
        "--kvcache",
        "tova,drop",
        "--kvcache-window",
        "512",
        "--at",
        "1x",
        "--perplexity",
        str(tmp_path / "long.txt"),
    )
    words += ("--needles", "natural", "--questions", "4", "--compressions", "1", "--json", "--out", str(tmp_path))
    assert run(here, *words) == 0
    first = capsys.readouterr()
    assert "plain: each of 3 caches reads" in first.err.split("tova, loss")[0] and " in all" in first.err
    values = json.loads(first.out)["checkpoints"]["plain"]
    assert values["questions"]["asked"] == 4 and not values["caches"]["tova"]["recall"]
    cells = [
        [(one["task"], one["place"], one["compressions"]) for one in answers]
        for answers in (*(cache["answers"] for cache in values["caches"].values()), values["questions"]["reference"])
    ]
    assert cells[0] == cells[1] == cells[2] and len(cells[0]) == 4
    assert "The full cache solves" in json.loads(first.out)["verdict"]
    assert "score by task" in (tmp_path / "report.html").read_text()
    (tmp_path / "plain" / ".done" / "kvcache-drop%2C costs.json").unlink()
    assert run(here, *words) == 0
    again = capsys.readouterr()
    assert again.err.count("done before\n") == again.err.count("plain: ") - 3  # opening, what it takes, and the one
    assert json.loads(again.out)["checkpoints"]["plain"]["caches"]["tova"] == values["caches"]["tova"]


def test_entries_may_be_counted(here: Path) -> None:
    """By the command's words, and for every method alike."""
    asked = cache_evaluation.ask("freqkv,sinks", CacheOptions(window=32, sinks=2, kept=13))
    checkpoint = Checkpoint("plain", here / "plain", lambda directory: pytest.fail("it is not opened"))
    assert asked.schedule(checkpoint) == Schedule(32, 2, 13) != Schedule.at(32, 2, 0.5)
    assert [asked.policy(checkpoint, method).kept for method in ("freqkv", "sinks")] == [13, 13]
    tuned = replace(checkpoint, directory=here / "tuned")
    assert cache_evaluation.ask("average", CacheOptions()).schedule(tuned) == Schedule.at(32, 2, 0.5), "as it was tuned"


@pytest.mark.parametrize("methods", ["freqkv,sinks", "sinks,freqkv", "full,sinks,average"])
def test_compressions_are_counted_whatever_comes_first(here: Path, methods: str) -> None:
    """`sinks` lets one token go at a time, so its own schedule says nothing of a share."""
    checkpoint = Checkpoint("plain", here / "plain", lambda directory: pytest.fail("it is not opened"))
    asked = cache_evaluation.ask(methods, CacheOptions(window=32, sinks=2, ratio=0.75))
    assert asked.schedule(checkpoint) == Schedule.at(32, 2, 0.75)


SHAPE = Schedule(64, 4, 30)


def cache(nats: Sequence[list[float]] = (), recall: dict[str, Recall] | None = None) -> CacheRow:
    times = {"p50": 1.0, "p90": 1.0, "max": 1.0}
    return CacheRow(list(nats), recall or {}, 0.1, [], [Load(4096, 64, 32_000, None, 1.0, times, "wall time")])


def found_in(row: CacheRow, schedule: Schedule = SHAPE) -> CheckpointCaches:
    return CheckpointCaches("", None, schedule, 0, "documents", Questions(0, {}, []), {"freqkv": row}, Spectrum())


def report_of(values: CheckpointCaches) -> CacheReport:
    return CacheReport(**vars(provenance()), methods=["freqkv"], at=[1], checkpoints={"m": values})


def test_the_sentence_says_no_more_than_the_interval() -> None:
    gaps = [
        CacheGap(mean, 3, half, None, method="freqkv", other=other)
        for other, mean, half in (
            ("drop", -0.2, 0.1),
            ("full", 0.3, 0.1),
            ("average", -0.1, 0.2),
            ("sinks", -1.0, None),
        )
    ]

    def said_of(right: list[int]) -> str:
        values = found_in(cache(recall={"4 needles": Recall(right, [100] * 5)}))
        return verdict(report_of(replace(values, tuned={"method": "freqkv"}, differences=gaps)))

    said = said_of([90, 80, 65, 55, 20])
    assert said == (
        "m: freqkv's loss beyond 64 tokens is better than drop (−0.2000 ± 0.1000); worse than full (+0.3000 ± 0.1000); "
        "not significantly different from average (−0.1000 ± 0.2000), sinks (−1.0000). It finds most of the four "
        "needles through 2 compressions, and holds 32 kB after 4,096 tokens."
    )
    for right, words in (
        ([55, 20, 20, 20, 20], "is inconclusive on needles (recall within the window is not clearly above 50 %), and"),
        ([90, 45, 20, 20, 20], "after one compression the result is inconclusive, and holds"),
        ([90, 30, 20, 20, 20], "loses most of the four needles at the first compression, and holds"),
    ):
        assert words in said_of(right)


def test_lengths_short_of_the_needles_still_read_documents(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One window is shorter than a text of needles; the loss reads the one, the needles the other."""
    words = ("--kvcache", "freqkv", *SCHEDULE, "--at", "1x", "--perplexity", str(here / "texts"), "--json")
    assert run(here, *words) == 0
    values = json.loads(capsys.readouterr().out)["checkpoints"]["plain"]
    assert values["haystack"] == "documents" and values["documents"] == 4
    assert [len(nats) for nats in values["caches"]["freqkv"]["nats"]] == [2] * 4


def test_spans_begin_at_the_window_whatever_the_ratio() -> None:
    """F = 24 does not divide N = 40: a stretch of F would hold tokens of the window too."""
    schedule = Schedule.at(40, 4, 0.4)
    nats = [[0.0] * 5 + [8.0] * 10] * 2  # stretches of gcd(40, 24) = 8, the window free of charge
    measured = found_in(cache(nats=nats), schedule)
    found = summarize({"m": measured}, ["freqkv"], [1, 3]).checkpoints["m"].caches["freqkv"]
    assert found.spans == [[0.0, 0.0], [1.0, 1.0]] and found.beyond == [1.0, 1.0]
    assert found.loss == [0.0, pytest.approx(1 / 3), 1.0, 1.0, 1.0]


def test_pieces_of_one_document_are_one_draw() -> None:
    """Six pieces of each of four documents: without their clusters the interval is narrower by far."""
    chance = np.random.default_rng(0)
    windows = [[[1.0, 1.0 + move] for move in np.repeat(chance.normal(size=4), 6)], [[1.0, 1.0]] * 24]
    parts = [[[value for value in row for _ in range(SHAPE.window // SHAPE.chunk)] for row in some] for some in windows]
    found = {}
    for clusters in (None, [str(n // 6) for n in range(24)]):
        caches = {name: cache(nats) for name, nats in zip(("drop", "full"), parts, strict=True)}
        measured = replace(found_in(caches["drop"]), caches=caches, clusters=clusters)
        (gap,) = summarize({"m": measured}, ["drop", "full"], [1, 2]).checkpoints["m"].differences
        found[clusters is None] = gap
    assert (found[True].pairs, found[False].pairs) == (24, 4) and found[True].mean == pytest.approx(found[False].mean)
    assert found[False].half_width > 2 * found[True].half_width


def test_scores_without_spread_have_no_interval() -> None:
    """One half-right answer says little, and was (0.50–0.50)."""
    answers = [Answer("vt", "outside", 1, False, 0.5, None)]
    assert Scores(answers, answers).score == Scores(answers * 9, answers * 9).score == "0.50 (–)"
    other = [replace(answers[0], score=1.0)]
    assert Scores(answers * 9 + other, answers).score == "0.55 (0.44–0.66)"
    assert Scores(other, other).score == "1.00 (0.21–1.00)"


def test_a_compression_is_among_the_decoded_tokens() -> None:
    for schedule in (Schedule.at(40, 4, 0.4), Schedule.at(1024, 4, 0.3), Schedule.at(1024, 4, 0.5)):
        lengths = [n * schedule.window for n in (1, 2, 3, 5)]
        decoded = cache_evaluation._decoded(schedule, lengths)
        assert decoded <= schedule.freed
        assert all(schedule.compressions(length + decoded) > schedule.compressions(length) for length in lengths)


def test_a_model_without_a_spectrum_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_tiny(tmp_path / "turned", k_norm_position="after_rope")
    words = ("--kvcache", "full", *SCHEDULE, "--at", "1x", "--out", str(tmp_path))
    assert run(tmp_path, *words, checkpoints=("turned",)) == 0
    assert "turned has none: k_norm_position" in (tmp_path / "report.html").read_text()
