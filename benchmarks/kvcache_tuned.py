"""What tuning buys a compressed cache on a real model: equal tokens under `drop`, `snapkv`, FreqKV and the full cache.

    fathom prepare NOVELS --tokenizer MODEL --held-out 0.1 --out SHARDS
    python benchmarks/kvcache_tuned.py MODEL --shards SHARDS --text books=FILE wiki=FILE --work DIR --out FILE.json
        [--tokens 120000] [--arms snapkv drop] [--precision bf16] [--minutes 9]

Every arm trains `recipes/kvcache/freqkv_lora.yaml` (adapters, embeddings, norms; rows of N + 3F) under its own cache,
with one learning rate. The base and the tuned models then read documents of 4N tokens through their caches. FILE.json
has the nats of each document. It is written after each part; run again, the benchmark goes on after the last, and
training after its last checkpoint. With bf16, training and scoring compute in bfloat16. One seed; intervals are over
documents.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.checkpoints.open import open_checkpoint
from fathom.evaluation.caches.measure import losses
from fathom.evaluation.perplexity import read_domains
from fathom.kvcache import build_cache
from fathom.recipe import load_recipe
from fathom.report.files import read_json, write_json
from fathom.report.provenance import provenance
from fathom.report.statistics import paired_difference
from fathom.training import train

METHODS = ("freqkv", "drop", "full", "snapkv")
RATE = 3e-4
WINDOW = 512
LENGTH = 4 * WINDOW
DOCUMENTS = 12
SPANS = {"first window": (0, WINDOW), "second": (WINDOW, 2 * WINDOW), "last two": (2 * WINDOW, LENGTH)}
ROW, STEP = 1280, 2560
"""N + 3F tokens, and the tokens of a step."""


def main() -> None:
    """Train and score what is missing, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shards", type=Path, required=True, help="of `fathom prepare`, by the model's tokenizer")
    parser.add_argument("--text", nargs="+", required=True, help="held-out texts, the training's domain first")
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--arms", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--minutes", type=float, default=1e9, help="CPU minutes after which no further part begins")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    log: dict[str, Any] = read_json(options.out) if options.out.exists() else {"before": {}, "after": {}}
    log["provenance"] = vars(provenance())
    for when, arms in (("after", options.arms), ("before", ("full", *options.arms))):
        for method in arms:
            found = log[when].setdefault(method, {"nats": {}})
            for _ in missing(found, when == "after", method, options):
                write_json(options.out, log)
                if time.process_time() > 60 * options.minutes:
                    return
    print(*table(log), sep="\n")


def missing(found: dict[str, Any], tuned: bool, method: str, options: argparse.Namespace) -> Iterator[None]:
    """Train if `tuned`, and score: each part that is not found yet."""
    directory = options.model
    if tuned:
        directory = options.work / f"{method}-tokens{options.tokens}" / "model"
        if "tokens" not in found:
            found |= trained(method, directory.parent, options)
            yield
    wanted = [domain for domain in read_domains(options.text, limit=400) if domain.name not in found["nats"]]
    if not wanted:
        return
    model, tokenizer = open_checkpoint(directory, "cpu", "bfloat16" if options.precision == "bf16" else "float32")
    for domain in wanted:
        rows = islice(long(map(str, domain.documents), tokenizer), DOCUMENTS)
        found["nats"][domain.name] = [nats(model, row, method) for row in rows]
        yield


def long(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tensor]:
    """The first tokens of the documents that have enough, and the one after them."""
    for document in documents:
        ids = tokenizer(document[: 8 * LENGTH], add_special_tokens=False)["input_ids"]
        if len(ids) > LENGTH:
            yield torch.tensor(ids[: LENGTH + 1])


def trained(method: str, run: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train a model under a cache."""
    words = [f"model.from_pretrained={options.model}", f"data.directory={options.shards}", f"optim.lr={RATE}"]
    words += [f"data.sequence_length={ROW}", f"train.steps={options.tokens // STEP}", f"train.tokens_per_step={STEP}"]
    words += ["train.activation_checkpointing=false", "train.micro_batch=1", "train.checkpoint_every=10"]
    words += ["train.keep_last=1", "train.seed=0", f"train.precision={options.precision}"]
    words += ["evaluate.every=0", f"evaluate.tokens={2 * ROW}"]
    words += ["kvcache=null"] if method == "full" else [f"kvcache.method={method}", f"kvcache.window={WINDOW}"]
    result = train(load_recipe("kvcache/freqkv_lora", words), run)
    if not result.finished:
        raise SystemExit(f"{run}: stopped after {result.tokens} tokens")
    return {"lr": RATE, "seconds": result.seconds, "tokens": result.tokens}


def nats(model: PreTrainedModel, row: Tensor, method: str) -> dict[str, float]:
    """The mean loss of a document's spans, read through a cache."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = build_cache(model, method, window=None if method == "full" else WINDOW)
    every = losses(model, row[None], cache)[0]
    return {name: float(every[start:end].mean()) for name, (start, end) in SPANS.items()}


def table(log: dict[str, Any]) -> list[str]:
    """Markdown: losses of the last two windows beyond the untuned full cache's, and what tuning buys of each."""
    base = log["before"].get("full", {"nats": {}})
    texts = list(base["nats"])
    heads = [f"{text}, {what}" for text in texts for what in ("untuned", "tuned", "tuned − untuned")]
    rows = [f"| cache | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for method, after in log["after"].items():
        before, cells = log["before"][method], []
        for text in texts:
            own = f"{fmean(column(base, text)):.3f} ({len(base['nats'][text])})"
            cells += [own if method == "full" else gap(before, base, text), gap(after, base, text)]
            cells.append(gap(after, before, text))
        rows.append(f"| {method} | {' | '.join(cells)} |")
    return rows


def column(found: dict[str, Any], text: str) -> list[float]:
    """The losses of the documents' last two windows."""
    return [one["last two"] for one in found["nats"][text]]


def gap(found: dict[str, Any], control: dict[str, Any], text: str) -> str:
    """A difference paired by document, with its interval over documents."""
    by_document = paired_difference(column(found, text), column(control, text))
    return f"{by_document.mean:+.3f} ±{by_document.half_width:.3f}".replace("-", "−")


if __name__ == "__main__":
    main()
