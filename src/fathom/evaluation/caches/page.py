"""The report on caches: numbers, verdict, tables for a terminal, and a page.

`questions.py` has the tables of questions, and leaves out of the verdict the tasks that the full cache does not solve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

import numpy as np
from markupsafe import Markup

from fathom.evaluation.caches.measure import stretches
from fathom.evaluation.caches.needles import Recall
from fathom.evaluation.caches.questions import question_tables, sentence
from fathom.evaluation.caches.results import CacheGap, CacheReport, CheckpointCaches, Load
from fathom.evaluation.caches.spectrum import Shares
from fathom.evaluation.paired import Items, paired
from fathom.report import PAGE, html
from fathom.report.numbers import DASH, size
from fathom.report.plots import Line, ends, reach
from fathom.report.provenance import provenance
from fathom.report.tables import PlainTable, print_report


def summarize(found: Mapping[str, CheckpointCaches], methods: Sequence[str], at: Sequence[int]) -> CacheReport:
    """Build the report from the measurements, with losses by position and differences paired over documents."""
    report = CacheReport(**vars(provenance()), methods=list(methods), at=list(at), checkpoints=dict(found))
    for values in found.values():
        schedule = values.schedule
        freed, window, width = schedule.freed, schedule.window, schedule.chunk
        for cache in values.caches.values():
            if cache.nats:
                cache.loss = [
                    loss / freed for loss in stretches(np.mean(cache.nats, axis=0, keepdims=True), freed // width)[0]
                ]
                cache.spans = [_span(cache.nats, a * window, b * window, width) for a, b in _spans(at)]
                cache.beyond = _span(cache.nats, window, max(at) * window, width) if max(at) > 1 else None
        values.differences = list(_differences(values, methods))
    report.verdict = verdict(report)
    return report


def verdict(report: CacheReport) -> str:
    """The verdict, with a line for each checkpoint: loss beyond the window, recall of needles, and bytes."""
    return "\n".join(_sentence(name, values, report) for name, values in report.checkpoints.items())


def _sentence(name: str, values: CheckpointCaches, report: CacheReport) -> str:
    first, window = report.methods[0], values.schedule.window
    mine = values.caches[first]
    parts = []
    for words, holds in (
        ("better than", lambda gap: gap.excludes_zero and gap.mean < 0),
        ("worse than", lambda gap: gap.excludes_zero and gap.mean > 0),
        ("not significantly different from", lambda gap: not gap.excludes_zero),
    ):
        gaps = [gap for gap in values.differences if gap.method == first and holds(gap)]
        if gaps:
            others = ", ".join(f"{gap.other} ({gap})" for gap in gaps)
            parts.append(f"{words} {others}")
    loss = f"{first}'s loss beyond {window:,} tokens is {'; '.join(parts)}. It " if parts else f"{first} "
    load = mine.loads[-1]
    held = f"holds {size(load.cache_bytes)} after {load.tokens:,} tokens"
    tuned = "" if values.tuned else ", not tuned under compression"
    asked = mine.recall.get("4 needles")
    found = f"{_found(asked)}, and {held}" if asked else held
    return f"{name}{tuned}: {loss}{found}.{sentence(values, first)}"


def _found(recall: Recall) -> str:
    """The verdict on needles: the number of compressions that most needles survive, judged by the confidence
    intervals."""
    sure = [interval is not None and interval[0] > 0.5 for interval in recall.intervals]
    if not sure[0]:
        return "is inconclusive on needles (recall within the window is not clearly above 50 %)"
    last = next((r for r, most in enumerate(sure) if not most), len(sure)) - 1
    end = recall.intervals[last + 1] if last + 1 < len(sure) else None
    if last == 0 and end is not None and end[1] < 0.5:
        return "loses most of the four needles at the first compression"
    if last == 0:
        return "finds most of the four needles in its window; after one compression the result is inconclusive"
    return f"finds most of the four needles through {last} compressions"


def _spans(at: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((0, *at[:-1]), at, strict=True))


def _span(nats: Sequence[Sequence[float]], start: int, stop: int, width: int) -> list[float]:
    """The mean loss of each document between two positions, from sums over segments; both positions are multiples of a
    segment's width."""
    return (np.asarray(nats)[:, start // width : stop // width].mean(1) / width).tolist()


def _differences(values: CheckpointCaches, methods: Sequence[str]) -> Iterator[CacheGap]:
    """The loss beyond the window of each cache minus that of each cache listed after it, paired over documents or their
    clusters."""
    for method, other in combinations(methods, 2):
        mine, theirs = values.caches[method].beyond, values.caches[other].beyond
        if mine and theirs:
            gap = paired(*(Items(beyond, clusters=values.clusters) for beyond in (mine, theirs)))
            yield CacheGap(gap.mean, gap.pairs, gap.half_width, gap.p, method=method, other=other)


def tables(name: str, values: CheckpointCaches, report: CacheReport) -> list[list[PlainTable]]:
    """The tables of loss by position, of needles by compressions, of questions, and of costs by length."""
    parts = (
        _loss_table(values, report),
        _recall_tables(values, report),
        question_tables(values, report.methods),
        _cost_table(values, report),
    )
    return [[(f"{name}: {caption}", columns, rows) for caption, columns, rows in part] for part in parts]


def _loss_table(values: CheckpointCaches, report: CacheReport) -> Iterator[PlainTable]:
    rows = []
    for method in report.methods:
        cache = values.caches[method]
        if cache.spans is not None:
            rows.append([method, *(f"{np.mean(span):.4f}" for span in cache.spans)])
    if rows:
        columns = ["cache", *(f"{a}–{b} windows" for a, b in _spans(report.at))]
        noun = "document" if values.documents == 1 else "documents"
        yield f"nats per token by position ({values.documents} {noun})", columns, rows


def _recall_tables(values: CheckpointCaches, report: CacheReport) -> Iterator[PlainTable]:
    first = values.caches[report.methods[0]]
    for task, recall in first.recall.items():
        rows = []
        for method in report.methods:
            mine = values.caches[method].recall[task]
            cells = zip(mine.accuracy, mine.intervals, strict=True)
            rows.append([method, *(DASH if i is None else f"{a:.2f} ({i[0]:.2f}–{i[1]:.2f})" for a, i in cells)])
        rows.append(["questions", *map(str, recall.asked)])
        caption = f"{task}, accuracy by compressions in between, 95 % intervals (chance {first.chance:.2f})"
        yield caption, ["cache", *map(str, range(len(recall.asked)))], rows


def _cost_table(values: CheckpointCaches, report: CacheReport) -> Iterator[PlainTable]:
    rows = []
    for method in report.methods:
        for load in values.caches[method].loads:
            ms, peak = load.decode_ms, load.peak_bytes
            cells = [f"{load.tokens:,}", f"{load.entries:,}", size(load.cache_bytes)]
            cells += [DASH if peak is None else size(peak), f"{load.prefill_tokens_per_second:,.0f}"]
            rows.append([method, *cells, *(f"{ms[key]:.2f}" for key in ("p50", "p90", "max"))])
    columns = ["cache", "tokens", "entries", "bytes", "peak", "prefill tokens/s", "decode ms, p50", "p90", "max"]
    yield "what it costs", columns, rows


def show(report: CacheReport, out: Path | None) -> None:
    """Print the tables, the verdict, and the path of the page."""
    parts = (part for name, values in report.checkpoints.items() for part in tables(name, values, report))
    print_report((table for part in parts for table in part), report.verdict, out and out / PAGE)


def page(report: CacheReport) -> str:
    """The whole report."""
    legend = html.legend(report.methods)
    blocks = []
    for name, values in report.checkpoints.items():
        parts = tables(name, values, report)
        losses, recalls, questions, costs = ([html.table(*table) for table in part] for part in parts)
        loss, needles = _loss_figures(values, report), _needle_figures(values, report)
        blocks += [
            html.section(f"{name}: loss by position", legend if loss else "", loss, _gaps(values), *losses),
            html.section(f"{name}: needles", legend, needles, *recalls) if needles else Markup(),
            html.section(f"{name}: questions", *questions),
            html.section(f"{name}: cost", legend, _cost_figures(values, report), *costs),
        ]
    title = f"Caches: {', '.join(report.methods)}"
    spectra = html.section("Spectrum", html.legend(list(report.checkpoints)), _spectrum_figures(report))
    reading = html.section("How to read this", html.bullets(_method(report)))
    return html.page(title, report.verdict, *blocks, spectra, reading, _source(report))


def _loss_figures(values: CheckpointCaches, report: CacheReport) -> Markup:
    freed, lines, gaps = values.schedule.freed, [], []
    curves = {m: loss for m in report.methods if (loss := values.caches[m].loss) is not None}
    control = next((m for m in ("full", *reversed(report.methods)) if m in curves), None)
    for i, (method, loss) in enumerate(curves.items()):
        x = [(j + 0.5) * freed for j in range(len(loss))]
        lines.append(Line(method, x, loss, i, marks=len(x) < 20))
        if method != control:
            against = curves[str(control)]
            gaps.append(Line(method, x, [a - b for a, b in zip(loss, against, strict=True)], i, marks=len(x) < 20))
    return html.figures(
        html.plot("Loss", lines, ("tokens read", "nats per token"), reach(lines, ".3f")),
        html.plot(f"Loss minus {control}'s", gaps, ("tokens read", "nats per token"), ends(gaps, "+.3f"), zero=True),
    )


def _gaps(values: CheckpointCaches) -> Markup:
    rows = [[f"{gap.method} − {gap.other}", str(gap), str(gap.pairs)] for gap in values.differences]
    draws = "documents" if values.clusters is None else "clusters of documents"
    caption = f"Loss beyond the window, paired over {draws}, with 95 % intervals"
    return html.table(caption, ["pair", "nats per token", draws], rows)


def _needle_figures(values: CheckpointCaches, report: CacheReport) -> Markup:
    shown = []
    for task in values.caches[report.methods[0]].recall:
        lines = []
        for i, method in enumerate(report.methods):
            accuracy = values.caches[method].recall[task].accuracy
            places = [r for r, a in enumerate(accuracy) if a is not None]
            lines.append(Line(method, places, [a for a in accuracy if a is not None], i))
        across = "compressions in between"
        shown.append(html.plot(task.capitalize(), lines, (across, "accuracy"), _values(lines), zero=True, top=1.0))
    return html.figures(*shown)


def _cost_figures(values: CheckpointCaches, report: CacheReport) -> Markup:
    kinds: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
        ("Cache bytes", "bytes", lambda load: load.cache_bytes),
        ("Peak memory, weights left out", "bytes", lambda load: load.peak_bytes or float("nan")),
        ("Decoding, median", "milliseconds per token", lambda load: load.decode_ms["p50"]),
        ("Prefill", "tokens per second", lambda load: load.prefill_tokens_per_second),
    )
    shown = []
    for title, label, value in kinds:
        lines = []
        for i, method in enumerate(report.methods):
            found = values.caches[method].loads
            lines.append(Line(method, [load.tokens for load in found], [value(load) for load in found], i))
        shown.append(html.plot(title, lines, ("tokens read", label), ends(lines, ".4g"), zero=True))
    return html.figures(*shown)


def _spectrum_figures(report: CacheReport) -> Markup:
    shown = []
    kinds = ("keys", "Keys, before rotation"), ("values", "Values, as cached"), ("unmixed_values", "Values, unmixed")
    parts = ("kept", "of what varies, kept"), ("mean", "in the mean")
    for (kind, title), (part, of) in product(kinds, parts):
        lines = []
        for i, (name, values) in enumerate(report.checkpoints.items()):
            shares: Shares | None = getattr(values.spectrum, kind)
            if shares is not None:
                found: list[float] = getattr(shares, part)
                lines.append(Line(name, list(range(len(found))), found, i))
        shown.append(html.plot(f"{title}: {of}", lines, ("layer", "share of energy"), _values(lines)))
    return html.figures(*shown)


def _values(lines: Sequence[Line]) -> str:
    return "; ".join(f"{line.name} " + " ".join(f"{y:.2f}" for y in line.y) for line in lines)


def _method(report: CacheReport) -> list[str]:
    first = next(iter(report.checkpoints.values()))
    clock = first.caches[report.methods[0]].loads[0].clock
    spectra = {name: values.spectrum for name, values in report.checkpoints.items()}
    whites = sorted({f"{one.white:.2f}" for one in spectra.values() if one.white is not None})
    missing = [f"{name} has none: {one.left_out}" for name, one in spectra.items() if one.left_out is not None]
    haystacks = " and ".join(sorted({f"of {values.haystack}" for values in report.checkpoints.values()}))
    return [
        "Every cache reads the same tokens once, as in serving, and predicts from its entries. full keeps everything; "
        "beyond the training length, its loss shows the limit of the weights, not of the cache.",
        f"A needle is a key of two tokens and a value, planted in a text {haystacks} (random tokens where no document "
        "is long enough); the key is asked for once, and the likeliest of the values is the answer. All caches count "
        "compressions by the same schedule. A needle that is missed at 0 compressions says nothing about the cache. "
        "Intervals are Wilson's, over questions.",
        "Questions in words: 'outside' questions come just after the last compression, which could not use them; "
        "'inside' questions come just before it. All caches answer the same questions, and differences to the full "
        "cache are paired over them. The "
        "tasks one, several and lookalike count exact answers; RULER's count the expected strings that appear.",
        "Bytes are those of the cache's tensors. Peak memory is the increase over the memory in use before. Decoding "
        f"times single tokens in {clock}, compressions included: the slowest token is one.",
        "Spectrum: how much of the energy lies in the mean over a window, which averaging keeps too, and how much of "
        f"the rest in the frequencies that a first compression keeps; of white noise {' or '.join(whites) or DASH}.",
        *missing,
    ]


def _source(report: CacheReport) -> Markup:
    schedules = {name: values.schedule for name, values in report.checkpoints.items()}
    words = "\n".join(f"{name}: {vars(schedule)}" for name, schedule in schedules.items())
    return html.section("Where it comes from", html.source(report), html.details("Schedules", words))
