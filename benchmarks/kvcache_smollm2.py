"""Compressed caches on a real model: loss on texts, needles and RULER's tasks, at equal entries; each cell as it ends.

    python benchmarks/kvcache_smollm2.py MODEL --texts books=FILE wiki=FILE --log LOG.jsonl [--rounds 8]
    python benchmarks/kvcache_smollm2.py --table LOG.jsonl [--picture docs/pictures/caches.svg]

A cache of ½ or ¼ holds at most that share of the entries of a full one after T tokens: its window is T/2 or T/4, and a
compression leaves half of a window (`sinks` lets 32 tokens go at a time). Every cell is one line of the log; run again,
it goes on after the last one. A round has one question of each kind and one document of each text, so that the log can
be read at any time. All caches read the same; the first window is read once for all of a share, since none has been
compressed yet. The loss is that of the last quarter of T tokens. RULER's tasks are asked of the full cache first, and
of the others where it solves half; at most 48 tokens are generated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache

from fathom.evaluation.caches.asking import answer, make_prompts
from fathom.evaluation.caches.natural import TASKS as NATURAL
from fathom.evaluation.caches.prompts import Frame, Prompt
from fathom.evaluation.caches.ruler import TASKS as RULER
from fathom.evaluation.perplexity import read_domains
from fathom.kvcache import MemoryCache, Schedule, build_cache, cache_bytes
from fathom.kvcache.build import cache_of, config_of
from fathom.kvcache.memory import Memory
from fathom.kvcache.method import Held, Method
from fathom.kvcache.rope import Rope
from fathom.report.numbers import size
from fathom.report.plots import ticks
from fathom.report.provenance import provenance
from fathom.report.statistics import paired_difference, wilson

WHOLE = ("full", "full_static", "full_fp8")
METHODS = (
    "drop",
    "tova",
    "snapkv",
    "key_norm",
    "expected_attention",
    "freqkv",
    "average",
    "orthogonal",
    "keydiff",
    "sinks",
)
SHARES = (0.5, 0.25)
ASKED = 512
"""Tokens before the answer to a question."""
TEXTS = {1024: 1, 2048: 2, 4096: 4}
"""Lengths of text, and in every how many rounds each is read; the longest of one text only."""
RULED = 4
"""In every how many rounds RULER's tasks are asked; their answers take half of the time."""
MOST = 48
LONG = 14_000
"""Characters of a document, enough for the second of the lengths."""


class Everything(Method):
    """Keeps all queries of a first window, for all methods to note what they need of them."""

    name = "everything"

    def condense(self, held: Held) -> tuple[Tensor, Tensor]:
        """Never asked for."""
        raise AssertionError


class Bench:
    """A model, its texts, and the log."""

    def __init__(self, directory: Path, texts: Sequence[str], log: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.log = log
        self.domains = {
            domain.name: [text for text in map(str, domain.documents) if len(text) > LONG]
            for domain in read_domains(texts, limit=400)
        }
        for name, found in self.domains.items():
            print(f"{name}: {len(found)} documents of more than {LONG:,} characters", flush=True)
        self.done = {json.dumps(line["cell"]): line for line in lines(log)}

    def cell(self, cell: dict[str, Any], work: Any) -> Any:
        """The results of a cell, from the log or computed now."""
        key = json.dumps(cell)
        if key not in self.done:
            began = time.process_time()
            self.done[key] = {"cell": cell, "found": work(), "cpu_seconds": time.process_time() - began}
            with self.log.open("a") as file:
                file.write(json.dumps(self.done[key]) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {key}", flush=True)
        return self.done[key]["found"]

    def cache(self, method: str, window: int) -> Cache:
        """An empty cache."""
        if (
            method in WHOLE
        ):  # `full_static` allocates the whole text, of which a window is half, and some decoded tokens
            return build_cache(self.model, method, window=2 * window + 8 if method == "full_static" else None)
        given = {"kept": window - 4 - 32} if method == "sinks" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build_cache(self.model, method, window=window, **given)

    @torch.no_grad()
    def first_window(self, ids: Tensor, window: int) -> MemoryCache:
        """The first window of texts `[B, T]`, with all its queries."""
        config = config_of(self.model)
        keeps = Everything(Schedule.at(window, 4, 0.5), Rope(config))
        keeps.observed = window
        cache = cache_of(keeps, config, self.model)
        self.model(ids[:, :window], past_key_values=cache, logits_to_keep=1)
        return cache

    def after(self, first: MemoryCache, method: str, window: int) -> Cache:
        """A cache of a method that has read the first window."""
        cache = self.cache(method, window)
        for i, (layer, read) in enumerate(zip(cache.layers, first.layers, strict=True)):
            if isinstance(layer, Memory):
                layer.lazy_initialization(read.keys, read.values)
                layer.keys, layer.values, layer.seen = read.keys, read.values, window
                if layer.method.observed:
                    layer.queries = layer.method.note(None, read.queries, 0, layer.rotation).clone()
            else:
                cache.update(read.keys, read.values, i)
        return cache

    def round(self, number: int) -> None:
        """One question of each kind and one document of each text."""
        self.questions(number, NATURAL, ("full", "full_fp8", *METHODS))
        for length, every in TEXTS.items():
            if number % every == 0:
                for name in list(self.domains)[: 1 if length == max(TEXTS) else None]:
                    self.text(name, number, length)
        if number % RULED:
            return
        self.questions(number, RULER, ("full",))
        found = [line for line in self.done.values() if line["cell"].get("method") == "full"]
        scores: dict[str, list[float]] = {}
        for one in (one for line in found if line["cell"]["kind"] == "questions" for one in line["found"]):
            scores.setdefault(one["task"], []).append(one["score"])
        good = [task for task in RULER if task in scores and statistics.fmean(scores[task]) >= 0.5]
        for task in good:
            self.questions(number, (task,), METHODS)

    def questions(self, number: int, tasks: Sequence[str], methods: Sequence[str]) -> None:
        """The round's questions of some tasks; those of a share have the same context."""
        texts = [text for found in self.domains.values() for text in found[:20]]
        # Both shares compress for the last time at the same token, so they have the same prompts.
        largest = int(max(SHARES) * ASKED)
        schedule, times = Schedule.at(largest, 4, 0.5), 1 + (ASKED - largest) // (largest // 2)

        def made(rounds: int) -> list[Prompt]:
            if not rounds:
                return []
            count = 2 * len(tasks) * rounds
            return make_prompts(Frame(self.tokenizer), schedule, tasks, (times,), texts, count)[0]

        before = {tuple(prompt.ids.tolist()) for prompt in made(number)}
        new = [prompt for prompt in made(number + 1) if tuple(prompt.ids.tolist()) not in before]
        for share in SHARES:
            window = int(share * ASKED)
            for prompt in new:
                first = None
                for method in methods:
                    if method in WHOLE and share != SHARES[0]:
                        continue
                    cell = {"kind": "questions", "task": prompt.cell.task, "place": prompt.cell.place, "round": number}
                    cell |= {"share": share, "method": method}
                    if json.dumps(cell) not in self.done and first is None:
                        first = self.first_window(prompt.ids[None], window)
                    self.cell(cell, lambda: self.said(first, prompt, method, window))  # noqa: B023

    def said(self, first: MemoryCache, prompt: Prompt, method: str, window: int) -> list[Any]:
        """The answer to one question, after the shared first window."""
        rest = dataclasses.replace(prompt, ids=prompt.ids[window:], most=min(prompt.most, MOST))
        survivors = window // 2
        new = lambda room: self.after(first, method, window)  # noqa: E731
        return [vars(one) for one in answer(self.model, self.tokenizer, new, [rest], survivors)]

    def text(self, name: str, number: int, length: int) -> None:
        """The loss of one document through every cache, its bytes, and the time of a decoded token."""
        index = number % len(self.domains[name])
        ids = torch.tensor(
            [self.tokenizer(self.domains[name][index], add_special_tokens=False)["input_ids"][: length + 1]]
        )
        if ids.shape[1] < length + 1:
            return
        for share in SHARES:
            window, first = int(share * length), None
            for method in (*WHOLE, *METHODS):
                if method in WHOLE and share != SHARES[0]:
                    continue
                cell = {
                    "kind": "text",
                    "text": name,
                    "round": number,
                    "length": length,
                    "share": share,
                    "method": method,
                }
                if json.dumps(cell) not in self.done and first is None:
                    first = self.first_window(ids, window)
                self.cell(cell, lambda: self.loss(first, ids, method, window) | {"document": index})  # noqa: B023

    @torch.no_grad()
    def loss(self, first: MemoryCache, ids: Tensor, method: str, window: int) -> dict[str, Any]:
        """Nats a token over the last quarter."""
        cache, length = self.after(first, method, window), ids.shape[1] - 1
        held, nats, clock = [cache_bytes(cache)], [], time.thread_time()
        for start in range(window, length, 64):
            logits = self.model(ids[:, start : start + 64], past_key_values=cache).logits
            held.append(cache_bytes(cache))
            if start >= length * 3 // 4:
                wanted = ids[:, start + 1 : start + 65]
                nats.append(F.cross_entropy(logits.float().mT, wanted, reduction="none")[0])
        spent = (time.thread_time() - clock) / (length - window)
        steps = []
        for _ in range(3):
            began = time.thread_time()
            self.model(ids[:, -1:], past_key_values=cache)
            steps.append(time.thread_time() - began)
        return {
            "nats": float(torch.cat(nats).mean()),
            "peak_bytes": max(held),
            "mean_bytes": statistics.fmean(held),
            "read_seconds": spent,
            "decode_seconds": statistics.median(steps),
        }


def lines(log: Path) -> Iterator[dict[str, Any]]:
    """The cells of a log."""
    for line in log.read_text().splitlines() if log.exists() else ():
        found = json.loads(line)
        if "cell" in found:
            yield found


def table(log: Path) -> Iterator[str]:
    """Markdown: by cache and share, loss against the full cache, and answers."""
    found = list(lines(log))
    texts = read_by_all([line for line in found if line["cell"]["kind"] == "text"])
    asked = [(line["cell"], one) for line in found if line["cell"]["kind"] == "questions" for one in line["found"]]
    losses = {row: nats_of(texts, *row) for row in rows(texts)}
    tasks = list(dict.fromkeys(one["task"] for _, one in asked))
    solved = {
        t: statistics.fmean(o["score"] for c, o in asked if c["method"] == "full" and o["task"] == t) for t in tasks
    }
    heads = "loss | minus drop | mean bytes | ms a token | natural needles | beyond drop | RULER | nats an answer"
    yield f"| cache | {heads} |"
    yield "| --- |" + " ---: |" * 8
    full = losses["full", max(SHARES)]
    for method, share in rows(texts):
        mine, drop = losses[method, share], losses.get(("drop", share))
        if method == "full":
            cells = [f"{mean_of(mine)} ({len({one[:2] for one in mine})})", ""]
        else:
            cells = [gap(mine, full), gap(mine, drop) if drop and method not in (*WHOLE, "drop") else ""]
        short = [line["found"] for line in texts if place_of(line) == (method, share, min(TEXTS))]
        cells.append(size(statistics.fmean(one["mean_bytes"] for one in short)))
        cells.append(f"{1000 * statistics.median(one['decode_seconds'] for one in short):.0f}")
        told = [one for cell, one in asked if (cell["method"], cell["share"]) == (method, share)]
        natural = [one for one in told if one["task"] in NATURAL]
        cells += [answers(natural), answers([one for one in natural if one["beyond"]], interval=True)]
        cells.append(answers([one for one in told if one["task"] not in NATURAL and solved[one["task"]] >= 0.5]))
        cells.append(f"{statistics.fmean(one['nats'] for one in natural):.2f}" if natural else "")
        yield f"| {label(method, share)} | {' | '.join(cells)} |"
    bad = [f"{task} ({solved[task]:.2f})" for task in tasks if solved[task] < 0.5]
    yield ""
    yield f"Not solved by the full cache: {', '.join(bad) or 'none'}."


def picture(log: Path) -> str:
    """Loss and recall of every cache as SVG: nats beyond the full cache on text, and on the answers about needles."""
    found = list(lines(log))
    texts = read_by_all([line for line in found if line["cell"]["kind"] == "text"])
    full = by_document(nats_of(texts, "full", max(SHARES)))
    points = []
    for method, share in rows(texts):
        mine = by_document(nats_of(texts, method, share))
        asked = [
            one["nats"]
            for line in found
            if (line["cell"]["kind"], line["cell"]["method"], line["cell"]["share"]) == ("questions", method, share)
            for one in line["found"]
            if one["task"] in NATURAL
        ]
        if asked and method not in WHOLE[1:]:
            gaps = [mine[document] - full[document] for document in full]
            points.append((method, share, statistics.fmean(gaps), statistics.fmean(asked)))
    return scatter(points)


def scatter(points: Sequence[tuple[str, float, float, float]]) -> str:
    """Points of a name, a share, x and y: filled for a half, open for a quarter; names do not overlap."""
    width, height, left, bottom = 640, 440, 56, 392
    right, top = (1.08 * max(point[axis] for point in points) for axis in (2, 3))
    x_of = lambda x: left + (width - left - 100) * x / right  # noqa: E731
    y_of = lambda y: bottom - (bottom - 20) * y / top  # noqa: E731
    style = "font: 12px system-ui, sans-serif; background: #fff"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {height}" style="{style}">']
    for number in ticks(0, right):
        x = x_of(number)
        parts.append(f'<path d="M{x:.1f} 20V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#444">{number:g}</text>')
    for number in ticks(0, top):
        y = y_of(number)
        parts.append(f'<path d="M{left} {y:.1f}H{width - 100}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{number:g}</text>')
    words = "text: nats a token beyond the full cache"
    parts.append(f'<text x="{(left + width - 100) / 2}" y="{height - 8}" text-anchor="middle">{words}</text>')
    turned = f'transform="rotate(-90 14 {bottom / 2})"'
    parts.append(f'<text x="14" y="{bottom / 2}" text-anchor="middle" {turned}>needles: nats an answer token</text>')
    spots = [(x_of(x), y_of(y)) for _, _, x, y in points]
    taken = [(at - 6, at + 6, row - 6, row + 6) for at, row in spots]  # marks, then names: left, right, top, bottom
    for (method, share, _, _), (at, row) in zip(points, spots, strict=True):
        name, fill = label(method, share), "#0b6fb3" if share == max(SHARES) else "#fff"
        box, away = free_box(at + 9, row, 6.6 * len(name), taken)
        taken.append(box)
        if away:
            parts.append(f'<path d="M{at:.1f} {row:.1f}L{box[0]:.1f} {row + away:.1f}" stroke="#aaa"/>')
        parts.append(f'<circle cx="{at:.1f}" cy="{row:.1f}" r="4" fill="{fill}" stroke="#0b6fb3" stroke-width="2"/>')
        parts.append(f'<text x="{box[0]:.1f}" y="{row + away + 4:.1f}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def free_box(
    x: float, y: float, width: float, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[tuple[float, float, float, float], float]:
    """The place of a name nearest to a mark that covers nothing, and how far above or below it is."""
    for away in sorted(range(-150, 151, 3), key=abs):
        box = (x, x + width, y + away - 7, y + away + 7)
        if not any(box[0] < r and l < box[1] and box[2] < b and t < box[3] for l, r, t, b in taken):  # noqa: E741
            return box, float(away)
    return (x, x + width, y - 7, y + 7), 0.0


Text = tuple[str, int, int]
"""A text that was read: its kind, its document and its length."""


def text_of(line: dict[str, Any]) -> Text:
    """What a cell has read."""
    cell = line["cell"]
    return cell["text"], line["found"].get("document", cell["round"]), cell["length"]


def place_of(line: dict[str, Any]) -> tuple[str, float, int]:
    """The cache of a cell and the length of its text."""
    cell = line["cell"]
    return cell["method"], cell["share"], cell["length"]


def read_by_all(texts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of the texts that every cache has read."""
    read = [{text_of(line) for line in texts if place_of(line)[:2] == row} for row in rows(texts)]
    common = set.intersection(*read) if read else set()
    return [line for line in texts if text_of(line) in common]


def nats_of(texts: Sequence[dict[str, Any]], method: str, share: float) -> dict[Text, float]:
    """The loss of a cache on each text."""
    return {text_of(line): line["found"]["nats"] for line in texts if place_of(line)[:2] == (method, share)}


def by_document(losses: dict[Text, float]) -> dict[tuple[str, int], float]:
    """The mean loss of each document: what is read again at greater length is no other document."""
    documents = dict.fromkeys(text[:2] for text in losses)
    return {one: statistics.fmean(loss for text, loss in losses.items() if text[:2] == one) for one in documents}


def rows(found: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Caches with their shares, the full ones first."""
    there = {(line["cell"]["method"], line["cell"]["share"]) for line in found}
    return [(m, share) for share in SHARES for m in (*WHOLE, *METHODS) if (m, share) in there]


def label(method: str, share: float) -> str:
    """A row's name."""
    return method if method in WHOLE else f"{method} {'½' if share == 0.5 else '¼'}"


def mean_of(losses: dict[Text, float]) -> str:
    """The mean loss over documents."""
    return f"{statistics.fmean(by_document(losses).values()):.3f}"


def gap(mine: dict[Text, float], control: dict[Text, float]) -> str:
    """The paired difference to another cache with its interval over documents."""
    ours, theirs = by_document(mine), by_document(control)
    found = paired_difference([ours[one] for one in theirs], list(theirs.values()))
    half = "" if found.half_width is None else f" ±{found.half_width:.3f}"
    return f"{found.mean:+.3f}{half}".replace("-", "−")


def answers(found: Sequence[dict[str, Any]], interval: bool = False) -> str:
    """The mean score of some answers; if asked, exact ones with Wilson's interval."""
    if not found:
        return ""
    scores = [one["score"] for one in found]
    if set(scores) <= {0.0, 1.0}:
        low, high = wilson(int(sum(scores)), len(scores))
        ends = f" ({low:.2f}–{high:.2f})" if interval else ""
        return f"{int(sum(scores))}/{len(scores)}{ends}"
    return f"{statistics.fmean(scores):.2f} ({len(scores)})"


def main() -> None:
    """Measure, or print the tables of a log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--texts", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--table", type=Path, metavar="LOG")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="with --table")
    options = parser.parse_args()
    if options.table:
        print(*table(options.table), sep="\n")
        if options.picture:
            options.picture.write_text(picture(options.table), encoding="utf-8")
        return
    torch.set_num_threads(1)
    with options.log.open("a") as file:
        file.write(json.dumps(vars(provenance())) + "\n")
    bench = Bench(options.model, options.texts, options.log)
    each = sum(6 * ASKED * len(METHODS) for _ in SHARES)
    each += sum(length * len(METHODS) * 2 * len(bench.domains) // every for length, every in TEXTS.items())
    print(f"about {each:,} tokens a round and RULER's tasks, {options.rounds} rounds", flush=True)
    for number in range(options.rounds):
        bench.round(number)


if __name__ == "__main__":
    main()
