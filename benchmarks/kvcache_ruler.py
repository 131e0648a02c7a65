"""RULER as kvpress asks it: a context is compressed before its question, and a quarter of its entries stays.

    python benchmarks/kvcache_ruler.py MODEL --text FILE --log LOG.jsonl [--minutes 9] [--tasks NAME ...]
    python benchmarks/kvcache_ruler.py --table LOG.jsonl

Wording, roles of the chat, tokens to generate and scores are those of kvpress's evaluation, which are RULER's (arXiv
2404.06654). The haystacks of text are FILE's documents in place of RULER's essays, and keys are pairs of Fathom's
words. Contexts fill 1,024 tokens, and the model computes in bfloat16. Every cache reads the same contexts. Each answer
is one line of the log; run again, the benchmark goes on after the last.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache

from fathom.evaluation.caches.natural import sentences
from fathom.evaluation.caches.ruler import FIRST, NEEDLES, SECOND
from fathom.evaluation.perplexity import read_domains
from fathom.kvcache import build_cache, compressed, reconstruct
from fathom.report.provenance import provenance
from fathom.report.statistics import paired_difference, wilson

LENGTH, MOST, RATIO = 1024, 128, 0.25
"""Tokens of a context, tokens of an answer, and the share of the entries that stays."""
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1")
METHODS = ("drop", "snapkv", "tova", "expected_attention", "keydiff", "kvzip")
CACHES = ("full", "full_int4", *METHODS)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MARK = "\u2402context\u2403"


@dataclass(frozen=True)
class Asked:
    """A question, and what comes before and after it."""

    context: str
    question: str
    lead: str
    answers: tuple[str, ...]


def ask(task: str, number: int, texts: Sequence[str], tokenizer: object) -> Asked:
    """A question of a task, the same for every cache."""
    kind, draw = NEEDLES[task], random.Random(f"{task}{number}")
    new = lambda other: str(uuid.UUID(int=draw.getrandbits(128), version=4)) if other else None  # noqa: E731
    key = lambda: new(kind.uuid_keys) or f"{draw.choice(FIRST.split())}-{draw.choice(SECOND.split())}"  # noqa: E731
    value = lambda: new(kind.uuid_values) or str(draw.randrange(10**6, 10**7))  # noqa: E731
    what = "uuids" if kind.uuid_values else "numbers"
    needle = lambda key, value: f"One of the special magic {what} for {key} is: {value}."  # noqa: E731
    hidden: dict[str, list[str]] = {}
    while len(hidden) < kind.keys:
        hidden.setdefault(key(), [value() for _ in range(kind.values)])
    planted = [needle(one, each) for one, values in hidden.items() for each in values]
    draw.shuffle(planted)
    wanted = draw.sample(list(hidden), kind.queries)
    names = wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])}, and {wanted[-1]}"
    single = kind.values * kind.queries == 1
    many, one, are = (what[:-1], "A", "is") if single else (what, "Some", "are")
    filler = {
        "noise": lambda: cycle([NOISE]),
        "text": lambda: sentences(texts, draw),
        "needles": lambda: iter(lambda: needle(key(), value()), None),
    }[kind.haystack]()
    before = (
        f"{one} special magic {many} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the {many} afterwards.\n"
    )
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator] # noqa: E731
    room, units = LENGTH - count(before) - sum(map(count, planted)) - 32, []
    while room > 0:
        units.append(next(filler))
        room -= count(units[-1]) + 1
    places = sorted(draw.sample(range(len(units)), len(planted)), reverse=True)
    for place, sentence in zip(places, planted, strict=True):
        units.insert(place, sentence)
    between = " " if kind.haystack == "text" else "\n"
    return Asked(
        f"{before}{between.join(units[:-1])}\n",
        f"What {'is' if single else 'are all'} the special magic {many} for {names} mentioned in the provided text? ",
        f"The special magic {many} for {names} mentioned in the provided text {are}",
        tuple(value for key in wanted for value in hidden[key]),
    )


class Bench:
    """A model, its texts, and the log."""

    def __init__(self, directory: Path, text: str, log: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        self.tokenizer, self.log = AutoTokenizer.from_pretrained(directory), log
        self.texts = [str(one) for one in read_domains([text], limit=200)[0].documents]
        shown = str(
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": MARK}], add_generation_prompt=True, tokenize=False
            )
        )
        self.before, self.after = shown.split(MARK)

    def ids(self, text: str) -> Tensor:
        """`[1, n]`."""
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def read(self, context: Tensor, cache: str) -> Cache:
        """A context in a cache."""
        if cache == "kvzip":
            request = self.ids(f"\n\nRepeat the previous context exactly.{self.after}")
            return reconstruct(self.model, context, request, ratio=RATIO)
        if cache in METHODS:
            with compressed(self.model, cache, ratio=RATIO):
                return self.model(context, logits_to_keep=1).past_key_values
        held = DynamicCache(config=self.model.config) if cache == "full" else build_cache(self.model, cache)
        self.model(context, past_key_values=held, logits_to_keep=1)
        return held

    @torch.no_grad()
    def answer(self, asked: Asked, cache: str) -> dict[str, object]:
        """The greedy answer until it ends or has all that is wanted, and its score."""
        context = self.ids(self.before + asked.context)
        held = self.read(context, cache)
        entries = held.layers[0].get_mask_sizes(0)[0]
        ids, said = self.ids(asked.question + self.after + asked.lead), torch.empty(1, 0, dtype=torch.long)
        for _ in range(MOST):
            ids = self.model(ids, past_key_values=held, logits_to_keep=1).logits[:, -1:].argmax(-1)[:, -1:]
            said = torch.cat([said, ids], dim=1)
            text = str(self.tokenizer.decode(said[0], skip_special_tokens=True))
            score = fmean(wanted.lower() in text.lower() for wanted in asked.answers)
            if score == 1 or int(ids) == self.model.generation_config.eos_token_id:
                break
        return {"score": score, "said": text, "tokens": context.shape[1], "entries": entries}


def lines(log: Path) -> Iterator[dict[str, object]]:
    """The answers of a log."""
    for line in log.read_text().splitlines() if log.exists() else ():
        found = json.loads(line)
        if "task" in found:
            yield found


def table(log: Path) -> Iterator[str]:
    """Markdown: scores by task, over all with their interval, and minus those of `drop`: of what all have answered."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for line in lines(log):
        found.setdefault(str(line["cache"]), {})[line["task"], line["number"]] = line["score"]  # type: ignore[index, assignment]
    common = sorted(set.intersection(*map(set, found.values())))
    tasks = sorted({task for task, _ in common})
    heads = [f"{task} ({sum(one == task for one, _ in common)})" for task in tasks]
    yield f"| cache | {' | '.join(heads)} | all ({len(common)}) | − drop |"
    yield "| --- |" + " ---: |" * (len(tasks) + 2)
    for cache, scores in found.items():
        mine = [scores[each] for each in common]
        means = [f"{fmean(scores[each] for each in common if each[0] == task):.2f}" for task in tasks]
        low, high = wilson(round(sum(mine)), len(mine))
        gap = paired_difference(mine, [found["drop"][each] for each in common])
        gaps = "" if cache == "drop" else f"{gap.mean:+.2f} ±{gap.half_width:.2f}".replace("-", "−")
        yield f"| {cache} | {' | '.join(means)} | {fmean(mine):.2f} ({low:.2f}–{high:.2f}) | {gaps} |"


def main() -> None:
    """Ask what is not answered yet, as long as there is time, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--text", help="documents for the haystacks")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=sorted(NEEDLES))
    parser.add_argument("--caches", nargs="+", default=CACHES, choices=CACHES)
    parser.add_argument("--questions", type=int, default=20, help="of each task")
    parser.add_argument("--minutes", type=float, default=9, help="CPU minutes of this call")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(options.table)))
        return
    if options.model is None or options.log is None or not options.text:
        parser.error("give a model, --text and --log, or --table")
    torch.set_num_threads(1)
    bench = Bench(options.model, options.text, options.log)
    if not options.log.exists():
        options.log.write_text(json.dumps({"provenance": asdict(provenance())}) + "\n")
    done = {(line["task"], line["number"], line["cache"]) for line in lines(options.log)}
    for number in range(options.questions):
        for task in options.tasks:
            asked = ask(task, number, bench.texts, bench.tokenizer)
            for cache in options.caches:
                if time.process_time() > 60 * options.minutes:
                    return
                if (task, number, cache) not in done:
                    began = time.process_time()
                    found = bench.answer(asked, cache) | {"cpu_seconds": round(time.process_time() - began, 2)}
                    with options.log.open("a") as file:
                        file.write(json.dumps({"task": task, "number": number, "cache": cache, **found}) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {number}", flush=True)


if __name__ == "__main__":
    main()
