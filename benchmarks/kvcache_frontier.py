"""Loss against stored bytes: methods, whole numbers of 8 and 4 bits, and both, each with a window that fits the bytes.

    python benchmarks/kvcache_frontier.py MODEL --texts wiki=FILE peps=FILE --log LOG.jsonl [--minutes 9]
    python benchmarks/kvcache_frontier.py MODEL --texts wiki=FILE --log LOG.jsonl --again
    python benchmarks/kvcache_frontier.py --table LOG.jsonl [--picture docs/pictures/frontier.svg]

A budget is ½, ¼ or ⅛ of the most bytes that a full cache of bfloat16 stores of T tokens. Each method gets the largest
window whose most bytes, kept queries and steps of quantisation included, are within 1 % of the budget; they are counted
on a cache of one layer that reads random keys in bfloat16. The loss is that of the last half of T tokens, computed in
bfloat16, and every row reads the same texts. Each cell is one line of the log. Run again, it goes on after the last.
`--again` reads the first document of the first text once more by plain transformers: whole, without a cache, and with
entries cut from an ordinary cache by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from fathom.evaluation.perplexity import read_domains
from fathom.kvcache import MemoryCache, build_cache, cache_bytes
from fathom.kvcache.memory import Memory
from fathom.report.numbers import size
from fathom.report.plots import ticks
from fathom.report.provenance import provenance
from fathom.report.statistics import paired_difference

T, CHUNK, DECODED = 1024, 64, 4
"""Tokens of a text, tokens of a forward pass, and single tokens that are timed after them."""
BUDGETS = (0.5, 0.25, 0.125)
WHOLE = ("full", "full_int8", "full_int4")
METHODS = tuple(f"{method}{stored}" for stored in ("", "+int8", "+int4") for method in ("drop", "sinks", "snapkv"))
CLOSE = 0.01
Row = tuple[str, float | None]
"""A cache and its budget; None for an uncompressed one."""


def cache_for(model: PreTrainedModel, method: str, window: int | None) -> Cache:
    """An empty cache; `sinks` lets 32 tokens go at a time, and `snapkv` keeps the queries of 16."""
    given: dict[str, Any] = {"kept": window - 4 - 32} if window and method.startswith("sinks") else {}
    given |= {"observed": 16} if method.startswith("snapkv") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_cache(model, method, window=window, **given)


@torch.no_grad()
def stored(model: PreTrainedModel, method: str, window: int | None) -> dict[str, float]:
    """Bytes of bfloat16 that all layers store of T tokens: the most, and the mean over the last half."""
    cache, config = cache_for(model, method, window), model.config
    layer, seen, found = cache.layers[0], 0, []
    heads, keys, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    while seen < T:
        length = min(CHUNK, T - seen)
        if isinstance(layer, Memory):
            length = layer.cuts(length)[0]
        layer.update(*torch.randn(2, 1, keys, length, d).bfloat16())
        if isinstance(layer, Memory) and layer.method.observed:
            layer.observe(torch.randn(1, heads, length, d).bfloat16())
        seen += length
        found.append((seen, config.num_hidden_layers * cache_bytes(cache)))
    return {"most": max(held for _, held in found), "mean": statistics.fmean(held for at, held in found if at > T / 2)}


def window_for(model: PreTrainedModel, method: str, most: float) -> int | None:
    """The largest window that stores `most` bytes within 1 %; None if the budget has room for all tokens."""
    small, large = 40, T
    if stored(model, method, large - 1)["most"] <= most:
        return None
    while large - small > 1:
        middle = (small + large) // 2
        fits = stored(model, method, middle)["most"] <= most * (1 + CLOSE / 2)
        small, large = (middle, large) if fits else (small, middle)
    return small if abs(stored(model, method, small)["most"] / most - 1) <= CLOSE else None


class Bench:
    """A model, its texts, and the log."""

    def __init__(self, directory: Path, texts: Sequence[str], log: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        self.tokenizer, self.log = AutoTokenizer.from_pretrained(directory), log
        self.domains = {domain.name: list(self.long(domain.documents)) for domain in read_domains(texts, limit=200)}
        self.done = {json.dumps(line["cell"]): line for line in lines(log)}

    def long(self, documents: Sequence[object]) -> Iterator[Tensor]:
        """The documents' first T tokens and the one after them, of those that have as many."""
        for document in documents:
            ids = self.tokenizer(str(document)[: 8 * T], add_special_tokens=False)["input_ids"]
            if len(ids) > T:
                yield torch.tensor([ids[: T + 1]])

    def cell(self, cell: dict[str, Any], work: Any) -> Any:
        """The results of a cell, from the log or computed now."""
        key = json.dumps(cell)
        if key not in self.done:
            self.done[key] = {"cell": cell, "found": work()}
            with self.log.open("a") as file:
                file.write(json.dumps(self.done[key]) + "\n")
        return self.done[key]["found"]

    def windows(self) -> dict[Row, int | None]:
        """Every row's window."""
        full = stored(self.model, "full", None)["most"]
        rows: dict[Row, int | None] = {(method, None): None for method in WHOLE}
        for budget in BUDGETS:
            for method in METHODS:
                cell = {"kind": "window", "method": method, "budget": budget}
                window = self.cell(cell, lambda: window_for(self.model, method, budget * full))  # noqa: B023
                if window is not None:
                    rows[method, budget] = window
        for (method, share), chosen in rows.items():
            cell = {"kind": "bytes", "method": method, "budget": share, "window": chosen}
            self.cell(cell, lambda: stored(self.model, method, chosen))  # noqa: B023
        return rows

    @torch.no_grad()
    def loss(self, ids: Tensor, method: str, window: int | None) -> dict[str, float]:
        """Nats a token over the last half, and milliseconds of a decoded token."""
        cache, nats = cache_for(self.model, method, window), []
        for start in range(0, T, CHUNK):
            scored = start >= T // 2
            keep = 0 if scored else 1
            logits = self.model(ids[:, start : start + CHUNK], past_key_values=cache, logits_to_keep=keep).logits
            if scored:
                wanted = ids[:, start + 1 : start + CHUNK + 1]
                nats.append(F.cross_entropy(logits.float().mT, wanted, reduction="none")[0])
        steps = []
        for _ in range(DECODED):
            began = time.thread_time()
            self.model(ids[:, -1:], past_key_values=cache)
            steps.append(1000 * (time.thread_time() - began))
        rounds = cache.compressions if isinstance(cache, MemoryCache) else 0
        return {"nats": float(torch.cat(nats).mean()), "ms": statistics.median(steps), "compressions": rounds}

    @torch.no_grad()
    def by_hand(self, ids: Tensor, window: int | None, kept: int = 0) -> dict[str, float]:
        """The loss without Fathom's caches. The first 4 entries and the last `kept` stay whenever `window` are held."""
        cache, seen, held, rounds = DynamicCache(config=self.model.config), 0, 0, 0
        first: list[Tensor] = []
        logits = []
        while seen < T:
            if held == window:
                rounds, freed = rounds + 1, window - 4 - kept
                first = first or [layer.keys[:, :, :4] for layer in cache.layers]
                for layer, sinks in zip(cache.layers, first, strict=True):
                    layer.keys = torch.cat([self.turned(sinks, rounds * freed), layer.keys[:, :, -kept:]], dim=2)
                    layer.values = torch.cat([layer.values[:, :, :4], layer.values[:, :, -kept:]], dim=2)
                held = 4 + kept
            length = T if window is None else min(CHUNK, window - held, T - seen)
            places = torch.arange(seen, seen + length).unsqueeze(0)
            piece = ids[:, seen : seen + length]
            logits.append(self.model(piece, past_key_values=cache, position_ids=places).logits[0].double())
            seen, held = seen + length, held + length
        every = -torch.cat(logits).log_softmax(-1).gather(1, ids[0, 1 : T + 1, None])
        return {"nats": float(every[T // 2 :].mean()), "compressions": rounds}

    def turned(self, keys: Tensor, by: int) -> Tensor:
        """Keys `[B, H_kv, n, D]` rotated by so many positions, as Llama rotates them."""
        angles = by * self.model.model.rotary_emb.inv_freq.float().repeat(2)
        one, other = keys.float().chunk(2, dim=-1)
        return (keys.float() * angles.cos() + torch.cat([-other, one], dim=-1) * angles.sin()).to(keys.dtype)


def lines(log: Path) -> Iterator[dict[str, Any]]:
    """The cells of a log."""
    for line in log.read_text().splitlines() if log.exists() else ():
        found = json.loads(line)
        if "cell" in found:
            yield found


def read(log: Path) -> tuple[dict[Row, dict[str, float]], dict[Row, dict[tuple[str, int], dict[str, float]]]]:
    """The bytes of every row, and its cells by document, of the documents that every row has read."""
    held: dict[Row, dict[str, float]] = {}
    found: dict[Row, dict[tuple[str, int], dict[str, float]]] = {}
    for line in lines(log):
        cell, row = line["cell"], (line["cell"]["method"], line["cell"]["budget"])
        if cell["kind"] == "bytes":
            held[row] = line["found"] | {"window": cell["window"]}
        if cell["kind"] == "text":
            found.setdefault(row, {})[cell["text"], cell["document"]] = line["found"]
    common = set.intersection(*(set(one) for one in found.values()))
    return held, {row: {document: one[document] for document in sorted(common)} for row, one in found.items()}


def table(log: Path) -> Iterator[str]:
    """Markdown: the loss minus the full cache's, and minus that of `drop` with the same bytes."""
    held, found = read(log)
    full = [one["nats"] for one in found["full", None].values()]
    yield f"| cache | N | most bytes | share | mean bytes | ms a token | loss − full ({len(full)} documents) | − drop |"
    yield "| --- |" + " ---: |" * 7
    for row, mine in sorted(found.items(), key=lambda one: (-held[one[0]]["most"], one[0][0])):
        nats = [one["nats"] for one in mine.values()]
        drop = found.get(("drop", row[1]))
        gaps = [f"{statistics.fmean(full):.3f}" if row == ("full", None) else gap(nats, full)]
        gaps.append(gap(nats, [one["nats"] for one in drop.values()]) if drop and row[0] != "drop" else "")
        share = held[row]["most"] / held["full", None]["most"]
        ms = statistics.median(one["ms"] for one in mine.values())
        cells = [row[0], f"{held[row]['window'] or ''}", size(int(held[row]["most"])), f"{share:.3f}"]
        yield f"| {' | '.join([*cells, size(int(held[row]['mean'])), f'{ms:.0f}', *gaps])} |"


def gap(mine: Sequence[float], control: Sequence[float]) -> str:
    """A difference paired by document, with its interval over documents."""
    found = paired_difference(mine, control)
    half = "" if found.half_width is None else f" ±{found.half_width:.3f}"
    return f"{found.mean:+.3f}{half}".replace("-", "−")


def picture(log: Path) -> str:
    """Loss beyond the full cache against bytes, a line for each method, as SVG."""
    held, found = read(log)
    full = [one["nats"] for one in found["full", None].values()]
    whole = held["full", None]["most"]
    curves: dict[str, list[tuple[float, float]]] = {}
    for row, mine in found.items():
        loss = statistics.fmean(a["nats"] - b for a, b in zip(mine.values(), full, strict=True))
        curves.setdefault(row[0], []).append((held[row]["most"] / whole, loss))
    width, height, left, bottom = 720, 440, 60, 390
    top = 1.08 * max(y for points in curves.values() for _, y in points)
    x_of = lambda x: left + (width - left - 150) * x  # noqa: E731
    y_of = lambda y: bottom - (bottom - 20) * max(0.0, y) / top  # noqa: E731
    style = "font: 12px system-ui, sans-serif; background: #fff"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {height}" style="{style}">']
    for x in (0, 0.125, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path d="M{x_of(x):.1f} 20V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x_of(x):.1f}" y="{bottom + 18}" text-anchor="middle" fill="#444">{x:g}</text>')
    for y in ticks(0, top):
        parts.append(f'<path d="M{left} {y_of(y):.1f}H{x_of(1):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end" fill="#444">{y:g}</text>')
    words = "stored bytes, as a share of the full cache in bfloat16"
    parts.append(f'<text x="{(left + x_of(1)) / 2:.0f}" y="{height - 10}" text-anchor="middle">{words}</text>')
    turned = f'transform="rotate(-90 14 {bottom // 2})"'
    parts.append(
        f'<text x="14" y="{bottom // 2}" text-anchor="middle" {turned}>nats a token beyond the full cache</text>'
    )
    colours = {"drop": "#666", "sinks": "#0b6fb3", "snapkv": "#c2410c", "full": "#15803d"}
    dashes = {"": "", "int8": "6 3", "int4": "2 3"}
    for place, (name, points) in enumerate(curves.items()):
        method, _, bits = name.replace("full_", "full+").partition("+")
        colour, dash = colours[method], dashes[bits]
        spots = [(x_of(x), y_of(y)) for x, y in sorted(points)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in spots]
        down, at = 30 + 18 * place, width - 138
        parts.append(f'<path d="M{at} {down}h28" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts.append(f'<circle cx="{at + 14}" cy="{down}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{at + 36}" y="{down + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Read further documents until the time is over, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--texts", nargs="+", default=[])
    parser.add_argument("--log", type=Path)
    parser.add_argument("--documents", type=int, default=8, help="of each text")
    parser.add_argument("--skip", type=int, default=0, help="documents of each text")
    parser.add_argument("--minutes", type=float, default=9, help="CPU minutes of this call")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(options.table)))
        if options.picture:
            options.picture.write_text(picture(options.table))
        return
    if options.model is None or options.log is None or not options.texts:
        parser.error("give a model, --texts and --log, or --table")
    torch.set_num_threads(1)
    bench = Bench(options.model, options.texts, options.log)
    if not options.log.exists():
        options.log.write_text(json.dumps({"provenance": asdict(provenance())}) + "\n")
    rows = bench.windows()
    if options.again:
        name, documents = next(iter(bench.domains.items()))
        for method, budget in (("full", None), ("drop", 0.5), ("sinks", 0.25)):
            window = rows[method, budget]
            kept = window - 36 if window and method == "sinks" else (window or 0) // 2 - 4
            cell = {"kind": "again", "text": name, "document": 0, "method": method, "budget": budget}
            bench.cell(cell, lambda: bench.by_hand(documents[0], window, kept))  # noqa: B023
        return
    for number in range(options.skip, options.documents):
        for name, documents in bench.domains.items():
            for (method, budget), window in rows.items():
                if time.process_time() > 60 * options.minutes:
                    return
                cell = {"kind": "text", "text": name, "document": number, "method": method, "budget": budget}
                bench.cell(cell, lambda: bench.loss(documents[number], method, window))  # noqa: B023
            print(f"{time.strftime('%H:%M:%S')} {name} {number}", flush=True)


if __name__ == "__main__":
    main()
