"""Every number of a paired report once more, without Fathom's evaluation: `python benchmarks/recompute.py REPORT DIR`.

REPORT is the `report.json` of `fathom evaluate tuned BASE NEW --benchmark DIR`. The models are opened by transformers'
own class, so they must be ones that it knows; questions and texts are scored one at a time, and the statistics are
written out. The script prints every number that differs by more than 1e-6 (relative to numbers above 1) and then fails.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

WAYS = ("text", "length", "letter", "shuffled")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TOLERANCE = 1e-6


class Reader:
    """A model, and the log-probabilities that it gives to tokens."""

    def __init__(self, directory: Path) -> None:
        config = AutoConfig.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        whole = AutoTokenizer.from_pretrained(directory)
        self.begin = whole.bos_token_id if whole.bos_token_id is not None else whole.eos_token_id
        self.longest: int = config.max_position_embeddings

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, no special ones added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @torch.no_grad()
    def log_probabilities(self, ids: Sequence[int], last: int) -> torch.Tensor:
        """Of the last tokens of a sequence, each after those before it."""
        logits = self.model(torch.tensor([ids[:-1]])).logits[0, -last:].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[-last:])[:, None])[:, 0]

    def of_continuation(self, question: str, text: str) -> float:
        """The log-probability of a text after a question and a blank."""
        whole, before = self.encode(f"{question} {text}"), self.encode(question)
        last = len(whole) - len(before)
        return float(self.log_probabilities(whole[-(self.longest + 1) :], last).sum())

    def nats(self, ids: Sequence[int], context: int) -> float:
        """The loss of a document in windows that do not overlap."""
        row = [self.begin, *ids]
        windows = (row[start : start + context + 1] for start in range(0, len(row) - 1, context))
        return -sum(float(self.log_probabilities(window, len(window) - 1).sum()) for window in windows)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def asked_of(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The distinct questions of a benchmark, and how many there are and are not."""
    rows = rows_of(path)
    once: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    choice = [row for row in rows if row.get("choices") and row.get("answer") is not None]
    for row in choice:
        key = row["question"], tuple(sorted(row["choices"]))
        once[key] = {**row, **once.get(key, {}), "dirty": row.get("dirty") or once.get(key, {}).get("dirty")}
        once[key]["dirty"] = None if row.get("dirty") is None else bool(once[key]["dirty"])
    check = path.with_name(f"{path.stem}.check.json")
    skipped = json.loads(check.read_text())["left_out"] if check.is_file() else {}
    skipped = {**skipped, "no choices, or none that is right": len(rows) - len(choice)}
    skipped["repeated"] = len(choice) - len(once)
    of = len(rows) + sum(json.loads(check.read_text())["left_out"].values() if check.is_file() else ())
    checked = bool(once) and all(row["dirty"] is not None for row in once.values())
    found = {"asked": len(once), "of": of, "skipped": {why: n for why, n in skipped.items() if n}, "checked": checked}
    return list(once.values()), found


def right(model: Reader, row: Mapping[str, Any], way: str) -> bool:
    """Whether a model answers a question rightly."""
    choices, answer = row["choices"], row["answer"]
    if way in ("text", "length"):
        scores = [model.of_continuation(row["question"], one) / (len(one) if way == "length" else 1) for one in choices]
        return int(np.argmax(scores)) == answer
    order = list(range(len(choices)))
    if way == "shuffled":
        random.Random(f"fathom {row['id']} {row['question']}").shuffle(order)
    listed = "\n".join(f"{LETTERS[place]}. {choices[one]}" for place, one in enumerate(order))
    scores = [model.of_continuation(f"{row['question']}\n{listed}\nAnswer:", LETTERS[i]) for i in range(len(order))]
    return order[int(np.argmax(scores))] == answer


def wilson(count: int, of: int) -> list[float]:
    """Wilson's 95 % interval of a share."""
    z, share = NormalDist().inv_cdf(0.975), count / of
    middle, spread = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return [(middle - spread) / (1 + z * z / of), (middle + spread) / (1 + z * z / of)]


def mcnemar(lost: int, won: int) -> float:
    """The exact two-sided p: a coin that falls as unequally as this or more so."""
    n = lost + won
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(lost, won) + 1)) / 2**n) if n else 1.0


def questions(pair: Sequence[Reader], name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a report on one benchmark."""
    parts = {"all": rows, "clean": [r for r in rows if r["dirty"] is False], "dirty": [r for r in rows if r["dirty"]]}
    if not parts["dirty"]:
        parts = {"all": rows}
    for way in WAYS:
        answers = {id(row): [right(model, row, way) for model in pair] for row in rows}
        for part, mine in parts.items():
            if not mine:
                continue
            both = [answers[id(row)] for row in mine]
            counts = [sum(base for base, _ in both), sum(new for _, new in both)]
            lost, won = sum(base and not new for base, new in both), sum(new and not base for base, new in both)
            yield {
                **{"benchmark": name, "way": way, "part": part, "asked": len(mine), "right": counts},
                **{"lost": lost, "won": won, "p": mcnemar(lost, won)},
                "intervals": [wilson(count, len(mine)) for count in counts],
            }


def shard_texts(shards: Path) -> Iterator[tuple[str, tuple[list[list[int]], list[int]]]]:
    """A collection, and (tokens of its held-out documents, their bytes)."""
    index = json.loads((shards / "index.json").read_text())
    for collection, entries in index["splits"]["val"].items():
        documents, sizes = [], []
        for number in range(len(entries)):
            place = shards / "val" / collection / f"{number:05d}"
            tokens = np.fromfile(place.with_suffix(".bin"), index["dtype"])
            ends = np.fromfile(place.with_suffix(".idx"), "<i8").reshape(-1, 2)
            documents += [part[:-1].tolist() for part in np.split(tokens, ends[:, 0])[:-1]]
            sizes += np.diff(ends[:, 1], prepend=0).tolist()
        yield collection, (documents, sizes)


def text(pair: Sequence[Reader], documents: Sequence[Sequence[int]], sizes: Sequence[int]) -> dict[str, Any]:
    """Bits per byte of both models, and the bootstrap of the difference."""
    context = min(2048, *(model.longest for model in pair))
    bits = np.array([[model.nats(ids, context) / math.log(2) for ids in documents] for model in pair])
    size = np.array(sizes, float)
    gap, chance, low, high = bits[1] - bits[0], np.random.default_rng(0), None, None
    if len(size) >= 20:
        picks = [chance.integers(len(size), size=len(size)) for _ in range(1000)]
        low, high = np.quantile([gap[one].sum() / size[one].sum() for one in picks], [0.025, 0.975]).tolist()
    base, new = bits.sum(1) / size.sum()
    value = gap.sum() / size.sum()
    difference = {"value": value, "low": low, "high": high}
    return {"documents": len(size), "bytes": int(size.sum()), "base": base, "new": new, "difference": difference}


def runs(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The runs from the base to the new model, from their recipes and metrics."""
    found: list[dict[str, Any]] = []
    place: Path | None = Path(report["new"]["directory"])
    base = Path(report["base"]["directory"]).resolve()
    base_run = base.parent if base.name == "model" else base
    while place is not None and (run := place.parent if place.name == "model" else place).resolve() != base_run:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        rows = [row for row in rows_of(run / "metrics.jsonl") if "grad_norm" in row]
        shares = recipe["data"]["mixture"] or {recipe["data"]["directory"]: 1.0}
        result = json.loads((run / "result.json").read_text())
        found.append(
            {
                "run": run.name,
                "data": {name: share / sum(shares.values()) for name, share in shares.items()},
                "steps": recipe["train"]["steps"],
                "tokens": recipe["train"]["steps"] * recipe["train"]["tokens_per_step"],
                "seconds": result["seconds"],
                "rate": recipe["optim"]["lr"],
                "first_loss": rows[0]["loss"],
                "last_loss": rows[-1]["loss"],
            }
        )
        start = recipe["model"].get("from_pretrained")
        place = Path(start.partition("@")[0]) if start else None
    yield from reversed(found)


def corpus(directory: Path) -> dict[str, int] | None:
    """Documents by what became of them, counted from the files of the stages."""
    stages = directory.resolve().parent / "stages"
    if not stages.is_dir():
        return None
    count = lambda stage, name: sum(len(rows_of(path)) for path in stages.glob(f"{stage}/*/{name}"))  # noqa: E731
    verdicts = [json.loads(path.read_text()) for path in stages.glob("contamination/*/verdicts.json")]
    unreadable = count("ingest", "failed.jsonl")
    return {
        "read": count("clean", "part-*.jsonl") + count("clean", "dropped.jsonl") + unreadable,
        "unreadable": unreadable,
        "filtered": count("clean", "dropped.jsonl"),
        "duplicate": count("duplicates", "duplicates.jsonl"),
        "dropped": sum(not spans for one in verdicts for spans in one.values()),
        "cut": sum(bool(spans) for one in verdicts for spans in one.values()),
        "tokens": sum(path.stat().st_size for path in stages.glob("tokenize/*/*/*/*.bin")) // 2,
    }


def recomputed(report: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Every number of a report that does not say where it comes from."""
    pair = [Reader(Path(report[name]["directory"])) for name in ("base", "new")]
    found = {path.stem: asked_of(path) for path in sorted(directory.glob("*.jsonl"))}
    asked = {name: rows for name, (rows, _) in found.items() if rows}
    letters = {name: Counter(row["answer"] for row in rows) for name, rows in asked.items()}
    examples = []
    for rows in asked.values():
        for row in [row for row in rows if not row["dirty"]][:8]:
            examples.append({"question": row["question"], "right": [right(model, row, "text") for model in pair]})
    return {
        "texts": {name: text(pair, *read) for name, read in shard_texts(directory.resolve().parent / "shards")},
        "questions": [row for name, rows in asked.items() for row in questions(pair, name, rows)],
        "asked": {name: facts for name, (_, facts) in found.items()},
        "guessing": {
            name: {
                "random": sum(1 / len(row["choices"]) for row in rows) / len(rows),
                "majority": max(letters[name].values()) / len(rows),
            }
            for name, rows in asked.items()
        },
        "examples": examples,
        "runs": list(runs(report)),
        "corpus": corpus(directory),
    }


def differing(ours: object, theirs: object, place: str = "") -> Iterator[str]:
    """Where what was computed here is not what a report says; keys that are not computed here do not count."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key, value in ours.items():
            yield from differing(value, theirs.get(key), f"{place}.{key}")
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differing(one, other, f"{place}[{number}]")
    elif isinstance(ours, float) and isinstance(theirs, float | int):
        if not abs(ours - theirs) <= TOLERANCE * max(1.0, abs(ours)):
            yield f"{place}: {theirs} in the report, {ours} here"
    elif ours != theirs:
        yield f"{place}: {theirs!r} in the report, {ours!r} here"


def numbers_in(value: object) -> Iterator[float]:
    """All numbers of a part of a report."""
    if isinstance(value, Mapping):
        yield from (one for inner in value.values() for one in numbers_in(inner))
    elif isinstance(value, list | tuple):
        yield from (one for inner in value for one in numbers_in(inner))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def unfounded(sentence: str, found: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Numbers of the verdict that nothing here rounds to; those in the names of models and benchmarks aside."""
    for name in names:
        sentence = sentence.replace(name, "")
    known = {*numbers_in(found), 20.0, 95.0}  # the fewest documents of an interval, and its per cent
    shares = [count / row["asked"] for row in found["questions"] for count in row["right"]]
    known |= {100 * one for one in (*shares, *(one for guess in found["guessing"].values() for one in guess.values()))}
    known |= {float(len(found["guessing"]))}
    said = re.findall(r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?", sentence)
    return [one for one in said if not any(_rounds_to(value, one.replace(",", "")) for value in known)]


def _rounds_to(value: float, said: str) -> bool:
    digits = len(said.partition(".")[2])
    return any(float(form) == float(said) for form in (f"{value:.{digits}f}", f"{value:.2g}"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("benchmark", type=Path)
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    ours = recomputed(report, options.benchmark)
    names = [report["base"]["name"], report["new"]["name"], *ours["guessing"], *ours["texts"]]
    wrong = [*differing(ours, report), *(f"verdict: {one}" for one in unfounded(report["verdict"], ours, names))]
    print("\n".join(wrong) or f"{sum(1 for _ in numbers_in(ours)):,} numbers agree")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
