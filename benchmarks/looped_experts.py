"""Do loops help more with experts than without? `registered/2026-11-29-looped-experts.md`, run.

    python benchmarks/looped_experts.py run --data CORPORA --log FILE.jsonl [--until HH:MM]
    python benchmarks/looped_experts.py report FILE.jsonl

`run` takes the registered steps in their order, one size × arm × rate × seed each, and appends a line to the log when
one ends. A step that the log holds is skipped, so it may be stopped at any time. CORPORA holds `wiki`, `arxiv` and
`books` (JSONL, `text`). `report` prints what the log holds; it gives a verdict only if every run is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import lzma
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.cost import active_parameters, count_parameters, training_flops_per_token
from fathom.report.provenance import provenance

CORPORA = ("wiki", "arxiv", "books")
VOCABULARY, SAMPLE = 1024, 1_000_000
"""Of the byte-level BPE, and the characters of each corpus that train it."""
LENGTH, ROWS, HELD_OUT = 256, 8, 340
"""Tokens of a sequence, sequences of a step, and held-out sequences of each corpus."""
LOOP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "recurrence": "loop",
    "recurrence_options": {"trips": 2, "prelude": 1, "coda": 1},
}
ARMS: dict[str, dict[str, Any]] = {
    "D once": {"num_hidden_layers": 6},
    "D loop": LOOP,
    "M once": {"num_hidden_layers": 6, "experts": 8},
    "M loop 8": {**LOOP, "experts": 8},
    "M loop 12": {**LOOP, "experts": 12},
}
"""Each makes six visits to layers."""
TUNED_AS = {"M loop 12": "M loop 8"}
RATES, EXTENSIONS, TUNING = (0.0033, 0.01, 0.03), 2, (10_000, 10_001)
"""The ladders' optimum at this size, steps of 2,048 tokens and AdamW is 0.01."""
SIZES: dict[str, tuple[dict[str, int], int, tuple[str, ...]]] = {
    "0.17 M": ({"hidden_size": 48, "intermediate_size": 128}, 5, tuple(ARMS)),
    "0.30 M": ({"hidden_size": 64, "intermediate_size": 176}, 3, ("D once", "D loop", "M once", "M loop 8")),
}
"""Widths, seeds and arms; the last size is sealed."""
TOKENS = 10
"""For each active parameter of D once without its tables; the same for every arm."""
INTERACTION = {"M loop 8": 1.0, "M once": -1.0, "D loop": -1.0, "D once": 1.0}
CLAIM = {"M loop 12": 1.0, "M once": -1.0}
DENSE = {"D loop": 1.0, "D once": -1.0}
CONTRASTS = {"interaction": INTERACTION, "M loop 12 - M once": CLAIM, "D loop - D once": DENSE}
"""In the order in which they are tested."""


# --- text -------------------------------------------------------------------------------------------------------------


def texts(folder: Path, split: str) -> Iterator[str]:
    """Documents of a split, file by file in the order of names."""
    for path in sorted(folder.glob(f"{split}*")):
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def sample(folder: Path) -> str:
    """The first characters of a corpus."""
    found, size = [], 0
    for text in texts(folder, "train"):
        found.append(text)
        size += len(text)
        if size >= SAMPLE:
            break
    return "\n".join(found)[:SAMPLE]


def windows(folder: Path, split: str, tokenizer: Tokenizer, count: int) -> Tensor:
    """The first sequences of a corpus, `[count, LENGTH]`: documents with id 0 after each, cut without overlap."""
    ids: list[int] = []
    for text in texts(folder, split):
        for start in range(0, len(text), 100_000):
            ids += tokenizer.encode(text[start : start + 100_000]).ids
            if len(ids) >= count * LENGTH:
                return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
        ids.append(0)
    raise SystemExit(f"{folder} has too little text")


class Texts:
    """The sequences that are trained on and scored, by corpus."""

    def __init__(self, corpora: Path) -> None:
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
        trainer = BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator([sample(corpora / name) for name in CORPORA], trainer)
        most = math.ceil(max(steps_of(size) for size in SIZES) * ROWS / len(CORPORA))
        self.train = {name: windows(corpora / name, "train", tokenizer, most) for name in CORPORA}
        self.held_out = {name: windows(corpora / name, "val", tokenizer, HELD_OUT) for name in CORPORA}

    def batches(self, seed: int, steps: int) -> Tensor:
        """`[steps, ROWS, LENGTH]`: as many sequences of each corpus, in a random order."""
        each = math.ceil(steps * ROWS / len(CORPORA))
        pool = torch.cat([one[:each] for one in self.train.values()])
        order = np.random.default_rng(seed).permutation(len(pool))[: steps * ROWS]
        return pool[order].view(steps, ROWS, LENGTH)


# --- one step ---------------------------------------------------------------------------------------------------------


def config_of(size: str, arm: str) -> FathomConfig:
    """An arm's configuration at a size."""
    heads = SIZES[size][0]["hidden_size"] // 16
    shape = {**SIZES[size][0], "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 16}
    fixed = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}
    return FathomConfig(**{**shape, **fixed, "use_cache": False, **ARMS[arm]})


def steps_of(size: str) -> int:
    """Optimizer steps of every run of a size."""
    config = config_of(size, "D once")
    layers = active_parameters(config) - config.vocab_size * config.hidden_size
    return round(TOKENS * layers / (ROWS * LENGTH))


def run_one(texts: Texts, size: str, arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Train an arm, and score it."""
    config, steps, begun = config_of(size, arm), steps_of(size), time.process_time()
    torch.manual_seed(seed)
    model = FathomForCausalLM(config).train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    warm = max(1, steps // 20)
    for step, ids in enumerate(texts.batches(seed, steps)):
        share = min((step + 1) / warm, (steps - step) / (steps - warm))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        model.set_step(step, steps)
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses = scored(model.eval(), texts)
    return {
        **{"step": "train", "size": size, "arm": arm, "rate": rate, "seed": seed, "steps": steps, "losses": losses},
        **{"cpu_seconds": round(time.process_time() - begun, 1), "parameters": count_parameters(config)},
        **{"active": active_parameters(config), "flops_per_token": training_flops_per_token(config, LENGTH)},
    }


@torch.inference_mode()
def scored(model: FathomForCausalLM, texts: Texts) -> dict[str, float]:
    """Held-out loss of each corpus in nats per token, without the loss that balances experts."""
    found = {}
    for name, rows in texts.held_out.items():
        parts = [float(model(ids, labels=ids).loss) for ids in rows.split(ROWS)]
        found[name] = float(np.average(parts, weights=[len(ids) for ids in rows.split(ROWS)]))
    return found


# --- the log and its order --------------------------------------------------------------------------------------------


class Log:
    """The lines of a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def add(self, row: dict[str, Any]) -> None:
        """Append a line."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def loss(self, size: str, arm: str, rate: float, seed: int) -> float | None:
        """The mean held-out loss over the corpora; None if the run is missing."""
        wanted = ("train", size, arm, rate, seed)
        for row in self.rows:
            if tuple(row.get(key) for key in ("step", "size", "arm", "rate", "seed")) == wanted:
                return float(np.mean(list(row["losses"].values())))
        return None

    def tuning(self, size: str, arm: str) -> tuple[float | None, tuple[float, int] | None]:
        """The chosen rate, or the next rate and seed to try: one of them is None."""
        arm, rates = TUNED_AS.get(arm, arm), list(RATES)
        while True:
            found = {rate: [self.loss(size, arm, rate, seed) for seed in TUNING] for rate in rates}
            missing = [(rate, seed) for rate in rates for seed in TUNING if self.loss(size, arm, rate, seed) is None]
            if missing:
                return None, missing[0]
            best = min(rates, key=lambda rate: sum(found[rate]))  # type: ignore[arg-type,return-value]
            if len(rates) == len(RATES) + EXTENSIONS or best not in (rates[0], rates[-1]):
                return best, None
            rates = sorted([*rates, best / 3 if best == rates[0] else best * 3])

    def sealed(self) -> bool:
        """Whether the prediction for the last size is made."""
        return any(row["step"] == "seal" for row in self.rows)


def next_step(log: Log) -> tuple[str, str, float, int] | str | None:
    """The first registered step that the log lacks; `seal` for the prediction."""
    small = next(iter(SIZES))
    for size, (_, seeds, arms) in SIZES.items():
        if size != small and not log.sealed():
            return "seal"
        for arm in arms if size == small else ():  # the last size takes the rates of the first, scaled by width
            rate, missing = log.tuning(size, arm)
            if rate is None and missing is not None:
                return size, TUNED_AS.get(arm, arm), *missing
        for seed in range(seeds):
            for arm in arms:
                if log.loss(size, arm, rate_of(log, size, arm), seed) is None:
                    return size, arm, rate_of(log, size, arm), seed
    return None


def rate_of(log: Log, size: str, arm: str) -> float:
    """The rate of an arm's runs: the tuned one, and at the last size that times the ratio of widths."""
    small = next(iter(SIZES))
    rate, _ = log.tuning(small, arm)
    assert rate is not None
    return rate * SIZES[small][0]["hidden_size"] / SIZES[size][0]["hidden_size"]


def run(options: argparse.Namespace) -> None:
    """Take the steps that are missing."""
    torch.manual_seed(0)
    log = Log(options.log)
    if not log.rows:
        log.add({"step": "provenance", **vars(provenance())})
    made: Texts | None = None
    while (wanted := next_step(log)) is not None:
        if options.until and datetime.datetime.now().strftime("%H:%M") >= options.until:
            break
        if isinstance(wanted, str):
            small = next(iter(SIZES))
            row = {"step": "seal", **vars(provenance()), "prediction": contrast(log, small, INTERACTION)}
        else:
            made = made or Texts(options.data)
            row = run_one(made, *wanted)
        log.add(row)
        print(datetime.datetime.now().strftime("%H:%M"), wanted, row.get("losses", ""), row.get("cpu_seconds", ""))


# --- the registered analysis ------------------------------------------------------------------------------------------


def contrast(log: Log, size: str, weights: Mapping[str, float], rates: Mapping[str, float] | None = None) -> Any:
    """A contrast's mean over seeds with Student's interval, and what 80 % of such experiments would show."""
    by_seed = []
    for seed in range(SIZES[size][1]):
        rate = {arm: rates[arm] if rates else rate_of(log, size, arm) for arm in weights}
        losses = {arm: log.loss(size, arm, rate[arm], seed) for arm in weights}
        if None not in losses.values():
            by_seed.append(sum(weight * float(losses[arm] or 0.0) for arm, weight in weights.items()))
    return {"by_seed": by_seed, **interval(by_seed)}


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean, ends of the 95 % interval, p-value, and the effect that a power of 0.8 needs."""
    if len(values) < 2:
        return {"mean": float(np.mean(values))} if values else {}
    freedom, error = len(values) - 1, float(stats.sem(values))
    half = error * float(stats.t.ppf(0.975, freedom))
    mean, seen = float(np.mean(values)), error * float(stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom))
    p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "detectable": seen}


def report(options: argparse.Namespace) -> None:
    """Print the contrasts that the log bears, and the verdict if it is complete."""
    log = Log(options.log)
    whole = next_step(log) is None
    print("complete" if whole else "interim, no verdict")
    for row in log.rows:
        if row["step"] == "train":
            mean = np.mean(list(row["losses"].values()))
            print("{size}  {arm:10} rate {rate:<6g} seed {seed}".format(**row), f" {mean:.4f}  {row['cpu_seconds']} s")
    if not whole:
        return
    going = True
    for size, (_, _, arms) in SIZES.items():
        for name, weights in CONTRASTS.items():
            if set(weights) <= set(arms):
                found = contrast(log, size, weights)
                print(f"{size}  {name:20} {found}")
                if size == next(iter(SIZES)):  # a fixed order: the first that is not decided ends the tests
                    going = going and found["p"] < 0.05
                    print(f"    {'decided' if going else 'not decided'}")


def main() -> None:
    """Read the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--log", type=Path, required=True)
    running.add_argument("--until", help="start no step after this time, HH:MM")
    running.set_defaults(run=run)
    reporting = commands.add_parser("report")
    reporting.add_argument("log", type=Path)
    reporting.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
