"""FreqKV tuned on a real model, beside `average`, `drop` and the full cache, which are tuned alike: before and after.

    python benchmarks/kvcache_tuned.py MODEL --shards DIR --text books=FILE other=FILE --work DIR --out FILE.json
        [--tokens 120000] [--precision bf16]

Every arm trains `recipes/kvcache/freqkv_lora.yaml` (adapters, embeddings, norms; rows of N + 3F) under its own cache.
Its learning rate is the best of two at a fifth of the tokens, by the loss under that cache. The base and the tuned
models then read documents of 4N tokens through their caches, and answer questions about natural needles after one and
two compressions. FILE.json has the nats of each document and every answer; it is written after each part and read
first. With bf16, training and scoring compute in bfloat16. One seed; intervals are over documents.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from fathom.checkpoints.open import open_checkpoint
from fathom.evaluation.caches.asking import answer, batches, make_prompts
from fathom.evaluation.caches.measure import losses
from fathom.evaluation.caches.natural import TASKS
from fathom.evaluation.caches.prompts import Frame
from fathom.evaluation.perplexity import read_domains
from fathom.kvcache import Schedule, build_cache
from fathom.recipe import load_recipe
from fathom.report.files import read_json, write_json
from fathom.report.provenance import provenance
from fathom.report.statistics import paired_difference
from fathom.training import train

METHODS = ("freqkv", "drop", "full", "average")
RATES = (3e-4, 1e-3)
WINDOW = 512
LENGTH = 4 * WINDOW
DOCUMENTS = 20
QUESTIONS = 48
SPANS = {"first window": (0, WINDOW), "second": (WINDOW, 2 * WINDOW), "last two": (2 * WINDOW, LENGTH)}
ROW, STEP = 1280, 2560
"""N + 3F tokens, and the tokens of a step."""


def main() -> None:
    """Train and score what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shards", type=Path, required=True, help="of `fathom prepare`, by the model's tokenizer")
    parser.add_argument("--text", nargs="+", required=True, help="held-out texts, the training's domain first")
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    log: dict[str, Any] = read_json(options.out) if options.out.exists() else {"before": {}, "tuning": {}, "after": {}}
    log["provenance"] = vars(provenance())
    for method in METHODS:
        if method not in log["before"]:
            log["before"][method] = scores(options.model, method, options)
            write_json(options.out, log)
    for method in METHODS:
        tuned = log["tuning"].setdefault(method, {})
        for rate in RATES:
            if f"{rate:g}" not in tuned:
                tuned[f"{rate:g}"] = trained(method, rate, options.tokens // 5, options)
                write_json(options.out, log)
        if method not in log["after"]:
            rate = float(min(tuned, key=lambda each: tuned[each]["held_out_loss"]))
            run = trained(method, rate, options.tokens, options)
            model = place_of(method, rate, options.tokens, options) / "model"
            log["after"][method] = {"lr": rate, **run, **scores(model, method, options)}
            write_json(options.out, log)
        log["table"] = [*table(log)]
        write_json(options.out, log)
    print(*log["table"], sep="\n")


def place_of(method: str, rate: float, tokens: int, options: argparse.Namespace) -> Path:
    """The run's directory."""
    return options.work / f"{method}-rate{rate:g}-tokens{tokens}"


def trained(method: str, rate: float, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """Train a model under a cache; its held-out loss under that cache, and seconds."""
    words = [f"model.from_pretrained={options.model}", f"data.directory={options.shards}", f"optim.lr={rate}"]
    words += [f"data.sequence_length={ROW}", f"train.steps={tokens // STEP}", f"train.tokens_per_step={STEP}"]
    words += [
        "train.activation_checkpointing=false",
        "train.micro_batch=1",
        "train.checkpoint_every=10",
        "train.keep_last=1",
        "train.seed=0",
    ]
    words += [f"train.precision={options.precision}", "evaluate.every=0", f"evaluate.tokens={10 * ROW}"]
    words += ["kvcache=null"] if method == "full" else [f"kvcache.method={method}", f"kvcache.window={WINDOW}"]
    result = train(load_recipe("kvcache/freqkv_lora", words), place_of(method, rate, tokens, options))
    assert result.evaluation is not None
    return {"held_out_loss": result.evaluation.loss, "seconds": result.seconds, "tokens": result.tokens}


@torch.no_grad()
def scores(directory: Path, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """The nats of each document by span, and the answers to all questions, read through a cache."""
    model, tokenizer = open_checkpoint(directory, "cpu", "bfloat16" if options.precision == "bf16" else "float32")
    schedule = Schedule.at(WINDOW, 4, 0.5)

    def cache(room: int) -> Cache:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build_cache(model, method, window=None if method == "full" else WINDOW)

    found: dict[str, Any] = {"nats": {}}
    domains = read_domains(options.text, limit=DOCUMENTS)
    for domain in domains:
        ids = [tokenizer(str(text), add_special_tokens=False)["input_ids"] for text in domain.documents]
        rows = [torch.tensor(each[: LENGTH + 1]) for each in ids if len(each) > LENGTH]
        found["nats"][domain.name] = [nats(model, row, cache(0)) for row in rows]
    asked, _ = make_prompts(Frame(tokenizer), schedule, TASKS, (1, 2), [*map(str, domains[0].documents)], QUESTIONS)
    survivors = schedule.kept + schedule.sinks
    found["answers"] = [
        vars(one) for some in batches(asked) for one in answer(model, tokenizer, cache, some, survivors)
    ]
    return found


def nats(model: PreTrainedModel, row: Tensor, cache: Cache) -> dict[str, float]:
    """The mean loss of a document's spans."""
    every = losses(model, row[None], cache)[0]
    return {name: float(every[start:end].mean()) for name, (start, end) in SPANS.items()}


def table(log: dict[str, Any]) -> list[str]:
    """Markdown: each cache's loss beyond the untuned full cache, before and after, and needles found."""
    texts = [*log["before"]["full"]["nats"]]
    span = [*SPANS][-1]
    heads = [f"{text}, {span} windows" for text in texts]
    rows = [f"| cache | {' | '.join(heads)} | needles | nats |", "| --- |" + " ---: |" * (len(heads) + 2)]
    for when in ("before", "after"):
        for method, found in log[when].items():
            cells = []
            for text in texts:
                base = [one[span] for one in log["before"]["full"]["nats"][text]]
                gap = paired_difference([one[span] for one in found["nats"][text]], base)
                own = when == "before" and method == "full"
                words = f"{gap.mean:+.3f} ±{gap.half_width:.3f}".replace("-", "−")
                cells.append(f"{sum(base) / len(base):.3f}" if own else words)
            right = sum(one["score"] == 1 for one in found["answers"])
            cost = sum(one["nats"] for one in found["answers"]) / len(found["answers"])
            words = f"{method}, {when}"
            rows.append(f"| {words} | {' | '.join(cells)} | {right}/{len(found['answers'])} | {cost:.2f} |")
    return rows


if __name__ == "__main__":
    main()
