"""A base against what was made of it: counts by hand, models that were told what to answer, and a careful sentence."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.recompute import differing, recomputed, unfounded
from examples.minerals import World

from fathom.cli.main import main
from fathom.errors import DataError, FathomError
from fathom.evaluation.harness import TaskResult
from fathom.evaluation.paired import Items
from fathom.evaluation.perplexity import DomainScore
from fathom.evaluation.results import (
    Answered,
    Asking,
    CorpusCounts,
    NamedModel,
    PairReport,
    PhaseShares,
    RatioGap,
    RunBetween,
)
from fathom.evaluation.scoring import Checkpoint, EvaluationSettings
from fathom.evaluation.tuned import (
    LETTERS,
    Quizzed,
    chosen,
    compare_texts,
    count_answers,
    evaluate_pair,
    guessing,
    left_out,
    read_benchmarks,
    summarize,
    task_rows,
    verdict,
)
from fathom.evaluation.tuned_origin import runs_between
from fathom.evaluation.tuned_page import WAYS, card, page
from fathom.report.provenance import provenance
from fathom.report.results import restored, to_json
from fathom.report.statistics import LEAST_DOCUMENTS, mcnemar
from fathom.training import train
from tests.tiny import tiny_recipe


def items(count: int = 40, dirty: int = 10) -> list[Quizzed]:
    chance = random.Random(2)
    made = []
    for number in range(count):
        choices = tuple(chance.sample(["red", "green", "blue", "white", "black", "grey"], 4))
        made.append(
            Quizzed(str(number), f"The colour of item {number} is", choices, chance.randrange(4), number < dirty)
        )
    return made


def scored(name: str, answers: dict[str, Sequence[bool]], texts: dict[str, list[float]]) -> Checkpoint:
    """A checkpoint that answered so, and read documents of 100 bytes at so many bits."""
    found = Checkpoint(name, Path("nowhere"), lambda _: (None, None))
    for task, right in answers.items():
        values = Items([float(one) for one in right])
        found.tasks[task] = TaskResult({}, {f"{task}/acc": values, f"{task}/acc_norm": values})
    for text, bits in texts.items():
        nats = [math.log(2) * one for one in bits]
        found.domains[text] = DomainScore(nats, [50] * len(bits), [100] * len(bits))
    return found


TASKS = {("quiz", way): f"choice:{way}" for way in ("text", "letter", "shuffled")}


RUN = RunBetween(
    run="new",
    data={"corpora/rocks": 0.8, "towns": 0.2},
    later=[],
    epochs={"corpora/rocks": 27.43, "towns": 1.1},
    **{"steps": 2, "tokens": 1024, "seconds": 1.0, "rate": 0.005, "adapters": None},
    **{"first_loss": 9.5, "last_loss": 0.5, "held_out_loss": 0.75},
)


def report_of(base: list[bool], new: list[bool], gap: float = -10.0) -> PairReport:
    chance = random.Random(1)
    before = [chance.uniform(100, 200) for _ in range(30)]
    after = [bits + gap + chance.gauss(0, 2) for bits in before]
    pair = [
        scored("base", dict.fromkeys(TASKS.values(), base), {"rocks": before, "towns": before}),
        scored("new", dict.fromkeys(TASKS.values(), new), {"rocks": after, "towns": before}),
    ]
    return summarize(pair, {"quiz": items()}, TASKS)


def test_counts_are_those_of_a_loop() -> None:
    chance = random.Random(5)
    asked = items()
    base, new = ([chance.random() < share for _ in asked] for share in (0.3, 0.6))
    found = {one.part: one for one in count_answers("quiz", "text", asked, base, new)}
    assert list(found) == ["all", "clean", "dirty"]
    for part, keep in (("all", range(40)), ("clean", range(10, 40)), ("dirty", range(10))):
        one = found[part]
        assert one.asked == len(keep)
        assert one.right == (sum(base[i] for i in keep), sum(new[i] for i in keep))
        assert one.won - one.lost == one.right[1] - one.right[0]
        assert one.lost == len([i for i in keep if base[i] and not new[i]])
        assert one.p == mcnemar(one.lost, one.won)
    unknown = [Quizzed(one.id, one.question, one.choices, one.answer) for one in asked]
    assert [one.part for one in count_answers("quiz", "text", unknown, base, new)] == ["all"]


def test_every_way_asks_for_the_same_answer() -> None:
    """The row's right choice leads back to the right text; the order of shuffled ones differs, and stays."""
    asked = items()
    for way in ("text", "letter", "shuffled"):
        rows = task_rows(asked, way)
        assert rows == task_rows(asked, way)
        for item, row in zip(asked, rows, strict=True):
            answer = row["choices"][row["answer"]]
            if way == "text":
                assert answer == item.choices[item.answer]
                assert row["question"] == item.question, "options that are not listed have no order"
                continue
            listed = dict(line.split(". ", 1) for line in row["question"].splitlines()[1:-1])
            assert listed[answer] == item.choices[item.answer]
            assert sorted(listed.values()) == sorted(item.choices)
            assert list(listed) == row["choices"] == list(LETTERS[:4])
    plain, mixed = ([row["answer"] for row in task_rows(asked, way)] for way in ("letter", "shuffled"))
    assert plain != mixed


def test_guessing() -> None:
    asked = [
        Quizzed("0", "a", ("x", "y"), 0),
        Quizzed("1", "b", ("x", "y", "z", "w"), 0),
        Quizzed("2", "c", ("x", "y"), 1),
    ]
    assert guessing(asked) == {"random": pytest.approx(1.25 / 3), "majority": pytest.approx(2 / 3)}


def test_text_is_paired_by_document() -> None:
    """Documents differ much and the models little: unpaired, the interval would hold zero."""
    chance = random.Random(0)
    before = [chance.uniform(50, 500) for _ in range(60)]
    after = [bits - 5 + chance.gauss(0, 1) for bits in before]
    pair = [scored(name, {}, {"t": bits}).domains["t"] for name, bits in (("base", before), ("new", after))]
    found = compare_texts(*pair)
    gap = found.difference
    assert found.new - found.base == pytest.approx(gap.value)
    assert gap.low < -0.05 < gap.high < -0.04
    assert compare_texts(pair[0], pair[0]).difference == RatioGap(0, 0, 0)


def test_pieces_of_one_document_are_one_draw() -> None:
    """Ten pieces of each of 40 documents, which differ alike within: without clusters the interval is too narrow."""
    chance = random.Random(0)
    gaps = [chance.gauss(-1, 30) for _ in range(40)]
    pair = [
        scored(name, {}, {"t": [100.0 + side * gap for gap in gaps for _ in range(10)]})
        for name, side in (("base", 0), ("new", 1))
    ]
    base, new = (one.domains["t"] for one in pair)
    alone = compare_texts(base, new)
    for score in (base, new):
        score.clusters = [str(n // 10) for n in range(400)]
    together = compare_texts(base, new)
    width = [one.difference.high - one.difference.low for one in (alone, together)]
    assert (together.documents, together.clusters, alone.clusters) == (400, 40, None)
    assert together.difference.value == pytest.approx(alone.difference.value) and width[1] > 2.5 * width[0]
    for score in (base, new):
        score.clusters = [str(n // 100) for n in range(400)]
    assert compare_texts(base, new).interval == f"no interval: clusters 4, needed {LEAST_DOCUMENTS}"


def test_too_few_documents_have_no_interval_and_make_no_claim() -> None:
    for count in (1, 2, LEAST_DOCUMENTS - 1, LEAST_DOCUMENTS):
        before = [100.0 + i for i in range(count)]
        after = [bits - 5 - i % 3 for i, bits in enumerate(before)]
        pair = [scored("base", {}, {"sea": before}), scored("new", {}, {"sea": after})]
        report = summarize(pair, {}, {})
        gap = report.texts["sea"].difference
        assert gap.value < -0.04
        if count == LEAST_DOCUMENTS:
            assert gap.high < 0 and report.verdict.startswith("Sea takes fewer bits per byte (")
            continue
        assert gap.low is None and gap.high is None
        assert report.verdict.startswith("Sea has too few documents to judge bits per byte (-0.0")
        words = f"no interval: documents {count}, needed {LEAST_DOCUMENTS}"
        assert all(words in made for made in (report.verdict, page(report), card(report)))


def test_a_loss_that_is_not_finite_is_not_judged() -> None:
    """An interval of NaN holds no zero, and the verdict was that the new model takes more bits."""
    bits = [100.0] * 30
    pair = [scored("base", {}, {"sea": bits}), scored("new", {}, {"sea": [math.nan, *bits[1:]]})]
    assert summarize(pair, {}, {}).verdict == "Sea is not judged: the loss of a model is not finite there."


def test_the_sentence_says_no_more_than_intervals_do() -> None:
    chance = random.Random(7)
    base = [chance.random() < 0.25 for _ in range(40)]
    better = report_of(base, [True] * 40).verdict
    assert better.startswith("On 30 uncontaminated questions of quiz (100.0 % right) new is better than base (")
    assert "rocks takes fewer bits per byte (-0.0" in better
    assert "towns shows no clear difference in bits per byte (+0.0000" in better
    assert "new is worse than base" in report_of([True] * 40, base).verdict
    one_more = [*base[:-1], not base[-1]]
    assert "new is not significantly different from base" in report_of(base, one_more).verdict
    # What is known by heart is no knowledge: right on the ten dirty ones alone.
    leaked = report_of(base, [True] * 10 + base[10:])
    assert "new is not significantly different from base" in leaked.verdict
    dirty = [row for row in leaked.questions if (row.way, row.part) == ("text", "dirty")]
    assert dirty[0].right[1] == 10
    assert "rocks takes more bits" in report_of(base, base, gap=+10).verdict


GUESS = {"random": 0.25, "majority": 0.3}
ASKED = Asking(40, 40, {}, False)


def report_on(questions: list[Answered], *names: str) -> PairReport:
    """Nothing but the answers to some benchmarks."""
    models = {"base": NamedModel("base", ""), "new": NamedModel("new", "")}
    nothing = {"texts": {}, "examples": [], "runs": [], "corpus": None}
    known = {"guessing": dict.fromkeys(names, GUESS), "asked": dict.fromkeys(names, ASKED)}
    return PairReport(**vars(provenance()), **models, **nothing, **known, questions=questions)


def test_questions_that_are_all_dirty_are_not_judged() -> None:
    """Right on what training text gave away is no gain, and its p none of Holm's family."""
    rows = count_answers("leaked", "text", items(20, dirty=20), [False] * 20, [True] * 20)
    alone = verdict(report_on(rows, "leaked"))
    assert (
        alone
        == "No uncontaminated question of leaked is left (training text contains 20 of 20), so there is no verdict."
    )
    rows += count_answers("quiz", "text", items(20, dirty=0), [False] * 20, [True] * 20)
    both = verdict(report_on(rows, "leaked", "quiz"))
    assert both.startswith(alone[:-1]) and both.count("better than") == 1 and "Holm" not in both
    unknown = [replace(one, dirty=None) if i else one for i, one in enumerate(items(20, dirty=20))]
    rows = count_answers("leaked", "text", unknown, [False] * 20, [True] * 20)
    assert "contains 1 of 20" in verdict(report_on(rows, "leaked"))


def test_several_benchmarks_are_judged_together() -> None:
    """Six changes to one side are p = .03 alone; of two benchmarks Holm makes .06 of it."""
    row = Answered("a", "text", "all", 40, (10, 16), lost=0, won=6)
    alone = verdict(report_on([row], "a"))
    assert "new is better than base" in alone and "Holm" not in alone
    other = replace(row, benchmark="b")
    said = verdict(report_on([row, other], "a", "b"))
    assert (
        said.count("new is not significantly different from base") == 2
        and said.count("0.062 after Holm's correction over 2 benchmarks") == 2
    )
    sure = replace(other, won=30, right=(10, 40))
    mixed = verdict(report_on([row, sure], "a", "b"))
    assert mixed.count("is better than") == 2, "the other one's certainty is no price for it"


def test_a_limit_draws_questions_and_says_how_many_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{number} is", "choices": ["x", "y"], "answer": 0} for number in range(9)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(entries: Sequence[str], settings: EvaluationSettings) -> tuple[list[Checkpoint], dict[str, Any]]:
        tasks = (settings.tasks or "").split(",")
        files = [Path(task.partition(":")[2]).read_text().splitlines()[: settings.limit] for task in tasks]
        answers = {task: [True] * len(file) for task, file in zip(tasks, files, strict=True)}
        return [scored(name, answers, {}) for name in entries], {}

    monkeypatch.setattr("fathom.evaluation.tuned.run", run)
    monkeypatch.setattr("fathom.evaluation.tuned.find_spec", lambda name: name)
    report = evaluate_pair(["base", "new"], tmp_path, EvaluationSettings(limit=4, device="cpu"))
    assert {row.asked for row in report.questions} == {4}
    assert report.asked["quiz"] == Asking(4, 9, {"not drawn": 5}, False)
    assert "quiz: asked 4 of 9 questions drawn at random; skipped: 5 not drawn." in card(report)
    assert [one.question for one in report.examples] != [row["question"] for row in rows[:4]]
    assert {row.asked for row in evaluate_pair(["base", "new"], tmp_path, EvaluationSettings()).questions} == {9}


def test_repeated_questions_are_asked_once() -> None:
    """Repetitions are no independent draws: McNemar's test and the intervals count distinct questions."""
    asked = items(6, 0)
    again = [replace(one, id=f"again {one.id}", choices=one.choices[::-1], answer=3 - one.answer) for one in asked[:2]]
    again[1] = replace(again[1], dirty=True)
    kept, asking = chosen([*asked, None, *again])
    assert [one.id for one in kept] == [one.id for one in asked] and [one.dirty for one in kept] == [
        False,
        True,
    ] + 4 * [False]
    skipped = {"no choices, or none that is right": 1, "repeated": 2}
    assert asking == Asking(6, 9, skipped, True)


def test_items_that_the_corpus_left_out_are_counted(tmp_path: Path) -> None:
    (tmp_path / "quiz.check.json").write_text(json.dumps({"items": 43, "left_out": {"with an empty option": 3}}))
    asked, asking = chosen(items(), 10, left_out(tmp_path, "quiz"))
    assert len(asked) == 10 and asking.of == 43
    assert asking.skipped == {"with an empty option": 3, "not drawn": 30}
    assert left_out(tmp_path, "other") == {}


def test_a_score_below_the_guess_is_remarked_on() -> None:
    row = Answered("quiz", "text", "all", 100, (8, 30), lost=0, won=22)
    said = "base answered fewer questions of quiz correctly than guessing would (25.0 %)"
    assert said in verdict(report_on([row], "quiz"))
    assert "than guessing would" not in verdict(report_on([replace(row, right=(18, 40))], "quiz"))


def test_clean_rows_stand_beside_dirty_ones_alone() -> None:
    clean = items(6, 0)
    assert [one.part for one in count_answers("quiz", "text", clean, [True] * 6, [True] * 6)] == ["all"]


def test_the_page_has_all_of_it() -> None:
    report = report_of([False] * 40, [True] * 40)
    text = page(report)
    for words in (
        "quiz, option text, uncontaminated",
        "quiz, letter, shuffled, all",
        "rocks, bits per byte",
        "quiz, majority",
    ):
        assert words in text
    assert "100.0 % (91.2–100.0)" in text
    assert "The colour of item 10 is" in text, "a clean one"
    assert "The colour of item 3 is" not in text
    later = [PhaseShares(240, {"towns": 0.5, "corpora/seas": 0.5}), PhaseShares(300, {"towns": 1.0})]
    phased = replace(RUN, run="continued", later=later, epochs={**RUN.epochs, "corpora/seas": 2.0})
    runs = [phased, replace(RUN, adapters=8, held_out_loss=None)]
    nothing = dict.fromkeys(("unreadable", "filtered", "duplicate", "cut", "conversations"), 0)
    whole = replace(report, runs=runs, corpus=CorpusCounts(read=1104, dropped=12, tokens=5000, **nothing))
    for made in (page(whole).replace("\u00a0", " "), card(whole)):
        assert "Of 1,104 documents read: 12 dropped as contaminated. 5,000 tokens remain." in made
        assert made.count("rocks 80 % (27.4), towns 20 % (1.1)") == 2
        assert made.count("towns 20 % (1.1); from step 240 towns 50 %, seas 50 % (2); from step 300 towns 100 %") == 1
        assert "new, adapters of rank 8" in made
    rows = [line for line in card(whole).splitlines() if line.startswith("| quiz, option text, uncontaminated")]
    assert len(rows) == 1 and "100.0 %" in rows[0]
    assert restored(PairReport, json.loads(to_json(report))) == report


def test_questions_are_read_with_their_flags(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "question": "x is", "choices": ["1", "2"], "answer": 1, "dirty": True},
        {"id": "b", "question": "open, without choices", "choices": [], "answer": None},
        {"question": "y is", "choices": ["1", "2", "3"], "answer": 0},
    ]
    odd = "x\x85is\u2029odd"  # ends of lines to Unicode, and none to JSON lines
    rows.insert(0, {"id": "o", "question": odd, "choices": ["1", "2"], "answer": 0})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "quiz.jsonl").write_text(text + "\n", encoding="utf-8")
    (tmp_path / "quiz.check.json").write_text("{}")
    found = read_benchmarks(tmp_path)
    assert found["quiz"] == [
        Quizzed("o", odd, ("1", "2"), 0),
        Quizzed("a", "x is", ("1", "2"), 1, True),
        None,
        Quizzed("3", "y is", ("1", "2", "3"), 0),
    ]
    (tmp_path / "quiz.jsonl").write_text("\ufeff" + text, encoding="utf-8")
    assert read_benchmarks(tmp_path) == found
    (tmp_path / "quiz.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"quiz\.jsonl:1: bad JSON: 'utf-8' codec"):
        read_benchmarks(tmp_path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"question": "x", "choices": ["1", "2"], "answer": 2}', "document 1: needs `answer`, the index of the right"),
        ('{"question": "x", "choices": ["1", 2], "answer": 0}', "document 1: needs `choices`, a list of two or more"),
        ('{"choices": ["1", "2"], "answer": 0}', "quiz.jsonl: document 1: needs `question`, a text"),
        ('{"question": "x", "choices": ["1", "2"], "answer": 0, "dirty": 1}', "1: `dirty` is neither true nor false"),
        (json.dumps({"question": "x", "choices": ["1"] * 27, "answer": 0}), "has more than 26 `choices`"),
        ("[1]", "quiz.jsonl:1: expected a JSON object"),
        ('{"question": "open"}', "no .*jsonl file with question, choices and answer"),
    ],
)
def test_what_is_no_benchmark_is_said_in_one_line(row: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "quiz.jsonl").write_text(row + "\n")
    with pytest.raises(FathomError, match=said):
        read_benchmarks(tmp_path)


def test_the_command_line_refuses_what_is_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["one", "--benchmark", str(tmp_path)], "the following arguments are required: TUNED"),
        (["one", "two", "--benchmark", str(tmp_path / "none")], "none: no such directory"),
        (["one", "two", "--benchmark", str(tmp_path), "--kvcache", "freqkv"], "unrecognized arguments: --kvcache"),
    ):
        assert main(["evaluate", "tuned", *words]) == 2
        assert said in capsys.readouterr().err


def test_two_runs_are_compared_and_nothing_is_scored_twice(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[evaluate]'")
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face models need accelerate")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    shutil.copytree(corpus, tmp_path / "geology" / "shards")
    benchmark = tmp_path / "geology" / "benchmark"
    benchmark.mkdir()
    rows = [{**one.row(), "dirty": number < 2} for number, one in enumerate(World(0, 12).questions(8))]
    (benchmark / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    longer = ("model.mixer=none", "model.max_position_embeddings=256", "train.export=true")
    train(tiny_recipe(corpus, *longer, "train.steps=2"), tmp_path / "base")
    onward = (f"model={{from_pretrained: {tmp_path / 'base'}}}", "train.export=true", "train.steps=8")
    train(tiny_recipe(corpus, *onward), tmp_path / "new")
    words = ["evaluate", "tuned", str(tmp_path / "base"), str(tmp_path / "new"), "--benchmark", str(benchmark)]
    monkeypatch.chdir(tmp_path)  # no checkout: git has nothing to say
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    printed = capfd.readouterr()
    assert "quiz, letter, shuffled, contaminated" in printed.out and "git" not in printed.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report["texts"]) == {"rivers", "seas"}
    assert all(text["difference"]["value"] < 0 for text in report["texts"].values()), "six more steps help"
    assert all(text["difference"]["high"] is None for text in report["texts"].values()), "14 and 9 documents"
    sizes = {(row["way"], row["part"]): row["asked"] for row in report["questions"]}
    assert sizes == {(w, p): n for w in WAYS for p, n in (("all", 8), ("clean", 6), ("dirty", 2))}
    assert (tmp_path / "out" / "report.html").stat().st_size > 5000
    assert [one["run"] for one in report["runs"]] == ["new"] and report["corpus"] is None, (
        "no corpus made the questions"
    )
    assert "quiz, option text, uncontaminated" in (tmp_path / "out" / "card.md").read_text()
    assert main([*words, "--out", str(tmp_path / "out"), "--json"]) == 0
    again = capfd.readouterr()
    assert again.err.count("done before") == 10
    assert json.loads(again.out)["questions"] == report["questions"]
    ours = recomputed(report, benchmark)  # by transformers' own class, one question at a time
    assert list(differing(ours, report)) == []
    names = ["base", "new", *ours["guessing"], *ours["texts"]]
    assert unfounded(report["verdict"], ours, names) == []
    report["texts"]["seas"]["new"] += 2e-6
    report["questions"][3]["won"] += 1
    assert len(list(differing(ours, report))) == 2, "what is wrong is found"
    assert unfounded(report["verdict"].replace(" 9,", " 977,"), ours, names) == ["977"]


@pytest.mark.slow
def test_the_runs_between_a_base_and_what_was_made_of_it(corpus: Path, tmp_path: Path) -> None:
    """By the directories alone: the base, a run from it, and another from a checkpoint of that one."""
    base, middle, new = (tmp_path / name for name in ("base", "middle", "new"))
    train(tiny_recipe(corpus, "train.steps=2", "train.export=true"), base)
    phases = "data.phases=[{at: 0.5, mixture: {seas: 1}}, {at: 3, mixture: {rivers: 1, seas: 1}}]"
    mixed = ("data.mixture={rivers: 3, seas: 1}", phases, f"model.from_pretrained={base / 'model'}")
    train(tiny_recipe(corpus, "train.steps=4", *mixed), middle)
    train(tiny_recipe(corpus, "train.steps=2", "train.export=true", f"model.from_pretrained={middle}@step-4"), new)
    found = runs_between(base / "model", new / "model")
    assert [one.run for one in found] == ["middle", "new"]
    assert found[0].data == {"rivers": 0.75, "seas": 0.25}
    assert found[0].later == [PhaseShares(2, {"seas": 1.0}), PhaseShares(3, {"rivers": 0.5, "seas": 0.5})]
    assert found[1].later == [], "one phase"
    assert found[0].epochs == json.loads((middle / "result.json").read_text())["collections"]
    assert found[1].tokens == json.loads((new / "result.json").read_text())["tokens"]
    losses = [json.loads(line)["loss"] for line in (middle / "metrics.jsonl").read_text().splitlines() if "lr" in line]
    assert (found[0].first_loss, found[0].last_loss) == (losses[0], losses[-1])
    assert runs_between(new / "model", new / "model") == []
    assert runs_between(tmp_path / "elsewhere", middle) == [], "made of something else"
    shutil.copytree(base / "model", tmp_path / "downloaded")
    tuned = train(
        tiny_recipe(corpus, "train.steps=1", f"model.from_pretrained={tmp_path / 'downloaded'}"), tmp_path / "t"
    )
    assert [one.run for one in runs_between(tmp_path / "downloaded", tuned.run_dir)] == ["t"]
