"""What learned gates, and gains alone, give a frozen pretrained model: `registered/2026-11-29-retrofit.md`, run.

    python benchmarks/retrofit.py run MODEL --data CORPORA --log FILE.jsonl [--cut] [--until HH:MM]
    python benchmarks/retrofit.py report FILE.jsonl

`run` takes the registered steps in their order, one variant × rate × seed each, and appends a line to the log when one
ends: the trained gates, the validation loss and, for runs that count as seeds, the loss of every held-out document. A
step that the log holds is skipped, so it may be stopped at any time. `--cut` takes the first cut alone. CORPORA holds
`wiki` and `arxiv` (JSONL, `text`). `report` prints what the log holds; it gives a verdict only if every run is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import lzma
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fathom.checkpoints.open import open_checkpoint
from fathom.deepen.request import parse_request
from fathom.deepen.write import deeper_config, deeper_model
from fathom.models.decoder.loss import token_losses
from fathom.models.modeling import FathomForCausalLM
from fathom.report.provenance import provenance

LEARNT = "blend=learned,gates=head,stride=4"
VARIANTS = {
    "gains": "branch_gain+value_gain",
    "queries": "branch_gain+value_gain:queries=true",
    "depth_attention": f"branch_gain+depth_attention:{LEARNT}",
    "shuffled": f"branch_gain+depth_attention:{LEARNT},shuffled=true",
    "uniform_depth": f"branch_gain+uniform_depth:{LEARNT}",
    "loop": "loop:trips=2,prelude=8,coda=7,blend=1.0+branch_gain:per_visit=true+value_gain",
}
"""By name, what `fathom deepen --with` takes."""
CONTROL, MECHANISMS, SHUFFLED = "queries", ("depth_attention", "uniform_depth", "loop"), "shuffled"
RATES, MIDDLE, EXTENSIONS = (0.005, 0.015, 0.045), 0.015, 2
SEEDS = 5
LENGTH, ROWS, STEPS, POOL = 256, 2, 58, 4096
VALIDATION = 20
SCORED = {"wiki": (512, 100), "arxiv": (192, 100)}
"""By text: tokens of a document, and documents."""
SMALLEST = 0.005
"""Nats; an interval within ± this is "nothing"."""


# --- text -------------------------------------------------------------------------------------------------------------


def documents(path: Path, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[list[int]]:
    """Token ids of the documents of at least so many tokens, cut there, in the order of the file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer(json.loads(line)["text"][: 12 * length], add_special_tokens=False)["input_ids"]
            if len(ids) >= length:
                yield ids[:length]


class Texts:
    """The documents that are trained on, validated on and scored."""

    def __init__(self, corpora: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        first = sorted((corpora / "wiki").glob("train-00-*"))[0]
        self.pool = torch.tensor(list(islice(documents(first, tokenizer, LENGTH), POOL)))
        held = corpora / "wiki" / "val.jsonl.xz"
        self.validation = torch.tensor(list(islice(documents(held, tokenizer, LENGTH), VALIDATION)))
        used = {tuple(row) for row in self.validation.tolist()}
        self.scored: dict[str, Tensor] = {}
        for name, (length, count) in SCORED.items():
            found = documents(corpora / name / "val.jsonl.xz", tokenizer, length)
            fresh = (ids for ids in found if tuple(ids[:LENGTH]) not in used)
            self.scored[name] = torch.tensor(list(islice(fresh, count)))

    def batch(self, seed: int, step: int) -> Tensor:
        """The documents of a step, `[ROWS, LENGTH]`."""
        order = np.random.default_rng(seed).permutation(len(self.pool))
        return self.pool[order[step * ROWS : (step + 1) * ROWS]]


# --- one step ---------------------------------------------------------------------------------------------------------


def gated(base: FathomForCausalLM, variant: str) -> FathomForCausalLM:
    """The base with a variant's gates; nothing else trains."""
    model = deeper_model(base, deeper_config(base.config, parse_request(VARIANTS[variant])))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gates" in name)
    return model


def train(model: FathomForCausalLM, texts: Texts, rate: float, seed: int) -> None:
    """The registered training."""
    gates = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(gates, lr=rate, betas=(0.9, 0.99))
    model.train()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / STEPS)
        ids = texts.batch(seed, step)
        model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(gates, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.inference_mode()
def losses(model: FathomForCausalLM, rows: Tensor) -> list[float]:
    """Mean loss of every document in nats, scored in pairs in their order."""
    found: list[float] = []
    for pair in rows.split(ROWS):
        hidden = model.model(pair[:, :-1], use_cache=False).last_hidden_state
        found += token_losses(hidden, model.lm_head, pair[:, 1:]).double().mean(1).tolist()
    return found


def one(base: FathomForCausalLM, texts: Texts, variant: str, rate: float, seed: int) -> dict[str, Any]:
    """Train a variant, and validate it."""
    model, begun = gated(base, variant), time.process_time()
    train(model, texts, rate, seed)
    seconds = time.process_time() - begun
    gates = {name: p.detach().tolist() for name, p in model.named_parameters() if p.requires_grad}
    return {
        **{"step": "train", "variant": variant, "rate": rate, "seed": seed, "cpu_seconds": round(seconds, 1)},
        **{"gates": gates, "validation": float(np.mean(losses(model, texts.validation)))},
    }


def scored(base: FathomForCausalLM, texts: Texts, trained: Mapping[str, Any] | None) -> dict[str, Any]:
    """The losses of a trained variant's documents, or the base model's."""
    begun, model = time.process_time(), base
    if trained is not None:
        model = gated(base, trained["variant"])
        with torch.no_grad():
            for name, values in trained["gates"].items():
                model.get_parameter(name).copy_(torch.tensor(values))
    what = {key: None if trained is None else trained[key] for key in ("variant", "rate", "seed")}
    found = {name: losses(model.eval(), rows) for name, rows in texts.scored.items()}
    return {"step": "score", **what, "cpu_seconds": round(time.process_time() - begun, 1), "losses": found}


# --- the log and its order --------------------------------------------------------------------------------------------

Key = tuple[str, str | None, float | None, int | None]


class Log:
    """Lines of the log by step, variant, rate and seed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def get(self, *key: object) -> dict[str, Any] | None:
        """The line of a step."""
        names = ("step", "variant", "rate", "seed")
        return next((row for row in self.rows if tuple(row.get(name) for name in names) == key), None)

    def add(self, row: dict[str, Any]) -> None:
        """Append a line."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rate(self, variant: str) -> float | None:
        """The chosen rate, or None while a rate is missing."""
        rates = list(RATES)
        for _ in range(EXTENSIONS + 1):
            found = {rate: self.get("train", variant, rate, 0) for rate in rates}
            if not all(found.values()):
                return None
            best = min(rates, key=lambda rate: found[rate]["validation"])  # type: ignore[index]
            if len(rates) == len(RATES) + EXTENSIONS or best not in (rates[0], rates[-1]):
                return best
            rates = sorted([*rates, best / 3 if best == rates[0] else best * 3])
        return None

    def missing_rate(self, variant: str) -> float | None:
        """The next rate to try."""
        rates = list(RATES)
        while True:
            for rate in rates:
                if self.get("train", variant, rate, 0) is None:
                    return rate
            if self.rate(variant) is not None:
                return None
            best = min(rates, key=lambda rate: self.get("train", variant, rate, 0)["validation"])  # type: ignore[index]
            rates = sorted([*rates, best / 3 if best == rates[0] else best * 3])


def next_step(log: Log, cut: bool) -> Key | None:
    """The first registered step that the log lacks."""
    if log.get("score", None, None, None) is None:
        return "score", None, None, None
    wanted: list[tuple[str, float, int]] = []
    for seed in (0, 1):
        wanted += [(variant, MIDDLE, seed) for variant in VARIANTS]
    if not cut and all(log.get("score", *key) for key in wanted):
        for variant in VARIANTS:
            if (rate := log.missing_rate(variant)) is not None:
                return "train", variant, rate, 0
        rates = {variant: log.rate(variant) for variant in VARIANTS}
        wanted += [(variant, rate, seed) for seed in range(SEEDS) for variant, rate in rates.items() if rate]
    for key in wanted:
        for step in ("train", "score"):
            if log.get(step, *key) is None:
                return step, *key
    return None


def run(options: argparse.Namespace) -> None:
    """Take the steps that are missing."""
    torch.manual_seed(0)
    base, tokenizer = open_checkpoint(options.model, "cpu", "float32")
    assert isinstance(base, FathomForCausalLM)
    texts, log = Texts(options.data, tokenizer), Log(options.log)
    if not log.rows:
        log.add({"step": "provenance", **vars(provenance())})
    while (key := next_step(log, options.cut)) is not None:
        if options.until and datetime.datetime.now().strftime("%H:%M") >= options.until:
            break
        step, variant, rate, seed = key
        if step == "train":
            assert variant is not None and rate is not None and seed is not None
            row = one(base, texts, variant, rate, seed)
        else:
            row = scored(base, texts, None if variant is None else log.get("train", variant, rate, seed))
        log.add(row)
        print(datetime.datetime.now().strftime("%H:%M"), *key, row.get("validation", ""), f"{row['cpu_seconds']} s")


# --- the registered analysis ------------------------------------------------------------------------------------------


def contrast(log: Log, one: str, other: str, text: str, rates: Mapping[str, float], seeds: Sequence[int]) -> Any:
    """Mean, interval and p-value of a contrast, `[seeds, documents]` paired by both."""
    sides = [
        np.array([log.get("score", name, rates[name], seed)["losses"][text] for seed in seeds])  # type: ignore[index]
        for name in (one, other)
    ]
    difference = sides[0] - sides[1]
    by_seed, by_document = difference.mean(1), difference.mean(0)
    mean = float(difference.mean())
    drawn = np.random.default_rng(0).choice(by_document, (10_000, len(by_document))).mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    tail = min((drawn <= 0).mean(), (drawn >= 0).mean())
    p = max(2 * float(tail), 1 / len(drawn))
    if len(seeds) > 1:
        spread = float(stats.sem(by_seed))
        half = spread * stats.t.ppf(0.975, len(seeds) - 1)
        if half > (high - low) / 2:
            low, high = mean - half, mean + half
        p = max(p, float(stats.ttest_1samp(by_seed, 0).pvalue)) if spread else p
    return {"contrast": f"{one} - {other}", "text": text, "mean": mean, "low": float(low), "high": float(high), "p": p}


def holm(p: Sequence[float]) -> list[float]:
    """Holm's corrected p-values."""
    order, worst, found = np.argsort(p), 0.0, [0.0] * len(p)
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        found[i] = worst
    return found


def report(options: argparse.Namespace) -> None:
    """Print the contrasts that the log bears, and the verdict if it is complete."""
    log = Log(options.log)
    tuned = {variant: log.rate(variant) for variant in VARIANTS}
    whole = all(tuned.values()) and next_step(log, cut=False) is None
    rates = {variant: tuned[variant] if whole else MIDDLE for variant in VARIANTS}
    seeds = range(SEEDS if whole else 2)
    done = [s for s in seeds if all(log.get("score", v, rates[v], s) for v in VARIANTS)]
    print(f"{'complete' if whole else 'interim, no verdict'}: seeds {done}, rates {rates}")
    if not done:
        return
    pairs = [(one, CONTROL) for one in MECHANISMS] + [(one, SHUFFLED) for one in MECHANISMS[:2]]
    pairs += [(CONTROL, "gains"), ("depth_attention", "uniform_depth")]
    rows = [contrast(log, *pair, text, rates, done) for text in SCORED for pair in pairs]  # type: ignore[arg-type]
    base = log.get("score", None, None, None)
    assert base is not None
    for text in SCORED:
        gains = np.mean([log.get("score", "gains", rates["gains"], s)["losses"][text] for s in done])  # type: ignore[index]
        print(f"{text}: base {np.mean(base['losses'][text]):.4f}, gains {gains - np.mean(base['losses'][text]):+.4f}")
    for row in rows:
        print("{contrast:36} {text:6} {mean:+.4f} ({low:+.4f} to {high:+.4f})  p {p:.4f}".format(**row))
    if whole:
        primary = rows[: len(MECHANISMS)]
        second = {row["contrast"]: row for row in rows if row["text"] == "arxiv"}
        for row, p in zip(primary, holm([row["p"] for row in primary]), strict=True):
            name = row["contrast"].split(" - ")[0]
            content = next((r for r in rows if r["contrast"] == f"{name} - {SHUFFLED}" and r["text"] == "wiki"), None)
            helps = p < 0.05 and row["mean"] < 0 and second[row["contrast"]]["mean"] < 0
            helps = helps and (content is None or (content["mean"] < 0 and content["p"] < 0.05))
            nothing = row["low"] > -SMALLEST and row["high"] < SMALLEST
            print(f"{name}: {'helps' if helps else 'nothing' if nothing else 'not decided'} (Holm's p {p:.4f})")


def main() -> None:
    """Read the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("model", type=Path)
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--log", type=Path, required=True)
    running.add_argument("--cut", action="store_true")
    running.add_argument("--until", help="start no step after this time, HH:MM")
    running.set_defaults(run=run)
    reporting = commands.add_parser("report")
    reporting.add_argument("log", type=Path)
    reporting.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
