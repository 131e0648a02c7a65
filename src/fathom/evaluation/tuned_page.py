"""The report on a base and a new model: a page, a card in Markdown, and rows for a terminal.

`tuned.py` asks the questions, and makes the verdict: Holm's adjustment, contaminated questions, models below guessing.
`tuned_origin.py` finds the runs and the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from fathom.evaluation.results import PairReport, RunBetween
from fathom.report import PAGE, html
from fathom.report.numbers import DASH
from fathom.report.plots import IntervalMark, interval_plot
from fathom.report.statistics import LEAST_DOCUMENTS
from fathom.report.tables import PlainTable, markdown_table, print_report

WAYS = {"text": "option text", "length": "option text, by length", "letter": "letter", "shuffled": "letter, shuffled"}
"""Ways of asking a question; the verdict uses the first."""
PARTS = {"all": "all", "clean": "uncontaminated", "dirty": "contaminated"}
MARKS = {True: "right", False: "wrong"}


def score_table(report: PairReport) -> PlainTable:
    """The table of all scores of both models, with the models' names as column titles."""
    made = []
    for name, text in report.texts.items():
        gap = f"{text.difference.value:+.4f}"
        cells = [f"{text.base:.4f}", f"{text.new:.4f}", gap, text.interval]
        made.append([f"{name}, bits per byte", f"{text.bytes:,} bytes", *cells])
    for row in report.questions:
        shares = [right / row.asked for right in row.right]
        scores = [
            f"{100 * share:.1f} % ({100 * low:.1f}–{100 * high:.1f})"
            for share, (low, high) in zip(shares, row.intervals, strict=True)
        ]
        changes = f"{row.won} won, {row.lost} lost, p = {row.p:.2g}"
        label = f"{row.benchmark}, {WAYS[row.way]}, {PARTS[row.part]}"
        made.append([label, f"{row.asked:,}", *scores, f"{100 * (shares[1] - shares[0]):+.1f}", changes])
    for name, guess in report.guessing.items():
        for word, share in guess.items():
            made.append([f"{name}, {word}", "", f"{100 * share:.1f} %", f"{100 * share:.1f} %", DASH, DASH])
    columns = ["", "n", report.base.name, report.new.name, "difference", "95 % interval, or changes and p"]
    return "Base and new on the same text and questions", columns, made


def asked_words(report: PairReport) -> list[str]:
    """How many questions of each benchmark were asked, and why the others were not."""
    return [f"{name}: {one}" for name, one in report.asked.items()]


def show(report: PairReport, out: Path | None) -> None:
    """Print the table of scores, the verdict, and the path of the page."""
    for words in asked_words(report):
        print(words)
    print_report([score_table(report)], report.verdict, out and out / PAGE)


def page(report: PairReport) -> str:
    """The whole report."""
    title = f"{report.new.name} against {report.base.name}"
    corpus = "" if report.corpus is None else html.paragraph(str(report.corpus))
    runs = html.table("The runs, in order", RUN_COLUMNS, run_rows(report), prose=("reads (epochs)",))
    return html.page(
        title,
        html.clauses(report.verdict, [*report.texts, report.base.name, report.new.name]),
        html.section("What it learned", html.figures(*_right_answers(report), _bits(report))),
        html.section("What was asked", html.bullets(asked_words(report)), _examples(report)),
        html.section(f"From {report.base.name} to {report.new.name}", corpus, runs),
        html.section("Every number", html.table(*score_table(report))),
        html.section("How to read this", html.bullets(reading(report))),
        html.section("Where it comes from", html.source(report)),
    )


def reading(report: PairReport) -> list[str]:
    """Explanations of the numbers."""
    flagged = any(row.part != "all" for row in report.questions)
    checked = bool(report.asked) and all(one.checked for one in report.asked.values())
    return [
        "Text: bits per byte of held-out documents, each read alone; intervals are from 1,000 paired bootstrap "
        f"samples of documents, or of the clusters that they name; below {LEAST_DOCUMENTS} there is no interval and no "
        "claim.",
        "Questions: lm-eval's scores. Option text: the choices are not listed, and the likeliest is the answer; by "
        "length, the likeliest per character. Letter: the choices are listed in the prompt. Brackets are Wilson's "
        "intervals. Won and lost are questions that only one model answers correctly; p is McNemar's exact test of "
        "that row, uncorrected.",
        "random is the score of guessing, majority that of always choosing the most frequent letter.",
        "Contaminated questions appear in training text; the verdict above is about uncontaminated questions."
        if flagged
        else "None of these questions is contaminated."
        if checked
        else "It is not known whether questions are contaminated.",
    ]


def _right_answers(report: PairReport) -> list[Markup]:
    """One figure for each benchmark, with the models' shares of right answers and the score of guessing."""
    pictures = []
    names = [report.base.name, report.new.name]
    for benchmark, guess in report.guessing.items():
        rows = {(row.way, row.part): row for row in report.questions if row.benchmark == benchmark}
        marks = []
        for way, part in (("text", "clean"), ("text", "dirty"), ("text", "all"), ("letter", "all")):
            row = rows.get((way, part))
            if row is None or (part == "all" and (way, "clean") in rows and way == "text"):
                continue
            label = WAYS[way] + ("" if part == "all" else f", {PARTS[part]}")
            for number, name in enumerate(names):
                low, high = row.intervals[number]
                share = 100 * row.right[number] / row.asked
                marks.append(IntervalMark(f"{label}: {name}", share, 100 * low, 100 * high, number))
        words = f"Shares of right answers on {benchmark}, with 95 % intervals."
        picture = interval_plot(marks, "% right", words, line=100 * guess["random"])
        caption = f"Dots with Wilson's 95 % intervals; the line is guessing, {100 * guess['random']:.0f} %."
        pictures.append(html.figure(f"Right answers on {benchmark}", picture, caption))
    return pictures


def _bits(report: PairReport) -> Markup:
    marks: list[IntervalMark] = []
    for name, text in report.texts.items():
        gap = text.difference
        label = f"{name}: {text.base:.3f} to {text.new:.3f} bits per byte"
        marks.append(IntervalMark(label, gap.value, gap.low, gap.high, len(marks)))
    if not marks:
        return Markup()
    words = "Differences in bits per byte of held-out text, with 95 % intervals."
    picture = interval_plot(marks, f"{report.new.name} minus {report.base.name}, bits per byte", words)
    caption = "Left of the line the new model predicts a text better; right of the line worse: it has forgotten."
    return html.figure("Held-out text", picture, caption)


def _examples(report: PairReport) -> Markup:
    names = [report.base.name, report.new.name]
    rows = [
        [one.answer, one.question, ", ".join(one.wrong), *(MARKS[right] for right in one.right)]
        for one in report.examples
    ]
    head = ["answer", "question", "other choices", *names]
    caption = "The first of the questions, and who is right by option text"
    return html.table(caption, head, rows, prose=("question", "other choices"))


RUN_COLUMNS = ["run", "reads (epochs)", "tokens", "learning rate", "loss, first step", "last step", "held out"]


def run_rows(report: PairReport) -> list[list[str]]:
    """Table rows of the training runs that lead from the base to the new model."""
    return [
        [
            one.run + (f", adapters of rank {one.adapters}" if one.adapters else ""),
            _reads(one),
            DASH if one.tokens is None else f"{one.tokens:,}",
            f"{one.rate:g}",
            *(DASH if loss is None else f"{loss:.3f}" for loss in (one.first_loss, one.last_loss, one.held_out_loss)),
        ]
        for one in report.runs
    ]


def _reads(one: RunBetween) -> str:
    """A run's training data in words: the shares of each phase; a collection's epochs are given once, at its first
    phase."""
    named: set[str] = set()
    phases = []
    for start, shares in (("", one.data), *((f"from step {x.step:,} ", x.data) for x in one.later)):
        words = []
        for name, share in shares.items():
            words.append(f"{Path(name).name} {100 * share:.0f} %")
            if name not in named:
                words[-1] += _epochs(one.epochs.get(name))
        named |= shares.keys()
        phases.append(start + ", ".join(words))
    return "; ".join(phases)


def _epochs(number: float | None) -> str:
    return "" if number is None else f" ({number:.3g})"


def card(report: PairReport) -> str:
    """The page's contents as Markdown, to store with the model."""
    return "\n".join(_card(report)) + "\n"


def _card(report: PairReport) -> Iterator[str]:
    yield from (f"# {report.new.name}, made from {report.base.name}", "", report.verdict, "")
    yield from (*asked_words(report), "")
    if report.corpus is not None:
        yield from (str(report.corpus), "")
    if rows := run_rows(report):
        yield from ("## Runs", "", *markdown_table(RUN_COLUMNS, rows), "")
    yield from ("## Scores", "", *markdown_table(*score_table(report)[1:]), "")
    yield from (f"- {one}" for one in reading(report))
    yield from ("", "## Provenance", "", *markdown_table(["", ""], [[k, str(v)] for k, v in report.facts().items()]))
