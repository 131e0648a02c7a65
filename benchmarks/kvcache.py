"""Compressed caches: what they cost, and the protocol that says what they keep.

    python benchmarks/kvcache.py system                       # bytes, decode time and the share of compression
    python benchmarks/kvcache.py rounds                       # FreqKV's first round: seconds and memory by window
    python benchmarks/kvcache.py needles                      # one and four needles by compressions, tuned and not
    python benchmarks/kvcache.py books --text FILES --base-steps 300 --steps 100    # loss by position, byte by byte

Every arm starts from the same weights and reads the same rows in the same order for equally many steps. Finished
parts lie under --work and are not done again; --out gets the table.
"""

from __future__ import annotations

import argparse
import copy
import glob
import json
import lzma
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from fathom.evaluation.caches.measure import Peak, loads, losses, scorer, stretches
from fathom.evaluation.caches.needles import Needles, Rows, plant, recall
from fathom.evaluation.caches.spectrum import spectrum
from fathom.kvcache import METHODS, NAMES, Schedule, build_cache, compress_in_training
from fathom.kvcache.memory import Memory
from fathom.kvcache.method import Held
from fathom.kvcache.whole import WHOLE
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.recipe import Optim
from fathom.report.provenance import provenance
from fathom.report.statistics import paired_difference
from fathom.training.optimizer import Optimizer, learning_rate

BORROWED = {"sinks": "drop", "key_norm": "drop", "full_fp8": "full"}
"""Arms that are not tuned, and whose weights they read with after a tuning. `sinks` lets one token go at a time, too
many compressions to train through."""
TUNED = tuple(name for name in NAMES if name not in BORROWED)
ARMS = (*TUNED, *BORROWED)
"""Of needles and books; `full_static` says there what `full` says, and has rows where bytes and time are measured."""
SYNTHETIC = {"fillers": 16, "keys": 16, "values": 16}
Kind = tuple[int, bool, int]
"""Needles in a text, whether all are planted in its first window, and keys to choose from."""
KEYLESS = "1 needle, 1 key"
TASKS: dict[str, Kind] = {
    "1 needle": (1, True, 16),
    "4 needles": (4, True, 16),
    "4 needles, anywhere": (4, False, 16),
    KEYLESS: (1, True, 1),
}
MIXES = {"1": ["1 needle"], "4": ["4 needles", "4 needles, anywhere"], "1 key": [KEYLESS]}
"""What a tuning reads. With one key there is nothing to look up: a value can be carried as a constant."""
ROUNDS = 10
SHAPES = (4, 256), (8, 512)
"""Layers and widths of the models that are timed, the second for the share of compression alone."""


def make(vocabulary: int, layers: int, width: int, window: int, seed: int, mixer: str = "none") -> FathomForCausalLM:
    """A small decoder with 4 heads over 2."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = FathomConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=window,
        rope_parameters=rope,
        mixer=mixer,
    )
    return FathomForCausalLM(config)


def train(model: FathomForCausalLM, optim: Optim, steps: int, loss: Callable[[FathomForCausalLM, int], Tensor]) -> None:
    """Optimizer steps on a loss of (model, step)."""
    model.train()
    optimizer, keep = Optimizer(model, optim), torch.zeros(())
    for step in range(steps):
        loss(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(learning_rate(optim, step, steps), keep)
        optimizer.zero_grad()
    model.eval()


def tune(base: FathomForCausalLM, arm: str, schedule: Schedule, run: Callable[[FathomForCausalLM], None]) -> Any:
    """A copy of the base after some steps under an arm's compression."""
    model = copy.deepcopy(base)
    shape = {"window": schedule.window, "sinks": schedule.sinks, "kept": schedule.kept}
    with nullcontext() if arm == "full" else compress_in_training(model, arm, **shape):
        run(model)
    return model


def cache_of(model: FathomForCausalLM, arm: str, schedule: Schedule, room: int | None = None) -> Any:
    """An arm's empty cache; `room` is the tokens that a static one must hold."""
    if arm in WHOLE:
        return build_cache(model, arm, window=room)
    kept = None if arm == "sinks" else schedule.kept
    return build_cache(model, arm, window=schedule.window, sinks=schedule.sinks, kept=kept)


def done(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a finished part found; else do it."""
    if path.exists():
        return json.loads(path.read_text())
    began, busy = time.perf_counter(), time.process_time()
    found = work()
    found["seconds"] = {"wall": time.perf_counter() - began, "cpu": time.process_time() - busy}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(path)
    print(f"{path.stem}: {found['seconds']['wall']:.0f} s", flush=True)
    return found


def kept_weights(path: Path, model: FathomForCausalLM, work: Callable[[], None]) -> FathomForCausalLM:
    """The model with weights that lie there; else train it and put them there."""
    if path.exists():
        model.load_state_dict(load_file(path), strict=False)
        return model.eval()
    began = time.perf_counter()
    work()
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.named_parameters()}
    save_file(weights, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)
    print(f"{path.stem}: trained in {time.perf_counter() - began:.0f} s", flush=True)
    return model


# Needles.


def needle_rows(
    schedule: Schedule, length: int, batch: int, step: int, seed: int, kinds: Sequence[Kind], after: int = 0
) -> Rows:
    """A batch of needles: the kinds take turns, and every arm gets the same."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    count, early, keys = kinds[step % len(kinds)]
    text = torch.randint(0, SYNTHETIC["fillers"], (batch, length), generator=generator)
    return plant(text, needles(keys), count, generator, schedule.window if early else None, after)


def needles(keys: int = 16) -> Needles:
    """One token each: in 2,600 steps a base did not learn to bind two tokens to each other, which is no memory."""
    whole = Needles.synthetic(SYNTHETIC["keys"], SYNTHETIC["values"], SYNTHETIC["fillers"])
    return Needles(whole.planted[:keys], whole.asked[:keys], whole.answers)


def needle_loss(schedule: Schedule, length: int, batch: int, seed: int, kinds: Sequence[Kind]):
    """Cross-entropy of the answers."""

    def loss(model: FathomForCausalLM, step: int) -> Tensor:
        rows = needle_rows(schedule, length, batch, step, seed, kinds)
        labels = torch.full_like(rows.ids, -1).scatter(1, rows.asked, needles().answers[rows.value])
        asked = labels >= 0
        return F.cross_entropy(model(input_ids=rows.ids, use_cache=False).logits[asked], labels[asked])

    return loss


def recalled(model: FathomForCausalLM, arm: str, schedule: Schedule, texts: int, keyless: bool = False) -> dict:
    """Accuracy by compressions, each task; compressions are counted by the arms' common schedule."""
    length = schedule.window + ROUNDS * schedule.freed
    found = {}
    for name, kind in TASKS.items():
        if (name == KEYLESS) != keyless:
            continue
        sinks = schedule.sinks  # what is planted there is never compressed
        batches = [needle_rows(schedule, length, 256, i, 7_777, [kind], sinks) for i in range(texts // 256)]
        result = recall(scorer(model, lambda: cache_of(model, arm, schedule)), batches, needles(), schedule, ROUNDS)
        found[name] = {"accuracy": result.accuracy, "asked": result.asked}
    return found


def run_needles(options: argparse.Namespace) -> dict[str, Any]:
    """Bases, tunings and tests; then the table."""
    schedule = Schedule.at(64, 4, 0.5)
    vocabulary = SYNTHETIC["fillers"] + SYNTHETIC["values"] + SYNTHETIC["keys"] * (1 + SYNTHETIC["values"])
    length = schedule.window + 3 * schedule.freed
    runs = []
    for seed in range(options.seeds):
        base = make(vocabulary, 2, 64, schedule.window, seed)
        loss = needle_loss(schedule, schedule.window, 64, seed, [(1, True, 16), (4, True, 16), (8, True, 16)])
        kept_weights(
            options.work / f"needles-base-{seed}.safetensors",
            base,
            lambda base=base, loss=loss: train(base, Optim(lr=3e-3, warmup=0.1), 400, loss),
        )
        for arm in options.arms:
            path = options.work / f"needles-untuned-{arm}-{seed}.json"
            runs.append({"arm": arm, "seed": seed, "tuned": None})
            runs[-1] |= done(path, lambda arm=arm, base=base: {"recall": recalled(base, arm, schedule, 1024)})
        for task in options.tunings:
            mix = MIXES[task]
            tuned_loss = needle_loss(schedule, length, 64, 100 + seed, [TASKS[name] for name in mix])
            steps = options.steps

            def fit(model: FathomForCausalLM, loss: Any = tuned_loss, steps: int = steps) -> None:
                train(model, Optim(lr=1e-3, warmup=0.1, schedule="constant"), steps, loss)

            for arm in options.arms:
                weights = BORROWED.get(arm, arm)
                file = options.work / f"needles-{task}-{weights}-{seed}.safetensors"

                def work(task=task, arm=arm, weights=weights, file=file, base=base, fit=fit) -> dict[str, Any]:
                    model = copy.deepcopy(base)
                    kept_weights(
                        file,
                        model,
                        lambda: model.load_state_dict(tune(base, weights, schedule, fit).state_dict()),
                    )
                    found = {"recall": recalled(model, arm, schedule, 1024, keyless=task == "1 key")}
                    if arm == "freqkv" and task != "1 key":
                        found["switched back to full"] = recalled(model, "full", schedule, 512)
                    return found

                runs.append({"arm": arm, "seed": seed, "tuned": task})
                runs[-1] |= done(options.work / f"needles-{task}-{arm}-{seed}.json", work)
    return {"window": 64, "sinks": 4, "kept": 28, "chance": needles().chance, "steps": options.steps, "runs": runs}


def needle_table(report: dict[str, Any]) -> Iterator[str]:
    """Mean accuracy and its range over seeds, by compressions."""
    yield "| tuned on | task | arm |" + "".join(f" {r} |" for r in range(ROUNDS + 1))
    yield "| --- | --- | --- |" + " ---: |" * (ROUNDS + 1)
    for tuned in (None, *MIXES):
        for task in TASKS if tuned is None else MIXES[tuned]:
            for arm in ARMS:
                found = [run for run in report["runs"] if run["arm"] == arm and run["tuned"] == tuned]
                if not found or any(task not in run["recall"] for run in found):
                    continue
                columns = zip(*(run["recall"][task]["accuracy"] for run in found), strict=True)
                cells = [f" {statistics.fmean(c):.2f} ({min(c):.2f}–{max(c):.2f}) |" for c in columns]
                yield f"| {tuned or 'nothing'} | {task} | {arm} |" + "".join(cells)


# Books.


def read_texts(paths: Sequence[str]) -> list[bytes]:
    """Whole books: a text file each, or the `text` of each line of a JSONL file; .xz is unpacked."""
    books = []
    for path in sorted(path for pattern in paths for path in glob.glob(pattern)):
        data = Path(path).read_bytes()
        data = lzma.decompress(data) if path.endswith(".xz") else data
        lines = data.splitlines() if ".jsonl" in path else ()
        books += [json.loads(line)["text"].encode() for line in lines] if lines else [data]
    return books


def book_rows(books: Sequence[bytes], length: int, batch: int, seed: int, step: int) -> Tensor:
    """Stretches of bytes, drawn by (seed, step) alone."""
    chance = random.Random(f"{seed}/{step}")
    whole = [book for book in books if len(book) > length]
    chosen = chance.choices(whole, weights=[len(book) for book in whole], k=batch)
    starts = [chance.randrange(len(book) - length) for book in chosen]
    rows = [np.frombuffer(book, np.uint8, length, start) for book, start in zip(chosen, starts, strict=True)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def book_loss(books: Sequence[bytes], length: int, batch: int, seed: int):
    """Cross-entropy of the next byte."""

    def loss(model: FathomForCausalLM, step: int) -> Tensor:
        ids = book_rows(books, length, batch, seed, step)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return loss


def run_books(options: argparse.Namespace) -> dict[str, Any]:
    """A byte-level base, tuned per arm; loss by position on held-out books."""
    schedule = Schedule.at(128, 4, 0.5)
    books = read_texts(options.text)
    long = 32 * schedule.window
    held_out = [book for i, book in enumerate(books) if i % 5 == 0 and len(book) > 2 * long][: options.held_out]
    chosen = set(map(id, held_out))
    training = [book for book in books if id(book) not in chosen]
    # From the middle: the first pages of a book are seldom its text.
    tests = torch.tensor([list(book[len(book) // 2 :][: long + 1]) for book in held_out])
    runs = []
    for mixer in ("none", "depth_attention"):
        for seed in range(options.seeds if mixer == "none" else 1):
            base = make(256, options.layers, options.width, schedule.window, seed, mixer)
            name = f"books-{mixer}"
            kept_weights(
                options.work / f"{name}-base-{seed}.safetensors",
                base,
                lambda base=base, seed=seed: train(
                    base,
                    Optim(name="muon", lr=1e-2, warmup=0.05),
                    options.base_steps,
                    book_loss(training, schedule.window, 32, seed),
                ),
            )
            loss = book_loss(training, schedule.window + 3 * schedule.freed, 8, 100 + seed)

            def fit(model: FathomForCausalLM, loss: Any = loss) -> None:
                train(model, Optim(name="muon", lr=3e-3, warmup=0.1), options.steps, loss)

            arms = options.arms if mixer == "none" else ("freqkv",)
            for tuned, arm in [(tuned, arm) for tuned in (False, True) for arm in arms]:
                weights = BORROWED.get(arm, arm)
                file = options.work / f"{name}-{weights}-{seed}.safetensors"

                def work(tuned=tuned, arm=arm, weights=weights, file=file, base=base, fit=fit) -> dict[str, Any]:
                    model = copy.deepcopy(base)
                    if tuned:
                        kept_weights(
                            file, model, lambda: model.load_state_dict(tune(base, weights, schedule, fit).state_dict())
                        )
                    return tested(model, arm, schedule, tests)

                runs.append({"mixer": mixer, "arm": arm, "seed": seed, "tuned": tuned})
                runs[-1] |= done(options.work / f"{name}-{'tuned' if tuned else 'untuned'}-{arm}-{seed}.json", work)
    shape = {"window": 128, "sinks": 4, "kept": 60, "layers": options.layers, "width": options.width}
    counts = {"books": len(books), "held_out": len(held_out), "steps": options.steps, "base_steps": options.base_steps}
    return {**shape, **counts, "runs": runs}


def tested(model: FathomForCausalLM, arm: str, schedule: Schedule, tests: Tensor) -> dict[str, Any]:
    """Bits per byte of each book by stretches of F, and the spectrum of its first windows."""
    nats = losses(model, tests, cache_of(model, arm, schedule))
    bits = (np.array(stretches(nats, schedule.freed)) / schedule.freed / np.log(2)).tolist()
    return {"bits_per_byte": bits, "spectrum": asdict(spectrum(model, tests, schedule))}


def book_table(report: dict[str, Any]) -> Iterator[str]:
    """Bits per byte by windows read, means over books and seeds; differences beyond the first window.

    A difference has its 95 % interval over books, for the models of these seeds, and its range over the seeds.
    """
    per = report["window"] // (report["window"] - report["sinks"] - report["kept"])
    spans = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32)]
    yield (
        "| tuned | arm |"
        + "".join(f" {a}–{b} N |" for a, b in spans)
        + " beyond N, minus full | minus average | minus drop |"
    )
    yield "| --- | --- |" + " ---: |" * (len(spans) + 3)
    for tuned in (False, True):
        mine = {arm: _bits(report, arm, tuned) for arm in ARMS}
        mine = {arm: table for arm, table in mine.items() if len(table)}
        for arm, table in mine.items():
            cells = [f" {table[..., a * per : b * per].mean():.4f} |" for a, b in spans]
            beyond = table[..., per:].mean(2)
            for other in ("full", "average", "drop"):
                cells.append(f" {_gap(beyond, mine[other][..., per:].mean(2))} |" if other in mine else " not run |")
            yield f"| {'yes' if tuned else 'no'} | {arm} |" + "".join(cells)


def _bits(report: dict[str, Any], arm: str, tuned: bool) -> np.ndarray:
    """`[seeds, books, stretches]`."""
    chosen = [r for r in report["runs"] if (r["mixer"], r["arm"], r["tuned"]) == ("none", arm, tuned)]
    return np.array([run["bits_per_byte"] for run in chosen])


def _gap(mine: np.ndarray, theirs: np.ndarray) -> str:
    """Of two tables `[seeds, books]`."""
    gap = paired_difference(mine.mean(0).tolist(), theirs.mean(0).tolist())
    seeds = (mine - theirs).mean(1)
    return f"{gap.mean:+.4f} ± {gap.half_width or 0:.4f} ({seeds.min():+.4f} to {seeds.max():+.4f})"


# System numbers.


def run_system(options: argparse.Namespace) -> dict[str, Any]:
    """A model with random weights, since cost does not depend on them: bytes, peak and speed by tokens read."""
    found = []
    (layers, width), n = SHAPES[0], options.window
    one_row = [arm for arm in (*METHODS, *WHOLE) if arm not in ("learned", "sinks")]
    rows = [(arm, 1, (n, 4 * n, 16 * n)) for arm in one_row]
    rows += [
        ("sinks", 1, (n, 4 * n)),
        ("freqkv", 1, (64 * n,)),
    ]  # token by token; and everything would take minutes there
    rows += [(arm, 8, (n, 4 * n)) for arm in ("freqkv", "snapkv", *WHOLE)]
    for arm, batch, lengths in rows:

        def work(arm: str = arm, batch: int = batch, lengths: Sequence[int] = lengths) -> dict[str, Any]:
            model = make(256, layers, width, n, 0).eval()
            new = partial(cache_of, model, arm, Schedule.at(n, 4, 0.5))
            ids = torch.randint(0, 256, (batch, lengths[-1] + options.decode))
            measured = loads(model, ids, new, lengths, options.decode)
            return {"loads": list(map(vars, measured))}

        found.append({"arm": arm, "batch": batch, "layers": layers, "width": width})
        found[-1] |= done(options.work / f"system-{n}-{arm}-{batch}-{lengths[-1]}.json", work)
    compression = done(options.work / f"system-{n}-share.json", lambda: {"rows": share(options)})["rows"]
    return {"window": n, "decode": options.decode, "runs": found, "compression": compression}


def share(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time in compressions as a share of decoding F tokens, one round included; matrix and FFT."""
    rows = []
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for (layers, width), transform in product(SHAPES, ("matrix", "fft")):
        model = make(256, layers, width, options.window, 0).eval()
        cache = build_cache(model, "freqkv", window=options.window, transform=transform)
        spent: list[float] = []
        plain = Memory._compress

        def timed(self: Memory, plain: Any = plain, spent: list[float] = spent) -> None:
            began = now()
            plain(self)
            spent.append(now() - began)

        freed = cache.schedule.freed
        ids = torch.randint(0, 256, (1, options.window + 3 * freed))
        Memory._compress = timed  # type: ignore[method-assign]
        try:
            for _ in loads(model, ids, lambda _, cache=cache: cache, [options.window], freed):  # one round, warm-up
                pass
            spent.clear()
            began = now()
            for at in range(options.window + freed, options.window + 3 * freed):
                with torch.no_grad():
                    model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            total = now() - began
        finally:
            Memory._compress = plain  # type: ignore[method-assign]
        rows.append({"layers": layers, "width": width, "transform": transform, "share": sum(spent) / total})
        rows[-1]["round_ms"] = 1000 * sum(spent) / 2
        rows[-1]["decode_ms"] = 1000 * (total - sum(spent)) / (2 * freed)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def first_round(window: int, transform: str) -> dict[str, Any]:
    """A first round of 8 heads of 128 channels, which makes what later ones use, and a second: seconds and bytes."""
    config = make(256, 1, 512, 64, 0).config
    given = {} if transform == "default" else {"transform": transform}
    method = build_cache(config, "freqkv", window=window, **given).method
    keys, values = torch.randn(2, 1, 8, window, 128)
    spent = []
    peak = Peak(SimpleNamespace(device=torch.device("cpu")))
    for rounds in range(2):
        began = time.process_time()
        method.compress(Held(keys, values), keys[:, :, :4], rounds)
        spent.append(time.process_time() - began)
    return {"window": window, "transform": transform, "seconds": spent, "peak_bytes": peak.bytes()}


def run_rounds(options: argparse.Namespace) -> dict[str, Any]:
    """First and second rounds by window, each in a process of its own, which has made nothing yet."""
    found = []
    for window, transform in product((1024, 2048, 4096, 8192), ("default", "matrix", "fft")):

        def work(window: int = window, transform: str = transform) -> dict[str, Any]:
            with get_context("spawn").Pool(1) as process:
                return {"round": process.apply(first_round, (window, transform))}

        found.append(done(options.work / f"rounds-{window}-{transform}.json", work)["round"])
    return {"rounds": found}


def rounds_table(report: dict[str, Any]) -> Iterator[str]:
    """One line per window and transform."""
    yield "| window | transform | first round, CPU s | second | peak |"
    yield "| ---: | --- | ---: | ---: | ---: |"
    for row in report["rounds"]:
        first, second = row["seconds"]
        words = f"{first:.2f} | {second:.2f} | {row['peak_bytes'] / 1e6:,.0f} MB"
        yield f"| {row['window']:,} | {row['transform']} | {words} |"


def system_table(report: dict[str, Any]) -> Iterator[str]:
    """One line per cache and length."""
    yield "| cache | batch | tokens | entries | bytes | prefill tokens/s | decode ms p50 | p90 | max |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for run in report["runs"]:
        for load in run["loads"]:
            ms = load["decode_ms"]
            numbers = f"{load['tokens']:,} | {load['entries']:,} | {load['cache_bytes']:,}"
            speed = f"{load['prefill_tokens_per_second']:,.0f} | {ms['p50']:.2f} | {ms['p90']:.2f} | {ms['max']:.1f}"
            yield f"| {run['arm']} | {run['batch']} | {numbers} | {speed} |"
    for row in report["compression"]:
        spent = f"{100 * row['share']:.2f} % of decoding, {row['round_ms']:.1f} ms a round"
        yield f"compression by {row['transform']}, {row['layers']} layers of {row['width']}: {spent}"


def rounded(value: Any) -> Any:
    """A log that can be read: no number is known to more than five digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("system", "needles", "books", "rounds"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of a tuning")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="of needles and books")
    parser.add_argument("--tunings", nargs="*", default=list(MIXES), choices=list(MIXES), help="of the needles")
    parser.add_argument("--base-steps", type=int, default=600, help="of a byte-level base")
    parser.add_argument("--layers", type=int, default=3, help="of the byte-level model")
    parser.add_argument("--width", type=int, default=128, help="of the byte-level model")
    parser.add_argument("--held-out", type=int, default=12, help="books to test on")
    parser.add_argument("--text", nargs="+", default=[], help="books: text files, or JSONL; .xz too")
    parser.add_argument("--window", type=int, default=1024, help="of the system numbers")
    parser.add_argument("--decode", type=int, default=64, help="tokens that are timed one by one")
    parser.add_argument("--work", type=Path, default=Path("runs/kvcache-benchmark"), help="finished parts")
    parser.add_argument("--out", type=Path, help="the log, as JSON")
    options = parser.parse_args()
    if options.part == "books" and not options.text:
        parser.error("books needs --text FILES")
    run, table = {
        "system": (run_system, system_table),
        "needles": (run_needles, needle_table),
        "books": (run_books, book_table),
        "rounds": (run_rounds, rounds_table),
    }[options.part]
    report = {**vars(provenance()), "threads": torch.get_num_threads(), **run(options)}
    print("\n".join(table(report)))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rounded(report)) + "\n")


if __name__ == "__main__":
    main()
